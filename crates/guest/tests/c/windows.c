/* Memory windows of both types, invalidated here and from afar, and regions that change under their keys. */

#include "check.h"

static struct setup s;

static uint64_t start(void)
{
	return (uintptr_t)s.buffer[1];
}

/* The window's owner is the second queue pair. */
static void bound(struct ibv_wc wc, uint64_t wr_id)
{
	if (wc.status != IBV_WC_SUCCESS)
		fprintf(stderr, "%s, vendor_err %#x\n", ibv_wc_status_str(wc.status), wc.vendor_err);
	CHECK(wc.wr_id == wr_id && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
}

static void is_refused(uint64_t address, uint32_t rkey)
{
	CHECK(try_write(&s, address, rkey, 8) == IBV_WC_REM_ACCESS_ERR);
	reconnect(&s);
}

static void type_1(void)
{
	struct ibv_mw *mw = ibv_alloc_mw(s.pd, IBV_MW_TYPE_1);
	CHECK(mw && mw->pd == s.pd && mw->type == IBV_MW_TYPE_1 && mw->context == s.context);
	uint32_t first = mw->rkey;
	is_refused(start(), first);
	struct ibv_mw_bind bind = {
		.wr_id = 1,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = { s.mr[1], start() + 4096, 4096, IBV_ACCESS_REMOTE_WRITE },
	};
	CHECK(!ibv_bind_mw(s.qp[1], mw, &bind));
	bound(completion(&s), 1);
	CHECK(mw->rkey != first && mw->rkey >> 8 == first >> 8);
	CHECK(try_write(&s, start() + 4096, mw->rkey, 4096) == IBV_WC_SUCCESS);
	is_refused(start() + 8192 - 4, mw->rkey);
	is_refused(start(), mw->rkey);

	/* a length of 0 unbinds */
	bind.bind_info.length = 0;
	CHECK(!ibv_bind_mw(s.qp[1], mw, &bind));
	bound(completion(&s), 1);
	is_refused(start() + 4096, mw->rkey);

	/* a region that does not allow it */
	struct ibv_mr *closed = ibv_reg_mr(s.pd, s.buffer[1], 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(closed);
	bind.bind_info = (struct ibv_mw_bind_info){ closed, start(), 4096, IBV_ACCESS_REMOTE_WRITE };
	CHECK(!ibv_bind_mw(s.qp[1], mw, &bind));
	CHECK(completion(&s).status == IBV_WC_MW_BIND_ERR);
	reconnect(&s);
	CHECK(!ibv_dereg_mr(closed));
	CHECK(!ibv_dealloc_mw(mw));
}

static void bind_2(struct ibv_mw *mw, uint32_t rkey, int call_by_call)
{
	struct ibv_mw_bind_info info = { s.mr[1], start(), 4096, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	if (call_by_call) {
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[1]);
		ibv_wr_start(qp);
		qp->wr_id = 2;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_bind_mw(qp, mw, rkey, &info);
		CHECK(!ibv_wr_complete(qp));
	} else {
		struct ibv_send_wr wr = {
			.wr_id = 2,
			.opcode = IBV_WR_BIND_MW,
			.send_flags = IBV_SEND_SIGNALED,
			.bind_mw = { mw, rkey, info },
		};
		struct ibv_send_wr *bad = NULL;
		CHECK(!ibv_post_send(s.qp[1], &wr, &bad));
	}
	bound(completion(&s), 2);
}

static void invalidate_here(uint32_t rkey, int call_by_call)
{
	if (call_by_call) {
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[1]);
		ibv_wr_start(qp);
		qp->wr_id = 3;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_local_inv(qp, rkey);
		CHECK(!ibv_wr_complete(qp));
	} else {
		struct ibv_send_wr wr = {
			.wr_id = 3,
			.opcode = IBV_WR_LOCAL_INV,
			.send_flags = IBV_SEND_SIGNALED,
			.invalidate_rkey = rkey,
		};
		struct ibv_send_wr *bad = NULL;
		CHECK(!ibv_post_send(s.qp[1], &wr, &bad));
	}
	CHECK(good(&s, 3).opcode == IBV_WC_LOCAL_INV);
}

static void invalidate_from_afar(uint32_t rkey, int call_by_call)
{
	post_recv_one(&s, 4, 500000, 64);
	if (call_by_call) {
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(s.qp[0]);
		ibv_wr_start(qp);
		qp->wr_id = 5;
		qp->wr_flags = 0;
		ibv_wr_send_inv(qp, rkey);
		ibv_wr_set_inline_data(qp, "gone", 4);
		CHECK(!ibv_wr_complete(qp));
	} else {
		struct ibv_send_wr wr = { .wr_id = 5, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = rkey };
		post(&s, &wr);
	}
	struct ibv_wc wc = good(&s, 4);
	CHECK((wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == rkey);
}

static void type_2(int call_by_call)
{
	struct ibv_mw *mw = ibv_alloc_mw(s.pd, IBV_MW_TYPE_2);
	CHECK(mw && mw->type == IBV_MW_TYPE_2);
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	bind_2(mw, rkey, call_by_call);
	CHECK(try_write(&s, start(), rkey, 4096) == IBV_WC_SUCCESS);
	invalidate_here(rkey, call_by_call);
	is_refused(start(), rkey);

	rkey = ibv_inc_rkey(rkey);
	bind_2(mw, rkey, call_by_call);
	CHECK(try_write(&s, start(), rkey, 8) == IBV_WC_SUCCESS);
	invalidate_from_afar(rkey, call_by_call);
	is_refused(start(), rkey);

	/* a window that is gone, bound or not */
	rkey = ibv_inc_rkey(rkey);
	bind_2(mw, rkey, call_by_call);
	CHECK(!ibv_dealloc_mw(mw));
	is_refused(start(), rkey);
}

static void regions_change(void)
{
	unsigned char *other = aligned_alloc(4096, 8192);
	memset(other, 9, 8192);
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_mr *mr = ibv_reg_mr(s.pd, s.buffer[1], 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	is_refused(start(), mr->rkey);
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access));
	CHECK(try_write(&s, start(), mr->rkey, 8) == IBV_WC_SUCCESS);

	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, 8192, 0));
	CHECK(mr->addr == other && mr->length == 8192);
	memset(s.buffer[0], 0x77, 8);
	CHECK(try_write(&s, (uintptr_t)other + 8000, mr->rkey, 8) == IBV_WC_SUCCESS && other[8000] == 0x77);
	is_refused(start(), mr->rkey);

	struct ibv_pd *pd = ibv_alloc_pd(s.context);
	CHECK(pd && !ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, 0) && mr->pd == pd);
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	is_refused((uintptr_t)other, mr->rkey);
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, s.pd, NULL, 0, 0) && !ibv_dealloc_pd(pd));
	CHECK(try_write(&s, (uintptr_t)other, mr->rkey, 8) == IBV_WC_SUCCESS);

	errno = 0;
	CHECK(ibv_rereg_mr(mr, 1 << 5, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	CHECK(ibv_rereg_mr(mr, 0, NULL, NULL, 0, access) == IBV_REREG_MR_ERR_INPUT);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	CHECK(!ibv_dereg_mr(mr));
	free(other);
}

int main(void)
{
	set_up(&s);
	CHECK(!ibv_alloc_mw(s.pd, 3) && errno == EINVAL);
	type_1();
	type_2(0);
	type_2(1);
	regions_change();
	clear_away(&s);
	puts("done");
	return 0;
}

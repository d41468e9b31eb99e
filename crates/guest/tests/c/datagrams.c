/* Datagrams: address handles, the header in front of the data, answers to it, multicast, and both ways to post. */

#include "check.h"

#include <arpa/inet.h>

enum { GRH_BYTES = 40, QKEY = 0x11111111 };

static struct setup s;
static struct ibv_qp *ud[2];
static struct ibv_ah *ah;

static struct ibv_qp *make_ud(int own_signals)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = s.cq,
		.recv_cq = s.cq,
		.cap = { DEPTH, DEPTH, 2, 2, INLINE_BYTES },
		.qp_type = IBV_QPT_UD,
		.sq_sig_all = own_signals,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = s.pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(s.context, &init);
	CHECK(qp && qp->qp_type == IBV_QPT_UD);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 7;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	struct ibv_qp_init_attr told;
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_QKEY, &told));
	CHECK(attr.qp_state == IBV_QPS_RTS && attr.qkey == QKEY && told.qp_type == IBV_QPT_UD);
	CHECK(!!told.sq_sig_all == !!own_signals && told.send_cq == s.cq && !told.srq);
	return qp;
}

static void expect(struct ibv_qp *qp, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)s.buffer[1] + offset, GRH_BYTES + length, s.mr[1]->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

/* The two completions of a datagram come in any order. */
static struct ibv_wc arrived(uint64_t send_id, uint64_t recv_id)
{
	struct ibv_wc received = { 0 };
	for (int seen = 0; seen < 2; seen++) {
		struct ibv_wc wc = completion(&s);
		CHECK(wc.status == IBV_WC_SUCCESS && (wc.wr_id == send_id || wc.wr_id == recv_id));
		if (wc.wr_id == recv_id)
			received = wc;
	}
	CHECK(received.opcode == IBV_WC_RECV && (received.wc_flags & IBV_WC_GRH));
	return received;
}

static void there_and_back(void)
{
	expect(ud[1], 1, 0, 100);
	memset(s.buffer[0], 0x5a, 100);
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 100, s.mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 2,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND_WITH_IMM,
		.imm_data = htonl(0xbeef),
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { ah, ud[1]->qp_num, QKEY },
	};
	struct ibv_send_wr *bad = NULL;
	CHECK(!ibv_post_send(ud[0], &wr, &bad));
	struct ibv_wc wc = arrived(2, 1);
	CHECK(wc.byte_len == GRH_BYTES + 100 && wc.src_qp == ud[0]->qp_num && wc.qp_num == ud[1]->qp_num);
	CHECK((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == htonl(0xbeef));
	CHECK(s.buffer[1][GRH_BYTES] == 0x5a && s.buffer[1][GRH_BYTES + 99] == 0x5a && s.buffer[1][GRH_BYTES + 100] == 1);

	/* who sent it is in front of it */
	struct ibv_ah_attr back;
	struct ibv_grh *grh = (struct ibv_grh *)s.buffer[1];
	CHECK(!ibv_init_ah_from_wc(s.context, 1, &wc, grh, &back));
	union ibv_gid own;
	CHECK(!ibv_query_gid(s.context, 1, 0, &own));
	CHECK(back.is_global && back.port_num == 1 && !memcmp(&back.grh.dgid, &own, sizeof(own)));
	CHECK(back.grh.sgid_index == 0 && back.grh.traffic_class == 8 && back.grh.hop_limit > 0);
	struct ibv_ah *answer = ibv_create_ah_from_wc(s.pd, &wc, grh, 1);
	CHECK(answer && answer->pd == s.pd);

	/* and can be answered, inline */
	expect(ud[0], 3, 4096, 6);
	struct ibv_sge text = { (uintptr_t)"answer", 6, 0 };
	struct ibv_send_wr reply = {
		.wr_id = 4,
		.sg_list = &text,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_INLINE,
		.wr.ud = { answer, wc.src_qp, QKEY },
	};
	CHECK(!ibv_post_send(ud[1], &reply, &bad));
	wc = arrived(4, 3);
	CHECK(wc.src_qp == ud[1]->qp_num && !memcmp(s.buffer[1] + 4096 + GRH_BYTES, "answer", 6));
	CHECK(!ibv_destroy_ah(answer));

	wc.wc_flags &= ~IBV_WC_GRH;
	errno = 0;
	CHECK(ibv_init_ah_from_wc(s.context, 1, &wc, grh, &back) == -1 && errno == EINVAL);
	CHECK(!ibv_create_ah_from_wc(s.pd, &wc, grh, 1));
}

static void call_by_call(void)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(ud[0]);
	CHECK(qp);
	expect(ud[1], 10, 0, 5);
	ibv_wr_start(qp);
	qp->wr_id = 11;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_ud_addr(qp, ah, ud[1]->qp_num, QKEY);
	ibv_wr_set_inline_data(qp, "first", 5);
	CHECK(!ibv_wr_complete(qp));
	arrived(11, 10);
	CHECK(!memcmp(s.buffer[1] + GRH_BYTES, "first", 5));

	/* the data before the address, in a batch with one that has no data */
	char text[] = "second";
	expect(ud[1], 12, 0, 6);
	expect(ud[1], 13, 4096, 0);
	ibv_wr_start(qp);
	qp->wr_id = 14;
	qp->wr_flags = 0;
	ibv_wr_send_imm(qp, htonl(5));
	ibv_wr_set_inline_data(qp, text, 6);
	memset(text, 0, 6);
	ibv_wr_set_ud_addr(qp, ah, ud[1]->qp_num, QKEY);
	qp->wr_id = 15;
	ibv_wr_send(qp);
	ibv_wr_set_ud_addr(qp, ah, ud[1]->qp_num, QKEY);
	CHECK(!ibv_wr_complete(qp));
	CHECK(good(&s, 12).imm_data == htonl(5));
	CHECK(good(&s, 13).byte_len == GRH_BYTES);
	CHECK(!memcmp(s.buffer[1] + GRH_BYTES, "second", 6));

	/* no address, no datagram */
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, "lost", 4);
	CHECK(ibv_wr_complete(qp) == EINVAL);
	ibv_wr_start(qp);
	ibv_wr_rdma_write(qp, 1, 2);
	CHECK(ibv_wr_complete(qp) == EINVAL);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad = NULL;
	CHECK(ibv_post_send(ud[0], &wr, &bad) == EINVAL && bad == &wr);
	wr.opcode = IBV_WR_RDMA_WRITE;
	CHECK(ibv_post_send(ud[0], &wr, &bad) == EINVAL && bad == &wr);
}

static void a_wrong_qkey_is_dropped(void)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(ud[0]);
	expect(ud[1], 20, 0, 5);
	ibv_wr_start(qp);
	qp->wr_id = 21;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_ud_addr(qp, ah, ud[1]->qp_num, QKEY ^ 1);
	ibv_wr_set_inline_data(qp, "wrong", 5);
	qp->wr_id = 22;
	ibv_wr_send(qp);
	ibv_wr_set_ud_addr(qp, ah, ud[1]->qp_num, QKEY);
	ibv_wr_set_inline_data(qp, "right", 5);
	CHECK(!ibv_wr_complete(qp));
	for (int seen = 0; seen < 3; seen++)
		CHECK(completion(&s).status == IBV_WC_SUCCESS);
	CHECK(!memcmp(s.buffer[1] + GRH_BYTES, "right", 5));
}

static void groups(void)
{
	union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 1, 2, 3 } }, unicast;
	CHECK(!ibv_query_gid(s.context, 1, 0, &unicast));
	CHECK(!ibv_attach_mcast(ud[1], &group, 0));
	CHECK(ibv_attach_mcast(ud[1], &unicast, 0) == EINVAL);
	CHECK(ibv_attach_mcast(s.qp[0], &group, 0) == EINVAL);
	CHECK(!ibv_detach_mcast(ud[1], &group, 0));
	CHECK(ibv_detach_mcast(ud[1], &group, 0) == EINVAL);
}

int main(void)
{
	set_up(&s);
	for (int i = 0; i < 2; i++)
		ud[i] = make_ud(i);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64, .traffic_class = 8 } };
	CHECK(!ibv_query_gid(s.context, 1, 0, &attr.grh.dgid));
	ah = ibv_create_ah(s.pd, &attr);
	CHECK(ah && ah->context == s.context);
	CHECK(ibv_dealloc_pd(s.pd) == EBUSY);
	there_and_back();
	call_by_call();
	a_wrong_qkey_is_dropped();
	groups();
	CHECK(!ibv_destroy_ah(ah));
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(ud[i]));
	clear_away(&s);
	puts("done");
	return 0;
}

/* What ibv_dump_context and ibv_restore_object refuse, and that all goes on after it. */

#include "check.h"

#include <verbatim.h>

static struct setup s;

static int restore(struct ibv_context *context, const struct ibv_dump_record *record, int cmd)
{
	void *object = NULL;
	int failed = ibv_restore_object(context, &object, record->type, cmd, (void *)record, record->length);
	CHECK(failed || object);
	return failed;
}

/* A WRITE arrives. */
static void still_works(void)
{
	static unsigned char turn;
	s.buffer[0][0] = ++turn;
	CHECK(try_write(&s, (uintptr_t)s.buffer[1], s.mr[1]->rkey, 16) == IBV_WC_SUCCESS);
	CHECK(s.buffer[1][0] == turn);
}

static void resume(void)
{
	CHECK(!ibv_restore_object(s.context, NULL, IBV_OBJECT_CONTEXT, IBV_RESTORE_RESUME, NULL, 0));
}

static struct ibv_context *open_again(void)
{
	struct ibv_context *context = ibv_open_device(s.devices[0]);
	CHECK(context);
	return context;
}

static void *dump_all(size_t *bytes, int *count)
{
	CHECK(!ibv_dump_context(s.context, count, NULL, 0));
	*bytes = verbatim_dump_bytes(s.context);
	void *dump = malloc(*bytes);
	CHECK(dump && !ibv_dump_context(s.context, NULL, dump, *bytes));
	return dump;
}

/* Too small a buffer: all goes on, and the size is known. */
static void check_room(void)
{
	unsigned char small[64];
	int count = 0;
	CHECK(verbatim_dump_bytes(s.context) == 0);
	memset(small, 0xaa, sizeof(small));
	CHECK(ibv_dump_context(s.context, &count, small, sizeof(small)) == ENOSPC);
	/* a domain, a queue, two regions, two queue pairs */
	CHECK(count == 6 && verbatim_dump_bytes(s.context) > sizeof(small));
	for (size_t i = 0; i < sizeof(small); i++)
		CHECK(small[i] == 0xaa);
	still_works();
	CHECK(ibv_dump_context(NULL, &count, NULL, 0) == EINVAL);
	CHECK(ibv_dump_context(s.context, &count, NULL, 8) == EINVAL);
	CHECK(ibv_restore_object(s.context, NULL, IBV_OBJECT_CONTEXT, IBV_RESTORE_RESUME, NULL, 0) == EINVAL);
	still_works();
}

/* What stands still stands, and what was asked of it meanwhile is done afterwards. */
static void check_standing(void)
{
	int count;
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	CHECK(ibv_modify_qp(s.qp[0], &attr, IBV_QP_STATE) == EBUSY);
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 16, s.mr[0]->lkey };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey } };
	post(&s, &wr);
	struct ibv_wc wc;
	for (int i = 0; i < 1000; i++)
		CHECK(!ibv_poll_cq(s.cq, 1, &wc));
	/* the request is in the next dump */
	size_t before = verbatim_dump_bytes(s.context);
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0) && verbatim_dump_bytes(s.context) > before);
	resume();
	good(&s, 5);
	still_works();
}

/* Each byte of the dump, and each end. Records are given to a context where nothing could be restored anyhow. */
static void check_damage(const unsigned char *dump, size_t bytes)
{
	unsigned char *bad = malloc(bytes);
	struct ibv_context *other = open_again();
	CHECK(bad && !verbatim_check_dump(dump, bytes));
	for (size_t at = 0; at < bytes; at++) {
		memcpy(bad, dump, bytes);
		bad[at] ^= 0x41;
		CHECK(verbatim_check_dump(bad, bytes));
		/* the walk ends, whatever is there */
		const struct ibv_dump_record *record = NULL;
		while ((record = ibv_dump_next(bad, bytes, record)))
			;
		CHECK(verbatim_check_dump(dump, at));
	}
	const struct ibv_dump_record *record = NULL;
	while ((record = ibv_dump_next(dump, bytes, record))) {
		for (size_t at = 0; at < record->length; at++) {
			memcpy(bad, record, record->length);
			bad[at] ^= 0x41;
			void *object = NULL;
			int failed = ibv_restore_object(other, &object, record->type, IBV_RESTORE_CREATE, bad,
							record->length);
			CHECK((failed == EINVAL || failed == EBADMSG || failed == EPROTONOSUPPORT) && !object);
			CHECK(ibv_restore_object(other, &object, record->type, IBV_RESTORE_CREATE, (void *)record,
						 at) == EINVAL);
		}
	}
	CHECK(!ibv_close_device(other));
	free(bad);
}

/* Its numbers and keys are those of the context that was dumped, which is still there. */
static void check_taken(const void *dump, size_t bytes)
{
	struct ibv_context *other = open_again();
	const struct ibv_dump_record *record = NULL;
	int refused = 0;
	while ((record = ibv_dump_next(dump, bytes, record))) {
		int wanted = record->type == IBV_OBJECT_MR || record->type == IBV_OBJECT_QP ? EEXIST : 0;
		CHECK(restore(other, record, IBV_RESTORE_CREATE) == wanted);
		refused += wanted == EEXIST;
		/* that number is taken now, too */
		if (!wanted)
			CHECK(restore(other, record, IBV_RESTORE_CREATE) == EEXIST);
		CHECK(restore(other, record, IBV_RESTORE_REFILL) == EINVAL);
		void *object;
		CHECK(ibv_restore_object(other, &object, record->type + 1, IBV_RESTORE_CREATE, (void *)record,
					 record->length) == EINVAL);
		CHECK(ibv_restore_object(other, &object, record->type, 9, (void *)record, record->length) == EINVAL);
		/* what stands still is not restored into */
		CHECK(restore(s.context, record, IBV_RESTORE_CREATE) == EBUSY);
	}
	CHECK(refused == 4);
	CHECK(!ibv_close_device(other));
}

/* Records whose domain, queue or region is not there. */
static void check_order(const void *dump, size_t bytes)
{
	struct ibv_context *other = open_again();
	const struct ibv_dump_record *record = NULL;
	while ((record = ibv_dump_next(dump, bytes, record)))
		if (record->type == IBV_OBJECT_MR || record->type == IBV_OBJECT_QP)
			CHECK(restore(other, record, IBV_RESTORE_CREATE) == EINVAL);
	CHECK(!ibv_close_device(other));
}

/* An unreliable connection and on-chip memory are refused, and nothing stands still for it. */
static void check_unsupported(void)
{
	int count;
	struct ibv_alloc_dm_attr dm_attr = { .length = 4096 };
	struct ibv_dm *dm = ibv_alloc_dm(s.context, &dm_attr);
	CHECK(dm && ibv_dump_context(s.context, &count, NULL, 0) == EOPNOTSUPP && !ibv_free_dm(dm));
	struct ibv_qp_init_attr init = { .send_cq = s.cq, .recv_cq = s.cq, .cap = { 4, 4, 1, 1, 0 },
					 .qp_type = IBV_QPT_UC };
	struct ibv_qp *uc = ibv_create_qp(s.pd, &init);
	CHECK(uc);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(!ibv_modify_qp(uc, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	/* not live yet */
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0) && count == 7);
	resume();
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = uc->qp_num,
				   .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } } };
	CHECK(!ibv_query_gid(s.context, 1, 0, &rtr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(uc, &rtr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN));
	CHECK(ibv_dump_context(s.context, &count, NULL, 0) == EOPNOTSUPP);
	still_works();
	CHECK(!ibv_destroy_qp(uc));
}

/* A queue pair that failed is dumped as it is. */
static void check_failed(void)
{
	int count;
	CHECK(try_write(&s, (uintptr_t)s.buffer[1], 0xdead0000, 16) == IBV_WC_REM_ACCESS_ERR);
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0) && count == 6);
	resume();
	reconnect(&s);
	still_works();
}

int main(void)
{
	set_up(&s);
	check_room();
	check_standing();
	check_unsupported();
	check_failed();
	size_t bytes;
	int count;
	unsigned char *dump = dump_all(&bytes, &count);
	CHECK(count == 6 && ((struct ibv_dump_head *)dump)->length == bytes);
	check_damage(dump, bytes);
	check_order(dump, bytes);
	check_taken(dump, bytes);
	resume();
	still_works();
	free(dump);

	/* what stands still can be cleared away, too */
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0));
	clear_away(&s);
	puts("done");
	return 0;
}

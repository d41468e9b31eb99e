/* How many bytes each object has in a dump: idle, and with something in it (MigrOS, Table 1). One object per line. */

#include "check.h"

#include <verbatim.h>

enum { MANY = 8, DEEP = 64 };

static struct setup s;
static struct ibv_srq *empty, *full;

static struct ibv_qp *make(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = s.cq, .srq = srq, .cap = { DEEP, DEEP, 1, 1, 0 }, .qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(s.pd, &init);
	CHECK(qp);
	return qp;
}

static void send_many(struct ibv_qp *qp, enum ibv_wr_opcode opcode)
{
	for (int i = 0; i < MANY; i++) {
		struct ibv_sge sge = { (uintptr_t)s.buffer[0], 64, s.mr[0]->lkey };
		struct ibv_send_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey } }, *bad;
		CHECK(!ibv_post_send(qp, &wr, &bad));
	}
}

static void post_many(struct ibv_srq *srq, struct ibv_qp *qp)
{
	for (int i = 0; i < MANY; i++) {
		struct ibv_sge sge = { (uintptr_t)s.buffer[1], 64, s.mr[1]->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;
		CHECK(srq ? !ibv_post_srq_recv(srq, &wr, &bad) : !ibv_post_recv(qp, &wr, &bad));
	}
}

static struct ibv_srq *make_srq(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = DEEP, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(s.pd, &init);
	CHECK(srq);
	return srq;
}

int main(void)
{
	set_up(&s);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(s.context);
	struct ibv_cq *idle_cq = ibv_create_cq(s.context, DEEP, NULL, channel, 0);
	struct ibv_cq *full_cq = ibv_create_cq(s.context, DEEP, NULL, NULL, 0);
	CHECK(channel && idle_cq && full_cq);
	empty = make_srq();
	full = make_srq();
	post_many(full, NULL);
	struct ibv_mw *window = ibv_alloc_mw(s.pd, IBV_MW_TYPE_1);
	struct ibv_ah_attr way = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	CHECK(!ibv_query_gid(s.context, 1, 0, &way.grh.dgid));
	CHECK(window && ibv_create_ah(s.pd, &way));
	struct ibv_mw_bind bind = {
		.bind_info = { s.mr[0], (uintptr_t)s.buffer[0], 4096, IBV_ACCESS_REMOTE_WRITE },
		.send_flags = IBV_SEND_SIGNALED,
	};
	CHECK(!ibv_bind_mw(s.qp[0], window, &bind));
	good(&s, 0);

	/* idle; with RECVs; with a shared receive queue; with requests that wait for RECVs of the last */
	struct ibv_qp *idle[2], *posted[2], *shared[2], *busy[2];
	for (int i = 0; i < 2; i++) {
		idle[i] = make(full_cq, NULL);
		posted[i] = make(idle_cq, NULL);
		shared[i] = make(idle_cq, empty);
		busy[i] = make(idle_cq, NULL);
	}
	for (int i = 0; i < 2; i++) {
		connect_qp(&s, idle[i], idle[1 - i]->qp_num);
		connect_qp(&s, posted[i], posted[1 - i]->qp_num);
		connect_qp(&s, shared[i], shared[1 - i]->qp_num);
		connect_qp(&s, busy[i], busy[1 - i]->qp_num);
	}
	post_many(NULL, posted[0]);
	send_many(busy[0], IBV_WR_SEND);
	/* when these are done, those have begun */
	send_many(idle[0], IBV_WR_RDMA_WRITE);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	for (int i = 0; i < 1000; i++)
		CHECK(!ibv_query_qp(idle[0], &attr, IBV_QP_STATE, &init));

	int count;
	CHECK(!ibv_dump_context(s.context, &count, NULL, 0));
	size_t bytes = verbatim_dump_bytes(s.context);
	void *dump = malloc(bytes);
	CHECK(dump && !ibv_dump_context(s.context, &count, dump, bytes) && !verbatim_check_dump(dump, bytes));
	printf("head %zu\n", sizeof(struct ibv_dump_head));
	const struct ibv_dump_record *record = NULL;
	while ((record = ibv_dump_next(dump, bytes, record))) {
		uint32_t handle = record->handle;
		const char *name = NULL;
		switch (record->type) {
		case IBV_OBJECT_PD: name = "pd"; break;
		case IBV_OBJECT_COMP_CHANNEL: name = "channel"; break;
		case IBV_OBJECT_CQ: name = handle == full_cq->handle ? "cq_full" : handle == idle_cq->handle ? "cq" : NULL; break;
		case IBV_OBJECT_SRQ: name = handle == full->handle ? "srq_full" : "srq"; break;
		case IBV_OBJECT_MR: name = handle == s.mr[0]->lkey ? "mr" : NULL; break;
		case IBV_OBJECT_AH: name = "ah"; break;
		case IBV_OBJECT_MW: name = "mw"; break;
		case IBV_OBJECT_QP:
			name = handle == idle[1]->qp_num ? "qp" : handle == posted[0]->qp_num ? "qp_recvs" :
			       handle == shared[0]->qp_num ? "qp_srq" : handle == busy[0]->qp_num ? "qp_sends" : NULL;
			break;
		}
		if (name)
			printf("%s %u\n", name, record->length);
	}
	return 0;
}

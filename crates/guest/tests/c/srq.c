/* A shared receive queue behind two queue pairs, its limit, and the last of its requests. */

#include "check.h"

static struct setup s;
static struct ibv_srq *srq;
static struct ibv_qp *to[2], *from[2];

static struct ibv_qp *make(struct ibv_srq *with)
{
	struct ibv_qp_init_attr init = {
		.send_cq = s.cq,
		.recv_cq = s.cq,
		.srq = with,
		.cap = { DEPTH, DEPTH, 1, 1, 0 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(s.pd, &init);
	CHECK(qp && qp->srq == with);
	struct ibv_qp_attr attr;
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_CAP, &init) && init.srq == with);
	return qp;
}

static void expect(uint64_t wr_id)
{
	struct ibv_sge sge = { (uintptr_t)s.buffer[1] + 64 * wr_id, 64, s.mr[1]->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	CHECK(!ibv_post_srq_recv(srq, &wr, &bad) && !bad);
}

static void send_by(int i, uint64_t expected)
{
	s.buffer[0][0] = 0x40 + expected;
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 64, s.mr[0]->lkey };
	struct ibv_send_wr wr = { .wr_id = 100, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad = NULL;
	CHECK(!ibv_post_send(from[i], &wr, &bad));
	struct ibv_wc wc = good(&s, expected);
	CHECK(wc.opcode == IBV_WC_RECV && wc.qp_num == to[i]->qp_num);
	CHECK(s.buffer[1][64 * expected] == 0x40 + expected);
}

static struct ibv_async_event next_event(void)
{
	struct ibv_async_event event;
	do {
		CHECK(!ibv_get_async_event(s.context, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_COMM_EST);
	return event;
}

int main(void)
{
	set_up(&s);
	struct ibv_srq_init_attr init = { .srq_context = &s, .attr = { .max_wr = 8, .max_sge = 1 } };
	srq = ibv_create_srq(s.pd, &init);
	CHECK(srq && init.attr.max_wr >= 8 && init.attr.max_sge >= 1 && srq->srq_context == &s && srq->pd == s.pd);
	for (int i = 0; i < 2; i++) {
		to[i] = make(srq);
		from[i] = make(NULL);
		connect_qp(&s, to[i], from[i]->qp_num);
		connect_qp(&s, from[i], to[i]->qp_num);
	}
	CHECK(ibv_destroy_srq(srq) == EBUSY);

	/* whichever queue pair a message comes to, it takes the oldest request */
	for (uint64_t i = 0; i < 8; i++)
		expect(i);
	for (uint64_t i = 0; i < 4; i++)
		send_by(i % 2, i);

	/* the limit tells once that there are too few; four are left */
	struct ibv_srq_attr attr = { .srq_limit = 3 };
	CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	CHECK(!ibv_query_srq(srq, &attr) && attr.srq_limit == 3 && attr.max_wr == init.attr.max_wr);
	send_by(0, 4);
	send_by(1, 5);
	struct ibv_async_event event = next_event();
	CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	CHECK(!ibv_query_srq(srq, &attr) && attr.srq_limit == 0);
	attr.max_wr = 100;
	CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR) == EOPNOTSUPP);
	attr.srq_limit = init.attr.max_wr + 1;
	CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == EINVAL);
	uint32_t number;
	CHECK(ibv_get_srq_num(srq, &number) == EOPNOTSUPP);

	/* a request that no queue takes */
	struct ibv_sge sges[64] = { { 0 } };
	struct ibv_recv_wr wr = { .sg_list = sges, .num_sge = 64 }, *bad = NULL;
	CHECK(ibv_post_srq_recv(srq, &wr, &bad) == EINVAL && bad == &wr);
	struct ibv_recv_wr own = { .wr_id = 1 };
	CHECK(ibv_post_recv(to[0], &own, &bad) == EINVAL && bad == &own);

	/* a queue pair in ERR takes no more of the shared requests, which its event tells */
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	CHECK(!ibv_modify_qp(to[0], &error, IBV_QP_STATE));
	event = next_event();
	CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == to[0]);
	send_by(1, 6);

	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(to[i]) && !ibv_destroy_qp(from[i]));
	CHECK(!ibv_destroy_srq(srq));
	clear_away(&s);
	puts("done");
	return 0;
}

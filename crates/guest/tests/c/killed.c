/* The RNIC goes while a program uses it: the program is told, nothing hangs, and it can clear up. The test that runs
 * this ends the RNIC when it reads "ready". */

#include "check.h"

#include <poll.h>

static struct setup s;

int main(void)
{
	set_up(&s);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(s.context);
	CHECK(channel);
	struct ibv_cq *cq = ibv_create_cq(s.context, DEPTH, NULL, channel, 0);
	CHECK(cq);
	struct ibv_cq *first = s.cq;
	s.cq = cq;
	struct ibv_qp *qp = make_qp(&s);
	s.cq = first;
	connect_qp(&s, qp, s.qp[1]->qp_num);
	CHECK(!ibv_req_notify_cq(cq, 0));

	/* nobody will ever send to these */
	for (uint64_t i = 0; i < 3; i++) {
		struct ibv_recv_wr wr = { .wr_id = i }, *bad;
		CHECK(!ibv_post_recv(qp, &wr, &bad));
	}
	puts("ready");
	fflush(stdout);

	struct ibv_async_event event;
	do {
		CHECK(!ibv_get_async_event(s.context, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_DEVICE_FATAL);

	struct ibv_cq *which;
	void *context;
	CHECK(!ibv_get_cq_event(channel, &which, &context) && which == cq);
	ibv_ack_cq_events(cq, 1);
	struct ibv_wc wc;
	for (uint64_t i = 0; i < 3; i++) {
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == i && wc.qp_num == qp->qp_num);
	}
	/* what comes later fails as well */
	struct ibv_send_wr wr = { .wr_id = 9, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (!ibv_post_send(qp, &wr, &bad)) {
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 9);
	}
	errno = 0;
	CHECK(!ibv_alloc_pd(s.context) && errno == EIO);
	CHECK(!ibv_reg_mr(s.pd, s.buffer[0], 4096, IBV_ACCESS_LOCAL_WRITE));

	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
	clear_away(&s);
	puts("done");
	return 0;
}

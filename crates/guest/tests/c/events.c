/* Completion events, blocking and not, and asynchronous events, each acknowledged before its object can go. */

#include "check.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

static struct setup s;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp[2];

static int readable(int fd, int wait_ms)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN };
	return poll(&entry, 1, wait_ms) == 1 && (entry.revents & POLLIN);
}

static void set_blocking(int fd, int blocking)
{
	int flags = fcntl(fd, F_GETFL);
	CHECK(flags >= 0 && !fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK));
}

static void send_one(unsigned int flags)
{
	struct ibv_sge sge = { (uintptr_t)s.buffer[0], 64, s.mr[0]->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = flags,
	};
	struct ibv_send_wr *bad = NULL;
	struct ibv_sge to = { (uintptr_t)s.buffer[1], 64, s.mr[1]->lkey };
	struct ibv_recv_wr recv = { .wr_id = 2, .sg_list = &to, .num_sge = 1 }, *bad_recv = NULL;
	CHECK(!ibv_post_recv(qp[1], &recv, &bad_recv));
	CHECK(!ibv_post_send(qp[0], &wr, &bad));
}

static void take_one(uint64_t wr_id)
{
	struct ibv_wc wc;
	int found;
	while (!(found = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(found == 1 && wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id);
}

static void get(void)
{
	struct ibv_cq *which = NULL;
	void *context = NULL;
	CHECK(!ibv_get_cq_event(channel, &which, &context) && which == cq && context == &cq);
}

static void *send_later(void *unused)
{
	(void)unused;
	send_one(0);
	return NULL;
}

static void completion_events(void)
{
	/* a thread that waits is woken by a completion of another's */
	CHECK(!ibv_req_notify_cq(cq, 0));
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, send_later, NULL));
	get();
	pthread_join(thread, NULL);
	take_one(2);

	/* one event per request for it */
	send_one(0);
	take_one(2);
	CHECK(!readable(channel->fd, 0));

	set_blocking(channel->fd, 0);
	struct ibv_cq *which;
	void *context;
	errno = 0;
	CHECK(ibv_get_cq_event(channel, &which, &context) == -1 && errno == EAGAIN);
	CHECK(!ibv_req_notify_cq(cq, 0));
	send_one(0);
	CHECK(readable(channel->fd, 10000));
	get();
	take_one(2);
	CHECK(!readable(channel->fd, 0));

	/* only solicited ones */
	CHECK(!ibv_req_notify_cq(cq, 1));
	send_one(0);
	take_one(2);
	CHECK(!readable(channel->fd, 0));
	send_one(IBV_SEND_SOLICITED);
	CHECK(readable(channel->fd, 10000));
	get();
	take_one(2);

	/* the channel stays while a queue uses it */
	CHECK(channel->refcnt == 1 && ibv_destroy_comp_channel(channel) == EBUSY);
}

/* Destroys the queue pairs and their queue, which must wait for the acknowledgement. */
static int acknowledged;
static void *acknowledge(void *unused)
{
	(void)unused;
	__atomic_store_n(&acknowledged, 1, __ATOMIC_SEQ_CST);
	ibv_ack_cq_events(cq, 3);
	return NULL;
}

static void asynchronous_events(void)
{
	/* a WRITE under a key that does not allow it is an access error of the one who is written to */
	struct ibv_async_event event;
	set_blocking(s.context->async_fd, 0);
	errno = 0;
	CHECK(ibv_get_async_event(s.context, &event) == -1 && errno == EAGAIN);
	CHECK(try_write(&s, (uintptr_t)s.buffer[1], s.mr[1]->rkey ^ 0x55, 8) == IBV_WC_REM_ACCESS_ERR);
	CHECK(readable(s.context->async_fd, 10000));
	int seen_access = 0;
	while (!ibv_get_async_event(s.context, &event)) {
		if (event.event_type == IBV_EVENT_QP_ACCESS_ERR) {
			CHECK(event.element.qp == s.qp[1]);
			seen_access++;
		}
		ibv_ack_async_event(&event);
	}
	CHECK(errno == EAGAIN && seen_access == 1);
	set_blocking(s.context->async_fd, 1);
}

int main(void)
{
	set_up(&s);
	channel = ibv_create_comp_channel(s.context);
	CHECK(channel && channel->fd >= 0 && channel->context == s.context);
	cq = ibv_create_cq(s.context, 2 * DEPTH, &cq, channel, 0);
	CHECK(cq && cq->channel == channel);
	struct ibv_cq *first = s.cq;
	s.cq = cq;
	for (int i = 0; i < 2; i++)
		qp[i] = make_qp(&s);
	for (int i = 0; i < 2; i++)
		connect_qp(&s, qp[i], qp[1 - i]->qp_num);
	s.cq = first;
	completion_events();
	asynchronous_events();
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, acknowledge, NULL));
	CHECK(!ibv_destroy_cq(cq) && __atomic_load_n(&acknowledged, __ATOMIC_SEQ_CST));
	pthread_join(thread, NULL);
	CHECK(channel->refcnt == 0 && !ibv_destroy_comp_channel(channel));
	clear_away(&s);
	puts("done");
	return 0;
}

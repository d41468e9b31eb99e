/* Extended completion queues with their timestamps, and completion queues that change their size. */

#include "check.h"

#include <time.h>
#include <unistd.h>

enum { CHAIN = 6 };

static struct setup s;

static uint64_t now_ns(clockid_t clock)
{
	struct timespec now;
	CHECK(!clock_gettime(clock, &now));
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t raw_clock(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	CHECK(!ibv_query_rt_values_ex(s.context, &values) && values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
	return (uint64_t)values.raw_clock.tv_sec * 1000000000 + values.raw_clock.tv_nsec;
}

/* WRITEs of the first queue pair, the last with immediate data that the second one receives. */
static void some_work(int count)
{
	post_recv_one(&s, 50, 0, 0);
	for (int i = 0; i < count; i++) {
		struct ibv_sge sge = { (uintptr_t)s.buffer[0], 64, s.mr[0]->lkey };
		struct ibv_send_wr wr = {
			.wr_id = i,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = i + 1 < count ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM,
			.imm_data = 0x01020304,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)s.buffer[1], s.mr[1]->rkey },
		};
		post(&s, &wr);
	}
}

static void extended(uint32_t flags)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 4 * DEPTH,
		.cq_context = &s,
		.wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
			    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = flags,
	};
	struct ibv_cq_ex *cq = ibv_create_cq_ex(s.context, &attr);
	CHECK(cq && cq->cqe >= 4 * DEPTH && cq->cq_context == &s);
	s.cq = ibv_cq_ex_to_cq(cq);
	for (int i = 0; i < 2; i++)
		s.qp[i] = make_qp(&s);
	for (int i = 0; i < 2; i++)
		connect_qp(&s, s.qp[i], s.qp[1 - i]->qp_num);

	struct ibv_poll_cq_attr poll = { .comp_mask = 1 };
	CHECK(ibv_start_poll(cq, &poll) == EINVAL);
	poll.comp_mask = 0;
	CHECK(ibv_start_poll(cq, &poll) == ENOENT);
	/* which leaves it free for the next */
	CHECK(ibv_start_poll(cq, &poll) == ENOENT);

	uint64_t before = raw_clock(), day_before = now_ns(CLOCK_REALTIME);
	some_work(CHAIN);
	int sent = 0, received = 0;
	uint64_t last = before;
	while (ibv_start_poll(cq, &poll) == ENOENT)
		;
	for (;;) {
		CHECK(cq->status == IBV_WC_SUCCESS);
		uint64_t stamp = ibv_wc_read_completion_ts(cq);
		CHECK(stamp >= last && stamp <= raw_clock());
		last = stamp;
		uint64_t day = ibv_wc_read_completion_wallclock_ns(cq);
		CHECK(day + 1000000000 >= day_before && day <= now_ns(CLOCK_REALTIME) + 1000000000);
		CHECK(ibv_wc_read_vendor_err(cq) == 0 && ibv_wc_read_slid(cq) == 0 && ibv_wc_read_sl(cq) == 0);
		CHECK(ibv_wc_read_dlid_path_bits(cq) == 0);
		if (ibv_wc_read_opcode(cq) == IBV_WC_RECV_RDMA_WITH_IMM) {
			CHECK(cq->wr_id == 50 && ibv_wc_read_byte_len(cq) == 64);
			CHECK(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM && ibv_wc_read_imm_data(cq) == 0x01020304);
			CHECK(ibv_wc_read_qp_num(cq) == s.qp[1]->qp_num);
			received++;
		} else {
			CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RDMA_WRITE && cq->wr_id == (uint64_t)sent);
			CHECK(ibv_wc_read_qp_num(cq) == s.qp[0]->qp_num);
			sent++;
		}
		if (sent + received == CHAIN + 1)
			break;
		while (ibv_next_poll(cq) == ENOENT)
			;
	}
	CHECK(ibv_next_poll(cq) == ENOENT);
	ibv_end_poll(cq);

	/* and as a plain one */
	some_work(1);
	for (int seen = 0; seen < 2; seen++)
		CHECK(completion(&s).status == IBV_WC_SUCCESS);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(s.qp[i]));
	CHECK(!ibv_destroy_cq(s.cq));
}

static void resized(void)
{
	/* what waits in it is there after it has grown, in order, and it cannot become too small for it */
	some_work(CHAIN);
	struct ibv_wc wc;
	int cqe = s.cq->cqe;
	CHECK(!ibv_resize_cq(s.cq, 4 * cqe) && s.cq->cqe >= 4 * cqe);
	int sent = 0;
	for (int seen = 0; seen < CHAIN + 1; seen++) {
		wc = completion(&s);
		CHECK(wc.status == IBV_WC_SUCCESS && (wc.wr_id == 50 || wc.wr_id == (uint64_t)sent));
		sent += wc.wr_id != 50;
	}
	CHECK(!ibv_resize_cq(s.cq, 2 * CHAIN) && s.cq->cqe >= 2 * CHAIN);
	some_work(CHAIN);
	while (!ibv_poll_cq(s.cq, 1, &wc))
		;
	/* nothing but polling tells how many wait, and that would take them away */
	usleep(100000);
	CHECK(ibv_resize_cq(s.cq, 1) == EINVAL && ibv_resize_cq(s.cq, 0) == EINVAL && ibv_resize_cq(s.cq, -1) == EINVAL);
	for (int seen = 1; seen < CHAIN + 1; seen++)
		CHECK(completion(&s).status == IBV_WC_SUCCESS);
}

int main(void)
{
	set_up(&s);
	struct setup saved = s;
	struct ibv_device_attr_ex device;
	CHECK(!ibv_query_device_ex(s.context, NULL, &device));
	CHECK(device.completion_timestamp_mask == UINT64_MAX && device.hca_core_clock == 1000000);
	resized();
	extended(0);
	extended(IBV_CREATE_CQ_ATTR_SINGLE_THREADED);
	s = saved;
	clear_away(&s);
	puts("done");
	return 0;
}

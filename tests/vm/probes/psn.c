/*
 * What `ibv_query_qp` says of packet sequence numbers, in RTS, SQD and ERR: whether two ends that are stopped can find out
 * which requests were executed.
 */
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "uverbs.h"
#include "verdict.h"

enum { LENGTH = 1 << 16, MTU = 1024, START_A = 1000, START_B = 5000000, ENTRIES = 64 };

static const unsigned ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

struct pair {
	struct device device;
	uint32_t pd;
	struct cq cq;
	struct qp a, b;
	struct mr mr;
	uint8_t *memory;
};

static struct pair pair_make(void)
{
	struct pair pair = { .device = device_open() };

	pair.pd = pd_make(&pair.device);
	pair.cq = cq_make(&pair.device, 256);
	ring_map(&pair.device, &pair.cq.ring);
	pair.memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pair.mr = mr_make(&pair.device, pair.pd, pair.memory, LENGTH, ACCESS);
	pair.a = qp_make(&pair.device, pair.pd, &pair.cq, IBV_QPT_RC, ENTRIES);
	pair.b = qp_make(&pair.device, pair.pd, &pair.cq, IBV_QPT_RC, ENTRIES);
	qp_map(&pair.device, &pair.a);
	qp_map(&pair.device, &pair.b);
	qp_connect(&pair.device, &pair.a, IBV_QPT_RC, pair.b.number, START_A, START_B, ACCESS);
	qp_connect(&pair.device, &pair.b, IBV_QPT_RC, pair.a.number, START_B, START_A, ACCESS);
	return pair;
}

static void post(struct pair *pair, enum ibv_wr_opcode opcode, uint32_t length)
{
	uint64_t local = (uintptr_t)pair->memory;
	struct request request = {
		.opcode = opcode,
		.flags = IBV_SEND_SIGNALED,
		.local = local,
		.length = length,
		.lkey = pair->mr.lkey,
		.remote = local + LENGTH / 2,
		.rkey = pair->mr.rkey,
	};

	send_request(&pair->device, &pair->a, &request);
}

static void completed(struct pair *pair)
{
	struct ib_uverbs_wc wc = cq_next(&pair->cq);

	if (wc.status != IBV_WC_SUCCESS) {
		errno = EIO;
		trouble("a request completed with status %d", wc.status);
	}
}

/* 0 or an errno. */
static int to_state(struct pair *pair, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	return qp_modify(&pair->device, &pair->a, &attr, IBV_QP_STATE);
}

/* How many of `wanted` good completions come, each within the limit. */
static int completions(struct pair *pair, int wanted, unsigned limit_ms)
{
	struct ib_uverbs_wc wc;
	int count = 0;

	while (count < wanted && cq_wait(&pair->cq, &wc, limit_ms) && wc.status == IBV_WC_SUCCESS)
		count++;
	return count;
}

/* Waits until nothing changes for 300 ms: what is under way towards a queue pair that answers nothing cannot be awaited. */
static void settle(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = 300000000 }, NULL);
}

int main(void)
{
	struct pair pair = pair_make();
	struct ib_uverbs_query_qp_resp a, b;
	uint32_t expected = START_A;

	/* 5 packets, 1, 1; and a READ takes the numbers of its answer's packets. */
	post(&pair, IBV_WR_RDMA_WRITE, 5 * MTU);
	post(&pair, IBV_WR_RDMA_WRITE, 1);
	post(&pair, IBV_WR_RDMA_WRITE, 0);
	post(&pair, IBV_WR_RDMA_READ, 3 * MTU);
	for (int i = 0; i < 4; i++)
		completed(&pair);
	expected += 5 + 1 + 1 + 3;
	a = qp_query(&pair.device, &pair.a);
	b = qp_query(&pair.device, &pair.b);
	claim("in-rts-sq-psn-is-that-of-the-next-request", a.sq_psn == expected, "%u instead of %u", a.sq_psn, expected);
	claim("in-rts-rq-psn-is-the-one-expected-next", b.rq_psn == expected, "%u instead of %u", b.rq_psn, expected);
	claim("in-rts-the-other-direction-is-untouched", a.rq_psn == START_B && b.sq_psn == START_B, "%u and %u", a.rq_psn,
	      b.sq_psn);

	/* Two SENDs that find no RECV: under way until there are some. */
	post(&pair, IBV_WR_SEND, 2 * MTU);
	post(&pair, IBV_WR_SEND, 1);
	settle();
	a = qp_query(&pair.device, &pair.a);
	b = qp_query(&pair.device, &pair.b);
	seen("two SENDs of 2 and 1 packets wait for a RECV: sq_psn %u, rq_psn %u; done are all below %u", a.sq_psn, b.rq_psn,
	     expected);
	claim("rq-psn-does-not-count-what-waits-for-a-recv", b.rq_psn == expected, "%u instead of %u", b.rq_psn, expected);

	/* SQD meanwhile, with another request behind them; then RECVs. */
	int error = to_state(&pair, IBV_QPS_SQD);

	a = qp_query(&pair.device, &pair.a);
	claim("rts-to-sqd-is-allowed", error == 0 && a.qp_state == IBV_QPS_SQD, "errno %d, state %u", error, a.qp_state);
	post(&pair, IBV_WR_RDMA_WRITE, 1);
	for (int i = 0; i < 2; i++)
		put_recv(&pair.b, 7, (uintptr_t)pair.memory + LENGTH / 2, LENGTH / 2, pair.mr.lkey);

	int done = completions(&pair, 5, 3000);

	claim("in-sqd-what-waits-for-a-recv-goes-on", done == 4, "%d of its 4 completions", done);
	seen("in SQD, 3 s later: %d completions, sq_psn %u, rq_psn %u", done, qp_query(&pair.device, &pair.a).sq_psn,
	     qp_query(&pair.device, &pair.b).rq_psn);
	error = to_state(&pair, IBV_QPS_RTS);
	if (!error)
		error = doorbell(&pair.device, &pair.a);
	done += completions(&pair, 5 - done, PATIENCE_MS);
	claim("from-sqd-back-to-rts-all-of-it-completes", error == 0 && done == 5, "errno %d, %d of 5 completions", error, done);
	expected += 2 + 1 + 1;

	/* SQD in the middle of a long row of WRITEs. */
	enum { ROW = 40, PACKETS = 20 };

	for (int i = 0; i < ROW; i++)
		post(&pair, IBV_WR_RDMA_WRITE, PACKETS * MTU);
	error = to_state(&pair, IBV_QPS_SQD);
	settle();
	done = completions(&pair, ROW, 1000);
	a = qp_query(&pair.device, &pair.a);
	b = qp_query(&pair.device, &pair.b);
	seen("in SQD in the middle of %d WRITEs: %d completed, sq_psn %u, rq_psn %u, sq_draining %u", ROW, done, a.sq_psn, b.rq_psn,
	     a.sq_draining);
	claim("in-sqd-both-numbers-are-those-of-what-has-completed",
	      error == 0 && a.sq_psn == expected + done * PACKETS && b.rq_psn == a.sq_psn, "%u and %u instead of %u", a.sq_psn,
	      b.rq_psn, expected + done * PACKETS);
	error = to_state(&pair, IBV_QPS_RTS);
	if (!error)
		error = doorbell(&pair.device, &pair.a);
	done += completions(&pair, ROW - done, PATIENCE_MS);
	claim("from-sqd-back-to-rts-the-row-completes", error == 0 && done == ROW, "errno %d, %d of %d", error, done, ROW);
	expected += ROW * PACKETS;

	/* The responder stops first: what the requester still sends is dropped. Then the requester. */
	post(&pair, IBV_WR_RDMA_WRITE, 1);
	completed(&pair);
	expected += 1;
	qp_state(&pair.device, &pair.b, IBV_QPS_ERR);
	post(&pair, IBV_WR_RDMA_WRITE, 4 * MTU);
	settle();
	b = qp_query(&pair.device, &pair.b);
	claim("in-err-rq-psn-is-the-one-expected-next", b.rq_psn == expected && b.qp_state == IBV_QPS_ERR,
	      "%u instead of %u, state %u", b.rq_psn, expected, b.qp_state);
	qp_state(&pair.device, &pair.a, IBV_QPS_ERR);

	struct ib_uverbs_wc wc = cq_next(&pair.cq);

	a = qp_query(&pair.device, &pair.a);
	seen("in ERR with 4 packets unacknowledged: sq_psn %u; acknowledged are all below %u", a.sq_psn, expected);
	claim("in-err-what-was-under-way-is-flushed", wc.status == IBV_WC_WR_FLUSH_ERR, "status %u", wc.status);
	claim("in-err-sq-psn-lies-between-what-is-done-and-what-was-posted",
	      a.sq_psn >= expected && a.sq_psn <= expected + 4, "%u, which is not in %u..=%u", a.sq_psn, expected, expected + 4);

	/* rxe writes the numbers of each request into the ring that it shares with its user. */
	struct rxe_queue_buf *ring = pair.a.sends.at;
	uint32_t last = (ring->producer_index - 1) & ring->index_mask;
	struct rxe_send_wqe *wqe = (void *)(ring->data + ((size_t)last << ring->log2_elem_size));

	seen("the ring says of that request: first_psn %u, last_psn %u", wqe->first_psn, wqe->last_psn);
	claim("the-ring-tells-the-numbers-of-each-request", wqe->first_psn == expected && wqe->last_psn == expected + 3,
	      "%u to %u instead of %u to %u", wqe->first_psn, wqe->last_psn, expected, expected + 3);
	return verdict_worst;
}

/*
 * The drain's hidden markers: a request that a program never posted, behind its own, whose completion tells that all before
 * it are done. And what a stopped program's RNIC does.
 */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "uverbs.h"
#include "verdict.h"

enum { LENGTH = 1 << 20, HALF = LENGTH / 2, ENTRIES = 128, MARK = 0xabcd, NO_KEY = 0x7fffff01, NOBODY = 0x00fedc };

struct pair {
	struct device device;
	uint32_t pd;
	struct cq at_a, at_b;
	struct qp a, b;
	struct mr mr;
	uint8_t *memory;
};

static const unsigned ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/* A pair of which `b` allows this to its peer. */
static struct pair pair_make(enum ibv_qp_type type, unsigned access)
{
	struct pair pair = { .device = device_open() };

	pair.pd = pd_make(&pair.device);
	pair.at_a = cq_make(&pair.device, 512);
	pair.at_b = cq_make(&pair.device, 512);
	ring_map(&pair.device, &pair.at_a.ring);
	ring_map(&pair.device, &pair.at_b.ring);
	pair.memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pair.mr = mr_make(&pair.device, pair.pd, pair.memory, LENGTH, ALL);
	pair.a = qp_make(&pair.device, pair.pd, &pair.at_a, type, ENTRIES);
	pair.b = qp_make(&pair.device, pair.pd, &pair.at_b, type, ENTRIES);
	qp_map(&pair.device, &pair.a);
	qp_map(&pair.device, &pair.b);
	qp_connect(&pair.device, &pair.a, type, pair.b.number, 1, 1, ALL);
	qp_connect(&pair.device, &pair.b, type, pair.a.number, 1, 1, access);
	return pair;
}

static struct request marker(void)
{
	return (struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = MARK, .flags = IBV_SEND_SIGNALED, .rkey = NO_KEY };
}

/* A request of the program's own from the first half of its memory to the second. */
static struct request own(const struct pair *pair, enum ibv_wr_opcode opcode, uint32_t length, unsigned flags)
{
	return (struct request){
		.opcode = opcode,
		.flags = flags,
		.local = (uintptr_t)pair->memory,
		.length = length,
		.lkey = pair->mr.lkey,
		.remote = (uintptr_t)pair->memory + HALF,
		.rkey = pair->mr.rkey,
	};
}

static bool is_mark(const struct ib_uverbs_wc *wc)
{
	return wc->status == IBV_WC_SUCCESS && wc->wr_id == MARK;
}

static void connected(enum ibv_qp_type type, const char *bare, const char *behind, const char *unseen)
{
	struct pair pair = pair_make(type, ALL);
	struct request request = marker();
	struct ib_uverbs_wc wc = { 0 };
	int landed = 0;

	put_recv(&pair.b, 1, (uintptr_t)pair.memory, 64, pair.mr.lkey);
	send_request(&pair.device, &pair.a, &request);
	claim(bare, cq_wait(&pair.at_a, &wc, PATIENCE_MS) && is_mark(&wc), "status %u", wc.status);

	/* Unsignaled requests of many packets, and the marker behind them. */
	enum { COUNT = 50, SIZE = 8000 };

	memset(pair.memory, 0x5a, HALF);
	for (int i = 0; i < COUNT; i++) {
		request = own(&pair, IBV_WR_RDMA_WRITE, SIZE, 0);
		request.remote += (uint64_t)i * SIZE;
		put_send(&pair.a, &request);
	}
	request = marker();
	send_request(&pair.device, &pair.a, &request);
	wc = cq_next(&pair.at_a);
	for (int i = 0; i < COUNT; i++)
		landed += pair.memory[HALF + i * SIZE] == 0x5a && pair.memory[HALF + (i + 1) * SIZE - 1] == 0x5a;
	/* Nothing acknowledges on UC: there it tells that they were sent. */
	if (type == IBV_QPT_UC)
		seen("on UC, at the marker's completion %d of %d WRITEs had landed", landed, COUNT);
	claim(behind, is_mark(&wc) && (landed == COUNT || type == IBV_QPT_UC), "status %u, %d of %d WRITEs landed", wc.status,
	      landed, COUNT);
	claim(unseen, !cq_wait(&pair.at_b, &wc, 500), "the peer got a completion of status %u", wc.status);
}

/* The peer allows no WRITE. */
static void not_allowed(void)
{
	struct pair pair = pair_make(IBV_QPT_RC, IBV_ACCESS_LOCAL_WRITE);
	struct request request = marker();
	struct ib_uverbs_wc wc = { 0 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

	send_request(&pair.device, &pair.a, &request);
	wc = cq_next(&pair.at_a);
	claim("a-marker-to-a-peer-that-allows-no-write-breaks-the-connection",
	      wc.status != IBV_WC_SUCCESS && qp_query(&pair.device, &pair.a).qp_state == IBV_QPS_ERR, "status %u", wc.status);
	seen("it completed with status %u, and the peer's queue pair is in state %u", wc.status,
	     qp_query(&pair.device, &pair.b).qp_state);

	pair = pair_make(IBV_QPT_RC, IBV_ACCESS_LOCAL_WRITE);
	int error = qp_modify(&pair.device, &pair.b, &attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS);

	send_request(&pair.device, &pair.a, &request);
	wc = cq_next(&pair.at_a);
	claim("rts-to-rts-allows-the-marker", error == 0 && is_mark(&wc), "errno %d, status %u", error, wc.status);
}

/* Access is given and taken all the time while requests of all kinds are under way. */
static void rights_change_under_way(void)
{
	struct pair pair = pair_make(IBV_QPT_RC, ALL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ib_uverbs_wc wc;
	enum { COUNT = 60, SIZE = 20000 };
	int changes = 0, good = 0, errors = 0;

	memset(pair.memory, 0x77, HALF);
	for (int i = 0; i < COUNT; i++)
		put_recv(&pair.b, i, (uintptr_t)pair.memory + HALF, SIZE, pair.mr.lkey);
	for (int i = 0; i < COUNT; i++) {
		struct request request = own(&pair, i % 3 == 0 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, SIZE, IBV_SEND_SIGNALED);

		put_send(&pair.a, &request);
	}
	if (doorbell(&pair.device, &pair.a))
		trouble("POST_SEND");
	/* READ goes and comes; WRITE, which is under way, stays. Memory windows' binding is of no concern. */
	for (int done = 0; done < COUNT; changes++) {
		attr.qp_access_flags = changes % 2 ? ALL : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
		errors += qp_modify(&pair.device, &pair.b, &attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS) != 0;
		while (cq_take(&pair.at_a, &wc)) {
			done++;
			good += wc.status == IBV_WC_SUCCESS;
		}
	}
	claim("rts-to-rts-with-access-flags-disturbs-nothing-under-way", good == COUNT && errors == 0,
	      "%d of %d requests were good, %d changes of %d failed", good, COUNT, errors, changes);
	seen("%d changes while %d requests were under way", changes, COUNT);
}

/*
 * A READ whose answer was lost comes again, after requests that were posted behind it have been executed. Here without any loss: the requester
 * begins anew with the PSN of the READ, which its peer takes for a repeated one. How the READ ends then.
 */
static uint32_t repeated_read(bool marked)
{
	struct pair pair = pair_make(IBV_QPT_RC, ALL);
	struct request read = own(&pair, IBV_WR_RDMA_READ, 100, IBV_SEND_SIGNALED), mark = marker();
	struct ib_uverbs_wc wc;

	memset(pair.memory + HALF, 0x21, 100);
	send_request(&pair.device, &pair.a, &read);
	wc = cq_next(&pair.at_a);
	if (wc.status == IBV_WC_SUCCESS && marked) {
		send_request(&pair.device, &pair.a, &mark);
		wc = cq_next(&pair.at_a);
	}
	if (wc.status != IBV_WC_SUCCESS)
		trouble("status %u before anything was repeated", wc.status);
	memset(pair.memory, 0, 100);
	qp_state(&pair.device, &pair.a, IBV_QPS_RESET);
	qp_connect(&pair.device, &pair.a, IBV_QPT_RC, pair.b.number, 1, 1, ALL);
	send_request(&pair.device, &pair.a, &read);
	wc = cq_next(&pair.at_a);
	if (wc.status == IBV_WC_SUCCESS && (pair.memory[0] != 0x21 || pair.memory[99] != 0x21))
		trouble("a READ completed, and its data are not there");
	return wc.status;
}

/*
 * The same of a WRITE and an ATOMIC behind it, none of which was acknowledged as far as their requester knows. What the ATOMIC has fetched
 * when it completes: 7, or what was in its place before.
 */
static uint64_t repeated_atomic(void)
{
	struct pair pair = pair_make(IBV_QPT_RC, ALL);
	struct request write = own(&pair, IBV_WR_RDMA_WRITE, 100, 0), atomic = own(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, IBV_SEND_SIGNALED);
	uint64_t *fetched = (void *)(pair.memory + 4096);
	struct ib_uverbs_wc wc;

	atomic.local = (uintptr_t)fetched;
	atomic.remote += 8192;
	atomic.add = 1;
	memset(pair.memory + HALF + 8192, 0, 8);
	pair.memory[HALF + 8192] = 7;
	for (int life = 0; life < 2; life++) {
		*fetched = UINT64_MAX;
		put_send(&pair.a, &write);
		send_request(&pair.device, &pair.a, &atomic);
		wc = cq_next(&pair.at_a);
		if (wc.status != IBV_WC_SUCCESS || (life == 0 && *fetched != 7))
			trouble("status %u, fetched %llu", wc.status, (unsigned long long)*fetched);
		if (life == 0) {
			qp_state(&pair.device, &pair.a, IBV_QPS_RESET);
			qp_connect(&pair.device, &pair.a, IBV_QPT_RC, pair.b.number, 1, 1, ALL);
		}
	}
	return *fetched;
}

/* A READ that is not answered, since the peer is not connected yet, and a marker behind it: which of them are sent until then. */
static void fenced(void)
{
	struct device device = device_open();
	uint32_t pd = pd_make(&device);
	struct pair pair = { .device = device, .pd = pd, .at_a = cq_make(&device, 512), .at_b = cq_make(&device, 512) };
	struct ib_uverbs_wc wc;

	ring_map(&device, &pair.at_a.ring);
	ring_map(&device, &pair.at_b.ring);
	pair.memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pair.mr = mr_make(&device, pd, pair.memory, LENGTH, ALL);
	for (int with_fence = 0; with_fence < 2; with_fence++) {
		struct request read, mark = marker();
		uint32_t sent;

		pair.a = qp_make(&device, pd, &pair.at_a, IBV_QPT_RC, ENTRIES);
		pair.b = qp_make(&device, pd, &pair.at_b, IBV_QPT_RC, ENTRIES);
		qp_map(&device, &pair.a);
		qp_map(&device, &pair.b);
		qp_connect(&device, &pair.a, IBV_QPT_RC, pair.b.number, 1, 1, ALL);
		read = own(&pair, IBV_WR_RDMA_READ, 100, 0);
		mark.flags |= with_fence ? IBV_SEND_FENCE : 0;
		put_send(&pair.a, &read);
		send_request(&device, &pair.a, &mark);
		usleep(100000);
		sent = qp_query(&device, &pair.a).sq_psn - 1;
		if (with_fence)
			claim("a-fenced-marker-waits-for-the-answer-to-a-read", sent == 1, "%u packets were sent", sent);
		else
			seen("without a fence %u packets are sent before the READ is answered", sent);
		/* The READ is repeated until there is somebody. */
		qp_connect(&device, &pair.b, IBV_QPT_RC, pair.a.number, 1, 1, ALL);
		wc = cq_next(&pair.at_a);
		if (with_fence)
			claim("and-is-sent-then", is_mark(&wc), "status %u, id %llu", wc.status, (unsigned long long)wc.wr_id);
	}
}

static void datagrams(void)
{
	struct pair pair = pair_make(IBV_QPT_UD, ALL);
	uint32_t ah = ah_make(&pair.device, pair.pd);
	struct request request = own(&pair, IBV_WR_SEND, 100, 0);
	struct ib_uverbs_wc wc = { 0 };

	/* The program's own datagram first, to the peer; the marker behind it, to nobody. */
	put_recv(&pair.b, 5, (uintptr_t)pair.memory + HALF, 200, pair.mr.lkey);
	put_recv(&pair.b, 6, (uintptr_t)pair.memory + HALF, 200, pair.mr.lkey);
	request.ah = ah;
	request.qpn = pair.b.number;
	put_send(&pair.a, &request);
	request = (struct request){
		.opcode = IBV_WR_SEND, .id = MARK, .flags = IBV_SEND_SIGNALED, .ah = ah, .qpn = NOBODY,
	};
	send_request(&pair.device, &pair.a, &request);
	claim("a-datagram-to-a-number-that-nobody-has-completes", cq_wait(&pair.at_a, &wc, PATIENCE_MS) && is_mark(&wc),
	      "status %u", wc.status);
	wc = cq_next(&pair.at_b);
	claim("the-programs-datagram-before-it-arrives", wc.status == IBV_WC_SUCCESS && wc.wr_id == 5, "status %u, id %llu",
	      wc.status, (unsigned long long)wc.wr_id);
	claim("nobody-gets-the-datagram", !cq_wait(&pair.at_b, &wc, 500), "a completion of status %u", wc.status);

	/* Where the program has left no RECV, its own queue pair is as good an address. */
	qp_state(&pair.device, &pair.a, IBV_QPS_RESET);
	claim("a-datagram-queue-pair-goes-to-reset", qp_query(&pair.device, &pair.a).qp_state == IBV_QPS_RESET, "no");
}

/* A process that stands still, frozen or stopped, is written to. */
static void stopped(void)
{
	struct pair pair = pair_make(IBV_QPT_RC, ALL);
	struct request request;
	struct ib_uverbs_wc wc = { 0 };
	uint8_t *shared = pair.memory;
	int status;
	pid_t child = fork();

	/* The child has the descriptor and the mappings, and neither it nor anybody runs on behalf of queue pair b. */
	if (child == 0) {
		for (;;)
			pause();
	}
	kill(child, SIGSTOP);
	waitpid(child, &status, WUNTRACED);
	memset(shared, 0x42, 100);
	request = own(&pair, IBV_WR_RDMA_WRITE, 100, IBV_SEND_SIGNALED);
	send_request(&pair.device, &pair.a, &request);
	wc = cq_next(&pair.at_a);
	claim("memory-of-a-stopped-process-is-written", wc.status == IBV_WC_SUCCESS && shared[HALF + 99] == 0x42, "status %u",
	      wc.status);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

int main(void)
{
	connected(IBV_QPT_RC, "a-zero-length-write-with-an-invalid-rkey-completes", "its-completion-tells-that-all-before-it-landed",
		  "the-peer-sees-nothing-of-it");
	connected(IBV_QPT_UC, "uc:a-zero-length-write-with-an-invalid-rkey-completes",
		  "uc:it-completes-behind-requests-of-many-packets", "uc:the-peer-sees-nothing-of-it");
	not_allowed();
	rights_change_under_way();
	uint32_t status = repeated_read(false);

	claim("a-read-that-is-repeated-is-answered", status == IBV_WC_SUCCESS, "status %u", status);
	status = repeated_read(true);
	claim("a-read-that-is-repeated-behind-a-zero-length-write-is-answered", status == IBV_WC_SUCCESS, "status %u", status);
	uint64_t fetched = repeated_atomic();

	claim("an-atomic-that-is-repeated-behind-a-write-completes-with-its-result", fetched == 7, "it fetched %llx",
	      (unsigned long long)fetched);
	fenced();
	datagrams();
	stopped();
	return verdict_worst;
}

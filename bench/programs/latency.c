/*
 * The latency of messages over CONNECTIONS reliable connections between two programs, round by round by turns: so what
 * differs between the connections and not between the rounds is theirs.
 *
 * The server is started without an address, the client with the server's, and with the same arguments else. Each says the
 * numbers of its queue pairs in a line of JSON and waits for SIGUSR1, so that somebody can change the connections first. Then each
 * connection has ROUNDS rounds of MESSAGES messages to and fro; each is answered when it has arrived: a SEND when its
 * completion is there, a WRITE when its last byte is, as in ib_send_lat and ib_write_lat. The client prints a line for each round.
 *
 * MEBIBYTES are registered besides, for who wants to move them. Plain libibverbs.
 */
#include <stdbool.h>

#include "common.h"
#include "meet.h"

enum { DEPTH = 64, WARM_UP = 200, MOST_CONNECTIONS = 16 };

/* What the ends tell each other, in this machine's byte order: both are on it. */
struct end {
	union ibv_gid gid;
	uint32_t qpn, rkey;
	uint64_t address;
};

struct connection {
	struct ibv_qp *qp;
	struct ibv_cq *sent, *received;
	struct ibv_mr *mr;
	/* First half: what is sent. Second half: what arrives. */
	char *memory;
	struct end other;
	unsigned under_way;
	unsigned char stamp;
};

static bool is_write, is_client;
static size_t bytes;

static void create(struct connection *of, struct ibv_context *context, struct ibv_pd *pd)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { DEPTH, DEPTH, 1, 1, 0 } };

	of->memory = aligned_alloc(4096, (2 * bytes + 4095) / 4096 * 4096);
	if (!of->memory)
		fail("memory");
	memset(of->memory, 0, 2 * bytes);
	of->mr = ibv_reg_mr(pd, of->memory, 2 * bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	of->sent = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
	of->received = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
	init.send_cq = of->sent;
	init.recv_cq = of->received;
	of->qp = of->mr && of->sent && of->received ? ibv_create_qp(pd, &init) : NULL;
	if (!of->qp)
		fail("MR, CQ or QP");
	to_init(of->qp);
}

static void post_recv(struct connection *of)
{
	struct ibv_sge sge = { (uintptr_t)of->memory + bytes, bytes, of->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	errno = ibv_post_recv(of->qp, &wr, &bad);
	if (errno)
		fail("ibv_post_recv");
}

static int reap(struct ibv_cq *cq, int most)
{
	struct ibv_wc wc[DEPTH];
	int count = ibv_poll_cq(cq, most, wc);

	for (int i = 0; i < count; i++) {
		if (wc[i].status != IBV_WC_SUCCESS) {
			errno = 0;
			fail("a completion says %s", ibv_wc_status_str(wc[i].status));
		}
	}
	if (count < 0)
		fail("ibv_poll_cq");
	return count;
}

static void say(struct connection *of)
{
	struct ibv_sge sge = { (uintptr_t)of->memory, bytes, of->mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = is_write ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { of->other.address, of->other.rkey },
	}, *bad;

	/* The completion of the message before comes with the answer to it, or later. */
	do
		of->under_way -= reap(of->sent, DEPTH);
	while (of->under_way == DEPTH);
	of->memory[bytes - 1] = of->stamp;
	errno = ibv_post_send(of->qp, &wr, &bad);
	if (errno)
		fail("ibv_post_send");
	of->under_way++;
}

static void hear(struct connection *of)
{
	volatile unsigned char *last = (unsigned char *)of->memory + 2 * bytes - 1;

	if (is_write) {
		while (*last != of->stamp)
			;
	} else {
		while (!reap(of->received, 1))
			;
		post_recv(of);
	}
}

static int by_size(const void *one, const void *other)
{
	double a = *(const double *)one, b = *(const double *)other;

	return (a > b) - (a < b);
}

/* So many messages to and fro; half a round trip of each, in microseconds, into `halves` if there is such. */
static void exchange(struct connection *of, unsigned messages, double *halves)
{
	for (unsigned i = 0; i < messages; i++) {
		double start = halves ? now() : 0;

		of->stamp++;
		if (is_client) {
			say(of);
			hear(of);
		} else {
			hear(of);
			say(of);
		}
		if (halves)
			halves[i] = (now() - start) * 1e6 / 2;
	}
}

static void report(unsigned round, unsigned connection, unsigned messages, double *halves)
{
	double sum = 0;

	for (unsigned i = 0; i < messages; i++)
		sum += halves[i];
	qsort(halves, messages, sizeof(*halves), by_size);
	printf("{\"round\": %u, \"connection\": %u, \"median_us\": %.3f, \"mean_us\": %.3f, \"least_us\": %.3f}\n", round,
	       connection, halves[messages / 2], sum / messages, halves[0]);
}

/* Memory that is registered and written to once, and then only moved along. */
static void hold(struct ibv_pd *pd, unsigned mebibytes)
{
	size_t size = (size_t)mebibytes << 20;
	char *memory = size ? aligned_alloc(4096, size) : NULL;

	if (!size)
		return;
	if (!memory)
		fail("memory");
	for (size_t at = 0; at < size; at += sizeof(at))
		memcpy(memory + at, &at, sizeof(at));
	if (!ibv_reg_mr(pd, memory, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE))
		fail("ibv_reg_mr of %u MiB", mebibytes);
}

int main(int argc, char **argv)
{
	static struct connection all[MOST_CONNECTIONS];
	struct ibv_port_attr port;
	union ibv_gid gid;

	if (argc < 7 || argc > 8 || (strcmp(argv[1], "send") && strcmp(argv[1], "write"))) {
		fputs("Usage: latency send|write BYTES MESSAGES ROUNDS CONNECTIONS MEBIBYTES [SERVER]\n", stderr);
		return 2;
	}
	expect(SIGUSR1);
	is_write = !strcmp(argv[1], "write");
	bytes = number(argv[2], 1, 1 << 24);
	unsigned messages = number(argv[3], 1, 1 << 20), rounds = number(argv[4], 1, 1 << 20);
	unsigned connections = number(argv[5], 1, MOST_CONNECTIONS);
	unsigned mebibytes = number(argv[6], 0, 1 << 16);
	is_client = argc == 8;
	int fd = meet(is_client ? argv[7] : NULL);
	struct ibv_context *context = open_device(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	double *halves = calloc(messages, sizeof(*halves));

	if (!pd || !halves || ibv_query_port(context, PORT, &port) || ibv_query_gid(context, PORT, 0, &gid))
		fail("PD, port, GID or memory");
	for (unsigned i = 0; i < connections; i++) {
		struct connection *of = &all[i];

		create(of, context, pd);
		struct end mine = { gid, of->qp->qp_num, of->mr->rkey, (uintptr_t)of->memory + bytes };

		swap(fd, &mine, &of->other, sizeof(mine));
		to_rtr(of->qp, of->other.qpn, &of->other.gid, port.active_mtu);
		to_rts(of->qp);
		for (unsigned depth = 0; !is_write && depth < DEPTH; depth++)
			post_recv(of);
	}
	hold(pd, mebibytes);
	printf("{\"qpns\": [");
	for (unsigned i = 0; i < connections; i++)
		printf("%s%u", i ? ", " : "", all[i].qp->qp_num);
	puts("]}");
	fflush(stdout);
	wait_for(SIGUSR1);
	char ready = 1;

	swap(fd, &ready, &ready, sizeof(ready));
	for (unsigned i = 0; i < connections; i++)
		exchange(&all[i], WARM_UP, NULL);
	for (unsigned round = 0; round < rounds; round++) {
		for (unsigned turn = 0; turn < connections; turn++) {
			/* Each is the first one as often as the others. */
			unsigned connection = (turn + round) % connections;

			exchange(&all[connection], messages, is_client ? halves : NULL);
			if (is_client)
				report(round, connection, messages, halves);
		}
	}
	/* The last answers are acknowledged before the queue pairs go. */
	swap(fd, &ready, &ready, sizeof(ready));
	puts("{\"done\": true}");
	return 0;
}

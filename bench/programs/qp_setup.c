/*
 * Makes QPS reliable connections, connects each to its neighbour within the same program, and MRS memory regions; says how
 * long each step took as one line of JSON; holds them until SIGTERM, so that somebody can look at what they cost; and
 * takes them down.
 *
 * Plain libibverbs: it measures whatever device is first, or the one that is named.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 1, DEPTH = 16, REGION_BYTES = 4096, PATIENCE_S = 300 };

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void fail(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	fputs("qp_setup: ", stderr);
	vfprintf(stderr, format, arguments);
	fprintf(stderr, ": %s\n", strerror(errno));
	exit(1);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

static struct ibv_context *open_device(const char *name)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context = NULL;

	for (int i = 0; list && i < count && !context; i++)
		if (!name || !strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	if (!context)
		fail("no RDMA device%s%s can be opened", name ? " " : "", name ? name : "");
	ibv_free_device_list(list);
	return context;
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, const char *state)
{
	int error = ibv_modify_qp(qp, attr, mask);

	if (error) {
		errno = error;
		fail("ibv_modify_qp to %s", state);
	}
}

/* The three steps from RESET to RTS. */
static void connect_qp(struct ibv_qp *qp, uint32_t remote_qpn, const union ibv_gid *gid, enum ibv_mtu mtu)
{
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu,
		.dest_qp_num = remote_qpn,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.port_num = PORT,
			.grh = { .dgid = *gid, .hop_limit = 64 },
		},
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};

	modify(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
	modify(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, "RTR");
	modify(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
	       IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
}

static void wait_for_sigterm(void)
{
	sigset_t set;
	struct timespec patience = { .tv_sec = PATIENCE_S };

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	while (sigtimedwait(&set, NULL, &patience) < 0 && errno == EINTR)
		;
}

static unsigned count_of(const char *text)
{
	char *end;
	unsigned long count = strtoul(text, &end, 10);

	if (*end || !*text || count > 1u << 20) {
		errno = EINVAL;
		fail("%s is no count", text);
	}
	return count;
}

int main(int argc, char **argv)
{
	if (argc < 3 || argc > 4) {
		fputs("Usage: qp_setup QPS MRS [DEVICE]\n\nExample: qp_setup 64 0 verbatim0\n", stderr);
		return 2;
	}
	unsigned qps = count_of(argv[1]), mrs = count_of(argv[2]);
	struct ibv_qp **qp = calloc(qps + 1, sizeof(*qp));
	struct ibv_mr **mr = calloc(mrs + 1, sizeof(*mr));
	char *memory = mrs ? aligned_alloc(REGION_BYTES, (size_t)mrs * REGION_BYTES) : NULL;
	struct ibv_port_attr port;
	union ibv_gid gid;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (!qp || !mr || (mrs && !memory))
		fail("memory");
	struct ibv_context *context = open_device(argv[3]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 1024, NULL, NULL, 0);

	if (!pd || !cq || ibv_query_port(context, PORT, &port) || ibv_query_gid(context, PORT, 0, &gid))
		fail("PD, CQ, port or GID");
	if (memory)
		memset(memory, 1, (size_t)mrs * REGION_BYTES);

	double start = now();
	for (unsigned i = 0; i < qps; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.qp_type = IBV_QPT_RC,
			.cap = { DEPTH, DEPTH, 1, 1, 0 },
		};

		qp[i] = ibv_create_qp(pd, &init);
		if (!qp[i])
			fail("ibv_create_qp number %u", i);
	}
	double created = now();
	for (unsigned i = 0; i < qps; i++)
		connect_qp(qp[i], qp[(i ^ 1) < qps ? i ^ 1 : i]->qp_num, &gid, port.active_mtu);
	double connected = now();
	for (unsigned i = 0; i < mrs; i++) {
		mr[i] = ibv_reg_mr(pd, memory + (size_t)i * REGION_BYTES, REGION_BYTES, IBV_ACCESS_LOCAL_WRITE);
		if (!mr[i])
			fail("ibv_reg_mr number %u", i);
	}
	double registered = now();
	printf("{\"create_s\": %.6f, \"connect_s\": %.6f, \"register_s\": %.6f}\n", created - start, connected - created,
	       registered - connected);
	fflush(stdout);
	wait_for_sigterm();

	start = now();
	for (unsigned i = 0; i < qps; i++)
		if (ibv_destroy_qp(qp[i]))
			fail("ibv_destroy_qp number %u", i);
	double destroyed = now();
	for (unsigned i = 0; i < mrs; i++)
		if (ibv_dereg_mr(mr[i]))
			fail("ibv_dereg_mr number %u", i);
	printf("{\"destroy_s\": %.6f, \"deregister_s\": %.6f}\n", destroyed - start, now() - destroyed);
	if (ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(context))
		fail("taking down");
	free(memory);
	free(qp);
	free(mr);
	return 0;
}

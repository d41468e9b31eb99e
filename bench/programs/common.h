/* What the programs of the benches share: plain libibverbs. */
#ifndef COMMON_H
#define COMMON_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 1, PATIENCE_S = 300 };

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Ends the program with this text and that of errno. */
static void fail(const char *format, ...)
{
	int error = errno;
	va_list arguments;

	va_start(arguments, format);
	fprintf(stderr, "%s: ", program_invocation_short_name);
	vfprintf(stderr, format, arguments);
	fprintf(stderr, ": %s\n", strerror(error));
	exit(1);
}

/* Seconds. */
static inline double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

static inline unsigned number(const char *text, unsigned least, unsigned most)
{
	char *end;
	unsigned long value = strtoul(text, &end, 10);

	if (*end || !*text || value < least || value > most) {
		errno = EINVAL;
		fail("%s is no number from %u to %u", text, least, most);
	}
	return value;
}

/* The device of this name, or the first one. */
static inline struct ibv_context *open_device(const char *name)
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

static inline void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, const char *state)
{
	int error = ibv_modify_qp(qp, attr, mask);

	if (error) {
		errno = error;
		fail("ibv_modify_qp to %s", state);
	}
}

/* The three steps from RESET to RTS. */

static inline void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};

	modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
}

static inline void to_rtr(struct ibv_qp *qp, uint32_t remote_qpn, const union ibv_gid *gid, enum ibv_mtu mtu)
{
	struct ibv_qp_attr attr = {
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

	modify(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, "RTR");
}

/* With 2.1 s for an answer, seven times: a virtual machine's processors may be taken away for long. */
static inline void to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.timeout = 19,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};

	modify(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
	       IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
}

/* From now on only `wait_for` sees this signal, in every thread. */
static inline void expect(int signal)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, signal);
	sigprocmask(SIG_BLOCK, &set, NULL);
}

/* Waits for the signal, but not for ever. */
static inline void wait_for(int signal)
{
	sigset_t set;
	struct timespec patience = { .tv_sec = PATIENCE_S };

	sigemptyset(&set);
	sigaddset(&set, signal);
	while (sigtimedwait(&set, NULL, &patience) < 0 && errno == EINTR)
		;
}

#endif

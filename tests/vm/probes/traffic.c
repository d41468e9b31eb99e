/*
 * A program with an RNIC, to be dumped in the middle of its traffic: a pair of queue pairs that are connected with each other, a
 * completion channel that an epoll descriptor watches, memory in a file.
 *
 * It says on SIGUSR1 how far it is, in the file that it was given: a line `rounds N`, or `failed WHY` for ever. After a restore
 * its descriptors are placeholders; it looks for that itself: what epoll watches under the channel's number is an eventfd then,
 * and it says `placeholders`.
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "verdict.h"

enum { PORT = 1, SIZE = 8192, HALF = 65536 };

/* What the thread that answers tells. */
static struct {
	const char *told;
	int channel;
	unsigned rounds;
	char failure[128];
} state;

static void say(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const char *path, const char *format, ...)
{
	char aside[256];
	va_list arguments;
	FILE *file;

	snprintf(aside, sizeof(aside), "%s.new", path);
	file = fopen(aside, "we");
	if (!file)
		trouble("%s", aside);
	va_start(arguments, format);
	vfprintf(file, format, arguments);
	va_end(arguments);
	fclose(file);
	if (rename(aside, path))
		trouble("%s", path);
}

static void to(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t other, union ibv_gid *gid, int gid_index)
{
	struct ibv_qp_attr attr = {
		.qp_state = state,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = other,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.port_num = PORT,
			.grh = { .dgid = *gid, .sgid_index = gid_index, .hop_limit = 64 },
		},
		.timeout = 18,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};
	int mask = IBV_QP_STATE;

	if (state == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	if (state == IBV_QPS_RTR)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			IBV_QP_MIN_RNR_TIMER;
	if (state == IBV_QPS_RTS)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
	errno = ibv_modify_qp(qp, &attr, mask);
	if (errno)
		trouble("ibv_modify_qp");
}

/* Whether the descriptor is what a restore puts in the channel's place. */
static bool is_placeholder(int fd)
{
	char path[64], target[64] = "";

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return readlink(path, target, sizeof(target) - 1) > 0 && strstr(target, "eventfd");
}

/* A thread of its own, since after a restore the other one may stand anywhere. */
static void *answer(void *nothing)
{
	sigset_t asked;
	int signal;

	sigemptyset(&asked);
	sigaddset(&asked, SIGUSR1);
	while (sigwait(&asked, &signal) == 0) {
		unsigned rounds = __atomic_load_n(&state.rounds, __ATOMIC_ACQUIRE);

		if (is_placeholder(state.channel))
			say(state.told, "placeholders %u\n", rounds);
		else if (__atomic_load_n(&state.failure[0], __ATOMIC_ACQUIRE))
			say(state.told, "failed %s\n", state.failure);
		else
			say(state.told, "rounds %u\n", rounds);
	}
	return nothing;
}

/* Tells of a failure for ever. */
static void fail(const char *what, int error)
{
	char text[sizeof(state.failure)];

	snprintf(text, sizeof(text), "%s: %s", what, strerror(error));
	memcpy(state.failure + 1, text + 1, sizeof(text) - 1);
	__atomic_store_n(&state.failure[0], text[0], __ATOMIC_RELEASE);
	for (;;)
		pause();
}

int main(int count, char **arguments)
{
	const char *told = count == 2 ? arguments[1] : NULL;
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_comp_channel *channel = context ? ibv_create_comp_channel(context) : NULL;
	struct ibv_cq *cq = channel ? ibv_create_cq(context, 16, NULL, channel, 0) : NULL;
	int file = memfd_create("memory", 0), epoll = epoll_create1(EPOLL_CLOEXEC);
	uint8_t *memory;
	struct ibv_mr *mr;
	struct ibv_qp *qps[2];
	union ibv_gid gid;
	int gid_index = 0;
	unsigned rounds = 0;

	if (!told || !cq || file < 0 || ftruncate(file, 2 * HALF))
		trouble("the device");
	memory = mmap(NULL, 2 * HALF, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	mr = ibv_reg_mr(pd, memory, 2 * HALF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!mr)
		trouble("ibv_reg_mr");
	do {
		if (ibv_query_gid(context, PORT, gid_index, &gid))
			trouble("ibv_query_gid");
	} while ((gid.raw[10] != 0xff || gid.raw[11] != 0xff) && ++gid_index < 8);
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
			.qp_type = IBV_QPT_RC,
		};

		qps[i] = ibv_create_qp(pd, &init);
		if (!qps[i])
			trouble("ibv_create_qp");
	}
	for (int i = 0; i < 2; i++) {
		to(qps[i], IBV_QPS_INIT, 0, &gid, gid_index);
		to(qps[i], IBV_QPS_RTR, qps[!i]->qp_num, &gid, gid_index);
		to(qps[i], IBV_QPS_RTS, 0, &gid, gid_index);
	}

	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 0x1234567890 };

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &event) || ibv_req_notify_cq(cq, 0))
		trouble("the completion channel");
	pthread_t thread;
	sigset_t asked;

	sigemptyset(&asked);
	sigaddset(&asked, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &asked, NULL);
	state.told = told;
	state.channel = channel->fd;
	errno = pthread_create(&thread, NULL, answer, NULL);
	if (errno)
		trouble("pthread_create");
	say(told, "ready\n");
	for (;; rounds++) {
		struct ibv_sge sge = { (uintptr_t)memory, SIZE, mr->lkey };
		struct ibv_send_wr request = {
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)memory + HALF, mr->rkey },
		}, *bad;
		struct ibv_wc wc;
		void *unused;
		int events = -1, error;

		memset(memory, rounds, SIZE);
		error = ibv_post_send(qps[0], &request, &bad);
		if (error)
			fail("ibv_post_send", error);
		/* A dump ends this call early. */
		do
			events = epoll_wait(epoll, &event, 1, -1);
		while (events != 1);
		if (ibv_get_cq_event(channel, &cq, &unused) || ibv_req_notify_cq(cq, 0))
			fail("the channel", errno);
		ibv_ack_cq_events(cq, 1);
		while (ibv_poll_cq(cq, 1, &wc) < 1)
			;
		if (wc.status)
			fail(ibv_wc_status_str(wc.status), 0);
		if (memory[HALF] != (uint8_t)rounds || memory[HALF + SIZE - 1] != (uint8_t)rounds)
			fail("the memory is not what was written", 0);
		__atomic_store_n(&state.rounds, rounds + 1, __ATOMIC_RELEASE);
	}
}

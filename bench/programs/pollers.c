/*
 * Transfers between two programs whose threads poll without pause, as those of many applications do: on a machine with few cores
 * they leave nothing to a software RNIC.
 *
 * The server is started without an address, the client with the server's, and with the same arguments else. Each has POLLERS threads
 * that poll completion queues without pause: the client's first thread makes TRANSFERS WRITEs of BYTES, one after the other, and
 * waits for the completion of each; all others, and all of the server's, poll queues to which nothing comes. The client prints a
 * line of JSON. Plain libibverbs.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "common.h"
#include "meet.h"

enum { MOST_POLLERS = 64, WARM_UP = 2 };

/* What the ends tell each other, in this machine's byte order: both are on it. */
struct end {
	union ibv_gid gid;
	uint32_t qpn, rkey;
	uint64_t address;
};

static atomic_bool over;

static int take(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int count = ibv_poll_cq(cq, 1, &wc);

	if (count < 0)
		fail("ibv_poll_cq");
	if (count && wc.status != IBV_WC_SUCCESS) {
		errno = 0;
		fail("a completion says %s", ibv_wc_status_str(wc.status));
	}
	return count;
}

static void *poll_in_vain(void *cq)
{
	while (!atomic_load_explicit(&over, memory_order_relaxed))
		take(cq);
	return NULL;
}

/* Waits for the other end's word, which comes when all is done. */
static void *wait_for_end(void *fd)
{
	char done;

	if (recv(*(int *)fd, &done, 1, MSG_WAITALL) != 1)
		fail("the other end");
	atomic_store(&over, true);
	return NULL;
}

static int by_size(const void *one, const void *other)
{
	double a = *(const double *)one, b = *(const double *)other;

	return (a > b) - (a < b);
}

/* Seconds that one WRITE takes. */
static double transfer(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_cq *cq)
{
	struct ibv_send_wr *bad;
	double start = now();

	errno = ibv_post_send(qp, wr, &bad);
	if (errno)
		fail("ibv_post_send");
	while (!take(cq))
		;
	return now() - start;
}

int main(int argc, char **argv)
{
	struct ibv_port_attr port;
	struct end mine, other;
	pthread_t threads[MOST_POLLERS];

	if (argc < 4 || argc > 5) {
		fputs("Usage: pollers BYTES TRANSFERS POLLERS [SERVER]\n", stderr);
		return 2;
	}
	size_t bytes = number(argv[1], 1, 1 << 30);
	unsigned transfers = number(argv[2], 1, 1 << 20), pollers = number(argv[3], 1, MOST_POLLERS);
	bool is_client = argc == 5;
	int fd = meet(is_client ? argv[4] : NULL);
	struct ibv_context *context = open_device(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	char *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	double *took = calloc(transfers, sizeof(*took));
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_mr *mr = pd && memory ? ibv_reg_mr(pd, memory, bytes, access) : NULL;
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 },
	};
	struct ibv_qp *qp = mr && cq ? ibv_create_qp(pd, &init) : NULL;

	if (!qp || !took || ibv_query_port(context, PORT, &port) || ibv_query_gid(context, PORT, 0, &mine.gid))
		fail("PD, CQ, MR, QP, port or GID");
	memset(memory, 1, bytes);
	to_init(qp);
	mine.qpn = qp->qp_num;
	mine.rkey = mr->rkey;
	mine.address = (uintptr_t)memory;
	swap(fd, &mine, &other, sizeof(mine));
	to_rtr(qp, other.qpn, &other.gid, port.active_mtu);
	to_rts(qp);
	swap(fd, &mine, &other, sizeof(mine));

	unsigned in_vain = is_client ? pollers - 1 : pollers;

	for (unsigned i = 0; i < in_vain; i++) {
		struct ibv_cq *nothing = ibv_create_cq(context, 16, NULL, NULL, 0);

		if (!nothing || pthread_create(&threads[i], NULL, poll_in_vain, nothing))
			fail("a poller");
	}
	if (is_client) {
		struct ibv_sge sge = { (uintptr_t)memory, bytes, mr->lkey };
		struct ibv_send_wr wr = {
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { other.address, other.rkey },
		};
		double sum = 0;

		for (unsigned i = 0; i < WARM_UP; i++)
			transfer(qp, &wr, cq);
		for (unsigned i = 0; i < transfers; i++) {
			took[i] = transfer(qp, &wr, cq);
			sum += took[i];
		}
		qsort(took, transfers, sizeof(*took), by_size);
		printf("{\"pollers\": %u, \"median_ms\": %.3f, \"worst_ms\": %.3f, \"gbit_s\": %.3f}\n", pollers,
		       took[transfers / 2] * 1e3, took[transfers - 1] * 1e3, bytes * 8e-9 * transfers / sum);
		atomic_store(&over, true);
		if (send(fd, "", 1, 0) != 1)
			fail("the other end");
	} else {
		wait_for_end(&fd);
	}
	for (unsigned i = 0; i < in_vain; i++)
		pthread_join(threads[i], NULL);
	return 0;
}

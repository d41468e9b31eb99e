/*
 * How long it takes to make verbs objects, and to bring queue pairs to RTS (each connected to its neighbour within this
 * program): COUNT of each in each of ROUNDS rounds, and what was made is destroyed after each. One line of JSON for each round:
 * microseconds of one object, the mean of the round. Round 0 comes before the others: it also pays for what device and program
 * keep.
 *
 * Plain libibverbs: it measures whatever device is first, or the one that is named.
 */
#include <stdint.h>
#include <sys/mman.h>

#include "common.h"

enum { DEPTH = 16, MOST_COUNT = 4096 };

/* Sizes of memory regions in bytes; of the large ones fewer are made, so that no more than BUDGET, or one, is there at a time. */
static const size_t sizes[] = { 4096, 1 << 16, 1 << 20, 16 << 20, 256 << 20, 1 << 30 };
enum { SIZES = sizeof(sizes) / sizeof(*sizes) };
static const size_t BUDGET = 64 << 20;

static struct ibv_context *context;
static struct ibv_port_attr port;
static union ibv_gid gid;
static void *all[MOST_COUNT];

/* Microseconds of one, since `start`. */
static double each(double start, unsigned count)
{
	return (now() - start) * 1e6 / count;
}

static void *made(void *object, const char *what)
{
	if (!object)
		fail("%s", what);
	return object;
}

static void gone(int error, const char *what)
{
	if (error) {
		errno = error;
		fail("destroying %s", what);
	}
}

static double pds(unsigned count)
{
	double start = now();

	for (unsigned i = 0; i < count; i++)
		all[i] = made(ibv_alloc_pd(context), "ibv_alloc_pd");
	double us = each(start, count);

	for (unsigned i = 0; i < count; i++)
		gone(ibv_dealloc_pd(all[i]), "a PD");
	return us;
}

static double cqs(unsigned count)
{
	double start = now();

	for (unsigned i = 0; i < count; i++)
		all[i] = made(ibv_create_cq(context, DEPTH, NULL, NULL, 0), "ibv_create_cq");
	double us = each(start, count);

	for (unsigned i = 0; i < count; i++)
		gone(ibv_destroy_cq(all[i]), "a CQ");
	return us;
}

static double srqs(struct ibv_pd *pd, unsigned count)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	double start = now();

	for (unsigned i = 0; i < count; i++)
		all[i] = made(ibv_create_srq(pd, &init), "ibv_create_srq");
	double us = each(start, count);

	for (unsigned i = 0; i < count; i++)
		gone(ibv_destroy_srq(all[i]), "an SRQ");
	return us;
}

/* Registers regions of memory that the program has written to. */
static double mrs(struct ibv_pd *pd, unsigned count, size_t size)
{
	char *memory = mmap(NULL, count * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		fail("memory");
	memset(memory, 1, count * size);
	double start = now();

	for (unsigned i = 0; i < count; i++)
		all[i] = made(ibv_reg_mr(pd, memory + i * size, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE),
			      "ibv_reg_mr");
	double us = each(start, count);

	for (unsigned i = 0; i < count; i++)
		gone(ibv_dereg_mr(all[i]), "an MR");
	munmap(memory, count * size);
	return us;
}

static void qps(struct ibv_pd *pd, unsigned count)
{
	struct ibv_cq *cq = made(ibv_create_cq(context, 1024, NULL, NULL, 0), "ibv_create_cq");
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { DEPTH, DEPTH, 1, 1, 0 },
	};
	struct ibv_qp **qp = (struct ibv_qp **)all;
	double start = now();

	for (unsigned i = 0; i < count; i++)
		qp[i] = made(ibv_create_qp(pd, &init), "ibv_create_qp");
	double create = each(start, count);

	start = now();
	for (unsigned i = 0; i < count; i++)
		to_init(qp[i]);
	double initialised = each(start, count);

	start = now();
	for (unsigned i = 0; i < count; i++)
		to_rtr(qp[i], qp[(i ^ 1) < count ? i ^ 1 : i]->qp_num, &gid, port.active_mtu);
	double rtr = each(start, count);

	start = now();
	for (unsigned i = 0; i < count; i++)
		to_rts(qp[i]);
	double rts = each(start, count);

	for (unsigned i = 0; i < count; i++)
		gone(ibv_destroy_qp(qp[i]), "a QP");
	gone(ibv_destroy_cq(cq), "a CQ");
	printf("\"qp_create\": %.3f, \"qp_init\": %.3f, \"qp_rtr\": %.3f, \"qp_rts\": %.3f, ", create, initialised, rtr, rts);
}

int main(int argc, char **argv)
{
	if (argc < 3 || argc > 4) {
		fputs("Usage: objects COUNT ROUNDS [DEVICE]\n\nExample: objects 64 50 verbatim0\n", stderr);
		return 2;
	}
	unsigned count = number(argv[1], 1, MOST_COUNT), rounds = number(argv[2], 1, 10000);

	context = open_device(argv[3]);
	struct ibv_pd *pd = made(ibv_alloc_pd(context), "ibv_alloc_pd");

	if (ibv_query_port(context, PORT, &port) || ibv_query_gid(context, PORT, 0, &gid))
		fail("port or GID");
	for (unsigned round = 0; round <= rounds; round++) {
		printf("{\"round\": %u, \"pd\": %.3f, \"cq\": %.3f, \"srq\": %.3f, ", round, pds(count), cqs(count),
		       srqs(pd, count));
		qps(pd, count);
		printf("\"mr\": [");
		for (unsigned i = 0; i < SIZES; i++) {
			unsigned fitting = sizes[i] < BUDGET ? BUDGET / sizes[i] : 1;
			unsigned regions = fitting < count ? fitting : count;

			printf("%s[%zu, %.3f]", i ? ", " : "", sizes[i], mrs(pd, regions, sizes[i]));
		}
		puts("]}");
	}
	gone(ibv_dealloc_pd(pd), "the PD");
	gone(ibv_close_device(context), "the context");
	return 0;
}

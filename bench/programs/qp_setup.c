/*
 * Makes QPS reliable connections, connects each to its neighbour within the same program, and MRS memory regions; says how
 * long each step took as one line of JSON; holds them until SIGTERM, so that somebody can look at what they cost; and
 * takes them down.
 *
 * Plain libibverbs: it measures whatever device is first, or the one that is named.
 */
#include "common.h"

enum { DEPTH = 16, REGION_BYTES = 4096, MOST = 1 << 20 };

static void connect_qp(struct ibv_qp *qp, uint32_t remote_qpn, const union ibv_gid *gid, enum ibv_mtu mtu)
{
	to_init(qp);
	to_rtr(qp, remote_qpn, gid, mtu);
	to_rts(qp);
}

int main(int argc, char **argv)
{
	if (argc < 3 || argc > 4) {
		fputs("Usage: qp_setup QPS MRS [DEVICE]\n\nExample: qp_setup 64 0 verbatim0\n", stderr);
		return 2;
	}
	unsigned qps = number(argv[1], 0, MOST), mrs = number(argv[2], 0, MOST);
	struct ibv_qp **qp = calloc(qps + 1, sizeof(*qp));
	struct ibv_mr **mr = calloc(mrs + 1, sizeof(*mr));
	char *memory = mrs ? aligned_alloc(REGION_BYTES, (size_t)mrs * REGION_BYTES) : NULL;
	struct ibv_port_attr port;
	union ibv_gid gid;

	expect(SIGTERM);
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
	wait_for(SIGTERM);

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

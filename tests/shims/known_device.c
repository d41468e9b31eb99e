/*
 * perftest posts with the ibv_wr_* calls only on devices that it knows by their part number; on any other it falls back to
 * ibv_post_send. Preloaded before the guest library, this makes it believe that it has such a device. To prove that the
 * calls are used it says so on standard error.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

/* A virtual function of a ConnectX: the one of perftest's list that brings the fewest assumptions with it. */
#define KNOWN_PART_ID 4126

static void *next(const char *symbol)
{
	void *function = dlsym(RTLD_NEXT, symbol);

	if (!function) {
		fprintf(stderr, "known_device: there is no %s\n", symbol);
		abort();
	}
	return function;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	int (*query)(struct ibv_context *, struct ibv_device_attr *) = next("ibv_query_device");
	int error = query(context, attr);

	if (!error)
		attr->vendor_part_id = KNOWN_PART_ID;
	return error;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct ibv_qp_ex *(*convert)(struct ibv_qp *) = next("ibv_qp_to_qp_ex");

	fputs("known_device: ibv_qp_to_qp_ex\n", stderr);
	return convert(qp);
}

/*
 * The RDMA device: found by name, its port, its GID, a protection domain and two completion queues for all queue pairs.
 */
#ifndef VCHECK_DEVICE_H
#define VCHECK_DEVICE_H

#include <infiniband/verbs.h>

#include "options.h"
#include "report.h"

enum { PORT_NUMBER = 1 };

struct device {
	struct ibv_context *context;
	struct ibv_device_attr attributes;
	struct ibv_port_attr port;
	unsigned gid_index;
	union ibv_gid gid;
	enum ibv_mtu mtu;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq, *recv_cq;
};

bool device_open(struct device *device, const struct options *options, struct report *report);
bool device_create_queues(struct device *device, uint64_t send_entries, uint64_t recv_entries, struct report *report);
void device_close(struct device *device);

unsigned mtu_bytes(enum ibv_mtu mtu);

#endif

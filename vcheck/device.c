#include "device.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define HOW_TO_GET_ONE "load a driver (e.g. rdma link add rxe0 type rxe netdev DEV) or preload a verbs library"

unsigned mtu_bytes(enum ibv_mtu mtu)
{
	return 128u << mtu;
}

static bool open_named(struct device *device, const char *name, struct report *report)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	int chosen = 0;

	if (!list)
		return report_setup_error(report, "listing RDMA devices: %s: " HOW_TO_GET_ONE, strerror(errno));
	while (name && chosen < count && strcmp(ibv_get_device_name(list[chosen]), name))
		chosen++;
	if (chosen < count) {
		device->context = ibv_open_device(list[chosen]);
		if (!device->context)
			report_setup_error(report, "opening RDMA device %s: %s", ibv_get_device_name(list[chosen]),
					   strerror(errno));
	} else if (count) {
		report_setup_error(report, "no RDMA device %s: the first of %d is %s, give it with -d", name, count,
				   ibv_get_device_name(list[0]));
	} else {
		report_setup_error(report, "no RDMA device: " HOW_TO_GET_ONE);
	}
	ibv_free_device_list(list);
	return device->context;
}

static bool is_ipv4_mapped(const union ibv_gid *gid)
{
	static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid->raw, prefix, sizeof(prefix));
}

static unsigned find_rocev2_ipv4_gid(const struct device *device)
{
	struct ibv_gid_entry entry;

	for (int i = 0; i < device->port.gid_tbl_len; i++)
		if (!ibv_query_gid_ex(device->context, PORT_NUMBER, i, &entry, 0) &&
		    entry.gid_type == IBV_GID_TYPE_ROCE_V2 && is_ipv4_mapped(&entry.gid))
			return i;
	return 0;
}

static bool choose_mtu(struct device *device, unsigned bytes, struct report *report)
{
	device->mtu = device->port.active_mtu;
	if (!bytes)
		return true;
	if (bytes > mtu_bytes(device->port.active_mtu))
		return report_setup_error(report, "--mtu %u: the port's active MTU is %u, give that or less", bytes,
					  mtu_bytes(device->port.active_mtu));
	for (device->mtu = IBV_MTU_256; mtu_bytes(device->mtu) < bytes; device->mtu++)
		;
	return true;
}

bool device_open(struct device *device, const struct options *options, struct report *report)
{
	int error;

	if (!open_named(device, options->device, report))
		return false;
	error = ibv_query_device(device->context, &device->attributes);
	if (error)
		return report_setup_error(report, "ibv_query_device: %s", strerror(error));
	error = ibv_query_port(device->context, PORT_NUMBER, &device->port);
	if (error)
		return report_setup_error(report, "ibv_query_port: %s", strerror(error));
	if (device->port.state != IBV_PORT_ACTIVE)
		return report_setup_error(report, "port %d is %s: bring its network interface up", PORT_NUMBER,
					  ibv_port_state_str(device->port.state));
	device->gid_index = options->gid_index >= 0 ? (unsigned)options->gid_index : find_rocev2_ipv4_gid(device);
	if (ibv_query_gid(device->context, PORT_NUMBER, device->gid_index, &device->gid))
		return report_setup_error(report, "no GID %u (%s): give -x below %d", device->gid_index,
					  strerror(errno), device->port.gid_tbl_len);
	if (!choose_mtu(device, options->mtu, report))
		return false;
	device->pd = ibv_alloc_pd(device->context);
	if (!device->pd)
		return report_setup_error(report, "ibv_alloc_pd: %s", strerror(errno));
	return true;
}

static struct ibv_cq *create_cq(struct device *device, uint64_t entries, struct report *report)
{
	struct ibv_cq *cq;

	if (entries > (uint64_t)device->attributes.max_cqe) {
		report_setup_error(report, "%llu completion queue entries are needed, the device has %d: lower -q or "
				   "--depth", (unsigned long long)entries, device->attributes.max_cqe);
		return NULL;
	}
	cq = ibv_create_cq(device->context, entries, NULL, NULL, 0);
	if (!cq)
		report_setup_error(report, "ibv_create_cq with %llu entries: %s", (unsigned long long)entries,
				   strerror(errno));
	return cq;
}

bool device_create_queues(struct device *device, uint64_t send_entries, uint64_t recv_entries, struct report *report)
{
	device->send_cq = create_cq(device, send_entries, report);
	if (!device->send_cq)
		return false;
	device->recv_cq = create_cq(device, recv_entries, report);
	return device->recv_cq;
}

void device_close(struct device *device)
{
	if (device->recv_cq)
		ibv_destroy_cq(device->recv_cq);
	if (device->send_cq)
		ibv_destroy_cq(device->send_cq);
	if (device->pd)
		ibv_dealloc_pd(device->pd);
	if (device->context)
		ibv_close_device(device->context);
	*device = (struct device){ 0 };
}

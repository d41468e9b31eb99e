#include "lane.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ops.h"
#include "queues.h"
#include "verify.h"

enum { WANTED_INLINE = 256, WANTED_READ_ATOMIC = 16 };

uint64_t lane_send_entries(const struct workload *load)
{
	return load->depth + CONTROL_ROOM;
}

uint64_t lane_recv_entries(const struct workload *load)
{
	return load->depth + CONTROL_ROOM;
}

static char *carve(char *base, size_t *used, size_t size)
{
	char *part = base + *used;

	/* Rows of pages, so that the parts do not share one. */
	*used += (size + 4095) / 4096 * 4096;
	return part;
}

/* Called twice: with base NULL to learn the size, then with the memory. */
static size_t lay_out(struct lane *lane, char *base)
{
	struct memory *memory = &lane->memory;
	const struct workload *load = lane->load;
	size_t ring = load->depth * memory->slot_size, used = 0;

	if (lane->tx.active)
		memory->send_slots = carve(base, &used, ring);
	if (lane->rx.active && (plan_has(load, OP_WRITE) || plan_has(load, OP_WRITE_IMM)))
		memory->write_slots = carve(base, &used, ring);
	if (lane->rx.active && plan_has(load, OP_READ))
		memory->read_slots = carve(base, &used, ring);
	if (lane->rx.active && plan_has(load, OP_ATOMIC))
		memory->counter = (uint64_t *)carve(base, &used, sizeof(*memory->counter));
	memory->recv_slots = carve(base, &used, lane->recvq.capacity * memory->recv_slot_size);
	memory->controls = carve(base, &used, lane->sendq.capacity * (size_t)CONTROL_LEN);
	return used;
}

static void set_guards(char *slots, uint64_t count, size_t size)
{
	for (uint64_t i = 0; slots && i < count; i++)
		guard_fill(slots + i * size, size);
}

static unsigned access_flags(const struct workload *load)
{
	unsigned flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

	return plan_has(load, OP_ATOMIC) ? flags | IBV_ACCESS_REMOTE_ATOMIC : flags;
}

static bool create_memory(struct lane *lane, struct device *device)
{
	struct memory *memory = &lane->memory;
	const struct workload *load = lane->load;
	void *base;

	memory->slot_size = slot_size(load->size);
	memory->recv_slot_size = lane->rx.active && plan_has(load, OP_SEND) && load->size > CONTROL_LEN ?
				 memory->slot_size : slot_size(CONTROL_LEN);
	memory->size = lay_out(lane, NULL);
	base = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return report_setup_error(lane->report, "%zu bytes for qp %u: %s: lower -q, --depth or -s", memory->size,
					  lane->index, strerror(errno));
	memory->base = base;
	lay_out(lane, memory->base);
	memory->mr = ibv_reg_mr(device->pd, memory->base, memory->size,
				access_flags(load));
	if (!memory->mr)
		return report_setup_error(lane->report, "ibv_reg_mr of %zu bytes for qp %u: %s: raise ulimit -l, or lower "
					  "-q, --depth or -s", memory->size, lane->index, strerror(errno));
	set_guards(memory->send_slots, load->depth, memory->slot_size);
	set_guards(memory->write_slots, load->depth, memory->slot_size);
	set_guards(memory->read_slots, load->depth, memory->slot_size);
	set_guards(memory->recv_slots, lane->recvq.capacity, memory->recv_slot_size);
	return true;
}

static bool create_qp(struct lane *lane, struct device *device)
{
	struct ibv_qp_init_attr init = {
		.send_cq = device->send_cq,
		.recv_cq = device->recv_cq,
		.qp_type = IBV_QPT_RC,
		.cap = {
			.max_send_wr = lane->sendq.capacity,
			.max_recv_wr = lane->recvq.capacity,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_inline_data = WANTED_INLINE,
		},
	};
	struct ibv_qp_attr attributes = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT_NUMBER,
		.qp_access_flags = access_flags(lane->load),
	};
	int error;

	lane->qp = ibv_create_qp(device->pd, &init);
	if (!lane->qp) {
		init.cap.max_inline_data = 0;
		lane->qp = ibv_create_qp(device->pd, &init);
	}
	if (!lane->qp)
		return report_setup_error(lane->report, "ibv_create_qp %u with %u requests: %s: lower --depth (the device "
					  "has max_qp_wr %d) or -q", lane->index, lane->sendq.capacity, strerror(errno),
					  device->attributes.max_qp_wr);
	lane->sendq.max_inline = init.cap.max_inline_data;
	error = ibv_modify_qp(lane->qp, &attributes,
			      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (error)
		return report_setup_error(lane->report, "qp %u to INIT: %s", lane->index, strerror(error));
	return true;
}

static bool create_tracks(struct lane *lane)
{
	lane->sendq.entries = calloc(lane->sendq.capacity, sizeof(*lane->sendq.entries));
	if (lane->sendq.entries && track_init(&lane->sendq.completions, lane->sendq.capacity) &&
	    track_init(&lane->recvq.completions, lane->recvq.capacity) &&
	    track_init(&lane->rx.messages, lane->load->depth) &&
	    track_init(&lane->controls_received, 2 * CONTROL_ROOM))
		return true;
	return report_setup_error(lane->report, "no memory for qp %u: lower -q or --depth", lane->index);
}

bool lane_create(struct lane *lane, unsigned index, const struct workload *load, bool server, struct device *device,
		 struct report *report)
{
	*lane = (struct lane){
		.load = load,
		.report = report,
		.index = index,
		.sendq.capacity = lane_send_entries(load),
		.recvq.capacity = lane_recv_entries(load),
		.tx = {
			.active = !server || load->bidirectional,
			.stream = stream_id(index, server),
			.limit = load->count ? load->count : UINT64_MAX,
		},
		.rx = {
			.active = server || load->bidirectional,
			.stream = stream_id(index, !server),
		},
	};
	if (!create_tracks(lane) || !create_memory(lane, device) || !create_qp(lane, device))
		return false;
	responder_prepare(lane);
	for (uint32_t i = 0; i < lane->recvq.capacity; i++)
		if (!recvq_post(lane, i))
			return report_setup_error(report, "qp %u: posting RECV %u of %u failed", index, i,
						  lane->recvq.capacity);
	return true;
}

struct lane_address lane_address(const struct lane *lane, const struct device *device)
{
	uint64_t gid[2];
	int reads = device->attributes.max_qp_rd_atom;

	memcpy(gid, device->gid.raw, sizeof(gid));
	return (struct lane_address){
		.qpn = lane->qp->qp_num,
		.psn = mix64(lane->load->seed ^ lane->tx.stream) & 0xffffff,
		.lid = device->port.lid,
		.mtu = device->mtu,
		.read_atomic = reads < WANTED_READ_ATOMIC ? reads : WANTED_READ_ATOMIC,
		.gid_high = be64toh(gid[0]),
		.gid_low = be64toh(gid[1]),
		.rkey = lane->memory.mr->rkey,
		.write_slots = (uintptr_t)lane->memory.write_slots,
		.read_slots = (uintptr_t)lane->memory.read_slots,
		.counter = (uintptr_t)lane->memory.counter,
	};
}

static struct ibv_ah_attr path_to(const struct lane_address *peer, const struct device *device)
{
	uint64_t gid[2] = { htobe64(peer->gid_high), htobe64(peer->gid_low) };
	struct ibv_ah_attr path = {
		.port_num = PORT_NUMBER,
		.dlid = peer->lid,
	};

	if (device->port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		path.is_global = 1;
		path.grh.sgid_index = device->gid_index;
		path.grh.hop_limit = 64;
		memcpy(path.grh.dgid.raw, gid, sizeof(gid));
	}
	return path;
}

bool lane_connect(struct lane *lane, const struct lane_address *mine, const struct device *device,
		  unsigned ack_timeout)
{
	const struct lane_address *peer = &lane->peer;
	int reads = device->attributes.max_qp_init_rd_atom;
	struct ibv_qp_attr to_rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = peer->mtu < mine->mtu ? peer->mtu : mine->mtu,
		.dest_qp_num = peer->qpn,
		.rq_psn = peer->psn,
		.max_dest_rd_atomic = mine->read_atomic,
		.min_rnr_timer = 12,
		.ah_attr = path_to(peer, device),
	};
	struct ibv_qp_attr to_rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = mine->psn,
		.timeout = ack_timeout,
		.retry_cnt = 7,
		.rnr_retry = 7,		/* without end */
		.max_rd_atomic = reads < (int)peer->read_atomic ? reads : (int)peer->read_atomic,
	};
	int error;

	error = ibv_modify_qp(lane->qp, &to_rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (error)
		return report_setup_error(lane->report, "qp %u to RTR: %s: check that GID %u (-x) reaches the other side",
					  lane->index, strerror(error), device->gid_index);
	error = ibv_modify_qp(lane->qp, &to_rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
	if (error)
		return report_setup_error(lane->report, "qp %u to RTS: %s", lane->index, strerror(error));
	return true;
}

void lane_destroy(struct lane *lane)
{
	if (lane->qp)
		ibv_destroy_qp(lane->qp);
	if (lane->memory.mr)
		ibv_dereg_mr(lane->memory.mr);
	if (lane->memory.base)
		munmap(lane->memory.base, lane->memory.size);
	free(lane->sendq.entries);
	track_free(&lane->sendq.completions);
	track_free(&lane->recvq.completions);
	track_free(&lane->rx.messages);
	track_free(&lane->controls_received);
	*lane = (struct lane){ 0 };
}

static uint64_t larger(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

void lane_finish(struct lane *lane)
{
	struct totals *totals = &lane->report->totals;
	struct track *sends = &lane->sendq.completions, *recvs = &lane->recvq.completions;
	struct track *messages = &lane->rx.messages, *controls = &lane->controls_received;

	track_finish(sends, lane->sendq.head, sendq_signaled, &lane->sendq);
	track_finish(recvs, recvs->next, always_due, NULL);
	track_finish(messages, messages->next, message_arrives, lane);
	track_finish(controls, controls->next, always_due, NULL);
	totals->lost_messages += messages->lost + lane->rx.lost_writes + lane->lost_reads;
	totals->duplicated_messages += messages->duplicated;
	/* A receive completion that is lost or comes twice shows in the messages too: it is one defect. */
	totals->lost += sends->lost + lane->rx.lost_writes + lane->lost_reads +
			larger(recvs->lost, messages->lost + controls->lost);
	totals->duplicated += sends->duplicated + larger(recvs->duplicated, messages->duplicated + controls->duplicated);
	totals->out_of_order += sends->out_of_order +
				larger(recvs->out_of_order, messages->out_of_order + controls->out_of_order);
}

bool lane_is_done(const struct lane *lane)
{
	return requester_is_done(lane) && responder_is_done(lane) && lane->sendq.head == lane->sendq.tail;
}

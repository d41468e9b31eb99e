#include "queues.h"

#include <errno.h>
#include <string.h>

enum { TAG_SEND = 0x5, TAG_RECV = 0xa };
enum { POSITION_BITS = 36, BUFFER_BITS = 14, LANE_BITS = 10 };

struct request_id {
	unsigned tag, lane, buffer;
	uint64_t position;
};

static uint64_t id_encode(struct request_id id)
{
	return (uint64_t)id.tag << (POSITION_BITS + BUFFER_BITS + LANE_BITS) |
	       (uint64_t)id.lane << (POSITION_BITS + BUFFER_BITS) | (uint64_t)id.buffer << POSITION_BITS | id.position;
}

static struct request_id id_decode(uint64_t wr_id)
{
	return (struct request_id){
		.tag = wr_id >> (POSITION_BITS + BUFFER_BITS + LANE_BITS),
		.lane = wr_id >> (POSITION_BITS + BUFFER_BITS) & ((1u << LANE_BITS) - 1),
		.buffer = wr_id >> POSITION_BITS & ((1u << BUFFER_BITS) - 1),
		.position = wr_id & ((1ull << POSITION_BITS) - 1),
	};
}

unsigned completion_lane(const struct ibv_wc *wc, unsigned lanes)
{
	struct request_id id = id_decode(wc->wr_id);

	return id.lane < lanes && (id.tag == TAG_SEND || id.tag == TAG_RECV) ? id.lane : lanes;
}

static uint64_t *corrupted(struct lane *lane)
{
	return &lane->report->totals.corrupted;
}

bool always_due(const void *owner, uint64_t seq)
{
	(void)owner;
	(void)seq;
	return true;
}

bool sendq_signaled(const void *owner, uint64_t position)
{
	const struct sendq *sendq = owner;

	return sendq->entries[position % sendq->capacity].signaled;
}

bool sendq_has_room(const struct lane *lane)
{
	return lane->sendq.tail - lane->sendq.head < lane->sendq.capacity;
}

/*
 * Unsignaled requests are known to be complete when a later one is. So among any credit step of requests, and as the
 * last one before the queue is full, there must be a signaled one. Then a full window (depth, at least four steps)
 * always holds completions enough for a NOTICE; and FIN, the last request of all, is signaled.
 */
static bool rule_signals(const struct lane *lane)
{
	const struct sendq *sendq = &lane->sendq;

	return sendq->unsignaled_run + 1 >= plan_credit_step(lane->load) ||
	       sendq->tail + 1 - sendq->head == sendq->capacity;
}

bool sendq_post(struct lane *lane, struct ibv_send_wr *request, const struct send_entry *entry, bool must_signal)
{
	struct sendq *sendq = &lane->sendq;
	struct send_entry *place = &sendq->entries[sendq->tail % sendq->capacity];
	struct ibv_send_wr *bad;
	int error;

	*place = *entry;
	place->signaled = must_signal || rule_signals(lane);
	if (place->signaled)
		request->send_flags |= IBV_SEND_SIGNALED;
	request->wr_id = id_encode((struct request_id){ TAG_SEND, lane->index, 0, sendq->tail });
	error = ibv_post_send(lane->qp, request, &bad);
	if (error) {
		report_defect(lane->report, &lane->report->totals.failed, "qp %u: ibv_post_send: %s", lane->index,
			      strerror(error));
		return false;
	}
	sendq->unsignaled_run = place->signaled ? 0 : sendq->unsignaled_run + 1;
	sendq->tail++;
	return true;
}

bool sendq_post_control(struct lane *lane, const struct control *control, bool must_signal)
{
	/* Each place of the queue has its own buffer: free when the place is. */
	char *buffer = lane->memory.controls + lane->sendq.tail % lane->sendq.capacity * CONTROL_LEN;
	struct message_id id = {
		.seed = lane->load->seed,
		.stream = lane->tx.stream,
		.seq = lane->controls_sent,
	};
	struct ibv_sge sge = {
		.addr = (uintptr_t)buffer,
		.length = CONTROL_LEN,
		.lkey = lane->memory.mr->lkey,
	};
	struct ibv_send_wr request = {
		.opcode = IBV_WR_SEND,
		.sg_list = &sge,
		.num_sge = 1,
		.send_flags = CONTROL_LEN <= lane->sendq.max_inline ? IBV_SEND_INLINE : 0,
	};

	control_encode(buffer, id, control);
	if (!sendq_post(lane, &request, &(struct send_entry){ .control = true }, must_signal))
		return false;
	lane->controls_sent++;
	return true;
}

static enum ibv_wc_opcode expected_opcode(const struct send_entry *entry)
{
	if (entry->control)
		return IBV_WC_SEND;
	switch (entry->message.op) {
	case OP_READ:
		return IBV_WC_RDMA_READ;
	case OP_ATOMIC:
		return entry->message.want_inline ? IBV_WC_COMP_SWAP : IBV_WC_FETCH_ADD;
	case OP_WRITE:
	case OP_WRITE_IMM:
		return IBV_WC_RDMA_WRITE;
	default:
		return IBV_WC_SEND;
	}
}

static void check_request_fields(struct lane *lane, const struct ibv_wc *wc, const struct send_entry *entry)
{
	if (wc->qp_num != lane->qp->qp_num)
		report_defect(lane->report, corrupted(lane), "qp %u: send completion has qp_num 0x%x, it is 0x%x",
			      lane->index, wc->qp_num, lane->qp->qp_num);
	else if (wc->opcode != expected_opcode(entry))
		report_defect(lane->report, corrupted(lane), "qp %u: send completion has opcode %d, it should be %d",
			      lane->index, wc->opcode, expected_opcode(entry));
}

void sendq_complete(struct lane *lane, const struct ibv_wc *wc, retire_request *retire)
{
	struct sendq *sendq = &lane->sendq;
	struct request_id id = id_decode(wc->wr_id);
	enum arrival arrival;

	if (id.tag != TAG_SEND || id.buffer || id.position >= sendq->tail ||
	    (id.position >= sendq->head && !sendq_signaled(sendq, id.position))) {
		report_defect(lane->report, corrupted(lane),
			      "qp %u: send completion with wr_id 0x%llx: no signaled request has it", lane->index,
			      (unsigned long long)wc->wr_id);
		return;
	}
	arrival = track_arrive(&sendq->completions, id.position, sendq_signaled, sendq);
	if (arrival != ARRIVAL_IN_ORDER)
		report_defect(lane->report, NULL, "qp %u: send completion %llu %s", lane->index,
			      (unsigned long long)id.position,
			      arrival == ARRIVAL_AFTER_GAP ? "came, one before it did not" :
			      arrival == ARRIVAL_LATE ? "came after a later one" : "came twice");
	if (id.position < sendq->head)
		return;
	check_request_fields(lane, wc, &sendq->entries[id.position % sendq->capacity]);
	for (; sendq->head <= id.position; sendq->head++)
		retire(lane, &sendq->entries[sendq->head % sendq->capacity]);
}

bool recvq_post(struct lane *lane, uint32_t buffer)
{
	struct recvq *recvq = &lane->recvq;
	struct ibv_sge sge = {
		.addr = (uintptr_t)(lane->memory.recv_slots + buffer * lane->memory.recv_slot_size),
		.length = lane->memory.recv_slot_size - GUARD_LEN,
		.lkey = lane->memory.mr->lkey,
	};
	struct ibv_recv_wr request = {
		.wr_id = id_encode((struct request_id){ TAG_RECV, lane->index, buffer, recvq->tail }),
		.sg_list = &sge,
		.num_sge = 1,
	}, *bad;
	int error = ibv_post_recv(lane->qp, &request, &bad);

	if (error) {
		report_defect(lane->report, &lane->report->totals.failed, "qp %u: ibv_post_recv: %s", lane->index,
			      strerror(error));
		return false;
	}
	recvq->tail++;
	return true;
}

bool recvq_complete(struct lane *lane, const struct ibv_wc *wc, uint32_t *buffer)
{
	struct recvq *recvq = &lane->recvq;
	struct request_id id = id_decode(wc->wr_id);
	enum arrival arrival;

	if (id.tag != TAG_RECV || id.buffer >= recvq->capacity || id.position >= recvq->tail) {
		report_defect(lane->report, corrupted(lane),
			      "qp %u: receive completion with wr_id 0x%llx: no RECV has it", lane->index,
			      (unsigned long long)wc->wr_id);
		return false;
	}
	arrival = track_arrive(&recvq->completions, id.position, always_due, NULL);
	if (arrival != ARRIVAL_IN_ORDER)
		report_defect(lane->report, NULL, "qp %u: receive completion %llu %s", lane->index,
			      (unsigned long long)id.position,
			      arrival == ARRIVAL_AFTER_GAP ? "came, one before it did not" :
			      arrival == ARRIVAL_LATE ? "came after a later one" : "came twice");
	*buffer = id.buffer;
	return arrival != ARRIVAL_DUPLICATE;
}

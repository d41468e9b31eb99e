#include "ops.h"

#include <endian.h>
#include <string.h>

#include "queues.h"

/* Messages per pump: the completion queues are looked at in between. */
enum { PUMP_BATCH = 16 };

/* What lies where an ATOMIC is to write what it found. */
#define NOTHING_FOUND UINT64_MAX

static char *send_slot(const struct lane *lane, uint64_t seq)
{
	return lane->memory.send_slots + seq % lane->load->depth * lane->memory.slot_size;
}

static struct ibv_send_wr plan_request(const struct lane *lane, uint64_t seq, const struct message *message,
				       struct ibv_sge *sge)
{
	uint64_t offset = seq % lane->load->depth * lane->memory.slot_size;
	bool inlined = message->op != OP_READ && message->op != OP_ATOMIC && message->want_inline &&
		       message->length <= lane->sendq.max_inline;
	struct ibv_send_wr request = {
		.sg_list = sge,
		.num_sge = 1,
		.send_flags = inlined ? IBV_SEND_INLINE : 0,
	};

	*sge = (struct ibv_sge){
		.addr = (uintptr_t)send_slot(lane, seq),
		.length = message->length,
		.lkey = lane->memory.mr->lkey,
	};
	switch (message->op) {
	case OP_SEND:
		request.opcode = IBV_WR_SEND;
		return request;
	case OP_ATOMIC:
		/* Either way the counter is one more: executed once, each finds the number of those before it. */
		request.opcode = message->want_inline ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD;
		request.wr.atomic.rkey = lane->peer.rkey;
		request.wr.atomic.remote_addr = lane->peer.counter;
		request.wr.atomic.compare_add = message->want_inline ? lane->tx.atomics : 1;
		request.wr.atomic.swap = lane->tx.atomics + 1;
		return request;
	case OP_WRITE:
		request.opcode = IBV_WR_RDMA_WRITE;
		break;
	case OP_WRITE_IMM:
		request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		request.imm_data = htobe32((uint32_t)seq);
		break;
	default:
		request.opcode = IBV_WR_RDMA_READ;
		break;
	}
	request.wr.rdma.rkey = lane->peer.rkey;
	request.wr.rdma.remote_addr =
		(message->op == OP_READ ? lane->peer.read_slots : lane->peer.write_slots) + offset;
	return request;
}

static bool may_post(const struct lane *lane, bool stop)
{
	const struct requester *tx = &lane->tx;

	return !stop && tx->posted < tx->limit && tx->posted < tx->credit + lane->load->depth &&
	       tx->posted < tx->completed + lane->load->depth && sendq_has_room(lane);
}

static bool post_next(struct lane *lane)
{
	struct requester *tx = &lane->tx;
	uint64_t seq = tx->posted;
	struct message message = plan_message(lane->load, tx->stream, seq);
	struct ibv_sge sge;
	struct ibv_send_wr request = plan_request(lane, seq, &message, &sge);
	uint64_t nothing = NOTHING_FOUND;
	struct send_entry entry = { .seq = seq, .atomics = tx->atomics, .message = message };

	if (message.op == OP_ATOMIC)
		memcpy(send_slot(lane, seq), &nothing, sizeof(nothing));
	else if (message.op != OP_READ)
		message_fill(send_slot(lane, seq), &(struct message_id){ KIND_DATA, lane->load->seed, tx->stream, seq,
									 message.length });
	if (!sendq_post(lane, &request, &entry, message.want_signal))
		return false;
	/* An inline request has taken its data: the buffer is ours again, and another content must not show. */
	if (request.send_flags & IBV_SEND_INLINE)
		memset(send_slot(lane, seq), 0xee, message.length);
	tx->unnoticed_write |= message.op == OP_WRITE || message.op == OP_ATOMIC;
	tx->atomics += message.op == OP_ATOMIC;
	tx->unnoticed_read |= message.op == OP_READ;
	tx->posted++;
	lane->report->totals.posted[message.op]++;
	return true;
}

/* Without NOTICEs the responder knows nothing of WRITEs, READs and ATOMICs. */
static bool notice_is_due(const struct lane *lane)
{
	const struct requester *tx = &lane->tx;
	uint64_t step = plan_credit_step(lane->load);

	return (tx->unnoticed_write && tx->posted - tx->noticed.posted >= step) ||
	       (tx->unnoticed_read && tx->completed - tx->noticed.completed >= step);
}

static bool post_notice(struct lane *lane, enum message_kind kind)
{
	struct requester *tx = &lane->tx;
	struct control notice = { .kind = kind, .posted = tx->posted, .completed = tx->completed };

	if (!sendq_post_control(lane, &notice, kind == KIND_FIN))
		return false;
	tx->noticed = notice;
	tx->unnoticed_write = false;
	/* READs that were posted and have not completed are for the next NOTICE. */
	tx->unnoticed_read = tx->unnoticed_read && tx->completed < tx->posted;
	tx->fin_posted = kind == KIND_FIN;
	return true;
}

bool requester_pump(struct lane *lane, bool stop)
{
	struct requester *tx = &lane->tx;

	if (!tx->active || tx->fin_posted)
		return true;
	for (int i = 0; i < PUMP_BATCH && may_post(lane, stop); i++) {
		if (!post_next(lane))
			return false;
		if (notice_is_due(lane) && sendq_has_room(lane) && !post_notice(lane, KIND_NOTICE))
			return false;
	}
	if (!sendq_has_room(lane))
		return true;
	if (stop || tx->posted == tx->limit)
		return post_notice(lane, KIND_FIN);
	return !notice_is_due(lane) || post_notice(lane, KIND_NOTICE);
}

static void verify_read(struct lane *lane, const struct send_entry *entry)
{
	struct message_id expected = {
		KIND_READ_DATA, lane->load->seed, lane->tx.stream, entry->seq, entry->message.length,
	};
	struct totals *totals = &lane->report->totals;
	uint64_t *counter = NULL;
	enum finding finding;
	char text[128];

	finding = message_verify(send_slot(lane, entry->seq), lane->memory.slot_size, &expected, text,
				 sizeof(text));
	switch (finding) {
	case FOUND_EXPECTED:
		break;
	case FOUND_OLDER:
		lane->lost_reads++;
		report_defect(lane->report, NULL, "qp %u: READ %llu did nothing: %s", lane->index,
			      (unsigned long long)entry->seq, text);
		return;
	case FOUND_NEWER:
		counter = &totals->out_of_order;
		break;
	default:
		counter = &totals->corrupted;
		break;
	}
	if (counter)
		report_defect(lane->report, counter, "qp %u: READ %llu: %s", lane->index,
			      (unsigned long long)entry->seq, text);
	if (finding == FOUND_DAMAGED)
		guard_fill(send_slot(lane, entry->seq), lane->memory.slot_size);	/* one overrun is one defect */
	totals->received[OP_READ]++;
}

static void verify_atomic(struct lane *lane, const struct send_entry *entry)
{
	struct totals *totals = &lane->report->totals;
	uint64_t *counter = &totals->duplicated;
	uint64_t found;

	memcpy(&found, send_slot(lane, entry->seq), sizeof(found));
	/* What it found is no header of a message: the next one that brings nothing here shall find none. */
	memset(send_slot(lane, entry->seq), 0, sizeof(found));
	totals->received[OP_ATOMIC]++;
	if (found == entry->atomics || lane->tx.atomics_wrong)
		return;
	lane->tx.atomics_wrong = true;
	if (found < entry->atomics || found == NOTHING_FOUND)
		counter = &totals->lost;
	report_defect(lane->report, counter, "qp %u: ATOMIC %llu found %llu, and %llu were posted before it", lane->index,
		      (unsigned long long)entry->seq, (unsigned long long)found, (unsigned long long)entry->atomics);
}

void requester_retire(struct lane *lane, const struct send_entry *entry)
{
	struct totals *totals = &lane->report->totals;

	if (entry->control)
		return;
	if (entry->message.op == OP_READ)
		verify_read(lane, entry);
	if (entry->message.op == OP_ATOMIC)
		verify_atomic(lane, entry);
	lane->tx.completed = entry->seq + 1;
	totals->completed[entry->message.op]++;
	totals->bytes += entry->message.length;
}

void requester_credit(struct lane *lane, uint64_t done)
{
	struct requester *tx = &lane->tx;

	if (!tx->active || done > tx->posted)
		report_defect(lane->report, &lane->report->totals.corrupted,
			      "qp %u: the other side says it is done with %llu messages, %llu were posted",
			      lane->index, (unsigned long long)done, (unsigned long long)tx->posted);
	else if (done > tx->credit)
		tx->credit = done;
}

bool requester_is_done(const struct lane *lane)
{
	const struct requester *tx = &lane->tx;

	return !tx->active || (tx->fin_posted && tx->completed == tx->posted && tx->credit == tx->posted);
}

#include "verify.h"

#include <endian.h>

#include "ops.h"
#include "queues.h"

static struct totals *totals_of(struct lane *lane)
{
	return &lane->report->totals;
}

static struct message planned(const struct lane *lane, uint64_t seq)
{
	return plan_message(lane->load, lane->rx.stream, seq);
}

static char *slot_of(const struct lane *lane, char *slots, uint64_t seq)
{
	return slots + seq % lane->load->depth * lane->memory.slot_size;
}

bool message_arrives(const void *owner, uint64_t seq)
{
	enum op op = planned(owner, seq).op;

	return op == OP_SEND || op == OP_WRITE_IMM;
}

static void prepare_read(struct lane *lane, uint64_t seq)
{
	struct message message = planned(lane, seq);

	if (message.op == OP_READ)
		message_fill(slot_of(lane, lane->memory.read_slots, seq),
			     &(struct message_id){ KIND_READ_DATA, lane->load->seed, lane->rx.stream, seq,
						   message.length });
}

void responder_prepare(struct lane *lane)
{
	if (lane->rx.active && lane->memory.read_slots)
		for (uint64_t seq = 0; seq < lane->load->depth; seq++)
			prepare_read(lane, seq);
}

/* What lies in slot should be message seq. Counts it as received unless it is not there at all. */
static void verify_content(struct lane *lane, uint64_t seq, const struct message *message, char *slot,
			   size_t slot_size)
{
	struct message_id expected = { KIND_DATA, lane->load->seed, lane->rx.stream, seq, message->length };
	struct totals *totals = totals_of(lane);
	char text[128];
	enum finding finding = message_verify(slot, slot_size, &expected, text, sizeof(text));
	uint64_t *counter = finding == FOUND_NEWER ? &totals->out_of_order : &totals->corrupted;

	if (finding == FOUND_OLDER && message->op == OP_WRITE) {
		lane->rx.lost_writes++;
		report_defect(lane->report, NULL, "qp %u: WRITE %llu is not in its slot: %s", lane->index,
			      (unsigned long long)seq, text);
		return;
	}
	if (finding != FOUND_EXPECTED)
		report_defect(lane->report, counter, "qp %u: %s %llu: %s", lane->index, op_name(message->op),
			      (unsigned long long)seq, text);
	if (finding == FOUND_DAMAGED)
		guard_fill(slot, slot_size);	/* one overrun is one defect */
	totals->received[message->op]++;
	totals->bytes += message->length;
}

/* Everything below seq was posted before something that has arrived: the WRITEs among it are in their slots. */
static void seen_up_to(struct lane *lane, uint64_t seq)
{
	struct responder *rx = &lane->rx;

	if (seq > rx->seen)
		rx->seen = seq;
	if (!plan_has(lane->load, OP_WRITE) && !plan_has(lane->load, OP_ATOMIC))
		return;
	for (; rx->verified_writes < rx->seen; rx->verified_writes++) {
		struct message message = planned(lane, rx->verified_writes);

		rx->atomics += message.op == OP_ATOMIC;
		if (message.op == OP_WRITE)
			verify_content(lane, rx->verified_writes, &message,
				       slot_of(lane, lane->memory.write_slots, rx->verified_writes),
				       lane->memory.slot_size);
	}
}

/* The stream is over: its ATOMICs were executed before its last message, each once. */
static void verify_counter(struct lane *lane)
{
	uint64_t counted, expected = lane->rx.atomics;

	if (!lane->memory.counter)
		return;
	counted = __atomic_load_n(lane->memory.counter, __ATOMIC_ACQUIRE);
	if (counted != expected)
		report_defect(lane->report, counted < expected ? &totals_of(lane)->lost : &totals_of(lane)->duplicated,
			      "qp %u: %llu ATOMICs were executed, %llu were posted", lane->index,
			      (unsigned long long)counted, (unsigned long long)expected);
}

/* Moves done over what is verified and READ, and renews the slots that are READ one depth further on. */
static void advance(struct lane *lane)
{
	struct responder *rx = &lane->rx;

	if (!lane->memory.read_slots) {
		rx->done = rx->seen;
		return;
	}
	/* After FIN nothing new is READ. A READ whose response was lost may still be repeated: leave the slots alone. */
	if (rx->fin)
		rx->done = rx->seen;
	for (; rx->done < rx->seen; rx->done++) {
		if (rx->done >= rx->reads_done && planned(lane, rx->done).op == OP_READ)
			return;
		prepare_read(lane, rx->done + lane->load->depth);
	}
}

/* The sender's window: a number beyond it cannot be. */
static bool plausible(const struct lane *lane, uint64_t seq)
{
	return lane->rx.active && seq <= lane->rx.credited + lane->load->depth;
}

static void take_notice(struct lane *lane, const struct control *notice)
{
	struct responder *rx = &lane->rx;

	if (!plausible(lane, notice->posted) || notice->completed > notice->posted) {
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: NOTICE of %llu posted, %llu completed "
			      "with credit for %llu", lane->index, (unsigned long long)notice->posted,
			      (unsigned long long)notice->completed,
			      (unsigned long long)(rx->credited + lane->load->depth));
		return;
	}
	if (notice->completed > rx->reads_done)
		rx->reads_done = notice->completed;
	track_skip_to(&rx->messages, notice->posted, message_arrives, lane);
	seen_up_to(lane, notice->posted);
	if (notice->kind == KIND_FIN) {
		rx->fin = true;
		rx->final = notice->posted;
		verify_counter(lane);
	}
}

static void receive_control(struct lane *lane, const struct ibv_wc *wc, const struct message_id *id, const char *slot)
{
	struct control control;
	enum arrival arrival;

	if (id->seq > lane->controls_received.next + CONTROL_ROOM) {
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: control message %llu arrived, %llu was "
			      "due", lane->index, (unsigned long long)id->seq,
			      (unsigned long long)lane->controls_received.next);
		return;
	}
	arrival = track_arrive(&lane->controls_received, id->seq, always_due, NULL);
	if (arrival != ARRIVAL_IN_ORDER)
		report_defect(lane->report, NULL, "qp %u: control message %llu arrived %s", lane->index,
			      (unsigned long long)id->seq,
			      arrival == ARRIVAL_AFTER_GAP ? "and one before it did not" :
			      arrival == ARRIVAL_LATE ? "after a later one" : "twice");
	if (arrival == ARRIVAL_DUPLICATE)
		return;
	if (wc->byte_len != CONTROL_LEN || !control_decode(slot, id, &control))
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: control message %llu is damaged",
			      lane->index, (unsigned long long)id->seq);
	else if (control.kind == KIND_CREDIT)
		requester_credit(lane, control.posted);
	else
		take_notice(lane, &control);
}

/* A SEND or a WRITE with immediate, which says it is message seq, with its content in slot. */
static void receive_message(struct lane *lane, const struct ibv_wc *wc, uint64_t seq, enum op op, char *slot,
			    size_t slot_size)
{
	struct message message = planned(lane, seq);
	enum arrival arrival;

	if (!plausible(lane, seq) || message.op != op) {
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: a %s arrived that says it is message "
			      "%llu, which is none", lane->index, op_name(op), (unsigned long long)seq);
		return;
	}
	arrival = track_arrive(&lane->rx.messages, seq, message_arrives, lane);
	if (arrival != ARRIVAL_IN_ORDER)
		report_defect(lane->report, NULL, "qp %u: %s %llu arrived %s", lane->index, op_name(op),
			      (unsigned long long)seq,
			      arrival == ARRIVAL_AFTER_GAP ? "and one before it did not" :
			      arrival == ARRIVAL_LATE ? "after a later one" : "twice");
	if (wc->byte_len != message.length) {
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: %s %llu arrived with byte_len %u of %u",
			      lane->index, op_name(op), (unsigned long long)seq, wc->byte_len, message.length);
		totals_of(lane)->received[op]++;
	} else if (op == OP_WRITE_IMM && arrival == ARRIVAL_DUPLICATE) {
		/* By now its slot may hold a later message. */
		totals_of(lane)->received[op]++;
	} else {
		verify_content(lane, seq, &message, slot, slot_size);
	}
	seen_up_to(lane, seq + 1);
}

/*
 * A SEND whose header cannot be read or does not belong here. If by its length it may be the one that is due, take it
 * as that one, so that it is not also counted as lost.
 */
static void receive_unreadable(struct lane *lane, const struct ibv_wc *wc, char *slot)
{
	struct responder *rx = &lane->rx;
	uint64_t due = rx->messages.next;

	while (plausible(lane, due) && !message_arrives(lane, due))
		due++;
	if (plausible(lane, due) && planned(lane, due).op == OP_SEND && planned(lane, due).length == wc->byte_len) {
		receive_message(lane, wc, due, OP_SEND, slot, lane->memory.recv_slot_size);
		return;
	}
	if (wc->byte_len == CONTROL_LEN)
		track_arrive(&lane->controls_received, lane->controls_received.next, always_due, NULL);
	report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: a SEND of %u bytes arrived with a damaged header",
		      lane->index, wc->byte_len);
}

static void receive_send(struct lane *lane, const struct ibv_wc *wc, char *slot)
{
	struct message_id id;

	if (!message_identify(slot, &id) || id.seed != lane->load->seed || id.stream != lane->rx.stream)
		receive_unreadable(lane, wc, slot);
	else if (id.kind == KIND_NOTICE || id.kind == KIND_FIN || id.kind == KIND_CREDIT)
		receive_control(lane, wc, &id, slot);
	else
		receive_message(lane, wc, id.seq, OP_SEND, slot, lane->memory.recv_slot_size);
}

static void receive_write(struct lane *lane, const struct ibv_wc *wc)
{
	/* The immediate is the low half of the number: the other half is that of the number due, or a neighbour. */
	uint64_t due = lane->rx.messages.next;
	uint64_t seq = due + (int32_t)(be32toh(wc->imm_data) - (uint32_t)due);

	if (!lane->memory.write_slots)
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: an unexpected WRITE with immediate",
			      lane->index);
	else
		receive_message(lane, wc, seq, OP_WRITE_IMM, slot_of(lane, lane->memory.write_slots, seq),
				lane->memory.slot_size);
}

static void check_fields(struct lane *lane, const struct ibv_wc *wc)
{
	bool immediate = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
	unsigned want = immediate ? IBV_WC_WITH_IMM : 0;

	/* Some drivers also set IBV_WC_GRH or IBV_WC_IP_CSUM_OK on RC, and may. */
	if (wc->qp_num != lane->qp->qp_num)
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: receive completion has qp_num 0x%x, it "
			      "is 0x%x", lane->index, wc->qp_num, lane->qp->qp_num);
	else if ((wc->wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV)) != want)
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: receive completion with opcode %d has "
			      "wc_flags 0x%x", lane->index, wc->opcode, wc->wc_flags);
}

bool responder_receive(struct lane *lane, const struct ibv_wc *wc)
{
	uint32_t buffer;

	if (!recvq_complete(lane, wc, &buffer))
		return true;
	check_fields(lane, wc);
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
		receive_write(lane, wc);
	else if (wc->opcode == IBV_WC_RECV)
		receive_send(lane, wc, lane->memory.recv_slots + buffer * lane->memory.recv_slot_size);
	else
		report_defect(lane->report, &totals_of(lane)->corrupted, "qp %u: receive completion with opcode %d",
			      lane->index, wc->opcode);
	advance(lane);
	return recvq_post(lane, buffer);
}

bool responder_pump(struct lane *lane)
{
	struct responder *rx = &lane->rx;
	struct control credit = { .kind = KIND_CREDIT, .posted = rx->done };
	bool final = rx->fin && rx->done == rx->final;

	if (!rx->active || rx->fin_credited || !sendq_has_room(lane))
		return true;
	if (!final && rx->done - rx->credited < plan_credit_step(lane->load))
		return true;
	if (!sendq_post_control(lane, &credit, final))
		return false;
	rx->credited = rx->done;
	rx->fin_credited = final;
	return true;
}

bool responder_is_done(const struct lane *lane)
{
	return !lane->rx.active || lane->rx.fin_credited;
}

/* The double's wire: Unix datagrams in the abstract namespace, one socket per queue pair, and the defects. */
#include "fakeverbs.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

enum { OPCODE_READ_RESPONSE = 0x100 };
enum { BATCH = 16, OUTBOX_LIMIT = 64 };

enum kind {
	NOTHING,
	/* of requests */
	DROP, DUPLICATE, SWAP, CORRUPT, CORRUPT_HEADER, TRUNCATE, OVERRUN, WRONG_IMM, CUT, PAUSE, FAIL,
	/* of completions */
	DROP_COMPLETION, DUPLICATE_COMPLETION, SWAP_COMPLETION, WRONG_WRID, WRONG_QPN, WRONG_OPCODE,
	WRONG_LENGTH,
};

static const struct {
	const char *name;
	enum kind kind;
	bool receives;
} kinds[] = {
	{ "drop", DROP, false },			/* not sent, but completes */
	{ "duplicate", DUPLICATE, false },		/* sent twice */
	{ "swap", SWAP, false },			/* sent after the next one */
	{ "corrupt", CORRUPT, false },			/* one bit in the middle */
	{ "corrupt-header", CORRUPT_HEADER, false },	/* one bit in the first 16 bytes */
	{ "truncate", TRUNCATE, false },		/* one byte less */
	{ "overrun", OVERRUN, false },			/* eight bytes more */
	{ "wrong-imm", WRONG_IMM, false },
	{ "cut", CUT, false },				/* from this one on nothing is sent, everything completes */
	{ "pause", PAUSE, false },			/* ARGUMENT ms */
	{ "fail", FAIL, false },			/* completes with IBV_WC_RETRY_EXC_ERR */
	{ "drop-completion", DROP_COMPLETION, false },
	{ "duplicate-completion", DUPLICATE_COMPLETION, false },
	{ "swap-completion", SWAP_COMPLETION, false },
	{ "wrong-wrid", WRONG_WRID, false },
	{ "wrong-qpn", WRONG_QPN, false },
	{ "wrong-opcode", WRONG_OPCODE, false },
	{ "drop-recv-completion", DROP_COMPLETION, true },
	{ "duplicate-recv-completion", DUPLICATE_COMPLETION, true },
	{ "swap-recv-completion", SWAP_COMPLETION, true },
	{ "wrong-recv-wrid", WRONG_WRID, true },
	{ "wrong-recv-qpn", WRONG_QPN, true },
	{ "wrong-recv-opcode", WRONG_OPCODE, true },
	{ "wrong-recv-length", WRONG_LENGTH, true },
};

static struct {
	enum kind kind;
	bool receives;
	unsigned long at, argument;
	int opcode;		/* -1: any */
	unsigned long requests, completions;
	struct packet *swapped;
	struct ibv_wc swapped_wc;
} inject = { .opcode = -1 };

__attribute__((constructor))
static void read_environment(void)
{
	static const char *const ops[] = {
		[IBV_WR_SEND] = "send", [IBV_WR_RDMA_WRITE] = "write", [IBV_WR_RDMA_WRITE_WITH_IMM] = "write-imm",
		[IBV_WR_RDMA_READ] = "read", [IBV_WR_ATOMIC_FETCH_AND_ADD] = "atomic",
	};
	const char *text = getenv("FAKEVERBS_INJECT"), *op = getenv("FAKEVERBS_OP");
	char name[32];

	for (int i = 0; op && i <= IBV_WR_ATOMIC_FETCH_AND_ADD; i++)
		if (ops[i] && !strcmp(ops[i], op))
			inject.opcode = i;
	if (!text || sscanf(text, "%31[^:]:%lu:%lu", name, &inject.at, &inject.argument) < 2)
		return;
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
		if (!strcmp(kinds[i].name, name)) {
			inject.kind = kinds[i].kind;
			inject.receives = kinds[i].receives;
			return;
		}
	}
	fprintf(stderr, "fakeverbs: unknown FAKEVERBS_INJECT=%s\n", text);
	abort();
}

static socklen_t name_of(uint32_t qpn, struct sockaddr_un *name)
{
	*name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	return offsetof(struct sockaddr_un, sun_path) + 1 +
	       snprintf(name->sun_path + 1, sizeof(name->sun_path) - 1, "fakeverbs-%u", qpn);
}

bool fake_open_socket(struct fake_qp *qp)
{
	struct sockaddr_un name;
	socklen_t size = name_of(qp->base.qp_num, &name);

	qp->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	return qp->socket >= 0 && !bind(qp->socket, (struct sockaddr *)&name, size);
}

static void push(struct fake_cq *cq, const struct ibv_wc *wc)
{
	if (cq->tail - cq->head == cq->capacity) {
		fputs("fakeverbs: completion queue overrun\n", stderr);
		abort();
	}
	cq->ring[cq->tail++ % cq->capacity] = *wc;
}

void fake_push_completion(struct ibv_cq *base, const struct ibv_wc *original)
{
	struct fake_cq *cq = (struct fake_cq *)base;
	struct ibv_wc wc = *original;
	unsigned long number;

	if (inject.kind < DROP_COMPLETION || inject.receives != cq->receives) {
		push(cq, &wc);
		return;
	}
	number = ++inject.completions;
	if (inject.kind == SWAP_COMPLETION && number == inject.at) {
		inject.swapped_wc = wc;
		return;
	}
	if (number == inject.at) {
		switch (inject.kind) {
		case DROP_COMPLETION:
			return;
		case DUPLICATE_COMPLETION:
			push(cq, &wc);
			break;
		case WRONG_WRID:
			wc.wr_id ^= 1ull << 35;
			break;
		case WRONG_QPN:
			wc.qp_num ^= 1;
			break;
		case WRONG_OPCODE:
			wc.opcode ^= 1;
			break;
		case WRONG_LENGTH:
			wc.byte_len ^= 1;
			break;
		default:
			break;
		}
	}
	push(cq, &wc);
	if (inject.kind == SWAP_COMPLETION && number == inject.at + 1)
		push(cq, &inject.swapped_wc);
}

static struct packet *new_packet(uint32_t opcode, uint32_t length, const void *payload)
{
	struct packet *packet = calloc(1, sizeof(*packet) + length + 8);

	packet->opcode = opcode;
	packet->length = length;
	if (payload)
		memcpy(packet->payload, payload, length);
	return packet;
}

static void enqueue(struct fake_qp *qp, struct packet *packet)
{
	packet->next = NULL;
	*qp->outbox_end = packet;
	qp->outbox_end = &packet->next;
}

static void corrupt(char *payload, uint32_t length, enum kind kind)
{
	payload[kind == CORRUPT_HEADER ? 9 : length / 2] ^= 0x10;
}

/* One request leaves, or suffers what was ordered. */
static void transmit_injected(struct fake_qp *qp, struct send_request *request, struct packet *packet)
{
	bool counts = inject.opcode < 0 || inject.opcode == (int)request->wr.opcode;
	unsigned long number = counts ? ++inject.requests : inject.requests;
	bool hit = counts && number == inject.at;
	struct packet *released = NULL;

	if (inject.kind == CUT && number >= inject.at) {
		request->done = true;
		free(packet);
		return;
	}
	if (hit) {
		switch (inject.kind) {
		case DROP:
			request->done = true;
			free(packet);
			return;
		case DUPLICATE: {
			struct packet *twin = new_packet(packet->opcode, packet->length, packet->payload);

			twin->imm = packet->imm;
			twin->rkey = packet->rkey;
			twin->remote_addr = packet->remote_addr;
			twin->request = packet->request;
			enqueue(qp, twin);
			break;
		}
		case SWAP:
			inject.swapped = packet;
			return;
		case CORRUPT:
		case CORRUPT_HEADER:
			if (request->wr.opcode == IBV_WR_RDMA_READ)
				request->corrupt_on_arrival = true;
			else
				corrupt(packet->payload, packet->length, inject.kind);
			break;
		case TRUNCATE:
			packet->length--;
			break;
		case OVERRUN:
			packet->length += 8;
			break;
		case WRONG_IMM:
			packet->imm = htobe32(be32toh(packet->imm) ^ 1u << 30);
			break;
		case PAUSE:
			nanosleep(&(struct timespec){ inject.argument / 1000, inject.argument % 1000 * 1000000 }, NULL);
			break;
		case FAIL:
			request->fail = true;
			break;
		default:
			break;
		}
	} else if (inject.swapped && counts) {
		released = inject.swapped;
		inject.swapped = NULL;
	}
	enqueue(qp, packet);
	if (released)
		enqueue(qp, released);
}

static bool is_atomic(uint32_t opcode)
{
	return opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
}

static void transmit(struct fake_qp *qp)
{
	int queued = 0;

	for (struct packet *packet = qp->outbox; packet; packet = packet->next)
		queued++;
	for (; qp->send_next < qp->send_tail && queued < OUTBOX_LIMIT; qp->send_next++, queued++) {
		struct send_request *request = &qp->sends[qp->send_next % qp->cap.max_send_wr];
		bool inlined = request->wr.send_flags & IBV_SEND_INLINE;
		bool read = request->wr.opcode == IBV_WR_RDMA_READ, atomic = is_atomic(request->wr.opcode);
		uint64_t operands[2] = { request->wr.wr.atomic.compare_add, request->wr.wr.atomic.swap };
		const void *from = inlined ? request->inlined : (void *)(uintptr_t)request->sge.addr;
		struct packet *packet = atomic ? new_packet(request->wr.opcode, sizeof(operands), operands) :
					new_packet(request->wr.opcode, request->sge.length, read ? NULL : from);

		packet->imm = request->wr.imm_data;
		packet->rkey = atomic ? request->wr.wr.atomic.rkey : request->wr.wr.rdma.rkey;
		packet->remote_addr = atomic ? request->wr.wr.atomic.remote_addr : request->wr.wr.rdma.remote_addr;
		packet->request = qp->send_next;
		packet->completes = !read && !atomic;
		transmit_injected(qp, request, packet);
	}
}

static void flush(struct fake_qp *qp)
{
	const size_t header = sizeof(struct packet) - offsetof(struct packet, opcode);
	struct sockaddr_un name;
	socklen_t size = name_of(qp->peer, &name);

	while (qp->outbox) {
		struct packet *packet = qp->outbox;
		bool request = packet->opcode == IBV_WR_RDMA_READ;
		size_t bytes = header + (request ? 0 : packet->length);

		if (sendto(qp->socket, &packet->opcode, bytes, 0, (struct sockaddr *)&name, size) < 0)
			return;		/* full, or the other side has gone: again at the next poll */
		if (packet->completes)
			qp->sends[packet->request % qp->cap.max_send_wr].done = true;
		qp->outbox = packet->next;
		if (!qp->outbox)
			qp->outbox_end = &qp->outbox;
		free(packet);
	}
}

/* False: no RECV is posted, keep the packet. */
static bool receive_into_recv(struct fake_qp *qp, const struct packet *packet)
{
	bool send = packet->opcode == IBV_WR_SEND;
	const struct recv_request *recv = &qp->recvs[qp->recv_head % qp->cap.max_recv_wr];
	struct ibv_wc wc = {
		.opcode = send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
		.byte_len = packet->length,
		.imm_data = packet->imm,
		.wc_flags = send ? 0 : IBV_WC_WITH_IMM,
		.qp_num = qp->base.qp_num,
	};

	if (qp->recv_head == qp->recv_tail)
		return false;
	wc.wr_id = recv->wr_id;
	if (send && packet->length > recv->sge.length)
		wc.status = IBV_WC_LOC_LEN_ERR;
	else if (send)
		memcpy((void *)(uintptr_t)recv->sge.addr, packet->payload, packet->length);
	qp->recv_head++;
	fake_push_completion(qp->base.recv_cq, &wc);
	return true;
}

static bool receive(struct fake_qp *qp, const struct packet *packet)
{
	switch (packet->opcode) {
	case IBV_WR_SEND:
		return receive_into_recv(qp, packet);
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_WRITE:
		if (packet->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && qp->recv_head == qp->recv_tail)
			return false;
		fake_check_memory(packet->rkey, packet->remote_addr, packet->length);
		memcpy((void *)(uintptr_t)packet->remote_addr, packet->payload, packet->length);
		return packet->opcode == IBV_WR_RDMA_WRITE || receive_into_recv(qp, packet);
	case IBV_WR_RDMA_READ: {
		struct packet *response;

		fake_check_memory(packet->rkey, packet->remote_addr, packet->length);
		response = new_packet(OPCODE_READ_RESPONSE, packet->length, (void *)(uintptr_t)packet->remote_addr);
		response->request = packet->request;
		enqueue(qp, response);
		return true;
	}
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_CMP_AND_SWP: {
		uint64_t operands[2], found, *target = (uint64_t *)(uintptr_t)packet->remote_addr;
		struct packet *response;

		fake_check_memory(packet->rkey, packet->remote_addr, sizeof(found));
		memcpy(operands, packet->payload, sizeof(operands));
		found = *target;
		if (packet->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
			*target += operands[0];
		else if (found == operands[0])
			*target = operands[1];
		response = new_packet(OPCODE_READ_RESPONSE, sizeof(found), &found);
		response->request = packet->request;
		enqueue(qp, response);
		return true;
	}
	default: {
		struct send_request *request = &qp->sends[packet->request % qp->cap.max_send_wr];

		memcpy((void *)(uintptr_t)request->sge.addr, packet->payload, packet->length);
		if (request->corrupt_on_arrival)
			corrupt((char *)(uintptr_t)request->sge.addr, packet->length, inject.kind);
		request->done = true;
		return true;
	}
	}
}

static void receive_some(struct fake_qp *qp)
{
	const size_t header = sizeof(struct packet) - offsetof(struct packet, opcode);

	for (int i = 0; i < BATCH; i++) {
		static struct packet *buffer;

		if (qp->held) {
			if (!receive(qp, qp->held))
				return;
			free(qp->held);
			qp->held = NULL;
		}
		if (!buffer)
			buffer = calloc(1, sizeof(*buffer) + FAKE_MAX_MESSAGE + 8);
		if (recv(qp->socket, &buffer->opcode, header + FAKE_MAX_MESSAGE + 8, 0) < 0)
			return;
		if (!receive(qp, buffer)) {
			qp->held = buffer;
			buffer = NULL;
		}
	}
}

static enum ibv_wc_opcode wc_opcode(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
		return IBV_WC_SEND;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	default:
		return IBV_WC_RDMA_WRITE;
	}
}

static void complete(struct fake_qp *qp)
{
	for (; qp->send_head < qp->send_next; qp->send_head++) {
		struct send_request *request = &qp->sends[qp->send_head % qp->cap.max_send_wr];
		struct ibv_wc wc = {
			.wr_id = request->wr.wr_id,
			.status = request->fail ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS,
			.opcode = wc_opcode(request->wr.opcode),
			.qp_num = qp->base.qp_num,
		};

		if (!request->done)
			return;
		if (request->fail || request->wr.send_flags & IBV_SEND_SIGNALED)
			fake_push_completion(qp->base.send_cq, &wc);
	}
}

void fake_progress(struct fake_qp *qp)
{
	if (qp->base.state != IBV_QPS_RTS)
		return;
	transmit(qp);
	receive_some(qp);
	flush(qp);
	complete(qp);
}

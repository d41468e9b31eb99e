/*
 * A test double of libibverbs, for LD_PRELOAD: one RoCE port, RC queue pairs over Unix datagram sockets (reliable and
 * in order, as RC is). Everything happens inside ibv_poll_cq: no thread, no protocol. It is here to make the defects
 * that vcheck must find; as a device it is useless.
 *
 * FAKEVERBS_INJECT=KIND:N[:ARGUMENT] makes one defect in this process. N counts from 1 what FAKEVERBS_OP names
 * (send, write, write-imm, read; default: any request), for kinds of completions the completions. fakewire.c has the
 * kinds.
 */
#ifndef FAKEVERBS_H
#define FAKEVERBS_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From here on the real names: this library defines them. */
#undef ibv_reg_mr
#undef ibv_get_device_list
#undef ibv_query_port

enum { FAKE_MAX_INLINE = 128, FAKE_MAX_MESSAGE = 128 * 1024 };

struct packet {
	struct packet *next;
	bool completes;		/* its request is done when it has left */
	/* The rest is the datagram. */
	uint32_t opcode, length, imm;
	uint32_t rkey;
	uint64_t remote_addr;
	uint64_t request;	/* position of a READ on the requester's queue */
	char payload[];
};

struct fake_cq {
	struct ibv_cq base;
	struct ibv_wc *ring;
	uint64_t head, tail, capacity;
	bool receives;
};

struct send_request {
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	char inlined[FAKE_MAX_INLINE];
	bool done, corrupt_on_arrival, fail;
};

struct recv_request {
	uint64_t wr_id;
	struct ibv_sge sge;
};

struct fake_qp {
	struct ibv_qp base;
	struct fake_qp *next;
	int socket;
	uint32_t peer;
	struct ibv_qp_cap cap;
	struct send_request *sends;
	uint64_t send_head, send_next, send_tail;	/* oldest not complete, next to transmit, next to post */
	struct recv_request *recvs;
	uint64_t recv_head, recv_tail;
	struct packet *outbox, **outbox_end;
	struct packet *held;	/* arrived before a RECV was posted */
};

extern struct fake_qp *fake_qps;

/* Aborts unless the range lies in a region with that key: vcheck itself would be wrong. */
void fake_check_memory(uint32_t key, uint64_t address, uint64_t length);

bool fake_open_socket(struct fake_qp *qp);
void fake_progress(struct fake_qp *qp);
void fake_push_completion(struct ibv_cq *cq, const struct ibv_wc *wc);

#endif

/*
 * The plan of a run: what the message with a given number is.
 *
 * Both sides compute it from the workload, so the receiver of a message knows what ought to arrive without being told:
 * which operation, how long, with which content. Nothing here has state.
 */
#ifndef VCHECK_PLAN_H
#define VCHECK_PLAN_H

#include <stdbool.h>
#include <stdint.h>

enum op {
	OP_SEND, OP_WRITE, OP_WRITE_IMM, OP_READ, OP_ATOMIC, OP_COUNT,
	OP_MIX = OP_COUNT,	/* all but ATOMICs, which not every device has */
	OP_ALL,
};

enum { ATOMIC_LEN = 8 };

/*
 * What the client asks for and the server adopts. Only uint64_t members: it crosses the TCP connection as an array of
 * them in network byte order (exchange.h).
 */
struct workload {
	uint64_t op;		/* enum op, OP_MIX and OP_ALL included */
	uint64_t size;		/* bytes; the largest message when random_size */
	uint64_t random_size;
	uint64_t seed;
	uint64_t qps;
	uint64_t depth;		/* messages in flight per QP and direction */
	uint64_t count;		/* messages per QP and direction; 0: until seconds have passed */
	uint64_t seconds;
	uint64_t bidirectional;
};

struct message {
	enum op op;
	uint32_t length;
	bool want_signal;	/* a few are signaled although nothing forces it */
	bool want_inline;	/* if it fits; of an ATOMIC: compare and swap, not fetch and add */
};

/* A stream is one direction of one QP: its messages are numbered from 0. */
static inline uint64_t stream_id(uint64_t qp_index, bool from_server)
{
	return qp_index * 2 + from_server;
}

/* Whether a run of this workload has messages of an operation. */
bool plan_has(const struct workload *load, enum op op);

struct message plan_message(const struct workload *load, uint64_t stream, uint64_t seq);

const char *op_name(enum op op);

/* Messages between two reports of progress to the other side (control.h). */
static inline uint64_t plan_credit_step(const struct workload *load)
{
	return load->depth >= 8 ? load->depth / 4 : 1;
}

/* The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit. */
static inline uint64_t mix64(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

#endif

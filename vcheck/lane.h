/*
 * A lane: one RC queue pair with its memory, both its directions, and what is known about each request on it.
 *
 * Outgoing (this side posts): requester. Incoming (the other side posts): responder. A lane has either or both.
 */
#ifndef VCHECK_LANE_H
#define VCHECK_LANE_H

#include <infiniband/verbs.h>

#include "control.h"
#include "device.h"
#include "exchange.h"
#include "plan.h"
#include "report.h"
#include "track.h"

/*
 * Room for control messages in either queue. At most depth / credit step + 2 <= 9 CREDITs and twice that many NOTICEs
 * can be under way, for each is sent on progress of a whole step within a window of depth.
 */
enum { CONTROL_ROOM = 32 };

/* Addresses as the other side needs them. Only uint64_t members: it is exchanged. */
struct lane_address {
	uint64_t qpn, psn, lid, mtu, read_atomic;
	uint64_t gid_high, gid_low;
	uint64_t rkey;
	uint64_t write_slots, read_slots, counter;	/* virtual addresses */
};

struct memory {
	char *base;
	size_t size;
	struct ibv_mr *mr;
	char *send_slots;	/* depth: content of outgoing messages, and where READs arrive */
	char *write_slots;	/* depth: the other side WRITEs here */
	char *read_slots;	/* depth: the other side READs here */
	uint64_t *counter;	/* how many ATOMICs the other side has had executed */
	char *recv_slots;	/* recvq.capacity, of recv_slot_size */
	char *controls;		/* sendq.capacity, of CONTROL_LEN */
	size_t slot_size, recv_slot_size;
};

struct send_entry {
	uint64_t seq;
	uint64_t atomics;	/* of an ATOMIC: how many its stream has before it */
	struct message message;
	bool control, signaled;
};

/* Requests by their position on the send queue; position % capacity is the place in entries. */
struct sendq {
	struct send_entry *entries;
	uint32_t capacity, max_inline;
	uint64_t head, tail;	/* [head, tail): not known to be complete */
	uint32_t unsignaled_run;
	struct track completions;
};

/* RECVs by the order in which they were posted. */
struct recvq {
	uint32_t capacity;
	uint64_t tail;
	struct track completions;
};

struct requester {
	bool active;
	uint64_t stream;
	uint64_t limit;		/* messages to post; UINT64_MAX: until stopped */
	uint64_t posted, completed;
	uint64_t credit;	/* the responder is done with everything below */
	struct control noticed;	/* the last NOTICE */
	bool unnoticed_write, unnoticed_read;
	bool fin_posted;
	uint64_t atomics;	/* ATOMICs posted */
	bool atomics_wrong;	/* one was not executed once: of those after it nothing can be said */
};

struct responder {
	bool active;
	uint64_t stream;
	struct track messages;	/* SENDs and WRITEs with immediate */
	uint64_t seen;		/* every message below was posted before something that arrived */
	uint64_t verified_writes;	/* WRITEs below were looked at */
	uint64_t reads_done;	/* READs below have completed at the requester */
	uint64_t atomics;	/* ATOMICs among those that were seen */
	uint64_t done, credited;
	bool fin, fin_credited;
	uint64_t final;		/* with fin: the number of messages of the stream */
	uint64_t lost_writes;
};

struct lane {
	const struct workload *load;
	struct report *report;
	unsigned index;
	struct ibv_qp *qp;
	struct memory memory;
	struct lane_address peer;
	struct sendq sendq;
	struct recvq recvq;
	struct requester tx;
	struct responder rx;
	uint64_t controls_sent;
	struct track controls_received;
	uint64_t lost_reads;
};

uint64_t lane_send_entries(const struct workload *load);
uint64_t lane_recv_entries(const struct workload *load);

/* Memory, queue pair in INIT, RECVs posted. On failure everything that was made is in lane, for lane_destroy. */
bool lane_create(struct lane *lane, unsigned index, const struct workload *load, bool server, struct device *device,
		 struct report *report);
struct lane_address lane_address(const struct lane *lane, const struct device *device);
/* To RTS; lane->peer is what the other side said. */
bool lane_connect(struct lane *lane, const struct lane_address *mine, const struct device *device,
		  unsigned ack_timeout);
void lane_destroy(struct lane *lane);

/* What is not there yet is counted as lost; the trackers' counts go to the report. */
void lane_finish(struct lane *lane);
/* Nothing is under way any more. */
bool lane_is_done(const struct lane *lane);

#endif

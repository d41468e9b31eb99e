/*
 * The requester of a lane: posts the planned messages within the responder's credit, and verifies what its READs
 * brought.
 */
#ifndef VCHECK_OPS_H
#define VCHECK_OPS_H

#include "lane.h"

/* Posts what may be posted now, a few at most. stop: the time is over, finish. False: a verb failed. */
bool requester_pump(struct lane *lane, bool stop);

/* A request of this lane, data or control, is complete. */
void requester_retire(struct lane *lane, const struct send_entry *entry);

/* The responder is done with every message below done. */
void requester_credit(struct lane *lane, uint64_t done);

bool requester_is_done(const struct lane *lane);

#endif

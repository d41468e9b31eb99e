/*
 * The control messages: 64-byte SENDs on the queue pair itself, in order with the data (IBA Vol 1 9.5: what was posted
 * before on an RC queue pair is done at the responder before).
 *
 *   requester                                responder
 *      WRITE 0 .. WRITE 15                      (nothing to see)
 *      NOTICE posted=16        ------------->   verifies slots 0..15
 *                              <-------------   CREDIT done=16
 *      may overwrite slots 0..15
 *
 * NOTICE  every message below `posted` was posted before this one; every READ below `completed` has completed
 * FIN     a NOTICE after which nothing comes: `posted` is the count of the stream
 * CREDIT  the responder is done with every message below `done`: WRITE slots verified, the data for the READs one
 *         depth further on in place, RECVs posted again
 *
 * They are cumulative, so a lost one is seen by its number and does not lose more. READ, NOTICE, CREDIT works the same
 * way: a slot that is READ gets its next content only after the READ has completed at the requester.
 */
#ifndef VCHECK_CONTROL_H
#define VCHECK_CONTROL_H

#include <stdint.h>

#include "pattern.h"

enum { CONTROL_LEN = 64 };

struct control {
	enum message_kind kind;
	uint64_t posted;	/* CREDIT: done */
	uint64_t completed;
};

/* id is of length MESSAGE_MIN: the header alone; its kind is taken from control. */
void control_encode(void *slot, struct message_id id, const struct control *control);
/* id: what message_identify found; false if the content behind the header is damaged. */
bool control_decode(const void *slot, const struct message_id *id, struct control *control);

#endif

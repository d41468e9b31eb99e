/*
 * Standing still in the middle of the traffic, by libverbatim.so's calls (../include/verbatim.h): whatever is under way must go on
 * as if nothing had been, whoever the other side's RNIC is.
 */
#ifndef VCHECK_HOLD_H
#define VCHECK_HOLD_H

#include <stdbool.h>
#include <stdint.h>

#include "device.h"
#include "lane.h"

struct hold {
	int64_t every_ns;	/* 0: never */
	int64_t next_ns;
};

/*
 * Gives each connection a secret, for --hold-every. Where libibverbs has no such calls nothing is done, then or later: the other
 * side may have asked for it. False after an error.
 */
bool hold_begin(struct hold *hold, unsigned every_ms, struct lane *lanes, struct report *report);

/* Stands still for a moment, when it is time. False after an error. */
bool hold_step(struct hold *hold, int64_t now_ns, struct device *device, struct report *report);

#endif

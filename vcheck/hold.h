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

/* Whether it was asked for, and libibverbs has the calls. */
bool hold_possible(unsigned every_ms);

/*
 * Where it is possible, begins to. With secrets the RNICs tell each other; a side that knows nothing of that must be told nothing,
 * and takes it for loss. False after an error.
 */
bool hold_begin(struct hold *hold, unsigned every_ms, bool secrets, struct lane *lanes, struct report *report);

/* Stands still for a moment, when it is time. False after an error. */
bool hold_step(struct hold *hold, int64_t now_ns, struct device *device, struct report *report);

#endif

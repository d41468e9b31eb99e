/*
 * The run itself: polls both completion queues and keeps every lane busy until all are done, or something ends it.
 */
#ifndef VCHECK_RUN_H
#define VCHECK_RUN_H

#include "device.h"
#include "exchange.h"
#include "lane.h"
#include "options.h"
#include "private.h"

struct run {
	const struct options *options;
	const struct workload *load;
	struct device *device;
	struct exchange *exchange;
	struct lane *lanes;
	struct private_memory *private_memory;
	struct report *report;
	bool share_secrets;	/* both sides stand still now and then, and can tell each other */
};

/* Leaves seconds, longest_gap_ms and all counts in the report. */
void run_lanes(struct run *run);

#endif

/*
 * What a side counted, the comparison with what the other side counted, and the JSON line.
 */
#ifndef VCHECK_REPORT_H
#define VCHECK_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "plan.h"

/*
 * Only uint64_t members: the sides exchange it at the end (exchange.h).
 *
 * A defect is counted where it is seen. lost_messages and duplicated_messages are the part of lost and duplicated that
 * is about arrivals, the rest is about completions of own requests.
 */
struct totals {
	uint64_t posted[OP_COUNT];
	uint64_t completed[OP_COUNT];
	uint64_t received[OP_COUNT];	/* content verified here; READs, ATOMICs: where they were posted */
	uint64_t bytes;			/* of completed and of received messages */
	uint64_t lost, duplicated, out_of_order, corrupted;
	uint64_t lost_messages, duplicated_messages;
	uint64_t failed;		/* the run was given up: stall, error completion, peer gone */
};

struct report {
	bool server;
	struct workload load;
	struct totals totals;
	double seconds;
	double longest_gap_ms;
	uint64_t holds;			/* how often it stood still (--hold-every) */
	bool setup_failed;
	char error[512];		/* the first defect or mistake; empty: none */
	bool verbose;
	unsigned printed;
};

/* Counts a defect and keeps (with --verbose: prints) what it is. counter may be NULL: counted elsewhere. */
__attribute__((format(printf, 3, 4)))
void report_defect(struct report *report, uint64_t *counter, const char *format, ...);

/* Something went wrong that is not a defect of the RDMA transport. Returns false, so that a caller can return it. */
__attribute__((format(printf, 2, 3)))
bool report_setup_error(struct report *report, const char *format, ...);

/* Every request that was posted must have completed; peer or no peer. */
void report_check_completed(struct report *report);

/* Compares the sides' counts; a difference that no defect explains yet becomes one. */
void report_compare(struct report *report, const struct totals *peer);

/* The last thing a side does: prints the JSON line, returns the exit status. */
int report_print(const struct report *report);

#endif

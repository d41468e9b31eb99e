/*
 * Follows a numbered sequence in which each number that is due must arrive once, in order: messages by their number,
 * completions by the position of their request.
 *
 * A number that is skipped is missing: it counts as out of order if it still comes, as lost if it has not come by the
 * time that its place in the window is needed again, or at the end.
 */
#ifndef VCHECK_TRACK_H
#define VCHECK_TRACK_H

#include <stdbool.h>
#include <stdint.h>

struct track {
	uint64_t next;		/* everything below has arrived or is missing */
	uint64_t *missing;	/* number + 1 at number % window; 0: none */
	uint32_t window;
	uint64_t lost, duplicated, out_of_order;
};

enum arrival { ARRIVAL_IN_ORDER, ARRIVAL_AFTER_GAP, ARRIVAL_LATE, ARRIVAL_DUPLICATE };

/* Whether this number of the sequence arrives at all: a WRITE sends no message, an unsignaled request no completion. */
typedef bool track_due(const void *owner, uint64_t seq);

bool track_init(struct track *track, uint32_t window);
void track_free(struct track *track);

enum arrival track_arrive(struct track *track, uint64_t seq, track_due *due, const void *owner);

/* Nothing below end will come in order any more. */
void track_skip_to(struct track *track, uint64_t end, track_due *due, const void *owner);

/* The run is over and the sequence had end numbers: what is missing now is lost. */
void track_finish(struct track *track, uint64_t end, track_due *due, const void *owner);

#endif

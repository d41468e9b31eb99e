#include "track.h"

#include <stdlib.h>

bool track_init(struct track *track, uint32_t window)
{
	*track = (struct track){ .window = window };
	track->missing = calloc(window, sizeof(*track->missing));
	return track->missing;
}

void track_free(struct track *track)
{
	free(track->missing);
	track->missing = NULL;
}

void track_skip_to(struct track *track, uint64_t end, track_due *due, const void *owner)
{
	for (; track->next < end; track->next++) {
		uint64_t *place = &track->missing[track->next % track->window];

		if (*place)
			track->lost++;
		*place = due(owner, track->next) ? track->next + 1 : 0;
	}
}

enum arrival track_arrive(struct track *track, uint64_t seq, track_due *due, const void *owner)
{
	uint64_t *place = &track->missing[seq % track->window];
	enum arrival arrival = ARRIVAL_IN_ORDER;

	if (seq < track->next) {
		if (*place != seq + 1) {
			track->duplicated++;
			return ARRIVAL_DUPLICATE;
		}
		*place = 0;
		track->out_of_order++;
		return ARRIVAL_LATE;
	}
	for (uint64_t skipped = track->next; skipped < seq; skipped++)
		if (due(owner, skipped))
			arrival = ARRIVAL_AFTER_GAP;
	track_skip_to(track, seq, due, owner);
	if (*place)
		track->lost++;
	*place = 0;
	track->next = seq + 1;
	return arrival;
}

void track_finish(struct track *track, uint64_t end, track_due *due, const void *owner)
{
	track_skip_to(track, end, due, owner);
	for (uint32_t i = 0; i < track->window; i++) {
		if (track->missing[i])
			track->lost++;
		track->missing[i] = 0;
	}
}

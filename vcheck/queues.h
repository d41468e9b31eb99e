/*
 * The send and receive queue of a lane: posting, and matching each completion with its request.
 *
 * wr_id: tag 4 bits | lane 10 | buffer 14 | position 36. The position counts the requests of a queue from 0, so that
 * the next completion is known; a completion with another one, with one twice, or for a request that was not signaled
 * is a defect.
 */
#ifndef VCHECK_QUEUES_H
#define VCHECK_QUEUES_H

#include "lane.h"

bool sendq_has_room(const struct lane *lane);

/* Fills in wr_id and flags. The request is signaled if must_signal, or if the rule of sendq says so. */
bool sendq_post(struct lane *lane, struct ibv_send_wr *request, const struct send_entry *entry, bool must_signal);
bool sendq_post_control(struct lane *lane, const struct control *control, bool must_signal);

/* Every request that this completion shows to be complete goes to retire(), in order. */
typedef void retire_request(struct lane *lane, const struct send_entry *entry);
void sendq_complete(struct lane *lane, const struct ibv_wc *wc, retire_request *retire);

bool recvq_post(struct lane *lane, uint32_t buffer);
/* True if the completion is of a RECV that was posted and had not completed; buffer says which. */
bool recvq_complete(struct lane *lane, const struct ibv_wc *wc, uint32_t *buffer);

/* The lane that a completion says it is of; lanes if there is none. */
unsigned completion_lane(const struct ibv_wc *wc, unsigned lanes);

/* For the trackers of a lane at the end. */
track_due sendq_signaled;
track_due always_due;

#endif

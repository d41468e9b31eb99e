/*
 * The responder of a lane: verifies what arrives, renews what is READ, and gives credit.
 */
#ifndef VCHECK_VERIFY_H
#define VCHECK_VERIFY_H

#include "lane.h"

/* A successful receive completion of this lane. False: a verb failed. */
bool responder_receive(struct lane *lane, const struct ibv_wc *wc);

/* Sends credit if it is due. False: a verb failed. */
bool responder_pump(struct lane *lane);

/* Fills the slots that the first `depth` READs read. */
void responder_prepare(struct lane *lane);

bool responder_is_done(const struct lane *lane);

/* For the tracker of messages: SENDs and WRITEs with immediate arrive, by plan. */
track_due message_arrives;

#endif

/*
 * The TCP connection beside the queue pairs: the client's workload, the addresses of both sides, "ready", and at the
 * end the totals. It stays open, and silent, while the queue pairs run.
 *
 * A message is an array of uint64_t in network byte order, so any struct of uint64_t members can be one.
 */
#ifndef VCHECK_EXCHANGE_H
#define VCHECK_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>

#include "options.h"
#include "report.h"

/* Changes whenever what the sides tell each other does. */
#define EXCHANGE_VERSION 0x76636865636b0002ull	/* "vcheck", 2 */

struct exchange {
	int fd;
	unsigned patience_seconds;	/* how long to wait for the other side's message */
};

/* Client: connects. Server: waits for one client. */
bool exchange_open(struct exchange *exchange, const struct options *options, struct report *report);
void exchange_close(struct exchange *exchange);

/* Sends mine and receives theirs, both `size` bytes of uint64_t. what names it in the error text. */
bool exchange_swap(struct exchange *exchange, const void *mine, void *theirs, size_t size, const char *what,
		   struct report *report);

/* The other side has closed the connection, or it broke. */
bool exchange_peer_gone(const struct exchange *exchange);

#endif

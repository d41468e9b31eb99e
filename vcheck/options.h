#ifndef VCHECK_OPTIONS_H
#define VCHECK_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "plan.h"

/* wr_id has room for this many (queues.h). */
enum { MAX_QPS = 1024, MAX_DEPTH = 8192 };
enum { MAX_SIZE = 16 << 20, MAX_SECONDS = 1000000, MAX_PRIVATE_MEBIBYTES = 1 << 20 };
#define MAX_COUNT (1ull << 35)

struct options {
	const char *host;	/* NULL: server */
	const char *device;	/* NULL: the first one */
	uint16_t port;
	int gid_index;		/* -1: look for a RoCEv2 IPv4 one */
	unsigned mtu;		/* bytes; 0: what the port has */
	unsigned stall_seconds;
	unsigned ack_timeout;	/* IBA Vol 1 11.2.5.2: 4.096 us * 2^ack_timeout */
	uint64_t private_mebibytes;	/* held and verified beside; 0: none */
	unsigned hold_every_ms;	/* stand still from time to time; 0: never */
	unsigned nap_ms;	/* sleep before each round of posts; 0: never */
	bool verbose;
	struct workload load;	/* the client's counts, the server adopts it */
};

enum options_result { OPTIONS_RUN, OPTIONS_EXIT_OK, OPTIONS_EXIT_USAGE };

/* Answers --help itself; on a mistake says on stderr what it is and what to do. */
enum options_result options_parse(int argc, char **argv, struct options *options);

#endif

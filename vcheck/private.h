/*
 * Private memory with known content, a small part of which changes all the time: whoever moves this process has to take
 * it along as it is at that moment.
 */
#ifndef VCHECK_PRIVATE_H
#define VCHECK_PRIVATE_H

#include <stdbool.h>
#include <stdint.h>

#include "report.h"

struct private_memory {
	unsigned char *bytes;	/* NULL: there is none */
	uint64_t pages;
	uint64_t changing;	/* the first of them are written again and again, in turn */
	uint64_t writes;	/* so far; tells the version of each page */
	uint64_t seed;
	int64_t next_ns;
};

/* Maps and fills it; nothing to do for 0 MiB. */
bool private_create(struct private_memory *memory, uint64_t mebibytes, uint64_t seed, struct report *report);

/* From time to time verifies two pages and writes a new version of one of them. */
void private_step(struct private_memory *memory, int64_t now_ns, struct report *report);

/* Verifies all of it. */
void private_verify(const struct private_memory *memory, struct report *report);

void private_destroy(struct private_memory *memory);

#endif

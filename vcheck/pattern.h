/*
 * What a message looks like in memory, and how one is checked.
 *
 *   +--------+---------------------------------+-----------+
 *   | header |  pattern up to message's length |  guard    |
 *   +--------+---------------------------------+-----------+
 *   0        32                           length   slot_size - 64
 *
 * Every 8 bytes of the pattern differ from every other 8 bytes of the run (but for chance), so content that is stale,
 * shifted or from another message is seen as well as a flipped bit. The guard is never part of a message: a device that
 * writes past the end is caught by it. All integers are little-endian.
 */
#ifndef VCHECK_PATTERN_H
#define VCHECK_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MESSAGE_MIN = 32, GUARD_LEN = 64 };

enum message_kind {
	KIND_DATA = 1,		/* SEND, WRITE, WRITE with immediate */
	KIND_READ_DATA = 2,	/* in the region that the other side READs */
	KIND_NOTICE = 3,	/* control messages: control.h */
	KIND_FIN = 4,
	KIND_CREDIT = 5,
};

struct message_id {
	enum message_kind kind;
	uint64_t seed, stream, seq;
	uint32_t length;
};

struct message_header {
	uint32_t magic;
	uint16_t kind;
	uint16_t stream;
	uint64_t seq;
	uint64_t seed;
	uint32_t length;
	uint32_t check;		/* over the other fields */
};
_Static_assert(sizeof(struct message_header) == MESSAGE_MIN, "the header is the shortest message");

/* What was found where a message was expected. */
enum finding {
	FOUND_EXPECTED,		/* all of it right */
	FOUND_DAMAGED,		/* this message, but a byte of it (or of the guard) differs */
	FOUND_OLDER,		/* an earlier message of the stream, or nothing: this one did not arrive */
	FOUND_NEWER,		/* a later message of the stream: it overtook this one */
	FOUND_FOREIGN,		/* neither: header unreadable, or of another stream */
};

size_t slot_size(size_t message_size);

void message_fill(void *slot, const struct message_id *id);
void guard_fill(void *slot, size_t slot_size);

/* Reads a header; false if it is none or damaged. */
bool message_identify(const void *slot, struct message_id *id);

/* On anything but FOUND_EXPECTED, text says what differs. */
enum finding message_verify(const void *slot, size_t slot_size, const struct message_id *expected,
			    char *text, size_t text_size);

#endif

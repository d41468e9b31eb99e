#include "pattern.h"

#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "plan.h"

#define MESSAGE_MAGIC 0x4b434856u	/* "VHCK" */
#define GUARD_WORD 0xa5c396e187d2b4f0u
#define WEYL_STEP 0x9e3779b97f4a7c15u

/* Words compared between two looks at the result: long enough for vector code, short enough to stop early. */
enum { VERIFY_BLOCK = 512 };

typedef uint64_t __attribute__((may_alias)) word;

static uint64_t pattern_key(const struct message_id *id)
{
	return mix64(id->seed ^ mix64(id->kind ^ mix64(id->stream ^ mix64(id->seq ^ mix64(id->length)))));
}

/*
 * Word i of the pattern: a Weyl sequence, its high half folded into the low. One addition, shift and xor: the compiler
 * makes vector code of the loops below.
 */
static inline uint64_t pattern_word(uint64_t weyl)
{
	return htole64(weyl ^ (weyl >> 31));
}

static void pattern_fill(void *to, size_t length, uint64_t weyl)
{
	word *words = to;
	size_t count = length / 8;

	for (size_t i = 0; i < count; i++, weyl += WEYL_STEP)
		words[i] = pattern_word(weyl);
	if (length % 8) {
		uint64_t last = pattern_word(weyl);

		memcpy(words + count, &last, length % 8);
	}
}

static size_t first_difference(const void *left, const void *right, size_t length)
{
	const unsigned char *l = left, *r = right;
	size_t i = 0;

	while (i < length && l[i] == r[i])
		i++;
	return i;
}

/* The offset of the first byte that differs from the pattern, or length. */
static size_t pattern_verify(const void *from, size_t length, uint64_t weyl)
{
	const word *words = from;
	size_t count = length / 8, start = 0;
	uint64_t last;

	while (start < count) {
		size_t block = count - start < VERIFY_BLOCK ? count - start : VERIFY_BLOCK;
		uint64_t differ = 0, w = weyl;

		for (size_t i = 0; i < block; i++, w += WEYL_STEP)
			differ |= words[start + i] ^ pattern_word(w);
		if (differ) {
			for (size_t i = 0; i < block; i++, weyl += WEYL_STEP) {
				uint64_t want = pattern_word(weyl);

				if (words[start + i] != want)
					return (start + i) * 8 + first_difference(&words[start + i], &want, 8);
			}
		}
		start += block;
		weyl = w;
	}
	last = pattern_word(weyl);
	return count * 8 + first_difference(words + count, &last, length % 8);
}

static uint32_t header_check(const struct message_header *header)
{
	uint64_t words[4];

	memcpy(words, header, sizeof(words));
	words[3] &= htole64(0xffffffff);	/* length stays, check goes */
	return mix64(words[0] ^ mix64(words[1] ^ mix64(words[2] ^ mix64(words[3])))) >> 32;
}

size_t slot_size(size_t message_size)
{
	return (message_size + 63) / 64 * 64 + GUARD_LEN;
}

void guard_fill(void *slot, size_t slot_size)
{
	word *guard = (word *)((char *)slot + slot_size - GUARD_LEN);

	for (size_t i = 0; i < GUARD_LEN / 8; i++)
		guard[i] = GUARD_WORD;
}

static bool guard_intact(const void *slot, size_t slot_size)
{
	const word *guard = (const word *)((const char *)slot + slot_size - GUARD_LEN);
	uint64_t differ = 0;

	for (size_t i = 0; i < GUARD_LEN / 8; i++)
		differ |= guard[i] ^ GUARD_WORD;
	return !differ;
}

void message_fill(void *slot, const struct message_id *id)
{
	struct message_header header = {
		.magic = htole32(MESSAGE_MAGIC),
		.kind = htole16(id->kind),
		.stream = htole16(id->stream),
		.seq = htole64(id->seq),
		.seed = htole64(id->seed),
		.length = htole32(id->length),
	};

	header.check = htole32(header_check(&header));
	memcpy(slot, &header, sizeof(header));
	pattern_fill((char *)slot + sizeof(header), id->length - sizeof(header), pattern_key(id));
}

bool message_identify(const void *slot, struct message_id *id)
{
	struct message_header header;

	memcpy(&header, slot, sizeof(header));
	if (le32toh(header.magic) != MESSAGE_MAGIC || le32toh(header.check) != header_check(&header))
		return false;
	*id = (struct message_id){
		.kind = le16toh(header.kind),
		.stream = le16toh(header.stream),
		.seq = le64toh(header.seq),
		.seed = le64toh(header.seed),
		.length = le32toh(header.length),
	};
	return true;
}

static bool header_is_zero(const void *slot)
{
	static const char zero[sizeof(struct message_header)];

	return !memcmp(slot, zero, sizeof(zero));
}

enum finding message_verify(const void *slot, size_t slot_size, const struct message_id *expected,
			    char *text, size_t text_size)
{
	size_t payload = expected->length - sizeof(struct message_header);
	struct message_id found;
	size_t differs;

	if (!message_identify(slot, &found)) {
		if (header_is_zero(slot)) {
			snprintf(text, text_size, "the buffer was never written");
			return FOUND_OLDER;
		}
		snprintf(text, text_size, "header damaged");
		return FOUND_FOREIGN;
	}
	if (found.seed != expected->seed || found.stream != expected->stream) {
		snprintf(text, text_size, "header is of stream %llu, seed %llu", (unsigned long long)found.stream,
			 (unsigned long long)found.seed);
		return FOUND_FOREIGN;
	}
	if (found.kind != expected->kind || found.seq != expected->seq) {
		snprintf(text, text_size, "found message %llu (kind %d)", (unsigned long long)found.seq, found.kind);
		/* A buffer that READs and sends share keeps what another operation left: this one did nothing. */
		return found.kind != expected->kind || found.seq < expected->seq ? FOUND_OLDER : FOUND_NEWER;
	}
	if (found.length != expected->length) {
		snprintf(text, text_size, "header says %u bytes, planned are %u", found.length, expected->length);
		return FOUND_DAMAGED;
	}
	differs = pattern_verify((const char *)slot + sizeof(struct message_header), payload, pattern_key(expected));
	if (differs < payload) {
		snprintf(text, text_size, "byte %zu of %u differs", differs + sizeof(struct message_header),
			 expected->length);
		return FOUND_DAMAGED;
	}
	if (!guard_intact(slot, slot_size)) {
		snprintf(text, text_size, "bytes past the end of the slot were overwritten");
		return FOUND_DAMAGED;
	}
	return FOUND_EXPECTED;
}

/* The parts of vcheck that need no queue pair: the sequence tracker, the pattern, control messages, the comparison. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "pattern.h"
#include "plan.h"
#include "private.h"
#include "report.h"
#include "track.h"

static unsigned passed, failed;

#define CHECK(what) check(what, #what, __LINE__)

static void check(bool fine, const char *what, int line)
{
	if (fine) {
		passed++;
		return;
	}
	failed++;
	printf("units.c:%d: failed: %s\n", line, what);
}

static bool every(const void *owner, uint64_t seq)
{
	(void)owner;
	(void)seq;
	return true;
}

static bool even(const void *owner, uint64_t seq)
{
	(void)owner;
	return seq % 2 == 0;
}

static bool track_found(struct track *track, uint64_t end, track_due *due, uint64_t lost, uint64_t duplicated,
			uint64_t out_of_order)
{
	bool fine;

	track_finish(track, end, due, NULL);
	fine = track->lost == lost && track->duplicated == duplicated && track->out_of_order == out_of_order;
	track_free(track);
	return fine;
}

static void feed(struct track *track, track_due *due, const char *digits)
{
	if (!track_init(track, 8))
		abort();
	for (; *digits; digits++)
		track_arrive(track, *digits - '0', due, NULL);
}

static void test_track(void)
{
	static const struct {
		const char *arrivals;
		track_due *due;
		uint64_t end, lost, duplicated, out_of_order;
	} cases[] = {
		{ "0123456789", every, 10, 0, 0, 0 },
		{ "012356789", every, 10, 1, 0, 0 },
		{ "0123", every, 5, 1, 0, 0 },
		{ "012334", every, 5, 0, 1, 0 },
		{ "012343", every, 5, 0, 1, 0 },
		{ "02134", every, 5, 0, 0, 1 },
		{ "03124", every, 5, 0, 0, 2 },
		{ "02114", every, 5, 1, 1, 1 },
		{ "02468", even, 10, 0, 0, 0 },
		{ "0268", even, 10, 1, 0, 0 },
		{ "", every, 20, 20, 0, 0 },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct track track;

		feed(&track, cases[i].due, cases[i].arrivals);
		CHECK(track_found(&track, cases[i].end, cases[i].due, cases[i].lost, cases[i].duplicated,
				  cases[i].out_of_order));
	}
}

static enum finding verify(const char *slot, size_t size, const struct message_id *id)
{
	char text[128];

	return message_verify(slot, size, id, text, sizeof(text));
}

/* Every single bit of every length counts, and so does the guard. */
static void test_pattern(void)
{
	char *slot = aligned_alloc(64, slot_size(300));

	for (uint32_t length = MESSAGE_MIN; length <= 300; length += 67) {
		struct message_id id = { KIND_DATA, 7, 3, 1000, length };
		size_t size = slot_size(300);
		bool found_all = true;

		memset(slot, 0, size);
		CHECK(verify(slot, size, &id) == FOUND_OLDER);
		guard_fill(slot, size);
		message_fill(slot, &id);
		CHECK(verify(slot, size, &id) == FOUND_EXPECTED);
		for (uint32_t bit = 0; bit < length * 8; bit++) {
			slot[bit / 8] ^= 1 << bit % 8;
			found_all &= verify(slot, size, &id) != FOUND_EXPECTED;
			slot[bit / 8] ^= 1 << bit % 8;
		}
		CHECK(found_all);
		slot[size - 1] ^= 1;
		CHECK(verify(slot, size, &id) == FOUND_DAMAGED);
		slot[size - 1] ^= 1;
		id.seq++;
		CHECK(verify(slot, size, &id) == FOUND_OLDER);
		id.seq -= 2;
		CHECK(verify(slot, size, &id) == FOUND_NEWER);
		id.seq++;
		id.stream++;
		CHECK(verify(slot, size, &id) == FOUND_FOREIGN);
	}
	free(slot);
}

static void test_control(void)
{
	struct control control = { KIND_NOTICE, 41, 17 }, decoded;
	struct message_id id = { .seed = 1, .stream = 2, .seq = 3 };
	char slot[CONTROL_LEN];
	bool found_all = true;

	control_encode(slot, id, &control);
	CHECK(message_identify(slot, &id) && control_decode(slot, &id, &decoded));
	CHECK(decoded.kind == KIND_NOTICE && decoded.posted == 41 && decoded.completed == 17);
	for (unsigned bit = MESSAGE_MIN * 8; bit < (CONTROL_LEN - 8) * 8; bit++) {
		slot[bit / 8] ^= 1 << bit % 8;
		found_all &= !control_decode(slot, &id, &decoded);
		slot[bit / 8] ^= 1 << bit % 8;
	}
	CHECK(found_all);
}

static void test_plan(void)
{
	struct workload load = { .op = OP_MIX, .size = 65536, .random_size = true, .seed = 5 };
	unsigned seen[OP_COUNT] = { 0 }, shorter = 0;

	for (uint64_t seq = 0; seq < 10000; seq++) {
		struct message message = plan_message(&load, 1, seq);

		seen[message.op]++;
		shorter += message.length <= 256;
		if (message.length < MESSAGE_MIN || message.length > load.size)
			CHECK(!"length within its limits");
	}
	for (int op = 0; op < OP_ATOMIC; op++)
		CHECK(seen[op] > 2000);
	CHECK(seen[OP_ATOMIC] == 0);
	CHECK(shorter > 500);
	load.op = OP_ALL;
	for (uint64_t seq = 0; seq < 10000; seq++) {
		struct message message = plan_message(&load, 1, seq);

		seen[message.op]++;
		CHECK(message.op != OP_ATOMIC || message.length == ATOMIC_LEN);
	}
	for (int op = 0; op < OP_COUNT; op++)
		CHECK(seen[op] > 1500 && plan_has(&load, op));
}

static struct report counted(uint64_t posted, uint64_t completed)
{
	struct report report = { 0 };

	report.totals.posted[OP_READ] = posted;
	report.totals.completed[OP_READ] = completed;
	report.totals.received[OP_READ] = completed;
	return report;
}

static void test_compare(void)
{
	struct totals peer = { 0 };
	struct report report = counted(10, 10);

	report_compare(&report, &peer);
	CHECK(!report.error[0] && !report.totals.lost && !report.totals.duplicated);

	report = counted(10, 9);
	report_check_completed(&report);
	CHECK(strstr(report.error, "wrong count") && report.totals.lost == 1 && !report.totals.duplicated);

	report = counted(0, 0);
	peer.posted[OP_SEND] = 5;
	report.totals.received[OP_SEND] = 4;
	report_compare(&report, &peer);
	CHECK(strstr(report.error, "wrong count") && report.totals.lost == 1);

	report = counted(0, 0);
	report.totals.received[OP_SEND] = 6;
	report_compare(&report, &peer);
	CHECK(strstr(report.error, "wrong count") && report.totals.duplicated == 1);

	/* What the tracker saw is not counted again. */
	report = counted(0, 0);
	report.totals.received[OP_SEND] = 5;
	report.totals.lost = report.totals.lost_messages = 1;
	report.totals.duplicated = report.totals.duplicated_messages = 1;
	report_compare(&report, &peer);
	CHECK(report.totals.lost == 1 && report.totals.duplicated == 1);

	report = counted(10, 10);
	peer = (struct totals){ .corrupted = 1 };
	report_compare(&report, &peer);
	CHECK(strstr(report.error, "the other side") && !report.totals.corrupted);
}

static void test_private(void)
{
	struct private_memory memory = { 0 };
	struct report report = { 0 };
	int64_t now_ns = 1;

	private_step(&memory, now_ns, &report);
	private_verify(&memory, &report);
	CHECK(private_create(&memory, 2, 7, &report) && memory.pages == 512 && memory.changing == 8);
	for (int step = 0; step < 20; step++, now_ns += 1000000000)
		private_step(&memory, now_ns, &report);
	/* Too early. */
	private_step(&memory, memory.next_ns - 1, &report);
	private_verify(&memory, &report);
	CHECK(memory.writes == 20 && !report.totals.corrupted && !report.error[0]);
	/* A page as it was, one too many, and one that is another's. */
	memory.writes++;
	private_verify(&memory, &report);
	CHECK(report.totals.corrupted == 1 && strstr(report.error, "page 4 "));
	memory.writes--;
	memcpy(memory.bytes + 300 * 4096, memory.bytes + 301 * 4096, 4096);
	private_verify(&memory, &report);
	CHECK(report.totals.corrupted == 2);
	private_destroy(&memory);
}

int main(void)
{
	test_track();
	test_pattern();
	test_control();
	test_plan();
	test_compare();
	test_private();
	printf("units: %u passed, %u failed\n", passed, failed);
	return failed > 0;
}

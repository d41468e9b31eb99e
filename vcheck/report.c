#include "report.h"

#include <stdarg.h>
#include <stdio.h>

enum { PRINTED_DEFECTS = 20 };
enum { EXIT_FINE = 0, EXIT_DEFECT = 1, EXIT_SETUP = 2 };

void report_defect(struct report *report, uint64_t *counter, const char *format, ...)
{
	char text[sizeof(report->error)];
	va_list arguments;

	if (counter)
		++*counter;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (!report->error[0])
		snprintf(report->error, sizeof(report->error), "%s", text);
	if (report->verbose && report->printed++ < PRINTED_DEFECTS)
		fprintf(stderr, "vcheck: defect: %s\n", text);
}

bool report_setup_error(struct report *report, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(report->error, sizeof(report->error), format, arguments);
	va_end(arguments);
	report->setup_failed = true;
	fprintf(stderr, "vcheck: %s\n", report->error);
	return false;
}

static uint64_t sum(const uint64_t counts[OP_COUNT])
{
	uint64_t total = 0;

	for (int op = 0; op < OP_COUNT; op++)
		total += counts[op];
	return total;
}

/* Whoever received should have `posted` of them, give or take the losses and repeats that it saw itself. */
static void compare_arrivals(struct report *report, const uint64_t posted[OP_COUNT])
{
	struct totals *mine = &report->totals;
	uint64_t expected = sum(posted) + mine->duplicated_messages;
	uint64_t accounted = sum(mine->received) + mine->lost_messages;

	if (accounted < expected) {
		mine->lost += expected - accounted;
		report_defect(report, NULL, "wrong count: %llu messages were posted, %llu arrived, %llu unexplained",
			      (unsigned long long)sum(posted), (unsigned long long)sum(mine->received),
			      (unsigned long long)(expected - accounted));
	} else if (accounted > expected) {
		mine->duplicated += accounted - expected;
		report_defect(report, NULL, "wrong count: %llu messages were posted, %llu arrived, %llu too many",
			      (unsigned long long)sum(posted), (unsigned long long)sum(mine->received),
			      (unsigned long long)(accounted - expected));
	}
}

static bool any_defect(const struct totals *totals)
{
	return totals->lost || totals->duplicated || totals->out_of_order || totals->corrupted || totals->failed;
}

void report_check_completed(struct report *report)
{
	struct totals *mine = &report->totals;
	uint64_t posted = sum(mine->posted), completed = sum(mine->completed);

	if (completed >= posted)
		return;
	mine->lost += posted - completed;
	report_defect(report, NULL, "wrong count: %llu requests were posted, %llu completed",
		      (unsigned long long)posted, (unsigned long long)completed);
}

void report_compare(struct report *report, const struct totals *peer)
{
	struct totals *mine = &report->totals;
	uint64_t posted[OP_COUNT];

	for (int op = 0; op < OP_COUNT; op++)
		posted[op] = op == OP_READ || op == OP_ATOMIC ? mine->posted[op] : peer->posted[op];
	compare_arrivals(report, posted);
	if (any_defect(peer))
		report_defect(report, NULL,
			      "the other side found: lost %llu, duplicated %llu, out of order %llu, corrupted %llu%s",
			      (unsigned long long)peer->lost, (unsigned long long)peer->duplicated,
			      (unsigned long long)peer->out_of_order, (unsigned long long)peer->corrupted,
			      peer->failed ? ", and gave up" : "");
}

static void print_json_string(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			printf("\\%c", *text);
		else if ((unsigned char)*text < 0x20)
			printf("\\u%04x", *text);
		else
			putchar(*text);
	}
	putchar('"');
}

int report_print(const struct report *report)
{
	const struct totals *totals = &report->totals;
	const char *verdict = report->setup_failed ? "error" : report->error[0] || any_defect(totals) ? "defect" : "ok";

	printf("{\"role\":\"%s\",\"op\":\"%s\",\"qps\":%llu,\"size\":%llu,\"seed\":%llu,\"seconds\":%.3f,",
	       report->server ? "server" : "client", op_name(report->load.op), (unsigned long long)report->load.qps,
	       (unsigned long long)report->load.size, (unsigned long long)report->load.seed, report->seconds);
	printf("\"posted\":%llu,\"completed\":%llu,\"received\":%llu,", (unsigned long long)sum(totals->posted),
	       (unsigned long long)sum(totals->completed), (unsigned long long)sum(totals->received));
	printf("\"lost\":%llu,\"duplicated\":%llu,\"out_of_order\":%llu,\"corrupted\":%llu,",
	       (unsigned long long)totals->lost, (unsigned long long)totals->duplicated,
	       (unsigned long long)totals->out_of_order, (unsigned long long)totals->corrupted);
	if (report->holds)
		printf("\"holds\":%llu,", (unsigned long long)report->holds);
	printf("\"longest_gap_ms\":%.3f,\"bytes\":%llu,\"verdict\":\"%s\",\"error\":", report->longest_gap_ms,
	       (unsigned long long)totals->bytes, verdict);
	if (report->error[0])
		print_json_string(report->error);
	else
		printf("null");
	puts("}");
	if (fflush(stdout) || ferror(stdout))
		return EXIT_SETUP;
	return report->setup_failed ? EXIT_SETUP : report->error[0] || any_defect(totals) ? EXIT_DEFECT : EXIT_FINE;
}

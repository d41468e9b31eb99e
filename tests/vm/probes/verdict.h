/*
 * How a probe answers. A line for each claim, on standard output:
 *
 *     name: holds
 *     name: does not hold: what was seen
 *
 * and `# text` for what was seen besides. Exit status: 0 if all claims hold, 1 if one does not, 2 if the probe itself failed.
 */
#ifndef VERDICT_H
#define VERDICT_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int verdict_worst;

/* Ends the probe with this text and that of errno. */
static void trouble(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static inline void trouble(const char *format, ...)
{
	int error = errno;
	va_list arguments;

	va_start(arguments, format);
	fflush(stdout);
	vfprintf(stderr, format, arguments);
	fprintf(stderr, ": %s\n", strerror(error));
	exit(2);
}

/* The claim holds if `true`; the text says what was seen otherwise. */
static void claim(const char *name, bool holds, const char *format, ...) __attribute__((format(printf, 3, 4)));
static inline void claim(const char *name, bool holds, const char *format, ...)
{
	va_list arguments;

	if (holds) {
		printf("%s: holds\n", name);
	} else {
		verdict_worst = 1;
		printf("%s: does not hold: ", name);
		va_start(arguments, format);
		vprintf(format, arguments);
		va_end(arguments);
		printf("\n");
	}
	fflush(stdout);
}

/* What was seen besides. */
static void seen(const char *format, ...) __attribute__((format(printf, 1, 2), unused));
static inline void seen(const char *format, ...)
{
	va_list arguments;

	printf("# ");
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf("\n");
	fflush(stdout);
}

#endif

/*
 * An epoll descriptor within an epoll descriptor, through a dump and a restore. The program says `ready` in the file that it was
 * given, waits, and on SIGUSR1, which comes after the restore, gives its verdict there.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "verdict.h"

static volatile sig_atomic_t asked;

static void ask(int signal)
{
	(void)signal;
	asked = 1;
}

static void watch(int epoll, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
		trouble("epoll_ctl");
}

/* The one event that is there, or 0. */
static uint64_t event_of(int epoll, int limit_ms)
{
	struct epoll_event event = { 0 };

	return epoll_wait(epoll, &event, 1, limit_ms) == 1 ? event.data.u64 : 0;
}

static void wake(int fd)
{
	uint64_t one = 1;

	if (write(fd, &one, sizeof(one)) != sizeof(one))
		trouble("write");
}

static void calm(int fd)
{
	uint64_t value;

	if (read(fd, &value, sizeof(value)) != sizeof(value))
		trouble("read");
}

int main(int count, char **arguments)
{
	/* The inner one has the higher number, so that the outer one is restored before it. */
	int outer = epoll_create1(EPOLL_CLOEXEC), inner = epoll_create1(EPOLL_CLOEXEC);
	int within = eventfd(0, 0), beside = eventfd(0, 0);
	sigset_t none, blocked;

	if (count != 2 || outer < 0 || inner < outer || within < 0 || beside < 0)
		trouble("descriptors");
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGUSR1);
	sigprocmask(SIG_BLOCK, &blocked, &none);
	signal(SIGUSR1, ask);
	watch(inner, within, EPOLLIN, 11);
	watch(outer, inner, EPOLLIN, 22);
	watch(outer, beside, EPOLLIN | EPOLLET, 33);
	if (!freopen(arguments[1], "we", stdout))
		trouble("%s", arguments[1]);
	printf("ready\n");
	fflush(stdout);
	while (!asked)
		sigsuspend(&none);

	claim("nothing-is-told-that-did-not-happen", event_of(outer, 100) == 0 && event_of(inner, 100) == 0, "an event");
	wake(within);

	uint64_t at_outer = event_of(outer, 5000), at_inner = event_of(inner, 5000);

	claim("an-event-of-the-inner-epoll-arrives-at-the-outer", at_outer == 22 && at_inner == 11,
	      "data %llu at the outer one, %llu at the inner one", (unsigned long long)at_outer, (unsigned long long)at_inner);
	calm(within);
	claim("and-is-gone-when-it-is-taken", event_of(outer, 100) == 0, "still there");
	wake(beside);
	at_outer = event_of(outer, 5000);
	claim("an-event-beside-it-arrives-once", at_outer == 33 && event_of(outer, 100) == 0, "data %llu",
	      (unsigned long long)at_outer);
	/* Registrations can be changed: they are the ones of these numbers. */
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 44 };
	int changed = epoll_ctl(inner, EPOLL_CTL_MOD, within, &event);

	wake(within);
	at_inner = event_of(inner, 5000);
	claim("a-registration-can-be-changed", changed == 0 && at_inner == 44, "%d, data %llu", changed,
	      (unsigned long long)at_inner);
	printf("done\n");
	fflush(stdout);
	return verdict_worst;
}

/*
 * A program of librdmacm does not show when it listens, and its client is rejected before that. perftest's
 * server listens twice, and its client asks for the second connection as soon as it can; Debian's perftest
 * does not survive a rejection there (linux-rdma/perftest issue 93). Preloaded into both sides, this library
 * puts them in order: the n-th rdma_connect waits until the server has returned from its n-th rdma_listen.
 *
 * VERBATIM_TURNS is a folder. The server's n-th successful rdma_listen makes the file `listens-n` there, and
 * the client waits for it. VERBATIM_LISTENS is the number of times that the server listens; later
 * connections wait for the last one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct rdma_cm_id;
struct rdma_conn_param;

static void fail(const char *what)
{
	fprintf(stderr, "in_turn: %s: %m\n", what);
	abort();
}

static void *next(const char *symbol)
{
	void *function = dlsym(RTLD_NEXT, symbol);

	if (!function)
		fail(symbol);
	return function;
}

static const char *setting(const char *variable)
{
	const char *value = getenv(variable);

	if (!value)
		fail(variable);
	return value;
}

static void path_of(char path[PATH_MAX], unsigned turn)
{
	snprintf(path, PATH_MAX, "%s/listens-%u", setting("VERBATIM_TURNS"), turn);
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	static unsigned listened;
	int (*call)(struct rdma_cm_id *, int) = next("rdma_listen");
	int error = call(id, backlog);
	int saved = errno;
	char path[PATH_MAX];

	if (!error) {
		int file;

		path_of(path, __atomic_add_fetch(&listened, 1, __ATOMIC_SEQ_CST));
		file = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
		if (file < 0)
			fail(path);
		close(file);
	}
	errno = saved;
	return error;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
	static unsigned asked;
	const struct timespec pause = { .tv_nsec = 1000000 };
	int (*call)(struct rdma_cm_id *, struct rdma_conn_param *) = next("rdma_connect");
	unsigned turn = __atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
	unsigned most = strtoul(setting("VERBATIM_LISTENS"), NULL, 10);
	char path[PATH_MAX];

	path_of(path, turn < most ? turn : most);
	/* The test ends a client that waits for too long. */
	while (access(path, F_OK)) {
		if (errno != ENOENT)
			fail(path);
		nanosleep(&pause, NULL);
	}
	return call(id, parameters);
}

/* Registered memory and children, by each way of making one: a child that has memory of its own shares none with its parent. */

#include "check.h"

#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
pid_t _Fork(void);

static struct setup s;
static char child_stack[64 << 10] __attribute__((aligned(16)));

static pid_t by_fork(void)
{
	return fork();
}

static pid_t by_plain_fork(void)
{
	return _Fork();
}

static pid_t by_clone(void)
{
	return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

static pid_t by_clone3(void)
{
	struct clone_args arguments = { .exit_signal = SIGCHLD };
	return syscall(SYS_clone3, &arguments, sizeof(arguments));
}

#ifdef SYS_fork
static pid_t by_fork_call(void)
{
	return syscall(SYS_fork);
}
#endif

/* What a child does: it sees what its parent had, changes it, and still has that after the RNIC has written to the parent's. */
static int child(unsigned char had, const int ends[2])
{
	/* It ends with its parent. */
	close(ends[1]);
	for (size_t at = 0; at < BUFFER_BYTES; at += 4096)
		if (s.buffer[0][at] != had || s.buffer[1][at] != had)
			return 1;
	memset(s.buffer[0], 0xee, BUFFER_BYTES);
	memset(s.buffer[1], 0xee, BUFFER_BYTES);
	char byte;
	if (read(ends[0], &byte, 1) != 1)
		return 2;
	for (size_t at = 0; at < BUFFER_BYTES; at += 4096)
		if (s.buffer[0][at] != 0xee || s.buffer[1][at] != 0xee)
			return 3;
	return 0;
}

static unsigned char now;
static int pipe_ends[2];

static int in_clone(void *nothing)
{
	(void)nothing;
	_exit(child(now, pipe_ends));
}

static pid_t by_clone_function(void)
{
	return clone(in_clone, child_stack + sizeof(child_stack), SIGCHLD, NULL);
}

/* How a child ends that was made in this way. */
static int status_of(const char *way, pid_t (*make)(void))
{
	static unsigned char value;
	now = ++value;
	memset(s.buffer[0], now, BUFFER_BYTES);
	memset(s.buffer[1], now, BUFFER_BYTES);
	CHECK(!pipe(pipe_ends));
	pid_t pid = make();
	if (pid == 0)
		_exit(child(now, pipe_ends));
	CHECK(pid > 0);
	/* Until it waits or has ended. */
	int status = 0;
	pid_t ended = 0;
	for (char state = 0; state != 'S' && !ended; ended = waitpid(pid, &status, WNOHANG)) {
		char path[64];
		snprintf(path, sizeof(path), "/proc/%d/stat", pid);
		FILE *file = fopen(path, "r");
		if (file && fscanf(file, "%*d %*s %c", &state) != 1)
			state = 0;
		if (file)
			fclose(file);
		sched_yield();
	}
	for (size_t at = 0; at < BUFFER_BYTES; at++)
		if (s.buffer[0][at] != now || s.buffer[1][at] != now) {
			fprintf(stderr, "%s: the child's writes are in its parent\n", way);
			exit(1);
		}
	s.buffer[0][0] = 0x77;
	CHECK(try_write(&s, (uintptr_t)s.buffer[1], s.mr[1]->rkey, 4096) == IBV_WC_SUCCESS);
	CHECK(s.buffer[1][0] == 0x77 && s.buffer[1][4096] == now);
	CHECK(write(pipe_ends[1], "x", 1) == 1);
	if (!ended)
		CHECK(waitpid(pid, &status, 0) == pid);
	close(pipe_ends[0]);
	close(pipe_ends[1]);
	return status;
}

static void has_a_copy(const char *way, pid_t (*make)(void))
{
	int status = status_of(way, make);
	if (status)
		fprintf(stderr, "%s: status %x\n", way, status);
	CHECK(!status);
}

/* As after ibv_fork_init elsewhere: what is registered is not there. */
static void has_none(const char *way, pid_t (*make)(void))
{
	int status = status_of(way, make);
	if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV)
		fprintf(stderr, "%s: status %x\n", way, status);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

static void runs_in_its_parents_memory(void)
{
	s.buffer[0][5] = 1;
	pid_t pid = vfork();
	if (pid == 0) {
		s.buffer[0][5]++;
		_exit(0);
	}
	int status = -1;
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status && s.buffer[0][5] == 2);

	char *arguments[] = { "true", NULL };
	CHECK(!posix_spawn(&pid, "/bin/true", NULL, NULL, arguments, environ));
	CHECK(waitpid(pid, &status, 0) == pid && !status);
}

static void all_ways(void)
{
	has_a_copy("fork", by_fork);
	has_none("_Fork", by_plain_fork);
	has_none("clone", by_clone);
	has_none("clone3", by_clone3);
	has_none("clone with a function", by_clone_function);
#ifdef SYS_fork
	has_none("the system call fork", by_fork_call);
#endif
	runs_in_its_parents_memory();
	has_a_copy("fork, after others", by_fork);
}

static void *in_a_thread(void *nothing)
{
	all_ways();
	return nothing;
}

int main(void)
{
	set_up(&s);
	all_ways();
	CHECK(!ibv_fork_init());
	all_ways();
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, in_a_thread, NULL) && !pthread_join(thread, NULL));

	/* What is no longer registered is any child's again. */
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_dereg_mr(s.mr[i]));
	memset(s.buffer[0], 9, BUFFER_BYTES);
	pid_t pid = by_clone();
	if (pid == 0) {
		int had = s.buffer[0][BUFFER_BYTES - 1];
		memset(s.buffer[0], 8, BUFFER_BYTES);
		_exit(had);
	}
	int status;
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 9 && s.buffer[0][0] == 9);
	for (int i = 0; i < 2; i++)
		CHECK((s.mr[i] = ibv_reg_mr(s.pd, s.buffer[i], BUFFER_BYTES, IBV_ACCESS_LOCAL_WRITE)));
	clear_away(&s);
	puts("done");
	return 0;
}

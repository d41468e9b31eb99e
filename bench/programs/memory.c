/* memory MIB: holds so much private memory, writes to it at random all the time, and tells each time for which it stood still.
   Without RDMA, so that CRIU alone can dump it. The wall clock goes on while it is written down. */
#include "common.h"

#include <sys/mman.h>

enum { PAGE = 4096, MOST_MIB = 65536, WRITES_A_STEP = 8 };
enum { STEP_NS = 1000 * 1000 };

/* Shorter pauses are the machine's own. */
#define TOLD_S 0.008

static uint64_t state = 88172645463325252ull;

/* xorshift64 (Marsaglia: "Xorshift RNGs", 2003). */
static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	return state ^= state << 17;
}

static double wall_clock(void)
{
	struct timespec time;

	clock_gettime(CLOCK_REALTIME, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int count, char **arguments)
{
	const struct timespec step = { .tv_nsec = STEP_NS };
	size_t bytes;
	uint64_t *memory;
	double last;

	if (count != 2) {
		errno = EINVAL;
		fail("usage: memory MIB");
	}
	bytes = (size_t)number(arguments[1], 0, MOST_MIB) << 20;
	if (!bytes)
		bytes = PAGE;
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("no memory");
	for (size_t word = 0; word < bytes / 8; word++)
		memory[word] = next();
	printf("ready\n");
	fflush(stdout);
	last = wall_clock();
	for (;;) {
		double at;

		nanosleep(&step, NULL);
		for (int write = 0; write < WRITES_A_STEP; write++)
			memory[next() % (bytes / 8)] = next();
		at = wall_clock();
		if (at - last > TOLD_S) {
			printf("%.6f stood still for %.3f ms\n", at, (at - last) * 1e3);
			fflush(stdout);
		}
		last = at;
	}
}

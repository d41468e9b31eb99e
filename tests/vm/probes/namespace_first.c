/*
 * The first object of a link-map namespace: what it defines, all others in the namespace bind to, their C library included.
 * It counts who calls, by the address of the caller, and does what was asked for: system calls by syscall instruction, since
 * libc's own `ioctl` would be ours; memory from an arena of its own.
 *
 * It is linked with nothing but the C library, which so comes second.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "namespace.h"

static struct call calls[CALLS];
static unsigned call_count;

static void note(enum function function, void *from)
{
	unsigned index = __atomic_fetch_add(&call_count, 1, __ATOMIC_RELAXED);

	if (index < CALLS)
		calls[index] = (struct call){ function, from };
}

#define NOTE(function) note(function, __builtin_return_address(0))

const struct call *namespace_calls(unsigned *count)
{
	unsigned all = __atomic_load_n(&call_count, __ATOMIC_ACQUIRE);

	*count = all < CALLS ? all : CALLS;
	return calls;
}

/* ---- system calls ------------------------------------------------------------------------------------------------ */

static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

extern int *__errno_location(void);

static long answer(long result)
{
	if (result < 0 && result > -4096) {
		*__errno_location() = -result;
		return -1;
	}
	return result;
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list arguments;
	void *argument;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	NOTE(IOCTL);
	return answer(raw(SYS_ioctl, fd, request, (long)argument, 0, 0, 0));
}

long write(int fd, const void *bytes, size_t length)
{
	NOTE(WRITE);
	return answer(raw(SYS_write, fd, (long)bytes, length, 0, 0, 0));
}

static void *map(void *at, size_t length, int protection, int flags, int fd, long offset)
{
	return (void *)answer(raw(SYS_mmap, (long)at, length, protection, flags, fd, offset));
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, long offset)
{
	NOTE(MMAP);
	return map(at, length, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t length, int protection, int flags, int fd, long offset)
{
	NOTE(MMAP);
	return map(at, length, protection, flags, fd, offset);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { ARENA = 64 << 20, HEADER = 16 };

static uint8_t *arena, *arena_end;
static size_t used;

static void *take(size_t alignment, size_t size)
{
	uint8_t *at;

	if (!arena) {
		arena = map(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		arena_end = arena + ARENA;
	}
	at = (uint8_t *)(((uintptr_t)arena + used + HEADER + alignment - 1) & ~(alignment - 1));
	if (at + size > arena_end)
		return NULL;
	used = at + size - arena;
	((size_t *)at)[-1] = size;
	return at;
}

void *malloc(size_t size)
{
	NOTE(MALLOC);
	return take(16, size);
}

void *calloc(size_t count, size_t size)
{
	NOTE(MALLOC);
	return take(16, count * size);
}

void *realloc(void *old, size_t size)
{
	void *at = take(16, size);
	size_t had = old ? ((size_t *)old)[-1] : 0;

	NOTE(MALLOC);
	if (at && old)
		memcpy(at, old, had < size ? had : size);
	return at;
}

int posix_memalign(void **at, size_t alignment, size_t size)
{
	NOTE(MALLOC);
	*at = take(alignment < 16 ? 16 : alignment, size);
	return *at ? 0 : 12;
}

void *aligned_alloc(size_t alignment, size_t size)
{
	NOTE(MALLOC);
	return take(alignment < 16 ? 16 : alignment, size);
}

void *memalign(size_t alignment, size_t size)
{
	NOTE(MALLOC);
	return take(alignment < 16 ? 16 : alignment, size);
}

void free(void *at)
{
	/* What is not the arena's would mean that somebody allocated elsewhere. */
	if (at && ((uint8_t *)at < arena || (uint8_t *)at >= arena_end))
		NOTE(FOREIGN_FREE);
}

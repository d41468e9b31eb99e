/* What programs that are timed while their memory is swapped have in common. */
#pragma once
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* A number that follows from `x` and looks like any other. */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Memory that is nobody else's, and not there before it is touched. */
static inline void *memory(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        fprintf(stderr, "no memory for %zu bytes: %s\n", bytes, strerror(errno));
        exit(2);
    }
    return at;
}

/* A counter of /proc/vmstat. */
static inline long long counter(const char *name)
{
    FILE *file = fopen("/proc/vmstat", "r");
    char found[64];
    long long value = 0;
    while (file && fscanf(file, "%63s %lld", found, &value) == 2)
        if (strcmp(found, name) == 0) {
            fclose(file);
            return value;
        }
    fprintf(stderr, "/proc/vmstat has no %s\n", name);
    exit(2);
}

/* A stretch of work, and the pages that the kernel has swapped in it. */
struct stretch {
    double begin;
    long long out, in;
};

static inline struct stretch begin(void)
{
    return (struct stretch){ .out = counter("pswpout"), .in = counter("pswpin"), .begin = now() };
}

/* Says how long it took, in JSON. */
static inline void end(struct stretch from)
{
    double seconds = now() - from.begin;
    printf("{\"seconds\": %.3f, \"pages_out\": %lld, \"pages_in\": %lld}\n", seconds, counter("pswpout") - from.out,
           counter("pswpin") - from.in);
}

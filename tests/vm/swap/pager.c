/* Programs that use more memory than there is, and compare every page that they look at with what they wrote there last.
 *
 *   pager PROGRAMS MIB SECONDS SEED
 *
 * Each of PROGRAMS processes has its part of MIB, which it fills, then reads and writes at random, with a stretch in order now and then, for
 * SECONDS, and in the end reads from the first page to the last. The first process, which is locked into memory, says each second on the console
 * how many pages each of them has compared: "pager: beat 12 pages 400 512". It ends with 0 if all pages were what they should be. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, MOST = 16, STRETCH = 64 };

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void fail(const char *what)
{
    fprintf(stderr, "pager: %s: %s\n", what, strerror(errno));
    exit(2);
}

/* The first word says which page of whom it is and when it was written; the rest follows from it. */
static void fill(volatile uint64_t *words, uint64_t page, uint32_t version, uint64_t seed)
{
    uint64_t word = mix(seed ^ page << 32 ^ version);
    for (int at = 0; at < WORDS; at++, word += 0x9e3779b97f4a7c15u)
        words[at] = word;
}

static void check(const volatile uint64_t *words, uint64_t page, uint32_t version, uint64_t seed)
{
    uint64_t word = mix(seed ^ page << 32 ^ version);
    for (int at = 0; at < WORDS; at++, word += 0x9e3779b97f4a7c15u) {
        if (words[at] == word)
            continue;
        uint32_t older = version;
        while (older > 0 && words[at] != mix(seed ^ page << 32 ^ older) + at * 0x9e3779b97f4a7c15u)
            older--;
        fprintf(stderr, "pager: page %llu of seed %llu, version %u: word %d is %llx and not %llx, %s\n", (unsigned long long)page,
                (unsigned long long)seed, version, at, (unsigned long long)words[at], (unsigned long long)word,
                older > 0 ? "which is older" : words[at] == 0 ? "a zero" : "of nothing");
        exit(1);
    }
}

static void work(uint64_t pages, double end, uint64_t seed, volatile uint64_t *count)
{
    uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    /* Huge pages would be split before they are swapped; what is looked for happens to small ones. */
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    uint32_t *versions = mmap(NULL, pages * sizeof *versions, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (versions == MAP_FAILED || mlock(versions, pages * sizeof *versions) != 0)
        fail("memory for the versions");
    for (uint64_t page = 0; page < pages; page++, ++*count)
        fill(memory + page * WORDS, page, versions[page] = 1, seed);
    for (uint64_t random = mix(seed); now() < end;) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        uint64_t many = random >> 60 == 0 ? STRETCH : 1, first = (random & 0xffffffff) % (pages - many);
        for (uint64_t page = first; page < first + many; page++, ++*count) {
            check(memory + page * WORDS, page, versions[page], seed);
            if (random >> 40 & 1)
                fill(memory + page * WORDS, page, ++versions[page], seed);
        }
    }
    for (uint64_t page = 0; page < pages; page++, ++*count)
        check(memory + page * WORDS, page, versions[page], seed);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return fputs("pager PROGRAMS MIB SECONDS SEED\n", stderr), 2;
    int programs = atoi(argv[1]), left = programs, verdict = 0;
    uint64_t pages = strtoull(argv[2], NULL, 0) * (1 << 20) / PAGE / programs, seed = strtoull(argv[4], NULL, 0);
    double end = now() + atof(argv[3]);
    int console = open("/dev/ttyS0", O_WRONLY | O_NOCTTY);
    if (console < 0)
        fail("/dev/ttyS0");
    volatile uint64_t *counts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (programs < 1 || programs > MOST || counts == MAP_FAILED)
        fail("counters");
    for (int program = 0; program < programs; program++) {
        pid_t pid = fork();
        if (pid < 0)
            fail("fork");
        if (pid == 0) {
            work(pages, end, seed + program, counts + program);
            return 0;
        }
    }
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0)
        fail("mlockall");
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    for (int second = 1; left > 0; second++) {
        struct timespec pause = { 1, 0 };
        sigtimedwait(&signals, NULL, &pause);
        char line[512];
        int length = snprintf(line, sizeof line, "pager: beat %d pages", second);
        for (int program = 0; program < programs; program++)
            length += snprintf(line + length, sizeof line - length, " %llu", (unsigned long long)counts[program]);
        line[length++] = '\n';
        if (write(console, line, length) < 0)
            fail("the console");
        int status;
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0; left--) {
            if (status != 0) {
                fprintf(stderr, "pager: a program has ended with status %#x\n", status);
                verdict = 1;
            }
        }
    }
    uint64_t all = 0;
    for (int program = 0; program < programs; program++)
        all += counts[program];
    printf("%llu pages were what they should be\n", (unsigned long long)all);
    return verdict;
}

/* A guest without an operating system whose RAM is filled, and written, as the words after its name say, in MiB:
 *
 *   full=N   so much is not zero
 *   hot=N    so much of that is written again and again
 *   ticks=1  it says "." on its serial line in every millisecond; else it halts
 *
 * When it is ready it says "R".
 */
#include "guest.h"

enum {
    SERIAL = 0x3f8,
    FIRST = 16 << 20, /* behind the guest itself and everything of its BIOS */
    PAGE = 4096,
    STRIDE = 256,
    AT_ONCE = 64,     /* pages between two looks at the clock */
};

/* What Multiboot hands over, as far as it is of interest (Multiboot Specification 0.6.96, §3.3). */
struct multiboot {
    u32 flags, memory_lower, memory_upper, boot_device;
    const char *command_line;
};

static void say(char what)
{
    while (!(in(SERIAL + 5) & 0x20))
        ;
    out(SERIAL, what);
}

/* The number behind "name=", or 0. */
static u32 option(const char *line, const char *name)
{
    for (; *line; line++) {
        const char *at = line, *wanted = name;
        while (*wanted && *at == *wanted)
            at++, wanted++;
        if (*wanted || *at != '=')
            continue;
        u32 number = 0;
        while (*++at >= '0' && *at <= '9')
            number = number * 10 + *at - '0';
        return number;
    }
    return 0;
}

static u64 now(void)
{
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

/* Counts of the clock in a millisecond, by channel 2 of the PIT, which counts at 1,193,182 Hz. */
static u64 in_a_millisecond(void)
{
    enum { COUNT = 11932, MILLISECONDS = 10 };
    out(0x61, (in(0x61) & ~2) | 1);
    out(0x43, 0xb0);
    out(0x42, COUNT & 0xff);
    out(0x42, COUNT >> 8);
    u64 begun = now();
    while (!(in(0x61) & 0x20))
        ;
    return (now() - begun) / MILLISECONDS;
}

void check(const struct multiboot *multiboot)
{
    const char *line = multiboot->command_line;
    u32 full = option(line, "full") << 20, hot = option(line, "hot") << 20;
    for (u32 at = 0; at < full; at += STRIDE)
        *(volatile u32 *)(FIRST + at) = (FIRST + at) * 2654435761u | 1;
    u64 tick = in_a_millisecond();
    say('R');
    if (!option(line, "ticks"))
        return;
    u64 next = now();
    for (u32 at = 0, turn = 1;;) {
        for (u32 page = 0; page < AT_ONCE && hot; page++) {
            *(volatile u32 *)(FIRST + at) = turn;
            at += PAGE;
            if (at >= hot)
                at = 0, turn += 2;
        }
        if (now() < next)
            continue;
        next += tick;
        say('.');
    }
}

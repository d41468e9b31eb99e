/* A guest without an operating system that knows what must be in its memory.
 *
 * It writes pages in an order that looks random, looks at each before it writes it again, and says on its serial line how far it
 * is: "tick N" with N = 1, 2, 3, ... without a gap, for ever, or "BAD ..." and stops. What is in a page follows from how often it was
 * written, and that is kept in another place: a page that is lost, old, or another one's is found. How often it has written at all is kept
 * in its memory and in a register: memory that is of an earlier moment as a whole is found, too. Between its ticks it
 * looks at pages that it has written once and, without a disk, never again.
 */
#include "guest.h"
#include "disk.h"

enum {
    SERIAL = 0x3f8,
    PAGE_WORDS = 1024,
    FIRST = 4 << 20,      /* where pages begin, in bytes */
    PAGES = 10 << 8,      /* 10 MiB: with the guest itself and its BIOS within 16 MiB, the least of RAM that it is given */
    HOT = 1 << 8,         /* the first so many are written again and again */
    WRITES = 2048,        /* of each tick */
    LOOKS = 256,
};

static u32 written[PAGES];
static volatile u32 writes;     /* the sum of `written`, and what CR2 has: nothing else uses that, since no page faults */

static void say(const char *text)
{
    for (; *text; text++) {
        while (!(in(SERIAL + 5) & 0x20))
            ;
        out(SERIAL, *text);
    }
}

static void say_number(u32 number)
{
    char digits[11], *at = digits + 10;
    *at = 0;
    do
        *--at = '0' + number % 10;
    while (number /= 10);
    say(at);
}

static u32 mix(u32 number)
{
    number = (number ^ number >> 16) * 0x7feb352d;
    number = (number ^ number >> 15) * 0x846ca68b;
    return number ^ number >> 16;
}

static volatile u32 *page(u32 index) { return (volatile u32 *)(FIRST + index * PAGE_WORDS * 4); }

/* The word at some places of the page that was written so often. */
static u32 word(u32 index, u32 times, u32 place) { return mix(mix(index + 1) ^ mix(times) ^ place); }

static u32 writes_by_register(void)
{
    u32 value;
    __asm__ volatile("mov %%cr2, %0" : "=r"(value));
    return value;
}

static void stop(void)
{
    for (;;)
        __asm__ volatile("hlt");
}

static void look_at_writes(void)
{
    if (writes == writes_by_register())
        return;
    say("BAD memory after ");
    say_number(writes);
    say(" writes, the register after ");
    say_number(writes_by_register());
    say("\n");
    stop();
}

static void look(u32 index)
{
    look_at_writes();
    for (u32 place = 0; place < PAGE_WORDS; place += 61) {
        u32 found = page(index)[place], wanted = word(index, written[index], place);
        if (found == wanted)
            continue;
        say("BAD page ");
        say_number(index);
        say(" written ");
        say_number(written[index]);
        say(" place ");
        say_number(place);
        say(" found ");
        say_number(found);
        say("\n");
        stop();
    }
}

static void write(u32 index)
{
    look_at_writes();
    u32 next = ++writes;
    __asm__ volatile("mov %0, %%cr2" : : "r"(next));
    written[index]++;
    for (u32 place = 0; place < PAGE_WORDS; place += 61)
        page(index)[place] = word(index, written[index], place);
}

/* Takes the pages that come next to the disk and back: the disk is then the last that has written there, until all others had their
 * turn. */
static void by_disk(void)
{
    static u32 next;
    u32 blocks[BATCH];
    void *memory[BATCH];
    for (u32 number = 0; number < BATCH; number++) {
        blocks[number] = next++ % ((PAGES - HOT) / REQUEST_PAGES);
        u32 first = HOT + blocks[number] * REQUEST_PAGES;
        memory[number] = (void *)page(first);
        for (u32 index = 0; index < REQUEST_PAGES; index++)
            write(first + index);
    }
    int moved = disk_move(1, BATCH, blocks, memory);
    for (u32 number = 0; number < BATCH; number++)
        for (u32 place = 0; place < REQUEST_PAGES * PAGE_WORDS; place++)
            ((volatile u32 *)memory[number])[place] = ~place;
    moved &= disk_move(0, BATCH, blocks, memory);
    if (!moved) {
        say("BAD disk\n");
        stop();
    }
}

void check(void)
{
    u32 state = 1;
    int has_disk = disk_found();
    for (u32 index = 0; index < PAGES; index++)
        write(index);
    for (u32 tick = 1;; tick++) {
        for (u32 number = 0; number < WRITES; number++) {
            u32 index = (state = mix(state + tick)) % HOT;
            look(index);
            write(index);
        }
        for (u32 number = 0; number < LOOKS; number++)
            look(HOT + (state = mix(state + tick)) % (PAGES - HOT));
        if (has_disk)
            by_disk();
        say("tick ");
        say_number(tick);
        say("\n");
    }
}

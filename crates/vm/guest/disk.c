#include "guest.h"
#include "disk.h"

enum { CONFIG_ADDRESS = 0xcf8, CONFIG_DATA = 0xcfc, VENDOR_DEVICE = 0x10011af4 };

/* Registers, as offsets from the port of BAR 0. */
enum { GUEST_FEATURES = 4, QUEUE_ADDRESS = 8, QUEUE_SIZE = 12, QUEUE_SELECT = 14, QUEUE_NOTIFY = 16, STATUS = 18 };

/* Values of STATUS. */
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4 };

/* Flags of a descriptor. */
enum { NEXT = 1, WRITABLE = 2 };

/* More than a disk's queue has. */
enum { LONGEST = 1024 };

struct descriptor {
    u32 address, address_high, length;
    u16 flags, next;
};

struct header {
    u32 type, reserved, sector, sector_high;
};

static u16 port;
static u32 size;
static u8 queue[(LONGEST * 16 + 6 + LONGEST * 2 + 4095) / 4096 * 4096 + 6 + LONGEST * 8] __attribute__((aligned(4096)));
static volatile struct descriptor *descriptors;
static volatile u16 *available, *used;
static struct header headers[BATCH];
static volatile u8 results[BATCH];

static u32 config(u32 device, u32 offset)
{
    out32(CONFIG_ADDRESS, 0x80000000 | device << 11 | offset);
    return in32(CONFIG_DATA);
}

int disk_found(void)
{
    for (u32 device = 0; device < 32; device++) {
        if (config(device, 0) != VENDOR_DEVICE)
            continue;
        /* I/O ports and bus mastering. */
        u32 command = config(device, 4);
        out32(CONFIG_DATA, command | 5);
        port = config(device, 0x10) & ~3;
        out(port + STATUS, 0);
        out(port + STATUS, ACKNOWLEDGE | DRIVER);
        out32(port + GUEST_FEATURES, 0);
        out16(port + QUEUE_SELECT, 0);
        size = in16(port + QUEUE_SIZE);
        if (size == 0 || size > LONGEST)
            return 0;
        descriptors = (void *)queue;
        available = (void *)(queue + size * 16);
        used = (void *)(queue + (size * 16 + 6 + size * 2 + 4095) / 4096 * 4096);
        out32(port + QUEUE_ADDRESS, (u32)queue >> 12);
        out(port + STATUS, ACKNOWLEDGE | DRIVER | DRIVER_OK);
        return 1;
    }
    return 0;
}

int disk_move(int writes, u32 count, const u32 *blocks, void *const *memory)
{
    u16 before = available[1];
    for (u32 number = 0; number < count; number++) {
        volatile struct descriptor *chain = descriptors + 3 * number;
        headers[number] = (struct header){writes ? 1 : 0, 0, blocks[number] * (BLOCK / 512), 0};
        results[number] = 0xff;
        chain[0] = (struct descriptor){(u32)&headers[number], 0, sizeof headers[number], NEXT, 3 * number + 1};
        chain[1] = (struct descriptor){(u32)memory[number], 0, BLOCK, NEXT | (writes ? 0 : WRITABLE), 3 * number + 2};
        chain[2] = (struct descriptor){(u32)&results[number], 0, 1, WRITABLE, 0};
        available[2 + (u16)(before + number) % size] = 3 * number;
    }
    __sync_synchronize();
    available[1] = before + count;
    __sync_synchronize();
    out16(port + QUEUE_NOTIFY, 0);
    while (used[1] != (u16)(before + count))
        __asm__ volatile("pause" : : : "memory");
    for (u32 number = 0; number < count; number++)
        if (results[number] != 0)
            return 0;
    return 1;
}

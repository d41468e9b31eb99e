//! The cases: what a guest writes before its ring starts, and the outcome.

use super::super::hostile::{AVAILABLE, Hands, RAM, TABLE, USED};
use super::{
    DATA, HEAD, LENGTH, NEXT, READ, SIZE, STATUS, WRITABLE, asks, available, chain, descriptors, usual,
};

/// Flag of a descriptor with a table of others.
const INDIRECT: u16 = 4;

/// Kinds of requests.
const WRITE: u32 = 1;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;

/// Statuses of an answered request.
const FAILED: u8 = 1;
const UNKNOWN: u8 = 2;

/// Address of an indirect table.
const INNER: u64 = 0x4000;

/// An address without memory.
const NOWHERE: u64 = 1 << 40;

/// The outcome of a case.
#[derive(Debug, Clone, Copy)]
pub enum Outcome {
    /// The request is answered with this status.
    Status(u8),
    /// The request is answered. Where its status is, the guest has not said in a way that can be understood.
    Answered,
    /// The front end is told that the ring is broken.
    Broken,
}

use Outcome::{Answered, Broken, Status};

/// A case: its name, the guest's actions before the ring starts, and the outcome.
pub type Case = (&'static str, fn(&Hands), Outcome);

/// A run of sectors, the data of a request for zeros.
fn run(hands: &Hands, sector: u64, sectors: u32, flags: u32) {
    let run = [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ];
    hands.write(DATA, &run.concat());
    usual(hands, 16, 0);
}

/// A head with an indirect table of this length.
fn indirect(hands: &Hands, at: u64, length: u32, flags: u16) {
    chain(
        hands,
        &[(at, length, INDIRECT | flags, 1), (STATUS, 1, WRITABLE, 0)],
    );
}

/// Chains of descriptors that lead nowhere.
pub const CHAINS: &[Case] = &[
    (
        "a descriptor leads to itself",
        |hands| chain(hands, &[(HEAD, 16, NEXT, 0)]),
        Answered,
    ),
    (
        "a circle of writable descriptors",
        |hands| {
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (DATA, 512, NEXT | WRITABLE, 2),
                    (DATA, 512, NEXT | WRITABLE, 1),
                ],
            )
        },
        Answered,
    ),
    (
        "a circle of all descriptors of the queue",
        |hands| {
            let all: Vec<_> = (0..SIZE)
                .map(|number| (HEAD, 16, NEXT, (number + 1) % SIZE))
                .collect();
            chain(hands, &all);
        },
        Answered,
    ),
    (
        "a descriptor behind the table",
        |hands| chain(hands, &[(HEAD, 16, NEXT, SIZE), (STATUS, 1, WRITABLE, 0)]),
        Answered,
    ),
    (
        "the last descriptor that there could be",
        |hands| chain(hands, &[(HEAD, 16, NEXT, u16::MAX)]),
        Answered,
    ),
    (
        "memory for the guest before the head",
        |hands| chain(hands, &[(STATUS, 1, WRITABLE | NEXT, 1), (HEAD, 16, 0, 0)]),
        Status(FAILED),
    ),
    (
        "no memory for the status",
        |hands| chain(hands, &[(HEAD, 16, 0, 0)]),
        Answered,
    ),
    (
        "descriptors without a byte",
        |hands| {
            chain(
                hands,
                &[
                    (HEAD, 0, NEXT, 1),
                    (DATA, 0, NEXT | WRITABLE, 2),
                    (STATUS, 0, WRITABLE, 0),
                ],
            )
        },
        Answered,
    ),
    (
        "a head that is too short",
        |hands| chain(hands, &[(HEAD, 15, NEXT, 1), (STATUS, 1, WRITABLE, 0)]),
        Status(FAILED),
    ),
];

/// Memory that is not the guest's.
pub const ADDRESSES: &[Case] = &[
    (
        "a head where there is no memory",
        |hands| chain(hands, &[(NOWHERE, 16, NEXT, 1), (STATUS, 1, WRITABLE, 0)]),
        Status(FAILED),
    ),
    (
        "a head that ends behind the memory",
        |hands| chain(hands, &[(RAM - 8, 16, NEXT, 1), (STATUS, 1, WRITABLE, 0)]),
        Status(FAILED),
    ),
    (
        "a head at the last address",
        |hands| chain(hands, &[(u64::MAX, 16, NEXT, 1), (STATUS, 1, WRITABLE, 0)]),
        Status(FAILED),
    ),
    (
        "a status where there is no memory",
        |hands| chain(hands, &[(HEAD, 16, NEXT, 1), (NOWHERE, 1, WRITABLE, 0)]),
        Answered,
    ),
    (
        "a status behind the last address",
        |hands| chain(hands, &[(HEAD, 16, NEXT, 1), (u64::MAX, 2, WRITABLE, 0)]),
        Answered,
    ),
    (
        "a read to where there is no memory",
        |hands| {
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (NOWHERE, 512, WRITABLE | NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            )
        },
        Status(FAILED),
    ),
    (
        "a read across the end of the memory",
        |hands| {
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (RAM - 256, 512, WRITABLE | NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            )
        },
        Status(FAILED),
    ),
    (
        "a read across the last address",
        |hands| {
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (u64::MAX - 15, 512, WRITABLE | NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            )
        },
        Status(FAILED),
    ),
    (
        "a write from where there is no memory",
        |hands| {
            asks(hands, WRITE, 0);
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (NOWHERE, 512, NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            );
        },
        Status(FAILED),
    ),
    (
        "a write from across the last address",
        |hands| {
            asks(hands, WRITE, 0);
            chain(
                hands,
                &[
                    (HEAD, 16, NEXT, 1),
                    (u64::MAX - 15, 512, NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            );
        },
        Status(FAILED),
    ),
];

/// Lengths and extents of requests. A chain of more than 4 GiB ends where it is too long, so that its status is
/// not found.
pub const LENGTHS: &[Case] = &[
    (
        "a read of nothing",
        |hands| usual(hands, 0, WRITABLE),
        Status(FAILED),
    ),
    (
        "a read of no whole sector",
        |hands| usual(hands, 511, WRITABLE),
        Status(FAILED),
    ),
    (
        "a read of 4 GiB",
        |hands| usual(hands, u32::MAX, WRITABLE),
        Answered,
    ),
    (
        "a read of 4 GiB less a sector",
        |hands| usual(hands, u32::MAX - 511, WRITABLE),
        Status(FAILED),
    ),
    (
        "reads of 4 GiB, many in one",
        |hands| {
            let mut all = vec![(HEAD, 16, NEXT, 1)];
            all.extend((2..7).map(|next| (DATA, u32::MAX, WRITABLE | NEXT, next)));
            all.push((STATUS, 1, WRITABLE, 0));
            chain(hands, &all);
        },
        Answered,
    ),
    (
        "a write of 4 GiB",
        |hands| {
            asks(hands, WRITE, 0);
            usual(hands, u32::MAX, 0);
        },
        Answered,
    ),
    (
        "a head of 4 GiB",
        |hands| chain(hands, &[(HEAD, u32::MAX, NEXT, 1), (STATUS, 1, WRITABLE, 0)]),
        Answered,
    ),
    (
        "a read behind the disk",
        |hands| {
            asks(hands, READ, LENGTH / 512);
            usual(hands, 512, WRITABLE);
        },
        Status(FAILED),
    ),
    (
        "a read of the last sector that there could be",
        |hands| {
            asks(hands, READ, u64::MAX);
            usual(hands, 512, WRITABLE);
        },
        Status(FAILED),
    ),
    (
        "a write of a sector that is the first one after an overflow",
        |hands| {
            asks(hands, WRITE, 1 << 55);
            usual(hands, 512, 0);
        },
        Status(FAILED),
    ),
    (
        "a discard of all sectors that there could be",
        |hands| {
            asks(hands, DISCARD, 0);
            run(hands, u64::MAX, u32::MAX, 0);
        },
        Status(FAILED),
    ),
    (
        "zeros behind the disk",
        |hands| {
            asks(hands, ZEROES, 0);
            run(hands, LENGTH / 512 - 1, 2, 0);
        },
        Status(FAILED),
    ),
    (
        "zeros with flags that do not exist",
        |hands| {
            asks(hands, ZEROES, 0);
            run(hands, 0, 1, u32::MAX);
        },
        Status(UNKNOWN),
    ),
    (
        "a request that does not exist",
        |hands| {
            asks(hands, u32::MAX, 0);
            usual(hands, 512, WRITABLE);
        },
        Status(UNKNOWN),
    ),
];

/// Indirect tables.
pub const TABLES: &[Case] = &[
    (
        "an indirect table in an indirect table",
        |hands| {
            descriptors(hands, INNER, &[(INNER + 0x100, 48, INDIRECT, 0)]);
            descriptors(
                hands,
                INNER + 0x100,
                &[
                    (HEAD, 16, NEXT, 1),
                    (DATA, 512, WRITABLE | NEXT, 2),
                    (STATUS, 1, WRITABLE, 0),
                ],
            );
            indirect(hands, INNER, 16, 0);
        },
        Answered,
    ),
    (
        "an indirect table that is in itself",
        |hands| {
            descriptors(hands, INNER, &[(INNER, 16, INDIRECT | NEXT, 0)]);
            indirect(hands, INNER, 16, 0);
        },
        Answered,
    ),
    (
        "the queue's table as an indirect table",
        |hands| indirect(hands, TABLE, 16 * 8, 0),
        Answered,
    ),
    (
        "an indirect table that goes on",
        |hands| indirect(hands, INNER, 16, NEXT),
        Answered,
    ),
    (
        "an indirect table where there is no memory",
        |hands| indirect(hands, NOWHERE, 48, 0),
        Answered,
    ),
    (
        "an indirect table across the end of the memory",
        |hands| indirect(hands, RAM - 16, 48, 0),
        Answered,
    ),
    (
        "an indirect table across the last address",
        |hands| indirect(hands, u64::MAX - 15, 48, 0),
        Answered,
    ),
    (
        "an indirect table of no whole descriptor",
        |hands| indirect(hands, INNER, 17, 0),
        Answered,
    ),
    (
        "an indirect table without a byte",
        |hands| indirect(hands, INNER, 0, 0),
        Answered,
    ),
    (
        "an indirect table of 4 GiB",
        |hands| indirect(hands, INNER, u32::MAX - 15, 0),
        Answered,
    ),
    (
        "a circle in an indirect table",
        |hands| {
            descriptors(
                hands,
                INNER,
                &[(HEAD, 16, NEXT, 1), (DATA, 512, WRITABLE | NEXT, 0)],
            );
            indirect(hands, INNER, 32, 0);
        },
        Answered,
    ),
    (
        "a descriptor behind an indirect table",
        |hands| {
            descriptors(hands, INNER, &[(HEAD, 16, NEXT, 2)]);
            indirect(hands, INNER, 32, 0);
        },
        Answered,
    ),
];

/// Rings.
pub const RINGS: &[Case] = &[
    (
        "a head behind the table",
        |hands| hands.write(AVAILABLE + 4, &SIZE.to_le_bytes()),
        Broken,
    ),
    (
        "the last head that there could be",
        |hands| hands.write(AVAILABLE + 4, &[0xff; 2]),
        Broken,
    ),
    (
        "more heads than the queue has",
        |hands| available(hands, SIZE + 1),
        Broken,
    ),
    (
        "an index that jumps by half",
        |hands| available(hands, 0x8000),
        Broken,
    ),
    (
        "an index that goes back",
        |hands| available(hands, u16::MAX),
        Broken,
    ),
    ("memory that is cut off", Hands::cut_off, Broken),
];

/// Addresses of descriptors, available ring and used ring, one of them where there is not all of it.
pub const PLACES: &[(&str, [u64; 3])] = &[
    ("descriptors where there is no memory", [NOWHERE, AVAILABLE, USED]),
    (
        "descriptors across the end of the memory",
        [RAM - 16, AVAILABLE, USED],
    ),
    (
        "descriptors at the last address",
        [u64::MAX - 15, AVAILABLE, USED],
    ),
    ("available ring where there is no memory", [TABLE, NOWHERE, USED]),
    (
        "available ring across the end of the memory",
        [TABLE, RAM - 4, USED],
    ),
    ("available ring at the last address", [TABLE, u64::MAX - 1, USED]),
    ("used ring where there is no memory", [TABLE, AVAILABLE, NOWHERE]),
    ("used ring behind the memory", [TABLE, AVAILABLE, RAM]),
    (
        "used ring across the end of the memory",
        [TABLE, AVAILABLE, RAM - 8],
    ),
    ("used ring at the last address", [TABLE, AVAILABLE, u64::MAX - 3]),
];

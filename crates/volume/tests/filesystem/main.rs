//! File systems on a volume that moves each 20 s: reads return written data, durable data outlive a power
//! failure, and the file system has no errors at the end.
//!
//! `make filesystem-test` runs all of it, for `VERBATIM_FILESYSTEM_MINUTES`, in rounds of a few minutes by
//! seeds from `VERBATIM_FILESYSTEM_SEED` on. Plain `cargo test` runs half a minute of it.
//! docs/volume-conformance.md lists the operations.

#[path = "../support/mod.rs"]
mod support;

mod crash;
mod disk;
mod follower;
mod mounted;
mod moving;
mod operations;
mod postgres;
mod process;
mod promises;
mod round;
#[allow(unsafe_code, reason = "files are mapped")]
mod sys;
mod tools;
mod volatile;
mod work;

use std::path::Path;
use std::time::{Duration, Instant};

use mounted::Kind;
use support::find;

/// The longest round.
const ROUND: Duration = Duration::from_secs(240);

/// Gives this thread mounts of its own. False: something that the tests need is missing, and is named.
fn is_prepared() -> bool {
    let programs = ["losetup", "mount", "mkfs.ext4", "e2fsck"];
    let is_there = Path::new("/dev/fuse").exists() && programs.iter().all(|name| find(name).is_some());
    if !is_there || !support::devices::can_have_devices() {
        eprintln!("skipped: not root, no FUSE, or one of {programs:?} is missing");
        return false;
    }
    sys::have_own_mounts().expect("root makes namespaces");
    true
}

fn number(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty());
    text.map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

/// Rounds by seeds, in this many hundredths of the requested time.
fn rounds(share: u32, round: impl Fn(u64, Duration)) {
    if !is_prepared() {
        return;
    }
    let minutes = number("VERBATIM_FILESYSTEM_MINUTES", 120);
    let time = Duration::from_secs(60 * minutes) * share / 100;
    let end = Instant::now() + time;
    let mut seed = number("VERBATIM_FILESYSTEM_SEED", 1);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // A round has 20 s at least.
        let this = left.min(ROUND).max(Duration::from_secs(20));
        round(seed, this);
        seed += 1;
        if end.saturating_duration_since(Instant::now()) < Duration::from_secs(20) {
            return;
        }
    }
}

#[test]
#[ignore = "started by the others"]
fn a_process_of_the_others() {
    process::run_task();
}

#[test]
fn a_short_round_on_ext4() {
    if is_prepared() {
        round::run(Kind::Ext4, 1, Duration::from_secs(12));
    }
}

#[test]
fn power_fails_in_a_move() {
    if is_prepared() {
        crash::run(Kind::Ext4, 1, Duration::from_secs(8));
    }
}

#[test]
#[ignore = "minutes: make filesystem-test"]
fn operations_on_ext4() {
    rounds(35, |seed, time| round::run(Kind::Ext4, seed, time));
}

#[test]
#[ignore = "minutes: make filesystem-test"]
fn operations_on_xfs() {
    assert!(find("mkfs.xfs").is_some(), "no mkfs.xfs: ./setup.sh --filesystem");
    rounds(35, |seed, time| round::run(Kind::Xfs, seed, time));
}

#[test]
#[ignore = "minutes: make filesystem-test"]
fn power_fails_in_moves() {
    rounds(18, |seed, time| {
        let kind = if seed.is_multiple_of(3) {
            Kind::Xfs
        } else {
            Kind::Ext4
        };
        crash::run(kind, seed, time);
    });
}

#[test]
#[ignore = "minutes: make filesystem-test"]
fn postgresql_is_killed() {
    rounds(12, |seed, time| {
        let kind = if seed.is_multiple_of(2) {
            Kind::Xfs
        } else {
            Kind::Ext4
        };
        postgres::run(kind, seed, time);
    });
}

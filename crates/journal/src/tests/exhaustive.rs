//! One story, and everything that can happen to it.

use std::cell::Cell;

use super::model::{BROKEN, World};
use crate::Durability::{Later, Synced};
use crate::testing::Fault;

/// What may be done of an operation that fails.
const DONE: [usize; 4] = [0, 1, 11, usize::MAX];

fn story(world: &mut World) {
    world.open();
    world.append(0, Later);
    world.append(2, Later);
    world.append(5, Synced);
    world.append(1, Later);
    world.reserve(60);
    world.append(3, Synced);
    world.append(4, Later);
    world.rewrite(0);
    world.append(2, Later);
    // Begins another segment.
    world.append(30, Synced);
    world.append(6, Later);
}

/// The same as of a process that is started again when the disk was too bad to begin with.
fn told(operations: u64, fault: Fault, what_follows: u64) -> World {
    let mut world = World::new(230);
    world.disk.fail(operations..operations + 1, fault);
    let nothing = Fault {
        error: BROKEN,
        done: 0,
    };
    world
        .disk
        .fail(operations + 1..operations + 1 + what_follows, nothing);
    story(&mut world);
    world.disk.heal();
    world
}

fn operations() -> u64 {
    let mut world = World::new(230);
    story(&mut world);
    let segments = world.disk.files().into_keys().collect::<Vec<_>>();
    assert_eq!(
        segments,
        ["00000002.log", "00000003.log"],
        "a rewriting and a full segment"
    );
    world.disk.operations()
}

/// Crashes that leave the first so many units of what was not synced, for every number; those that leave what was not synced
/// from there on; and all or nothing of each change by turns.
fn crashes(world: &World, mut check: impl FnMut(World)) {
    let mut units = 0;
    world.copy().disk.crash(|all| {
        units += all;
        0..0
    });
    for first in 0..=units {
        for is_kept in [true, false] {
            let crashed = world.copy();
            let left = Cell::new(first);
            crashed.disk.crash(|all| {
                let split = left.get().min(all);
                left.set(left.get() - split);
                if is_kept { 0..split } else { split..all }
            });
            check(crashed);
        }
    }
    for parity in 0..2 {
        let crashed = world.copy();
        let mut turn = parity;
        crashed.disk.crash(|all| {
            turn += 1;
            0..(turn % 2) * all
        });
        check(crashed);
    }
}

#[test]
fn every_fault_and_every_crash() {
    let mut checked = 0;
    for operation in 0..operations() {
        for done in DONE {
            for what_follows in [0, 1, 2, 3, 1 << 40] {
                let fault = Fault { error: BROKEN, done };
                let mut world = told(operation, fault, what_follows);
                crashes(&world, |mut crashed| {
                    checked += 1;
                    crashed.is_in_order();
                });
                // The process goes on, or only the process has died.
                let mut killed = world.copy();
                killed.disk.crash(|all| 0..all);
                killed.is_in_order();
                world.is_in_order();
            }
        }
    }
    assert!(checked > 50_000, "{checked}");
}

#[test]
fn every_crash_while_a_log_is_opened_after_a_crash() {
    for operation in 0..operations() {
        for done in DONE {
            let fault = Fault { error: BROKEN, done };
            let world = told(operation, fault, 1 << 40);
            for kept in [0, 9, usize::MAX] {
                let crashed = world.copy();
                crashed.disk.crash(|all| 0..all.min(kept));
                let begin = crashed.disk.operations();
                // As long as opening it takes.
                for second in begin.. {
                    let mut again = crashed.copy();
                    again.disk.fail(second..second + 1, fault);
                    let nothing = Fault { done: 0, ..fault };
                    again.disk.fail(second + 1..1 << 40, nothing);
                    again.open();
                    let end = again.disk.operations();
                    again.kill();
                    again.disk.heal();
                    crashes(&again, |mut crashed| crashed.is_in_order());
                    if end <= second {
                        break;
                    }
                }
            }
        }
    }
}

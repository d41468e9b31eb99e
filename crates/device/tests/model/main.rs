//! The shared queues under every interleaving and every reordering that the memory model allows, by
//! [loom](https://docs.rs/loom).
//!
//! The sources of the queues are compiled here once more, with another `crate::shared`: there a word of shared memory is
//! one of loom's atomics, and a slot is a loom cell, which fails if a read and a write of it are not ordered. Nothing in
//! the queues knows of it.
//!
//! A model that cannot fail proves nothing. `weaken` goes through every place in the sources that names an ordering,
//! makes it weaker there, and asks that some scenario fails. The few that may be weakened are listed with the reason.

#![allow(
    dead_code,
    unused_imports,
    reason = "the queues and their contract offer more than the scenarios use"
)]

#[path = "../../src/control/mod.rs"]
mod control;
#[path = "../../src/layout.rs"]
mod layout;
mod ring;
mod scenarios;
mod shared;
mod weaken;

use scenarios::SCENARIOS;

#[test]
fn every_scenario_holds() {
    for (name, scenario) in SCENARIOS {
        let (executions, _) = shared::explore(None, *scenario);
        println!("{name}: {executions} executions");
        assert!(executions > 1, "{name} has only one way to go");
    }
}

#[test]
fn every_ordering_is_needed() {
    weaken::weaken_each_place();
}

#[test]
#[ignore = "a part of the one above"]
fn weakened_as_asked() {
    weaken::run_as_asked();
}

//! Lifetimes of descriptors.

use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use verbatim_container::{CgroupVersion, CheckpointConfig, Dumped, Fact};

use crate::held::held;
use crate::world::{World, assert_runs, counts, ends_within, name, reap, runs};

/// A pidfd tells the end of a frozen task that was killed when it comes: at once, or, with version 1, when it is thawed.
pub fn pidfds_of_frozen_tasks(world: &mut World) {
    let place = world.start_counting(Duration::ZERO);
    let state = world
        .runtime
        .block_on(world.a.host.runc().state(&name()))
        .unwrap()
        .unwrap();
    let first = pidfd_open(Pid::from_raw(state.pid).unwrap(), PidfdFlags::empty()).unwrap();
    let tasks = world.a.tasks(&name());
    world.runtime.block_on(tasks.freeze()).unwrap();
    let still = counts(&place);
    assert!(!ends_within(&first, Duration::ZERO));
    pidfd_send_signal(&first, Signal::KILL).unwrap();
    match world.version {
        // Its PID namespace ends with it.
        CgroupVersion::V2 => assert!(ends_within(&first, Duration::from_secs(10))),
        CgroupVersion::V1 => assert!(!ends_within(&first, Duration::from_millis(50))),
    }
    world.runtime.block_on(tasks.kill()).unwrap();
    assert!(ends_within(&first, Duration::from_secs(10)));
    assert_eq!(counts(&place), still);
    world.stop(&world.a, place);
}

/// The gate of a held dump is there for the next agent as long as the proxy waits, and no longer.
pub fn the_gates_sockets(world: &mut World) {
    let place = world.start();
    for victim in [None, Some("runc"), Some("criu"), Some("proxy")] {
        let (dumped, at) = held(world);
        let path = dumped.held_path();
        // The agent is lost: its end of the gate is closed.
        drop(dumped);
        if let Some(victim) = victim {
            at.kill(victim);
            // Also one that nobody waits for any more.
            reap();
        }
        let waits = matches!(victim, None | Some("runc"));
        if !waits {
            at.settle();
        }
        let config = CheckpointConfig {
            name: name(),
            images: world.a.images(&name()),
            work: world.a.work(),
            parent: None,
            lazy: world.a.lazy.get(),
            network: None,
            rnics: false,
            terminals: true,
            stop_limit: None,
        };
        let taken = world
            .runtime
            .block_on(Dumped::take_over(&world.a.host, config, &path));
        assert!(!runs(&place), "{victim:?} killed");
        assert_eq!(world.fact(&world.a), Fact::Frozen, "{victim:?} killed");
        match (taken, victim) {
            // Whether runc is there or not: it is the proxy that waits.
            (Ok(dumped), None | Some("runc")) => world.runtime.block_on(dumped.abort()).unwrap(),
            (Err(_), Some("criu" | "proxy")) => {
                world.runtime.block_on(world.a.tasks(&name()).thaw()).unwrap();
            }
            (taken, victim) => panic!("{victim:?} killed: {taken:?}"),
        }
        assert_runs(&place);
        assert_eq!(world.fact(&world.a), Fact::Running, "{victim:?} killed");
    }
    world.stop(&world.a, place);
}

//! A dump that is held: frozen by the cgroup while it is decided elsewhere whether the copy runs.

use std::time::Instant;

use verbatim_container::{Dumped, Fact};

use crate::support::host::Place;
use crate::world::{At, Running, World, assert_runs, counts, name, runs};

/// Whom a case kills.
const VICTIMS: [&[&str]; 5] = [&["criu"], &["proxy"], &["runc"], &["runc", "proxy", "criu"], &[]];

/// Dumps and holds; returns where CRIU is, which goes no further by itself.
pub fn held(world: &World) -> (Dumped, At) {
    let checkpoint = world.runtime.block_on(world.a.checkpoint(&name()));
    let (sender, mut receiver) = tokio::sync::oneshot::channel();
    let mut operation: Running<'_, ()> = Box::pin(async move {
        let dumped = checkpoint.freeze_and_dump().await.expect("it is dumped");
        let _ = sender.send(dumped);
        std::future::pending().await
    });
    // The shim passes the notification on when we leave it, and says nothing more before CRIU is answered.
    let at = world.run_until(&mut operation, "post-dump", "before");
    let at = at.passed();
    world.runtime.block_on(async {
        let mut dumped = tokio::select! {
            () = operation => unreachable!("it waits for ever"),
            dumped = &mut receiver => dumped.expect("it was sent"),
        };
        let start = Instant::now();
        dumped.hold().await.expect("it is held");
        println!("  held in {} µs", start.elapsed().as_micros());
        (dumped, at)
    })
}

/// Holds, kills and looks: the tasks stand still whoever is killed.
fn held_and_killed(world: &World, place: &Place, victims: &[&str]) -> Dumped {
    let (dumped, at) = held(world);
    let still = counts(place);
    for victim in victims {
        at.kill(victim);
    }
    let waits_on = victims.is_empty() || victims == ["runc"];
    if waits_on {
        assert!(!runs(place));
        assert!(
            at.lives("criu") && at.lives("proxy"),
            "they wait for the decision"
        );
    } else {
        at.settle();
    }
    assert!(!runs(place), "{victims:?} killed");
    assert_eq!(counts(place), still, "{victims:?} killed");
    assert_eq!(world.fact(&world.a), Fact::Frozen, "{victims:?} killed");
    dumped
}

pub fn kills_then_abort(world: &mut World) {
    let place = world.start();
    for victims in VICTIMS {
        let dumped = held_and_killed(world, &place, victims);
        let still = counts(&place);
        world.runtime.block_on(dumped.abort()).unwrap();
        assert_eq!(world.fact(&world.a), Fact::Running, "{victims:?} killed");
        assert_runs(&place);
        assert!(counts(&place) > still);
    }
    world.stop(&world.a, place);
}

pub fn kills_then_commit(world: &mut World) {
    for victims in VICTIMS {
        let place = world.start();
        let dumped = held_and_killed(world, &place, victims);
        let still = counts(&place);
        world.runtime.block_on(dumped.commit()).unwrap();
        assert_eq!(counts(&place), still, "{victims:?} killed");
        assert_eq!(
            world.fact(&world.a),
            Fact::Gone { ran: true },
            "{victims:?} killed"
        );
        let state = world
            .runtime
            .block_on(world.a.host.runc().state(&name()))
            .unwrap();
        assert_eq!(state, None, "{victims:?} killed");
        world.stop(&world.a, place);
    }
}

/// The agent is lost after that, too, and the next one has what the kernel and runc know.
pub fn then_the_agent_too(world: &mut World) {
    let place = world.start();
    for victims in VICTIMS
        .into_iter()
        .filter(|victims| !victims.is_empty() && *victims != ["runc"])
    {
        let dumped = held_and_killed(world, &place, victims);
        // Dropping is what a lost agent does to its sockets; it is given the time to do harm.
        world.runtime.block_on(async {
            drop(dumped);
            tokio::task::yield_now().await;
        });
        assert!(!runs(&place), "{victims:?} killed");
        assert_eq!(world.fact(&world.a), Fact::Frozen, "{victims:?} killed");
        world.runtime.block_on(world.a.tasks(&name()).thaw()).unwrap();
        assert_runs(&place);
    }
    // Or it is not wanted any more.
    drop(held_and_killed(world, &place, &["runc", "proxy", "criu"]));
    let still = counts(&place);
    let runc = world.a.host.runc();
    world.runtime.block_on(runc.delete(&name(), true)).unwrap();
    assert_eq!(counts(&place), still);
    assert_eq!(world.fact(&world.a), Fact::Gone { ran: true });
    world.stop(&world.a, place);
}

/// CRIU is killed after the dump, the tasks run on, and only then they are to be held.
pub fn a_dump_that_criu_let_go_of_is_not_held(world: &mut World) {
    let place = world.start();
    let checkpoint = world.runtime.block_on(world.a.checkpoint(&name()));
    let mut operation: Running<'_, _> = Box::pin(checkpoint.freeze_and_dump());
    let at = world.run_until(&mut operation, "post-dump", "before");
    let at = at.passed();
    let mut dumped = world.finish(operation).unwrap();
    at.kill("criu");
    at.settle();
    assert_runs(&place);
    let refused = world.runtime.block_on(dumped.hold()).unwrap_err().to_string();
    assert!(
        refused.contains("CRIU was lost before they were frozen"),
        "{refused}"
    );
    assert_eq!(world.fact(&world.a), Fact::Running);
    // Undoing it all the same is fine.
    world.runtime.block_on(dumped.abort()).unwrap();
    assert_runs(&place);
    world.stop(&world.a, place);
}

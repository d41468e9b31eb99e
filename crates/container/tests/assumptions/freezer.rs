//! The kernel's freezer.

use std::time::{Duration, Instant};

use verbatim_container::Fact;

use crate::world::{World, assert_runs, counts, name, runs};

pub fn frozen_tasks_stand_still_and_go_on(world: &mut World) {
    let place = world.start();
    let tasks = world.a.tasks(&name());
    assert_eq!(world.fact(&world.a), Fact::Running);
    for _ in 0..3 {
        let start = Instant::now();
        world.runtime.block_on(tasks.freeze()).unwrap();
        println!("  frozen in {} µs", start.elapsed().as_micros());
        assert_eq!(world.fact(&world.a), Fact::Frozen);
        assert!(!runs(&place));
        // It needs nobody: neither agent nor runc knows of it.
        world.runtime.block_on(tasks.thaw()).unwrap();
        assert_eq!(world.fact(&world.a), Fact::Running);
        assert_runs(&place);
    }
    world.stop(&world.a, place);
    assert_eq!(world.fact(&world.a), Fact::Gone { ran: true });
}

pub fn what_is_killed_while_frozen_never_runs_again(world: &mut World) {
    for _ in 0..4 {
        // Without a pause: an instruction more would be seen.
        let place = world.start_counting(Duration::ZERO);
        let tasks = world.a.tasks(&name());
        world.runtime.block_on(tasks.freeze()).unwrap();
        let frozen = counts(&place);
        world.runtime.block_on(tasks.kill()).unwrap();
        assert_eq!(world.fact(&world.a), Fact::Gone { ran: true });
        assert_eq!(counts(&place), frozen);
        world.stop(&world.a, place);
    }
}

/// Why the tasks are frozen at `post-dump` and not before.
pub fn frozen_before_the_dump_criu_hangs(world: &mut World) {
    let place = world.start();
    let tasks = world.a.tasks(&name());
    world.runtime.block_on(async {
        let checkpoint = world.a.checkpoint(&name()).await;
        tasks.freeze().await.unwrap();
        let dump = checkpoint.freeze_and_dump();
        tokio::pin!(dump);
        let within = Duration::from_millis(500);
        let hangs = tokio::time::timeout(within, dump.as_mut()).await.is_err();
        assert!(
            hangs,
            "it does not with {:?}: then it might be frozen earlier",
            world.version
        );
        tasks.thaw().await.unwrap();
        dump.await.unwrap().abort().await.unwrap();
    });
    assert_runs(&place);
    world.stop(&world.a, place);
}

//! What goes wrong.

use verbatim_session::Role;
use verbatim_session::decision::Mark;

use super::journal::Says;
use super::{MOVES, Steps, World, named};

/// How far a clock jumps: beyond all sessions.
const JUMP: i16 = 50;

pub(super) fn steps(steps: &mut Steps<'_>, host: u8) {
    let is_up = steps.world.agent(host).is_some();
    let has_records = !steps.world.hosts[usize::from(host)].journal.records.is_empty();
    if is_up {
        steps.fault("the agent dies", |world| agent_dies(world, host));
        if has_records {
            steps.fault("the agent dies, and the disk goes bad", |world| {
                agent_dies(world, host);
                world.host_mut(host).journal.is_bad = true;
            });
        }
    }
    steps.fault("the machine restarts", |world| restarts(world, host));
    if has_records {
        steps.fault("the machine restarts, and the disk goes bad", |world| {
            restarts(world, host);
            world.host_mut(host).journal.is_bad = true;
        });
    }
    if steps.world.is_small {
        return;
    }
    steps.fault("the clock is put back", |world| {
        world.host_mut(host).journal.clock -= JUMP
    });
    steps.fault("the clock is put forward", |world| {
        world.host_mut(host).journal.clock += JUMP
    });
}

pub(super) fn partner(steps: &mut Steps<'_>) {
    steps.fault("the machine restarts", |world| {
        world.partner = false;
        // Its programs are gone, and with them what was to be switched.
        for one in &mut world.moves[..usize::from(world.begun)] {
            one.is_switched = true;
        }
    });
}

fn agent_dies(world: &mut World, host: u8) {
    let host = world.host_mut(host);
    host.agent = None;
    // The proxies end what they were not told to hold, or to let go.
    host.arriving = None;
    if let Some(tasks) = &mut host.tasks
        && tasks.record.held_by.is_none()
    {
        tasks.run = true;
    }
}

fn restarts(world: &mut World, number: u8) {
    let host = world.host_mut(number);
    host.agent = None;
    let had_tasks = host.tasks.take().is_some();
    (host.arriving, host.marker) = (None, None);
    host.journal.boot += 1;
    // What is committed may have run here, as far as anybody knows.
    let is_committed = |part: usize| {
        let of_part = host
            .journal
            .records
            .iter()
            .filter(|record| usize::from(record.part) == part);
        let last = of_part
            .map(|record| record.says)
            .rfind(|says| *says != Says::Filled);
        matches!(last, Some(Says::Committed(_) | Says::Mark(Mark::Committed)))
    };
    let parts = (0..2 * MOVES).filter(|part| named(*part).1 == Role::Destination);
    let may_be_lost = had_tasks || parts.into_iter().any(is_committed);
    world.lost |= may_be_lost;
}

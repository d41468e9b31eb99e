//! What happens at a host: operators' wishes, sources that are lost, agents that die and start again.

use verbatim_session::turns::Turns;

use super::state::{Part, Reply, Session, Stage};
use super::{MOST, Quirk, Steps, Who, Whom, World};

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    for (number, instance) in world.instances.iter().enumerate() {
        let Some(instance) = instance else { continue };
        let number = number as u8;
        if let Some(wish) = instance.wishes.iter().flatten().next()
            && !instance.moving
            && world.host(instance.host).up
        {
            steps.who = Who {
                host: instance.host,
                what: Whom::Session(world.sessions.len() as u8, number),
            };
            let wish = *wish;
            steps.then("is asked to move it", move |world| asked(world, number, wish));
        }
    }
    for (number, host) in world.hosts.iter().enumerate() {
        let number = number as u8;
        steps.who = Who {
            host: number,
            what: Whom::Agent,
        };
        if host.up {
            steps.fault("the agent dies", move |world| dies(world, number));
        } else {
            let quirks = steps.quirks;
            steps.later("the agent starts", move |world| starts(world, number, quirks));
        }
        for (session, what) in world.sessions.iter().enumerate() {
            let has_part = what.parts[usize::from(number)] == Part::Prepared;
            let is_watched = host.watched & 1 << session != 0;
            if host.up && (has_part || is_watched) {
                steps.who.what = Whom::Session(session as u8, what.moving);
                source_is_lost(steps, number, session as u8, what, is_watched);
            }
        }
    }
}

fn asked(world: &mut World, instance: u8, wish: u8) {
    let hosts = world.hosts.len() as u8;
    let at = world.instance_mut(instance);
    match at.wishes.iter_mut().find(|wish| wish.is_some()) {
        Some(first) => *first = None,
        None => return,
    }
    let to = match wish == at.host {
        true => (wish + 1) % hosts,
        false => wish,
    };
    world.open(instance, to, false);
}

/// A partner's host does not see the source any more, or hears what was decided.
fn source_is_lost(steps: &mut Steps<'_>, host: u8, number: u8, session: &Session, is_watched: bool) {
    let quirks = steps.quirks;
    let is_gone = session.is_orphan || session.has_ended();
    let loses = move |world: &mut World| {
        let at = world.host_mut(host);
        at.watched &= !(1 << number);
        let keeps_joins = quirks.has(Quirk::DeadKeepsItsJoins);
        if world.session(number).parts[usize::from(host)] == Part::None && !keeps_joins {
            world.host_mut(host).turns.leave(number.into());
        }
    };
    if is_watched {
        if is_gone {
            steps.then("sees that the source is gone", loses);
        } else {
            steps.may("loses sight of the source", move |world| {
                loses(world);
                world.session_mut(number).is_lost = true;
            });
        }
    }
    // What is decided, the other hosts know.
    let is_undone = matches!(session.stage, Stage::Undoing | Stage::Ended { moved: false });
    if session.parts[usize::from(host)] == Part::Prepared && is_undone {
        steps.then("undoes its part, and is left", move |world| {
            world.session_mut(number).parts[usize::from(host)] = Part::None;
            world.host_mut(host).turns.leave(number.into());
        });
    }
}

fn dies(world: &mut World, host: u8) {
    let at = world.host_mut(host);
    (at.up, at.turns, at.watched, at.count) = (false, Turns::default(), 0, 0);
    for session in &mut world.sessions {
        // Whoever has asked it hears of it at once.
        if session.mail & 1 << host != 0 {
            session.mail &= !(1 << host);
            if session.stage == Stage::Joining {
                session.replies[usize::from(host)] = Reply::Refused;
            }
        }
        if session.has_ended() {
            continue;
        }
        if session.partners() & 1 << host != 0 {
            session.is_lost = true;
        }
        if session.from == host {
            (session.is_orphan, session.has_turn) = (true, false);
            session.replies = [Reply::None; MOST];
            if !session.is_committed() {
                session.stage = Stage::Undoing;
            }
        }
    }
}

fn starts(world: &mut World, host: u8, quirks: super::Quirks) {
    world.host_mut(host).up = true;
    for number in 0..world.sessions.len() as u8 {
        let session = *world.session(number);
        if session.parts[usize::from(host)] == Part::Prepared && !quirks.has(Quirk::ForgetsJoins) {
            let found = session.found_at(host);
            let turns = &mut world.host_mut(host).turns;
            turns.join_again(number.into(), &session.moving, found);
        }
        if session.from == host && session.stage == Stage::Undoing {
            world.host_mut(host).turns.have(&session.moving, number.into());
            world.session_mut(number).has_turn = true;
        }
        if session.to == host && session.is_committed() && !session.is_resumed {
            world.host_mut(host).turns.have(&session.moving, number.into());
        }
    }
}

//! What a source does, as `agent::session::source` does it.

use verbatim_session::decision::Timer;
use verbatim_session::turns::{self, Joined};

use super::state::{Met, Part, Reply, Session, Stage};
use super::{MOST, Quirk, Steps, Who, Whom, World, bits};

pub(super) fn steps(steps: &mut Steps<'_>) {
    for (number, session) in steps.world.sessions.iter().enumerate() {
        let number = number as u8;
        let who = |host| Who {
            host,
            what: Whom::Session(number, session.moving),
        };
        for host in bits(session.mail) {
            steps.who = who(host);
            join(steps, number, session, host);
        }
        steps.who = who(session.from);
        if steps.world.host(session.from).up && !session.has_ended() {
            source(steps, number, session);
        }
        if session.is_committed() {
            finish(steps, number, session, who);
        }
    }
}

/// A host is asked to join.
fn join(steps: &mut Steps<'_>, number: u8, session: &Session, host: u8) {
    let (world, quirks) = (steps.world, steps.quirks);
    let answer = move |world: &mut World, reply: Reply| {
        let session = world.session_mut(number);
        session.mail &= !(1 << host);
        if session.stage == Stage::Joining {
            session.replies[usize::from(host)] = reply;
        }
    };
    if !world.host(host).up {
        steps.then("is not reached", move |world| answer(world, Reply::Refused));
        return;
    }
    steps.may("the request to join is lost", move |world| {
        answer(world, Reply::Refused)
    });
    if world.host(host).watched & 1 << number == 0 && !quirks.has(Quirk::JoinsForTheGone) {
        steps.then("is asked by a source that is gone", move |world| {
            answer(world, Reply::Refused)
        });
        return;
    }
    let at = world.host(host);
    if at.turns.earlier(number.into(), &session.moving).is_some() && !quirks.has(Quirk::NextDoesNotWait) {
        return;
    }
    // Processes that are about to come, or wait at the gate, are not here.
    let is_here = |instance: &u8| {
        let is_still = world
            .mover(*instance)
            .is_some_and(|mover| mover.stage == Stage::Suspended);
        world.instance(*instance).host == host && !is_still
    };
    if !session.found_at(host).iter().all(is_here) {
        let other = at.turns.anyone(number.into()).copied();
        let reply = other.map_or(Reply::Refused, |other| Reply::Said(Joined::Moving(other)));
        steps.then("does not find the other ends", move |world| answer(world, reply));
        return;
    }
    let joins = move |world: &mut World| {
        let Session { moving, .. } = *world.session(number);
        let instances = world.session(number).found_at(host);
        world.host_mut(host).turns.join(number.into(), &moving, instances)
    };
    steps.then(
        "joins the other ends, unless they are being moved",
        move |world| {
            let joined = joins(world);
            answer(world, Reply::Said(joined));
        },
    );
    steps.may("joins the other ends, and the answer is lost", move |world| {
        joins(world);
        answer(world, Reply::Refused);
    });
}

/// What its agent does.
fn source(steps: &mut Steps<'_>, number: u8, session: &Session) {
    let world = steps.world;
    let at = world.host(session.from);
    let can_be_cancelled = !matches!(
        session.stage,
        Stage::Undoing | Stage::Committed | Stage::Behind | Stage::Ended { .. }
    );
    if can_be_cancelled {
        steps.may("an operator cancels", move |world| {
            world.session_mut(number).fail()
        });
        if session.is_lost {
            steps.then("sees that a partner is gone", move |world| {
                world.session_mut(number).fail()
            });
        }
    }
    match session.stage {
        Stage::Taking => {
            if !at.turns.is_had(&session.moving) && at.turns.joined_by(&session.moving).is_none() {
                let quirks = steps.quirks;
                steps.then("comes to its turn", move |world| takes(world, number, quirks));
            }
        }
        Stage::Finding => finds(steps, number, session),
        Stage::Joining => {
            if session.asked() == 0 {
                let quirks = steps.quirks;
                steps.then("has all answers", move |world| {
                    let count = |met: Met| {
                        let host = world.host(met.host);
                        host.count
                    };
                    let session = *world.session(number);
                    let next = after_joining(&session, quirks, count);
                    *world.session_mut(number) = next;
                });
            }
        }
        Stage::LettingGo(met) => {
            let left = session.partners() & !session.left;
            for host in bits(left) {
                steps.who.host = host;
                let leaves = move |world: &mut World| world.session_mut(number).left |= 1 << host;
                if world.host(host).up {
                    steps.then("is told that it is left", move |world| {
                        world.host_mut(host).turns.leave(number.into());
                        leaves(world);
                    });
                    steps.may("does not hear that it is left", leaves);
                } else {
                    steps.then("cannot be told that it is left", leaves);
                }
            }
            steps.who.host = session.from;
            if left == 0 {
                steps.then("gives its turn back", move |world| {
                    gives_back(world, number);
                    let session = world.session_mut(number);
                    (session.stage, session.left) = (Stage::Waiting(met), 0);
                });
            }
        }
        Stage::Waiting(met) => {
            let looks_again = move |world: &mut World| {
                let session = world.session_mut(number);
                session.stage = if session.has_turn {
                    Stage::Finding
                } else {
                    Stage::Taking
                };
            };
            let there = world.host(met.host);
            if !there.up {
                steps.then("cannot ask when the other move ends", move |world| {
                    world.session_mut(number).fail()
                });
            } else if !there.turns.is_had(&met.moving) {
                steps.then("hears that the other move has ended", looks_again);
            } else {
                steps.timer("has waited, and looks again", Timer::Write, looks_again);
            }
        }
        Stage::Preparing => prepares(steps, number, session),
        Stage::Suspended => {
            steps.may("the program has changed", move |world| {
                let session = world.session_mut(number);
                // Agents make three attempts.
                session.again = !session.is_another;
                session.fail();
            });
            if world.host(session.to).up {
                steps.then(
                    "the instance runs at the destination",
                    commits(steps.quirks, number),
                );
            } else {
                steps.then("cannot reach the destination", move |world| {
                    world.session_mut(number).fail()
                });
            }
        }
        Stage::Committed | Stage::Behind => {
            let is_done = session.is_resumed && !session.parts.contains(&Part::Prepared);
            if is_done {
                steps.then("everything is done after the decision", move |world| {
                    gives_back(world, number);
                    world.session_mut(number).stage = Stage::Ended { moved: true };
                });
            } else if session.stage == Stage::Committed {
                steps.timer("the rest is done behind", Timer::Doubt, move |world| {
                    gives_back(world, number);
                    world.session_mut(number).stage = Stage::Behind;
                });
            }
        }
        Stage::Undoing => steps.then("has undone everything", move |world| {
            gives_back(world, number);
            let Session {
                moving, to, again, ..
            } = *world.session(number);
            world.session_mut(number).stage = Stage::Ended { moved: false };
            match again {
                true => world.open(moving, to, true),
                false => world.instance_mut(moving).moving = false,
            }
        }),
        Stage::Ended { .. } => {}
    }
}

fn takes(world: &mut World, number: u8, quirks: super::Quirks) {
    let Session { from, moving, .. } = *world.session(number);
    let host = world.host_mut(from);
    let has_turn = host.turns.take(&moving, number.into());
    if quirks.has(Quirk::FirstComeKeeps) {
        host.count = host.count.saturating_add(1);
    }
    let came = host.count;
    let session = world.session_mut(number);
    if has_turn {
        (session.has_turn, session.came, session.stage) = (true, came, Stage::Finding);
    }
}

fn gives_back(world: &mut World, number: u8) {
    let Session { from, moving, .. } = *world.session(number);
    world.host_mut(from).turns.give_back(&moving, number.into());
    let session = world.session_mut(number);
    (session.has_turn, session.came) = (false, 0);
}

fn finds(steps: &mut Steps<'_>, number: u8, session: &Session) {
    let world = steps.world;
    let mut peers = bits(world.instance(session.moving).peers);
    let is_out_of_reach = |peer: u8| !world.host(world.instance(peer).host).up;
    if peers.any(is_out_of_reach) {
        steps.then("cannot reach a partner", move |world| {
            world.session_mut(number).fail()
        });
    } else {
        steps.then("finds the other ends, and asks to join them", move |world| {
            let mut found = [None; MOST];
            let moving = world.session(number).moving;
            for peer in bits(world.instance(moving).peers) {
                let host = world.instance(peer).host;
                found[usize::from(peer)] = Some(host);
                world.host_mut(host).watched |= 1 << number;
            }
            let session = world.session_mut(number);
            session.found = found;
            session.mail = session.partners();
            session.replies = [Reply::None; MOST];
            for host in bits(session.mail) {
                session.replies[usize::from(host)] = Reply::Asked;
            }
            session.stage = Stage::Joining;
        });
    }
}

/// All hosts have answered.
fn after_joining(session: &Session, quirks: super::Quirks, count: impl Fn(Met) -> u8) -> Session {
    let mut session = *session;
    let mut met = None;
    for (host, reply) in (0..).zip(session.replies) {
        match reply {
            Reply::Refused => {
                session.fail();
                return session;
            }
            Reply::Said(Joined::Moving(moving)) => met = met.or(Some(Met { host, moving })),
            _ => {}
        }
    }
    session.replies = [Reply::None; MOST];
    session.stage = match met {
        Some(met) => {
            let keeps = if quirks.has(Quirk::NeverLetsGo) {
                true
            } else if quirks.has(Quirk::FirstComeKeeps) {
                session.came <= count(met)
            } else {
                turns::keeps(&session.moving, &met.moving)
            };
            match keeps {
                true => Stage::Waiting(met),
                false => Stage::LettingGo(met),
            }
        }
        None => Stage::Preparing,
    };
    session
}

fn prepares(steps: &mut Steps<'_>, number: u8, session: &Session) {
    let world = steps.world;
    let mut is_ready = true;
    for host in bits(session.partners()) {
        if session.parts[usize::from(host)] == Part::Prepared {
            continue;
        }
        is_ready = false;
        steps.who.host = host;
        let at = world.host(host);
        if at.up && at.watched & 1 << number != 0 {
            steps.then("is prepared", move |world| {
                world.session_mut(number).parts[usize::from(host)] = Part::Prepared;
            });
        } else {
            steps.then("cannot be prepared", move |world| {
                world.session_mut(number).fail()
            });
        }
    }
    steps.who.host = session.from;
    if is_ready {
        steps.later("nothing is in flight any more", move |world| {
            world.session_mut(number).stage = Stage::Suspended;
        });
    }
}

fn commits(quirks: super::Quirks, number: u8) -> impl FnOnce(&mut World) {
    move |world| {
        let Session { moving, to, .. } = *world.session(number);
        world.instance_mut(moving).host = to;
        if !quirks.has(Quirk::ArrivesWithoutTurn) {
            world.host_mut(to).turns.have(&moving, number.into());
        }
        world.session_mut(number).stage = Stage::Committed;
    }
}

/// What is left after the decision. The source asks for it, or the destination in its place.
fn finish(steps: &mut Steps<'_>, number: u8, session: &Session, who: impl Fn(u8) -> Who) {
    let world = steps.world;
    let is_driven = world.host(session.from).up || world.host(session.to).up;
    for host in 0..world.hosts.len() as u8 {
        let part = session.parts[usize::from(host)];
        if part == Part::Prepared && world.host(host).up && is_driven {
            steps.who = who(host);
            steps.later("switches, and is left", move |world| {
                world.session_mut(number).parts[usize::from(host)] = Part::Switched;
                world.host_mut(host).turns.leave(number.into());
            });
        }
    }
    if !session.is_resumed && world.host(session.to).up {
        steps.who = who(session.to);
        steps.later("the instance has resumed", move |world| {
            let Session { moving, to, .. } = *world.session(number);
            world.host_mut(to).turns.give_back(&moving, number.into());
            world.instance_mut(moving).moving = false;
            world.session_mut(number).is_resumed = true;
        });
    }
}

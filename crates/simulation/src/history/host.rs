//! A host: its agent starts, memory comes, and the volume daemon hears how sessions ended.

use verbatim_session::Role;
use verbatim_session::decision::destination::{self, Destination};
use verbatim_session::decision::source::Source;
use verbatim_session::decision::{Keep, Mark, Outcome, Written};
use verbatim_session::fill::{self, Fill, Noted};
use verbatim_session::record::Standing;
use verbatim_session::recovery::Touches;

use super::journal::{Journal, Read, Says};
use super::{Agent, MOVES, Machine, Part, Quirk, Quirks, Steps, World, index, named, session};

pub(super) fn steps(steps: &mut Steps<'_>, host: u8) {
    let world = steps.world;
    let here = &world.hosts[usize::from(host)];
    let quirks = steps.quirks;
    if here.tasks.is_some_and(|tasks| tasks.lack) {
        steps.later("all of the memory has come", |world| {
            if let Some(tasks) = &mut world.host_mut(host).tasks {
                tasks.lack = false;
            }
        });
    }
    let Some(agent) = &here.agent else {
        if here.journal.is_bad {
            bad_disk(steps, host);
        } else {
            steps.later("the agent starts", |world| start(world, host, quirks));
        }
        return;
    };
    if agent.tells != 0 {
        steps.later("the volume daemon hears how sessions ended", |world| {
            let host = world.host_mut(host);
            if let Some(agent) = &mut host.agent {
                host.volumes &= !agent.tells;
                agent.tells = 0;
            }
        });
    }
    fill(steps, host, agent);
    begin(steps, host, agent);
}

/// Any record may be the one that is lost.
fn bad_disk(steps: &mut Steps<'_>, host: u8) {
    const LOST: [&str; 24] = [
        "record 0 is lost",
        "record 1 is lost",
        "record 2 is lost",
        "record 3 is lost",
        "record 4 is lost",
        "record 5 is lost",
        "record 6 is lost",
        "record 7 is lost",
        "record 8 is lost",
        "record 9 is lost",
        "record 10 is lost",
        "record 11 is lost",
        "record 12 is lost",
        "record 13 is lost",
        "record 14 is lost",
        "record 15 is lost",
        "record 16 is lost",
        "record 17 is lost",
        "record 18 is lost",
        "record 19 is lost",
        "record 20 is lost",
        "record 21 is lost",
        "record 22 is lost",
        "record 23 is lost",
    ];
    let records = steps.world.hosts[usize::from(host)].journal.records.len();
    for (record, what) in LOST.into_iter().enumerate().take(records) {
        steps.then(what, |world| {
            let journal = &mut world.host_mut(host).journal;
            journal.records[record].is_lost = true;
            journal.is_bad = false;
        });
    }
}

fn fill(steps: &mut Steps<'_>, host: u8, agent: &Agent) {
    let Some((fill, session)) = agent.fill else { return };
    let lacks = steps.world.hosts[usize::from(host)]
        .tasks
        .is_some_and(|tasks| tasks.lack);
    match fill.state() {
        fill::State::Filling if !lacks => steps.then("hears that all of the memory has come", |world| {
            filled(world, host, fill::Event::Filled)
        }),
        fill::State::Noting => steps.then("notes that no memory is missing", |world| {
            if let Some(session) = session {
                let part = index(session, Role::Destination);
                world.host_mut(host).journal.write(part, Says::Filled);
            }
            filled(world, host, fill::Event::Written(Written::Durable));
        }),
        fill::State::Clearing => steps.then("removes what was kept of the memory", |world| {
            if let Some(tasks) = &mut world.host_mut(host).tasks {
                tasks.cache = false;
            }
            filled(world, host, fill::Event::Cleared { gone: true });
        }),
        fill::State::Filling | fill::State::Ending | fill::State::Ended => {}
    }
}

fn filled(world: &mut World, host: u8, event: fill::Event) {
    if let Some(Agent {
        fill: Some((fill, _)),
        ..
    }) = &mut world.host_mut(host).agent
    {
        fill.handle(event);
    }
}

/// The next move begins, as soon as nothing is in its way.
fn begin(steps: &mut Steps<'_>, from: u8, agent: &Agent) {
    let world = steps.world;
    let Some(next) = world.moves.get(usize::from(world.begun)) else {
        return;
    };
    let runs = world.hosts[usize::from(from)]
        .tasks
        .is_some_and(|tasks| tasks.run && tasks.record.held_by.is_none());
    let is_whole = agent.fill.is_none_or(|(fill, _)| fill.is_whole());
    let is_free = agent.reserved.is_none() && !agent.parts.iter().flatten().any(session::has_the_tasks);
    let to = (from + next.to) % super::HOSTS as u8;
    let there = &world.hosts[usize::from(to)];
    let is_free_there = there.agent.as_ref().is_some_and(|agent| agent.reserved.is_none());
    let has_room = there.tasks.is_none() && there.arriving.is_none();
    if next.to == 0 || !runs || !is_whole || !is_free || !is_free_there || !has_room {
        return;
    }
    let number = world.begun;
    steps.then("a move begins", |world| {
        world.begun += 1;
        let one = &mut world.moves[usize::from(number)];
        (one.from, one.to) = (from, to);
        open(
            world,
            from,
            index(number, Role::Source),
            Machine::Source(Source::begin()),
        );
        open(
            world,
            to,
            index(number, Role::Destination),
            Machine::Destination(Destination::begin()),
        );
        if let Some(agent) = &mut world.host_mut(to).agent {
            agent.reserved = Some(number);
        }
    });
}

fn open(world: &mut World, host: u8, part: usize, machine: Machine) {
    let has_volumes = !world.is_small;
    let host = world.host_mut(host);
    host.journal.write(part, Says::Opened);
    host.volumes |= u8::from(has_volumes) << part;
    if let Some(agent) = &mut host.agent {
        agent.parts[part] = Some(Part {
            machine,
            effects: Vec::new(),
            touches: Touches::ALL,
            is_recovered: false,
        });
    }
}

/// An agent starts, and goes on where an earlier one was cut off.
fn start(world: &mut World, number: u8, quirks: Quirks) {
    mend(world, number, quirks);
    let all = world.hosts[usize::from(number)].journal.read(quirks);
    world.host_mut(number).agent = Some(Agent::default());
    if quirks.has(Quirk::VolumesFirst) {
        tell_of_ended(world, number, &all);
    }
    let all = supersede(world, number, all, quirks);
    let order = match quirks.has(Quirk::MemoryByClock) {
        true => Quirks::NONE,
        false => quirks,
    };
    let latest = latest(&all, order);
    let mut touched = false;
    for (part, read) in all.iter().enumerate() {
        let Some(read) = read.filter(|read| !read.part.standing.has_ended()) else {
            continue;
        };
        let touches = take_up(world, number, part, &read, latest == Some(part), quirks);
        touched |= touches.anything();
    }
    let host = world.host_mut(number);
    if !touched && host.tasks.is_none() {
        // What lies about is what an instance has left behind.
        (host.arriving, host.marker) = (None, None);
    }
    take_over_fill(world, number, &all, quirks);
    if !quirks.has(Quirk::VolumesFirst) {
        tell_of_ended(world, number, &all);
    }
}

/// Tasks are held for a session of which the journal has lost everything.
fn mend(world: &mut World, number: u8, quirks: Quirks) {
    let host = world.host_mut(number);
    let Some(session) = host.tasks.and_then(|tasks| tasks.record.held_by) else {
        return;
    };
    let part = index(session as u8, Role::Source);
    if host.journal.read(quirks)[part].is_none() {
        host.journal.write(part, Says::Mark(Mark::Deciding));
        host.journal.write(part, Says::Opened);
    }
}

fn latest(all: &[Option<Read>; 2 * MOVES], quirks: Quirks) -> Option<usize> {
    let parts = all
        .iter()
        .enumerate()
        .filter_map(|(part, read)| Some((part, read.as_ref()?)));
    let latest = parts.max_by_key(|(_, read)| Journal::order(read, quirks));
    latest.map(|(part, _)| part)
}

/// What an agent did once: all sessions of an instance that have not ended are closed, but for the latest.
fn supersede(
    world: &mut World,
    host: u8,
    mut all: [Option<Read>; 2 * MOVES],
    quirks: Quirks,
) -> [Option<Read>; 2 * MOVES] {
    if !quirks.has(Quirk::Guesses) && !quirks.has(Quirk::VolumesFirst) {
        return all;
    }
    let open = all
        .iter()
        .enumerate()
        .filter_map(|(part, read)| Some((part, (*read)?)));
    let open: Vec<_> = open.filter(|(_, read)| !read.part.standing.has_ended()).collect();
    let latest = open
        .iter()
        .max_by_key(|(_, read)| Journal::order(read, quirks))
        .map(|(part, _)| *part);
    for (part, read) in open {
        if Some(part) == latest {
            continue;
        }
        let decided = match read.part.standing {
            Standing::Ran | Standing::Cleared | Standing::Resolved(Keep::Destination) => {
                Some(Outcome::Committed)
            }
            Standing::RolledBack | Standing::Resolved(Keep::Source) => Some(Outcome::RolledBack),
            _ => None,
        };
        let guess = quirks.has(Quirk::Guesses).then(|| match named(part).1 {
            Role::Destination => Outcome::Committed,
            _ => Outcome::RolledBack,
        });
        if let Some(outcome) = decided.or(guess) {
            let closed = Mark::Closed(outcome);
            world.host_mut(host).journal.write(part, Says::Mark(closed));
            if let Some(read) = &mut all[part] {
                read.part.add(&closed.into());
            }
        }
    }
    all
}

fn take_up(
    world: &mut World,
    number: u8,
    part: usize,
    read: &Read,
    is_latest: bool,
    quirks: Quirks,
) -> Touches {
    let (session, role) = named(part);
    let host = world.host_mut(number);
    let record = host.tasks.map(|tasks| tasks.record);
    let touches = match quirks.has(Quirk::ByName) {
        true => Touches::ALL,
        false => Touches::of(role, u64::from(session), record, is_latest),
    };
    let standing = match read.part.standing {
        // The record that the old place is cleared came with the cure.
        Standing::Cleared if quirks.has(Quirk::ByName) => Standing::Ran,
        standing => standing,
    };
    let is_here = read.boot == host.journal.boot && is_latest;
    let standing = match (standing, role) {
        (Standing::Damaged, Role::Destination) if quirks.has(Quirk::DamageIsCommit) => Standing::Committed,
        (standing, _) => standing,
    };
    if touches.anything()
        && let Some(agent) = &mut host.agent
    {
        agent.reserved = Some(session);
    }
    match role {
        Role::Source => {
            let (machine, actions) = Source::recover(standing);
            session::insert(world, number, part, Machine::Source(machine), touches);
            session::source_actions(world, number, part, actions);
        }
        _ => {
            let (machine, actions) = Destination::recover(standing, is_here);
            session::insert(world, number, part, Machine::Destination(machine), touches);
            session::destination_actions(world, number, part, actions);
        }
    }
    touches
}

/// Whoever takes tasks over finds in the journal whether memory is missing to them.
fn take_over_fill(world: &mut World, number: u8, all: &[Option<Read>; 2 * MOVES], quirks: Quirks) {
    let host = world.host_mut(number);
    let boot = host.journal.boot;
    let Some(tasks) = host.tasks else { return };
    let came = all.iter().enumerate().filter_map(|(part, read)| {
        let read = read.as_ref()?;
        let (session, role) = named(part);
        let rolled_back = matches!(
            read.part.standing,
            Standing::RolledBack | Standing::Resolved(Keep::Source) | Standing::Closed(Outcome::RolledBack)
        );
        (role == Role::Destination && read.boot == boot && !rolled_back).then_some((session, read))
    });
    let latest = came.max_by_key(|(_, read)| Journal::order(read, quirks));
    let noted = latest.map_or(Noted::Unknown, |(_, read)| read.part.memory_here());
    let (fill, _) = Fill::recover(noted, tasks.cache);
    if let Some(agent) = &mut host.agent {
        agent.fill = Some((fill, latest.map(|(session, _)| session)));
    }
}

/// Sessions that had ended before: whoever did not tell the volume daemon any more is gone.
fn tell_of_ended(world: &mut World, number: u8, all: &[Option<Read>; 2 * MOVES]) {
    let host = world.host_mut(number);
    let ended = all
        .iter()
        .enumerate()
        .filter(|(_, read)| read.is_some_and(|read| read.part.standing.has_ended()));
    let ended = ended.fold(0, |bits, (part, _)| bits | 1 << part);
    if let Some(agent) = &mut host.agent {
        agent.tells |= host.volumes & ended;
    }
}

/// A destination that is asking has no place of its own any more: what was here is removed before the name is free.
pub(super) fn let_go_of_the_name(world: &mut World, number: u8, part: usize) {
    let host = world.host_mut(number);
    let Some(agent) = &mut host.agent else { return };
    let (session, _) = named(part);
    let Some(asking) = agent.parts[part].as_mut().filter(|part| {
        matches!(part.machine, Machine::Destination(machine) if machine.state() == destination::State::Asking)
    }) else {
        return;
    };
    if std::mem::replace(&mut asking.touches, Touches::NOTHING).undo {
        (host.arriving, host.tasks, host.marker) = (None, None, None);
    }
    if agent.reserved == Some(session) {
        agent.reserved = None;
    }
}

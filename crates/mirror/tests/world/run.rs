//! One walk: the events, and the calm at the end.

use std::time::Duration;

use rand::Rng;
use verbatim_mirror::{Event, Failure, Standing};

use super::disk::{Io, IoKind};
use super::host::{For, Stage};
use super::network::{Letter, ToSource};
use super::{CELLS, Which, World};

/// Steps with faults, and most steps until all is well afterwards.
const STEPS: u64 = 1_000;
const CALM: u64 = 20_000;

impl World {
    pub(super) fn roll(&mut self, sides: u32) -> u32 {
        self.random.random_range(0..sides)
    }

    pub(super) fn random_bool(&mut self) -> bool {
        self.random.random()
    }

    pub(super) fn random_cell(&mut self) -> usize {
        self.random.random_range(0..CELLS)
    }

    pub(super) fn random_length(&mut self, offset: usize) -> usize {
        self.random.random_range(1..=(CELLS - offset).min(6))
    }

    pub(super) fn run(&mut self) {
        for _ in 0..STEPS {
            self.one();
            if self.wrong.is_some() {
                return;
            }
        }
        self.is_calm = true;
        // The paper's algorithm has no rule for the state after a hold.
        if self.rules.which != Which::Ours {
            return;
        }
        self.is_quiet = true;
        self.until("some copy serves, and all is answered", Self::is_settled);
        let commits = self.tally.commits;
        self.is_quiet = false;
        self.until("the volume moves", |world| world.tally.commits > commits);
        self.is_quiet = true;
        self.until("some copy serves, and all is answered again", Self::is_settled);
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..CALM {
            if self.wrong.is_some() || is_so(self) {
                return;
            }
            self.one();
        }
        self.is_wrong(format!("never: {what}"));
    }

    fn is_settled(&self) -> bool {
        let serving = self.serving();
        let is_settled = serving.is_some_and(|host| {
            let process = self.process(host);
            process.open.is_empty() && process.session.is_none() && process.stage == Stage::None
        });
        is_settled
            && self.hosts.iter().all(|host| {
                host.process
                    .as_ref()
                    .is_some_and(|process| process.writing.is_none())
            })
    }

    fn serving(&self) -> Option<usize> {
        self.hosts
            .iter()
            .position(|host| host.process.as_ref().is_some_and(|process| process.serves()))
    }

    /// One random event.
    fn one(&mut self) {
        self.tally.steps += 1;
        match self.roll(100) {
            0..40 => self.io(),
            40..58 => self.deliver(),
            58..62 => self.letter(),
            62..70 => self.tenant(),
            70..80 => self.sidecar(),
            80..86 => self.time(),
            86..97 => self.operate(),
            _ if self.rules.faults && !self.is_calm && self.chance(self.rarity) => self.fault(),
            _ => self.operate(),
        }
        self.check();
    }

    fn io(&mut self) {
        let first = self.roll(2) as usize;
        let count = |host: usize| {
            self.hosts[host]
                .process
                .as_ref()
                .map_or(0, |process| process.io.len())
        };
        let host = if count(first) > 0 { first } else { 1 - first };
        let count = count(host);
        if count == 0 {
            return;
        }
        let which = self.random.random_range(0..count);
        let place = &mut self.hosts[host];
        let process = place.process.as_mut().expect("it runs");
        let (what, io) = &mut process.io[which];
        let what = *what;
        if !io.is_done() {
            io.step(&mut place.disk, &mut self.random);
            return self.tell(|| format!("{host}: a step of {what:?}"));
        }
        let (_, io) = process.io.swap_remove(which);
        match what {
            For::Arrival(_) => self.arrival_done(host, what, true),
            _ => self.local_done(host, what, io, Ok(())),
        }
    }

    /// An I/O fails, at any point of its progress.
    fn fail_io(&mut self) {
        let host = self.roll(2) as usize;
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        // Failed flushes of the source's disk are in the other worlds (`worlds`).
        let may = |(what, io): &(For, Io)| io.kind != IoKind::Flush || matches!(what, For::Arrival(_));
        let Some(which) = process.io.iter().position(may) else {
            return;
        };
        let (what, io) = process.io.swap_remove(which);
        if io.kind == IoKind::Flush {
            self.hosts[host].disk.fail_flush();
        }
        self.tally.faults += 1;
        match what {
            For::Arrival(_) => self.arrival_done(host, what, false),
            _ => self.local_done(host, what, io, Err(Failure::Disk(5))),
        }
    }

    fn deliver(&mut self) {
        let open: Vec<usize> = (0..self.connections.len())
            .filter(|&index| self.connections[index].is_some())
            .collect();
        if open.is_empty() {
            return;
        }
        let index = open[self.random.random_range(0..open.len())];
        let connection = self.connections[index].as_mut().expect("it is open");
        let (to, from) = (connection.to_destination.len(), connection.to_source.len());
        if to + from == 0 {
            return;
        }
        let which = self.random.random_range(0..to + from);
        match which < to {
            true => {
                let message = connection.to_destination.swap_remove(which);
                self.tell(|| format!("connection {index}: {message:?} arrives"));
                self.arrives(index, message);
            }
            false => {
                let message = connection.to_source.swap_remove(which - to);
                self.tell(|| format!("connection {index}: {message:?} comes back"));
                self.comes_back(index, message);
            }
        }
    }

    fn letter(&mut self) {
        if self.letters.is_empty() {
            return;
        }
        let which = self.random.random_range(0..self.letters.len());
        // Some messages come twice.
        let letter = match self.chance(8) {
            true => self.letters[which],
            false => self.letters.swap_remove(which),
        };
        self.tell(|| format!("{letter:?} arrives"));
        match letter {
            Letter::Ask { from, to, ask } => self.asked(from, to, ask),
            Letter::Answer { to, ask, answer } => self.answered(to, ask, answer),
        }
    }

    fn tenant(&mut self) {
        let Some(host) = self.hosts.iter().position(|host| {
            let engine = host.process.as_ref().and_then(|process| process.engine.as_ref());
            engine.is_some_and(|engine| engine.standing() != Standing::Moved)
        }) else {
            return;
        };
        if !self.is_quiet && self.process(host).open.len() < self.depth {
            self.issue(host);
        }
    }

    fn sidecar(&mut self) {
        let host = self.roll(2) as usize;
        if self.hosts[host]
            .process
            .as_ref()
            .is_some_and(|it| it.is_suspecting && it.writing.is_none())
        {
            return self.suspect(host);
        }
        let is_good = self.is_calm || !self.rules.faults || !self.chance(6);
        self.written(host, is_good);
    }

    fn time(&mut self) {
        let is_long = self.rules.faults && !self.is_calm && self.chance(12 * self.rarity);
        self.now += Duration::from_millis(if is_long { 250 } else { 4 });
        self.tally.silences += u64::from(is_long);
        for host in 0..2 {
            if self.hosts[host].process.is_some() {
                self.engine(host, Event::Tick);
            }
        }
    }

    fn operate(&mut self) {
        let host = self.roll(2) as usize;
        if self.hosts[host].process.is_none() {
            return self.start(host);
        }
        let is_serving = self.process(host).serves();
        match self.roll(6) {
            0 if is_serving && !self.is_quiet => self.migrate(host),
            1 | 2 if is_serving => self.connect(host),
            3 | 4 if is_serving => {
                if self
                    .process(host)
                    .session
                    .is_some_and(|session| session.is_mirrored)
                {
                    self.engine(host, Event::Hold);
                } else if self.is_quiet && self.process(host).session.is_some() {
                    self.engine(host, Event::Cancel);
                }
            }
            5 if self.process(host).stage == Stage::Asking => self.ask(host),
            _ => {}
        }
    }

    fn fault(&mut self) {
        let host = self.roll(2) as usize;
        match self.roll(6) {
            0 => self.kill(host, false),
            1 => self.kill(host, true),
            2 | 3 => {
                // The source learns of it; messages in flight to the destination still arrive.
                let connection = self.hosts[host]
                    .process
                    .as_ref()
                    .and_then(|process| process.session?.connection);
                if let Some(index) = connection {
                    self.tally.faults += 1;
                    self.comes_back(index, ToSource::Closed);
                }
            }
            4 => self.fail_io(),
            _ => {
                let serving = self.serving();
                if let Some(host) = serving {
                    self.engine(host, Event::Cancel);
                }
            }
        }
    }
}

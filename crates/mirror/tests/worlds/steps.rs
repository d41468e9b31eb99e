//! The possible steps, and their execution.

use verbatim_mirror::decision::{Role, SessionId, Sidecar};
use verbatim_mirror::trust::May;
use verbatim_mirror::{Extent, Op};

use super::faults::Fault;
use super::operators::Word;
use super::{CELLS, Poison, Process, Quirk, Row, Rules, World};

/// One possible step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Start(usize),
    Look(usize),
    Write(usize),
    Flush(usize),
    /// The note of a failed flush becomes durable.
    Note(usize),
    Migrate {
        host: usize,
        to: usize,
        is_rescue: bool,
    },
    Connect(usize),
    Copy {
        host: usize,
        cell: usize,
    },
    FlushMirror(usize),
    Hold(usize),
    Ask(usize),
    Deliver(usize),
    Grow(usize),
    Decide {
        which: usize,
        is_committed: bool,
    },
    Tell {
        which: usize,
        side: usize,
    },
    Fault(Fault),
    Word(Word),
}

const CHANGE: Op = Op::Change(Extent { offset: 0, length: 1 });

pub fn session(number: u8) -> SessionId {
    SessionId(number.into())
}

pub fn name(host: usize) -> String {
    host.to_string()
}

impl World {
    /// All possible steps now.
    pub fn steps(&self, rules: &Rules) -> Vec<Step> {
        let mut steps = Vec::with_capacity(64);
        for host in 0..self.hosts.len() {
            match self.process(host) {
                None => steps.push(Step::Start(host)),
                Some(process) => self.steps_of(host, process, rules, &mut steps),
            }
        }
        steps.extend((0..self.letters.len()).map(Step::Deliver));
        for (which, agents) in self.agents.iter().enumerate() {
            match agents.decision {
                None => {
                    steps.push(Step::Decide {
                        which,
                        is_committed: false,
                    });
                    if agents.is_promised {
                        steps.push(Step::Decide {
                            which,
                            is_committed: true,
                        });
                    }
                }
                Some(_) => {
                    let sides = (0..2).filter(|&side| agents.notes[side]);
                    steps.extend(sides.map(|side| Step::Tell { which, side }));
                }
            }
        }
        // The deletion of a copy whose data are gone is no fault.
        let gone =
            (0..self.hosts.len()).filter(|&host| self.process(host).is_some() && self.lacks_data(host));
        steps.extend(gone.map(|host| Step::Word(Word::DeleteGone(host))));
        if self.faults > 0 {
            steps.extend(self.faults(rules).into_iter().map(Step::Fault));
            if rules.operators {
                steps.extend(self.words(rules).into_iter().map(Step::Word));
            }
        }
        steps
    }

    fn steps_of(&self, host: usize, process: &Process, rules: &Rules, steps: &mut Vec<Step>) {
        if process.row == Row::Unknown || self.copy(host).is_some_and(Sidecar::may_serve) && !process.is_open
        {
            steps.push(Step::Look(host));
        }
        if process.poison == Poison::Unnoted || process.is_open && process.trust.flushed() == May::Wait {
            steps.push(Step::Note(host));
        }
        if process.grows {
            steps.push(Step::Grow(host));
        }
        let Some(sidecar) = self.copy(host) else {
            return;
        };
        let asks = matches!(sidecar.role, Role::Deciding { .. })
            || !sidecar.overruled.is_empty() && rules.quirk != Some(Quirk::KeepsWithoutAsking);
        if asks
            && self
                .questions(host)
                .iter()
                .any(|question| !self.letters.contains(question))
        {
            steps.push(Step::Ask(host));
        }
        if !self.serves(host) {
            return;
        }
        if self.writes > 0 && process.trust.may(CHANGE) == May::Go {
            steps.push(Step::Write(host));
        }
        if process.trust.may(Op::Flush) == May::Go && self.flushed != self.acknowledged {
            steps.push(Step::Flush(host));
        }
        let Some(moving) = &process.moving else {
            if rules.grows && !process.grows && process.told == 1 && process.trust.is_sound() {
                steps.push(Step::Grow(host));
            }
            if self.moves > 0 && !process.grows {
                for to in (0..self.hosts.len()).filter(|&to| to != host) {
                    steps.push(Step::Migrate {
                        host,
                        to,
                        is_rescue: sidecar.suspect,
                    });
                }
            }
            return;
        };
        if !moving.is_linked {
            if self.process(moving.to).is_some() {
                steps.push(Step::Connect(host));
            }
            return;
        }
        let left = (0..CELLS).filter(|&cell| cell < usize::from(process.told) && !moving.has[cell]);
        steps.extend(left.map(|cell| Step::Copy { host, cell }));
        let is_there = (0..usize::from(process.told)).all(|cell| moving.has[cell]);
        if is_there && !moving.is_flushed {
            steps.push(Step::FlushMirror(host));
        }
        if is_there && moving.is_flushed {
            steps.push(Step::Hold(host));
        }
    }

    /// Executes a step.
    pub fn go(&mut self, step: Step, rules: &Rules) {
        match step {
            Step::Start(host) => self.start(host, rules),
            Step::Look(host) => self.look(host, rules),
            Step::Write(host) => self.write(host, rules),
            Step::Flush(host) => {
                self.disk(host).flush(true);
                self.flushed = self.acknowledged;
            }
            Step::Note(host) => self.note(host, rules),
            Step::Migrate { host, to, is_rescue } => self.migrate(host, to, is_rescue, rules),
            Step::Connect(host) => self.connect(host, rules),
            Step::Copy { host, cell } => self.copy_cell(host, cell, rules),
            Step::FlushMirror(host) => self.flush_mirror(host, true, rules),
            Step::Hold(host) => self.hold(host, rules),
            Step::Ask(host) => self.ask(host),
            Step::Deliver(which) => self.deliver(which, rules),
            Step::Grow(host) => self.grow(host, rules),
            Step::Decide { which, is_committed } => {
                let agents = &mut self.agents[which];
                (agents.decision, agents.notes) = (Some(is_committed), [true; 2]);
                self.has_lied |= agents.said.is_some_and(|said| said != is_committed);
            }
            Step::Tell { which, side } => self.tell(which, side, rules),
            Step::Fault(fault) => self.fail(fault, rules),
            Step::Word(word) => self.say(word, rules),
        }
        self.let_go();
        self.letters.sort();
        self.letters.dedup();
        self.check();
    }

    /// Data that a role no longer needs are closed.
    fn let_go(&mut self) {
        for host in 0..self.hosts.len() {
            let is_kept = match self.copy(host).map(|here| &here.role) {
                Some(Role::Moved { .. } | Role::Incomplete) | None => false,
                Some(_) => true,
            };
            if !is_kept {
                self.hosts[host].close();
            }
        }
    }
}

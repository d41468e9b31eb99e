//! What happens when nothing fails.

use verbatim_mirror::decision::{
    Answer, Ask, Heard, Here, Offer, Record, Role, SessionId, Sidecar, Verdict, all_overruled, answer,
    decided, deciding, heard, prepare,
};
use verbatim_mirror::resize::{self, Lengths};
use verbatim_mirror::together::{Settle, held, promised, settle};
use verbatim_mirror::trust::{self, May};
use verbatim_mirror::{Extent, Op};

use super::faults::Fault;
use super::operators::Word;
use super::{Agents, CELLS, Disk, Filling, ID, Letter, Moving, Poison, Process, Quirk, Row, Rules, World};

/// One thing that may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Start(usize),
    Look(usize),
    Write(usize),
    Flush(usize),
    /// That a flush has failed is written down.
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

fn name(host: usize) -> String {
    host.to_string()
}

impl World {
    /// All that may happen now.
    pub fn steps(&self, rules: &Rules) -> Vec<Step> {
        let mut steps = Vec::new();
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
        if self.faults > 0 {
            steps.extend(self.faults(rules).into_iter().map(Step::Fault));
            if rules.operators {
                steps.extend(self.words().into_iter().map(Step::Word));
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
        let disk = self.hosts[host].place.as_ref().expect("it is open");
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
        let left = (0..CELLS).filter(|&cell| cell < usize::from(disk.length) && !moving.has[cell]);
        steps.extend(left.map(|cell| Step::Copy { host, cell }));
        let is_there = (0..usize::from(process.told)).all(|cell| moving.has[cell]);
        if is_there && !moving.is_flushed {
            steps.push(Step::FlushMirror(host));
        }
        if is_there && moving.is_flushed {
            steps.push(Step::Hold(host));
        }
    }

    /// It happens.
    pub fn go(&mut self, step: Step, rules: &Rules) {
        match step {
            Step::Start(host) => self.start(host, rules),
            Step::Look(host) => self.look(host, rules),
            Step::Write(host) => self.write(host),
            Step::Flush(host) => {
                self.disk(host).flush(true);
                self.flushed = self.acknowledged;
            }
            Step::Note(host) => self.note(host, rules),
            Step::Migrate { host, to, is_rescue } => self.migrate(host, to, is_rescue, rules),
            Step::Connect(host) => self.connect(host, rules),
            Step::Copy { host, cell } => self.copy_cell(host, cell),
            Step::FlushMirror(host) => self.flush_mirror(host, true, rules),
            Step::Hold(host) => self.hold(host),
            Step::Ask(host) => self.ask(host),
            Step::Deliver(which) => self.deliver(which, rules),
            Step::Grow(host) => self.grow(host, rules),
            Step::Decide { which, is_committed } => {
                self.agents[which].decision = Some(is_committed);
                self.agents[which].notes = [true; 2];
            }
            Step::Tell { which, side } => self.tell(which, side, rules),
            Step::Fault(fault) => self.fail(fault, rules),
            Step::Word(word) => self.say(word, rules),
        }
        self.letters.sort();
        self.letters.dedup();
        self.check();
    }

    fn write(&mut self, host: usize) {
        self.writes -= 1;
        self.values += 1;
        let value = self.values;
        let process = self.process_mut(host);
        let cell = usize::from(process.told) - 1;
        let moving = process.moving.clone();
        self.disk(host).write(cell, value);
        self.acknowledged[cell] = value;
        if let Some(moving) = moving {
            let has = moving.is_linked && moving.has[cell] && self.fills(moving.to, moving.session);
            if has {
                self.disk(moving.to).write(cell, value);
                self.process_mut(moving.to)
                    .filling
                    .as_mut()
                    .expect("it fills")
                    .is_flushed = false;
            }
            let moving = self.process_mut(host).moving.as_mut().expect("it moves");
            (moving.has[cell], moving.is_flushed) = (has, false);
        }
    }

    pub fn fills(&self, host: usize, session: u8) -> bool {
        let filling = self.process(host).and_then(|process| process.filling.as_ref());
        filling.is_some_and(|filling| filling.session == session) && self.hosts[host].place.is_some()
    }

    /// The copy is written down as suspect; who waits hears of it.
    fn note(&mut self, host: usize, rules: &Rules) {
        let Some(sidecar) = self.copy(host) else {
            self.process_mut(host).poison = Poison::Noted;
            self.hosts[host].is_flushing = false;
            return;
        };
        if let Some(suspect) = trust::failed(sidecar)
            && rules.quirk != Some(Quirk::ForgetsAtReopen)
            && rules.quirk != Some(Quirk::ComparesWithTheCache)
            && !self.put(host, Some(Record::Copy(suspect)), true)
        {
            return;
        }
        self.hosts[host].is_flushing = false;
        let process = self.process_mut(host);
        if process.trust.flushed() == May::Wait {
            process.trust.noted();
        }
        if process.poison == Poison::Unnoted {
            process.poison = Poison::Noted;
            let session = process.filling.as_ref().map(|filling| filling.session);
            // The source hears of it, if they are connected.
            for source in 0..self.hosts.len() {
                if let Some(process) = &mut self.hosts[source].process
                    && let Some(moving) = &process.moving
                    && moving.is_linked
                    && Some(moving.session) == session
                {
                    process.moving = None;
                }
            }
        }
    }

    fn migrate(&mut self, host: usize, to: usize, is_rescue: bool, rules: &Rules) {
        self.moves -= 1;
        let sidecar = self.copy(host).expect("it serves").clone();
        if trust::may_move(&sidecar, is_rescue).is_err() {
            return;
        }
        if rules.sessions && sidecar.suspect {
            return;
        }
        // A host of which an operator has said that it has not committed answers first.
        if all_overruled(&sidecar).any(|(_, other)| other == name(to))
            && rules.quirk != Some(Quirk::KeepsWithoutAsking)
        {
            return;
        }
        self.sessions += 1;
        let session = self.sessions;
        let by = rules.sessions.then_some(session);
        if let Some(by) = by {
            self.agents.push(Agents {
                by,
                from: host,
                to,
                is_promised: false,
                decision: None,
                notes: [false; 2],
            });
        }
        self.process_mut(host).moving = Some(Moving {
            session,
            to,
            is_rescue,
            by,
            is_linked: false,
            keeps: false,
            has: [false; CELLS],
            is_flushed: false,
        });
    }

    /// The source calls. A refusal ends the attempt.
    fn connect(&mut self, host: usize, rules: &Rules) {
        let moving = self
            .process(host)
            .and_then(|process| process.moving.clone())
            .expect("it moves");
        match self.offered(host, &moving, rules) {
            Some(keeps) => {
                let moving = self.process_mut(host).moving.as_mut().expect("it moves");
                (moving.is_linked, moving.keeps) = (true, true);
                if !keeps {
                    (moving.has, moving.is_flushed) = ([false; CELLS], false);
                }
            }
            None => self.process_mut(host).moving = None,
        }
    }

    /// Whether what was acknowledged so far counts; none: refused.
    fn offered(&mut self, from: usize, moving: &Moving, rules: &Rules) -> Option<bool> {
        let to = moving.to;
        let source = self.copy(from).expect("it serves");
        let offer = Offer {
            id: ID,
            session: session(moving.session),
            base: source.generation,
            length: source.length,
            from: name(from),
        };
        let process = self.process(to).expect("it runs");
        let poison = process.poison;
        let retries = rules.quirk == Some(Quirk::RetriesWithinTheSession);
        let is_same = matches!(self.copy(to), Some(Sidecar { role: Role::Incoming { session, .. }, .. }) if *session == offer.session);
        if is_same {
            if poison != Poison::None && !retries {
                return None;
            }
            self.process_mut(to).poison = Poison::None;
            let here = self.copy(to).expect("it is there").clone();
            let keeps = moving.keeps && trust::may_keep(&here, poison != Poison::None);
            let keeps = keeps || retries && moving.keeps;
            if !self.opens(to, offer.length, rules) {
                return None;
            }
            self.first(to, &here, rules);
            let compares = trust::may_compare(Here::Copy(&here));
            self.fill(to, moving.session, compares);
            return Some(keeps);
        }
        if poison == Poison::Unnoted {
            return None;
        }
        let before = self.here(to);
        let mut next = prepare(before, &offer).ok()?;
        let is_new = !matches!(before, Here::Copy(_));
        let length_before = match before {
            Here::Copy(here) => here.length,
            _ => 0,
        };
        let mut compares = trust::may_compare(before) && poison == Poison::None;
        if rules.quirk == Some(Quirk::ComparesWithTheCache) {
            compares = !is_new;
        }
        if rules.quirk == Some(Quirk::BaseProvesNothing) {
            next.floor = 0;
        }
        if is_new {
            // The file is made; what somebody has there otherwise is refused.
            if self.hosts[to].place.is_some() || self.hosts[to].away.is_some() {
                return None;
            }
        } else if !self.opens(to, length_before, rules) {
            return None;
        }
        if !self.put(
            to,
            Some(Record::Copy(next.clone())),
            rules.quirk == Some(Quirk::CommitNeedsRoom),
        ) {
            return None;
        }
        let length = offer.length as u8;
        let disk = self.hosts[to].place.get_or_insert_with(|| Disk::zeros(length));
        if disk.length < length {
            (disk.length, disk.has_rest) = (length, false);
        }
        self.first(to, &next, rules);
        self.process_mut(to).poison = Poison::None;
        self.fill(to, moving.session, compares);
        Some(false)
    }

    fn fill(&mut self, host: usize, session: u8, compares: bool) {
        self.process_mut(host).filling = Some(Filling {
            session,
            compares,
            is_flushed: false,
        });
        // Of several connections the last one counts.
        for source in 0..self.hosts.len() {
            if let Some(process) = &mut self.hosts[source].process
                && let Some(moving) = &mut process.moving
                && moving.to == host
                && moving.session != session
            {
                moving.is_linked = false;
            }
        }
    }

    fn copy_cell(&mut self, host: usize, cell: usize) {
        let value = self.disk(host).cache[cell];
        let moving = self.process_mut(host).moving.as_mut().expect("it moves");
        let (to, session) = (moving.to, moving.session);
        if !self.fills(to, session) {
            self.unlink(host);
            return;
        }
        let moving = self.process_mut(host).moving.as_mut().expect("it moves");
        moving.has[cell] = true;
        let filling = self.process_mut(to).filling.as_mut().expect("it fills");
        let compares = filling.compares;
        if compares && self.disk(to).cache[cell] == value {
            return;
        }
        self.disk(to).write(cell, value);
        self.process_mut(to)
            .filling
            .as_mut()
            .expect("it fills")
            .is_flushed = false;
    }

    pub fn unlink(&mut self, host: usize) {
        if let Some(process) = &mut self.hosts[host].process
            && let Some(moving) = &mut process.moving
        {
            (moving.is_linked, moving.is_flushed) = (false, false);
        }
    }

    /// The destination flushes, which succeeds or does not.
    pub fn flush_mirror(&mut self, host: usize, is_good: bool, rules: &Rules) {
        let moving = self
            .process(host)
            .and_then(|process| process.moving.clone())
            .expect("it moves");
        let to = moving.to;
        if !self.fills(to, moving.session) {
            return self.unlink(host);
        }
        self.disk(to).flush(is_good);
        let process = self.process_mut(to);
        if !is_good {
            process.poison = Poison::Unnoted;
            process.filling.as_mut().expect("it fills").is_flushed = false;
            self.hosts[to].is_flushing = true;
            return;
        }
        match process.poison {
            Poison::None => {
                process.filling.as_mut().expect("it fills").is_flushed = true;
                self.process_mut(host)
                    .moving
                    .as_mut()
                    .expect("it moves")
                    .is_flushed = true;
            }
            // It is told with the first one.
            Poison::Unnoted if rules.quirk != Some(Quirk::AnswersBeforeNoted) => {}
            Poison::Unnoted => {
                process.filling.as_mut().expect("it fills").is_flushed = true;
                self.process_mut(host)
                    .moving
                    .as_mut()
                    .expect("it moves")
                    .is_flushed = true;
            }
            Poison::Noted => self.process_mut(host).moving = None,
        }
    }

    /// The tenant is held, which is written down.
    fn hold(&mut self, host: usize) {
        let moving = self
            .process(host)
            .and_then(|process| process.moving.clone())
            .expect("it moves");
        let sidecar = self.copy(host).expect("it serves").clone();
        let is_rescue = moving.is_rescue;
        let to = name(moving.to);
        let next = match moving.by {
            Some(by) => held(&sidecar, session(moving.session), &to, by.into()),
            None => deciding(&sidecar, session(moving.session), &to, is_rescue),
        };
        let written = next.is_some_and(|next| self.put(host, Some(Record::Copy(next)), true));
        if !written || moving.by.is_none() {
            self.process_mut(host).moving = None;
        }
        if !written {
            return;
        }
        self.process_mut(host).is_open = false;
        let Some(by) = moving.by else {
            return;
        };
        // The destination promises, or not: an answer that is lost is one that was not given.
        self.process_mut(host).moving = None;
        if self.process(moving.to).is_none() {
            return;
        }
        let ask = Ask {
            id: ID,
            session: session(moving.session),
            base: sidecar.generation,
        };
        let is_complete = self.is_complete(moving.to, moving.session);
        if let Some(ready) = promised(self.here(moving.to), &ask, by.into(), is_complete)
            && self.put(moving.to, Some(Record::Copy(ready)), true)
        {
            self.process_mut(moving.to).filling = None;
            let agents = self
                .agents
                .iter_mut()
                .find(|agents| agents.by == by)
                .expect("it goes");
            agents.is_promised = agents.decision.is_none();
        }
    }

    fn is_complete(&self, host: usize, session: u8) -> bool {
        let process = self.process(host).expect("it runs");
        let filling = process.filling.as_ref();
        process.poison == Poison::None
            && filling.is_some_and(|filling| filling.session == session && filling.is_flushed)
    }

    fn ask(&mut self, host: usize) {
        let questions = self.questions(host);
        self.letters.extend(questions);
    }

    fn questions(&self, host: usize) -> Vec<Letter> {
        let Some(sidecar) = self.copy(host) else {
            return Vec::new();
        };
        let ask = |ask: Ask, to: &str, is_wish| Letter::Ask {
            from: host,
            to: to.parse().expect("a host"),
            session: ask.session.0 as u8,
            base: ask.base,
            is_wish,
        };
        let wishes = all_overruled(sidecar).map(|(question, to)| ask(question, to, true));
        let mut questions: Vec<_> = wishes.collect();
        if let Role::Deciding { session, to } = &sidecar.role {
            let question = Ask {
                id: ID,
                session: *session,
                base: sidecar.generation,
            };
            questions.push(ask(question, to, false));
        }
        questions
    }

    fn deliver(&mut self, which: usize, rules: &Rules) {
        match self.letters.remove(which) {
            Letter::Ask {
                from,
                to,
                session,
                base,
                is_wish,
            } => self.asked(from, to, session, base, is_wish, rules),
            Letter::Answer { to, session, answer } => {
                let answer = [Answer::Committed, Answer::NotCommitted, Answer::NotKnown][usize::from(answer)];
                self.answered(to, session, answer, rules);
            }
        }
    }

    fn asked(&mut self, from: usize, host: usize, number: u8, base: u64, is_wish: bool, rules: &Rules) {
        if self.process(host).is_none() {
            return;
        }
        let ask = Ask {
            id: ID,
            session: session(number),
            base,
        };
        let is_complete = !is_wish && self.is_complete(host, number);
        let mut verdict = answer(self.here(host), &ask, is_complete);
        // As the rule was before.
        if rules.quirk == Some(Quirk::BaseProvesNothing)
            && let Some(here) = self.copy(host)
            && here.generation <= base
            && matches!(&here.role, Role::Incoming { session, .. } if *session != ask.session)
        {
            verdict = Verdict::Say(Answer::NotCommitted);
        }
        let said = match verdict {
            Verdict::Refuse => return,
            Verdict::Say(answer) => answer,
            Verdict::WriteThenSay(next, answer) => {
                let has_room = rules.quirk != Some(Quirk::CommitNeedsRoom);
                let commits = next.may_serve();
                if !self.put(host, Some(Record::Copy(next)), has_room) {
                    return;
                }
                self.process_mut(host).filling = None;
                if commits {
                    self.committed(host, number, rules);
                }
                answer
            }
        };
        let answer = match said {
            Answer::Committed => 0,
            Answer::NotCommitted => 1,
            Answer::NotKnown => 2,
        };
        self.letters.push(Letter::Answer {
            to: from,
            session: number,
            answer,
        });
    }

    /// The copy there has become the one that serves.
    fn committed(&mut self, host: usize, session: u8, rules: &Rules) {
        self.committed.push(session);
        self.has_lied |= self.overruled.contains(&session);
        let length = self.copy(host).map_or(0, |here| here.length);
        // One that was cut, or is another, is not opened.
        let is_whole = |disk: &&Disk| disk.is_it && u64::from(disk.length) >= length;
        if !self.has_lied
            && let Some(disk) = self.hosts[host].place.as_ref().filter(is_whole)
        {
            let durable = disk.durable;
            // Of a rescue it is what there was.
            let is_rescue =
                (0..self.hosts.len()).any(|host| self.durable_copy(host).is_some_and(|here| here.suspect));
            for (cell, &value) in durable.iter().enumerate() {
                if value < self.flushed[cell] {
                    self.is_wrong(format!(
                        "{host} was committed without what was flushed in cell {cell}"
                    ));
                }
                if value < self.acknowledged[cell] && !is_rescue {
                    self.is_wrong(format!(
                        "{host} was committed without what was written to cell {cell}"
                    ));
                }
            }
            self.flushed = durable;
        }
        self.open(host, rules);
    }

    fn answered(&mut self, host: usize, number: u8, answer: Answer, rules: &Rules) {
        let Some(sidecar) = self.copy(host).cloned() else {
            return;
        };
        match heard(&sidecar, session(number), answer) {
            Heard::Nothing => {}
            Heard::Contradiction => self.is_shouted = true,
            Heard::Confirmed(next) => {
                self.put(host, Some(Record::Copy(next)), true);
            }
        }
        if !matches!(&sidecar.role, Role::Deciding { session, .. } if session.0 == u128::from(number)) {
            return;
        }
        if let Some(next) = decided(&sidecar, answer)
            && self.put(host, Some(Record::Copy(next)), true)
        {
            self.open(host, rules);
        }
    }

    fn grow(&mut self, host: usize, rules: &Rules) {
        let sidecar = self.copy(host).expect("it serves").clone();
        let process = self.process_mut(host);
        process.grows = true;
        if rules.quirk == Some(Quirk::TellsSizeFirst) {
            process.told = 2;
        }
        let now = Lengths {
            told: process.told.into(),
            sidecar: sidecar.length,
            data: self.disk(host).length.into(),
        };
        let step = match resize::next(now, 2) {
            resize::Step::Done if sidecar.length < 2 => resize::Step::WriteSidecar,
            step => step,
        };
        match step {
            resize::Step::GrowData => (self.disk(host).length, self.disk(host).has_rest) = (2, false),
            resize::Step::WriteSidecar => {
                let next = Sidecar { length: 2, ..sidecar };
                self.put(host, Some(Record::Copy(next)), false);
            }
            resize::Step::Announce => self.process_mut(host).told = 2,
            resize::Step::Done => {}
        }
        let (told, length) = (
            self.process(host).expect("it runs").told,
            self.copy(host).expect("it serves").length,
        );
        self.process_mut(host).grows = told < 2 || length < 2;
    }

    /// An agent tells its daemon.
    fn tell(&mut self, which: usize, side: usize, rules: &Rules) {
        let agents = self.agents[which].clone();
        let host = if side == 0 { agents.from } else { agents.to };
        if self.process(host).is_none() {
            return;
        }
        let is_committed = agents.decision.expect("it is decided");
        let is_heard = match settle(self.here(host), agents.by.into(), is_committed) {
            Settle::Unknown => rules.quirk == Some(Quirk::SettlesUnknown),
            Settle::NotFilled => false,
            Settle::Already | Settle::NotMine => true,
            Settle::Become(next) => {
                let serves = next.may_serve();
                let is_put = self.put(host, Some(Record::Copy(next)), true);
                if is_put {
                    if side == 1 && serves {
                        self.committed(host, agents.by, rules);
                    }
                    self.process_mut(host).filling = None;
                    self.open(host, rules);
                }
                is_put
            }
        };
        if is_heard {
            self.agents[which].notes[side] = false;
            let process = self.process_mut(host);
            if process
                .moving
                .as_ref()
                .is_some_and(|moving| moving.by == Some(agents.by))
            {
                process.moving = None;
            }
        }
    }
}

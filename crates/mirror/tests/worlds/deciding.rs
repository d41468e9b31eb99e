//! Decisions which copy serves: promises, questions and answers, and the agents' decisions.

use verbatim_mirror::decision::{
    Answer, Ask, Heard, Here, Offer, Record, Role, Verdict, all_overruled, answer, decided, deciding,
    has_left, heard, prepare,
};
use verbatim_mirror::together::{Settle, held, promised, settle};

use super::steps::{name, session};
use super::{Disk, ID, Letter, Path, Poison, Question, Quirk, Row, Rules, World, within};

impl World {
    /// Holds the tenant, and writes that down.
    pub(super) fn hold(&mut self, host: usize, rules: &Rules) {
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
        // The destination promises or refuses; a lost answer counts as none.
        self.process_mut(host).moving = None;
        if self.process(moving.to).is_none() {
            return;
        }
        let ask = Ask {
            id: ID,
            session: session(moving.session),
            base: sidecar.generation,
        };
        let is_complete = self.is_complete(moving.to, moving.session, rules);
        if let Some(ready) = promised(self.here(moving.to), &ask, by.into(), is_complete)
            && self.put(moving.to, Some(Record::Copy(ready)), true)
        {
            self.is_in_a_file(moving.to);
            self.process_mut(moving.to).filling = None;
            let agents = self
                .agents
                .iter_mut()
                .find(|agents| agents.by == by)
                .expect("it goes");
            agents.is_promised = agents.decision.is_none();
        }
    }

    /// A copy that is about to be the only one is in a file that a later process finds.
    fn is_in_a_file(&mut self, host: usize) {
        if self.hosts[host].path == Path::Nowhere {
            self.is_wrong(format!("{host} commits to a file that was deleted"));
        }
    }

    pub(super) fn is_complete(&self, host: usize, session: u8, rules: &Rules) -> bool {
        let process = self.process(host).expect("it runs");
        let filling = process.filling.as_ref();
        let is_deleted = self.hosts[host].path == Path::Nowhere;
        process.poison == Poison::None
            && (!is_deleted || rules.quirk == Some(Quirk::CommitsDeletedFile))
            && filling.is_some_and(|filling| filling.session == session && filling.is_flushed)
    }

    pub(super) fn ask(&mut self, host: usize) {
        let questions = self.questions(host);
        self.letters.extend(questions);
    }

    pub(super) fn questions(&self, host: usize) -> Vec<Letter> {
        let Some(sidecar) = self.copy(host) else {
            return Vec::new();
        };
        let ask = |ask: Ask, to: &str, question| Letter::Ask {
            from: host,
            to: to.parse().expect("a host"),
            session: ask.session.0 as u8,
            base: ask.base,
            question,
        };
        let wishes = all_overruled(sidecar).map(|(question, it)| match it.was_destination {
            true => ask(question, &it.to, Question::Leaves),
            false => ask(question, &it.to, Question::Wish),
        });
        let mut questions: Vec<_> = wishes.collect();
        if let Role::Deciding { session, to } = &sidecar.role {
            let question = Ask {
                id: ID,
                session: *session,
                base: sidecar.generation,
            };
            questions.push(ask(question, to, Question::Commits));
        }
        questions
    }

    pub(super) fn deliver(&mut self, which: usize, rules: &Rules) {
        match self.letters.remove(which) {
            Letter::Ask {
                from,
                to,
                session,
                base,
                question,
            } => self.asked((from, to), session, base, question, rules),
            Letter::Answer { to, session, answer } => {
                let takes = answer == 3;
                let answer =
                    [Answer::Committed, Answer::NotCommitted, Answer::NotKnown][usize::from(answer.min(2))];
                self.answered(to, session, answer, takes, rules);
            }
        }
    }

    pub(super) fn asked(
        &mut self,
        (from, host): (usize, usize),
        number: u8,
        base: u64,
        question: Question,
        rules: &Rules,
    ) {
        if self.process(host).is_none() {
            return;
        }
        let ask = Ask {
            id: ID,
            session: session(number),
            base,
        };
        let is_complete = question == Question::Commits && self.is_complete(host, number, rules);
        let mut verdict = match question {
            Question::Commits | Question::Wish => answer(self.here_before(host, rules), &ask, is_complete),
            Question::Leaves => has_left(self.here(host), &ask, &name(from)),
        };
        // As the rule was before.
        if rules.quirk == Some(Quirk::BaseProvesNothing)
            && let Some(here) = self.copy(host)
            && here.generation <= base
            && matches!(&here.role, Role::Incoming { session, .. } if *session != ask.session)
        {
            verdict = Verdict::Say(Answer::NotCommitted);
        }
        // As an earlier release says it.
        let is_promised = matches!(self.copy(host).map(|here| &here.role), Some(Role::Ready { .. }));
        if question != Question::Leaves && is_promised && verdict == Verdict::Refuse {
            verdict = Verdict::Say(Answer::NotKnown);
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
                    self.is_in_a_file(host);
                    self.committed(host, number, rules);
                }
                answer
            }
        };
        let answer = match said {
            Answer::Committed => 0,
            Answer::NotCommitted => 1,
            Answer::NotKnown => 2 + u8::from(question == Question::Wish && self.takes(from, host)),
        };
        self.letters.push(Letter::Answer {
            to: from,
            session: number,
            answer,
        });
    }

    /// The state of the copy for a question about this volume: another one of that name says nothing of it.
    fn here_before(&self, host: usize, rules: &Rules) -> Here<'_> {
        match &self.process(host).expect("it runs").row {
            Row::Known(Some(record @ Record::Gone { .. }))
                if rules.quirk != Some(Quirk::AnotherHidesTombstone) =>
            {
                Here::from(record)
            }
            _ => self.here(host),
        }
    }

    /// Whether it would take an offer of the copy at `from` as that is now: that host asks for it when it hears that nothing is known there.
    fn takes(&self, from: usize, host: usize) -> bool {
        let Some(source) = self.copy(from) else {
            return false;
        };
        let offer = Offer {
            id: ID,
            session: session(u8::MAX),
            base: source.generation,
            length: source.length,
            from: name(from),
        };
        prepare(self.here(host), &offer).is_ok()
    }

    /// The copy there has become the one that serves.
    pub(super) fn committed(&mut self, host: usize, session: u8, rules: &Rules) {
        self.committed.push(session);
        self.has_lied |= self.overruled.contains(&session);
        let length = self.copy(host).map_or(0, |here| here.length);
        if self.hosts[host].path == Path::Nowhere {
            // It had promised before the file was deleted.
            self.is_lost = true;
        }
        // A copy that was cut, or is another one, is not opened.
        let is_whole = |disk: &&Disk| disk.is_it && u64::from(disk.length) >= length;
        if !self.has_lied
            && let Some(disk) = self.hosts[host].place.as_ref().filter(is_whole)
        {
            let durable = disk.durable;
            // A rescue takes the data as they were.
            let is_rescue =
                (0..self.hosts.len()).any(|host| self.durable_copy(host).is_some_and(|here| here.suspect));
            for (cell, &value) in durable.iter().enumerate().take(length as usize) {
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
            self.flushed = within(durable, length);
        }
        self.open(host, rules);
    }

    pub(super) fn answered(&mut self, host: usize, number: u8, answer: Answer, takes: bool, rules: &Rules) {
        let Some(sidecar) = self.copy(host).cloned() else {
            return;
        };
        let takes = takes || rules.quirk == Some(Quirk::NotKnownConfirms);
        match heard(&sidecar, session(number), answer, takes) {
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

    /// An agent tells its daemon the decision.
    pub(super) fn tell(&mut self, which: usize, side: usize, rules: &Rules) {
        let agents = self.agents[which].clone();
        let host = if side == 0 { agents.from } else { agents.to };
        if self.process(host).is_none() {
            return;
        }
        let is_committed = agents.decision.expect("it is decided");
        let is_heard = match settle(self.here(host), agents.by.into(), is_committed) {
            Settle::Unknown => rules.quirk == Some(Quirk::SettlesUnknown),
            Settle::NotFilled if rules.quirk == Some(Quirk::GivenUpIsTold) => true,
            Settle::NotFilled => {
                // The daemon of the copy says that none serves.
                self.is_shouted |= side == 1;
                false
            }
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
            let is_given_up = self.copy(host).is_some_and(|here| here.role == Role::Incomplete);
            if side == 1 && is_committed && is_given_up && !self.committed.contains(&agents.by) {
                self.is_wrong(format!(
                    "{host} has given its copy up, and takes the commit for delivered"
                ));
            }
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

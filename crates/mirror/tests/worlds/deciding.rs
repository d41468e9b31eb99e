//! Decisions which copy serves: promises, questions and answers, and the agents' decisions.

use verbatim_mirror::decision::{
    Answer, Ask, Heard, Record, Role, Verdict, all_overruled, answer, decided, deciding, heard,
};
use verbatim_mirror::together::{Settle, held, promised, settle};

use super::steps::{name, session};
use super::{Disk, ID, Letter, Poison, Quirk, Rules, World};

impl World {
    /// Holds the tenant, and writes that down.
    pub(super) fn hold(&mut self, host: usize) {
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

    pub(super) fn is_complete(&self, host: usize, session: u8) -> bool {
        let process = self.process(host).expect("it runs");
        let filling = process.filling.as_ref();
        process.poison == Poison::None
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

    pub(super) fn deliver(&mut self, which: usize, rules: &Rules) {
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

    pub(super) fn asked(
        &mut self,
        from: usize,
        host: usize,
        number: u8,
        base: u64,
        is_wish: bool,
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
        let is_complete = !is_wish && self.is_complete(host, number);
        let mut verdict = answer(self.here(host), &ask, is_complete);
        // The rule of an earlier release.
        if rules.quirk == Some(Quirk::BaseProvesNothing)
            && let Some(here) = self.copy(host)
            && here.generation <= base
            && matches!(&here.role, Role::Incoming { session, .. } if *session != ask.session)
        {
            verdict = Verdict::Say(Answer::NotCommitted);
        }
        if rules.quirk == Some(Quirk::PromisedKnowsNothing) && verdict == Verdict::Refuse {
            let is_promised = matches!(self.copy(host).map(|here| &here.role), Some(Role::Ready { .. }));
            verdict = match is_promised {
                true => Verdict::Say(Answer::NotKnown),
                false => verdict,
            };
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

    /// The copy on this host has become the one that serves.
    pub(super) fn committed(&mut self, host: usize, session: u8, rules: &Rules) {
        self.committed.push(session);
        self.has_lied |= self.overruled.contains(&session);
        let length = self.copy(host).map_or(0, |here| here.length);
        // A copy that was cut, or is another one, is not opened.
        let is_whole = |disk: &&Disk| disk.is_it && u64::from(disk.length) >= length;
        if !self.has_lied
            && let Some(disk) = self.hosts[host].place.as_ref().filter(is_whole)
        {
            let durable = disk.durable;
            // A rescue takes the data as they were.
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

    pub(super) fn answered(&mut self, host: usize, number: u8, answer: Answer, rules: &Rules) {
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

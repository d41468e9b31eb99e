//! Decisions of operators, at any moment.

use verbatim_mirror::decision::{Keep, Record, Role, Tombstone, forced, revived};
use verbatim_mirror::{together, trust};

use super::steps::session;
use super::{CELLS, Folder, Medium, Path, Quirk, Row, Rules, Said, World, within};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    Delete(usize),
    /// By force: the data of the copy that would serve are gone.
    DeleteGone(usize),
    Keep(usize, bool),
    /// A suspect copy is good, or a sidecar of unknown age is right.
    Accept(usize),
    /// That all copies are lost that served after this one.
    Revive(usize),
    Cancel(usize),
    /// Another volume gets the name.
    Create(usize),
}

impl World {
    pub fn words(&self, rules: &Rules) -> Vec<Word> {
        let mut words = Vec::new();
        for host in 0..self.hosts.len() {
            let Some(process) = self.process(host) else {
                continue;
            };
            if process.row == Row::Unknown {
                words.extend([Word::Delete(host), Word::Accept(host)]);
                continue;
            }
            if self.may_delete(host) && !self.lacks_data(host) {
                words.push(Word::Delete(host));
            }
            let place = &self.hosts[host];
            let is_free = self.copy(host).is_none() && place.place.is_none() && place.away.is_none();
            if rules.names && is_free && !place.has_other {
                words.push(Word::Create(host));
            }
            if let Some(here) = self.copy(host) {
                if matches!(
                    here.role,
                    Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. }
                ) {
                    words.extend([Word::Keep(host, true), Word::Keep(host, false)]);
                }
                if here.suspect && here.may_serve() {
                    words.push(Word::Accept(host));
                }
                if matches!(here.role, Role::Moved { .. }) {
                    words.push(Word::Revive(host));
                }
            }
            if process.moving.is_some() {
                words.push(Word::Cancel(host));
            }
        }
        words
    }

    fn may_delete(&self, host: usize) -> bool {
        let process = self.process(host).expect("it runs");
        match &process.row {
            Row::Unknown => true,
            Row::Known(_) if self.hosts[host].has_other => true,
            Row::Known(None) => false,
            Row::Known(Some(Record::Gone { .. })) => true,
            Row::Known(Some(Record::Copy(here))) => match here.role {
                Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. } => false,
                Role::Serving => process.moving.is_none() && !process.grows,
                Role::Incoming { session, .. } => {
                    let is_linked = |source: usize| {
                        let moving = self.process(source).and_then(|process| process.moving.as_ref());
                        moving
                            .is_some_and(|moving| moving.is_linked && u128::from(moving.session) == session.0)
                    };
                    !(0..self.hosts.len()).any(is_linked)
                }
                Role::Moved { .. } | Role::Incomplete => true,
            },
        }
    }

    pub fn say(&mut self, word: Word, rules: &Rules) {
        self.faults -= u8::from(!matches!(word, Word::DeleteGone(_)));
        match word {
            Word::Delete(host) | Word::DeleteGone(host) => {
                self.delete(host, rules);
            }
            Word::Keep(host, is_source) => self.keep(host, is_source, rules),
            Word::Accept(host) => self.accept(host, rules),
            Word::Revive(host) => self.revive(host, rules),
            Word::Create(host) => {
                let place = &mut self.hosts[host];
                place.has_other = place.folder == Folder::Good && place.medium == Medium::Good;
            }
            Word::Cancel(host) => self.process_mut(host).moving = None,
        }
    }

    pub fn delete(&mut self, host: usize, rules: &Rules) -> bool {
        if self.hosts[host].has_other {
            let place = &mut self.hosts[host];
            place.has_other = !matches!(place.folder, Folder::Good | Folder::Full);
            return !place.has_other;
        }
        let here = self.copy(host).cloned();
        let durable = self.durable_copy(host).cloned();
        // By force; nothing more is lost by that.
        let lacks_data = self.lacks_data(host);
        let forgets = match rules.quirk {
            Some(Quirk::DeleteForgets) => true,
            Some(Quirk::DeleteOfGoneForgets) => lacks_data,
            _ => false,
        };
        let next = match &here {
            Some(here) if !forgets => Some(Record::Gone {
                gone: Tombstone::of(here),
            }),
            // The second deletion, or one of a copy whose state is unknown.
            _ => None,
        };
        if self.hosts[host].record == next {
            self.process_mut(host).row = Row::Known(next);
        } else if !self.put(host, next, true) {
            return false;
        }
        self.was_gone |= lacks_data;
        let knows_nothing = here.is_none();
        self.hosts[host].has_forgotten |= knows_nothing;
        self.is_lost |= durable.is_some_and(|here| {
            here.may_serve() && !lacks_data
                || knows_nothing && !matches!(here.role, Role::Moved { .. } | Role::Incomplete)
        });
        // A restored sidecar does not name lost data.
        self.is_lost |= knows_nothing && self.hosts[host].is_old;
        let place = &mut self.hosts[host];
        (place.place, place.away, place.path, place.is_old) = (None, None, Path::There, false);
        place.backup = None;
        let process = self.process_mut(host);
        (process.is_open, process.filling) = (false, None);
        true
    }

    pub fn keep(&mut self, host: usize, is_source: bool, rules: &Rules) {
        let here = self.copy(host).expect("it waits").clone();
        let number = match here.role {
            Role::Deciding { session, .. } => session.0 as u8,
            Role::Held { by, .. } | Role::Ready { by, .. } => {
                return self.keep_together(host, by as u8, is_source, rules);
            }
            _ => return,
        };
        let has_committed = self.committed.contains(&number);
        let keep = if is_source {
            Keep::Source
        } else {
            Keep::Destination
        };
        let mut next = forced(&here, keep).expect("it waits");
        if rules.quirk == Some(Quirk::KeepsWithoutRaising) {
            next.generation = here.generation;
        }
        if rules.quirk == Some(Quirk::LeavesWithoutAsking) && !is_source {
            next.overruled.clear();
        }
        let generation = next.generation;
        if self.put(host, Some(Record::Copy(next)), true) {
            match is_source {
                true => self.overruled.push(number),
                false => self.have_said(host, number, generation, false),
            }
            // A kept destination that never had all data leaves no copy that serves.
            self.has_lied |= is_source == has_committed;
            self.open(host, rules);
        }
    }

    fn have_said(&mut self, host: usize, session: u8, generation: u64, serves: bool) {
        self.said.push(Said {
            host,
            session,
            generation,
            serves,
        });
    }

    /// True if all copies that served after it are gone for good. Then the volume is what this one has.
    pub fn revive(&mut self, host: usize, rules: &Rules) {
        let here = self.copy(host).expect("it has left").clone();
        self.sessions += 1;
        let number = self.sessions;
        let mut next = revived(&here, session(number)).expect("it has left");
        if rules.quirk == Some(Quirk::RevivesWithoutAsking) {
            next.overruled.clear();
        }
        let generation = next.generation;
        let is_true = self.is_left_alone(host);
        if self.put(host, Some(Record::Copy(next)), true) {
            match is_true {
                true => {
                    let left = self.own_data(host).map(|disk| disk.durable);
                    self.flushed = within(left.unwrap_or_default(), here.length);
                }
                false => {
                    self.have_said(host, number, generation, true);
                    self.has_lied = true;
                }
            }
            self.open(host, rules);
        }
    }

    /// Whether the data of the volume were lost, and no other copy serves or is about to.
    fn is_left_alone(&self, host: usize) -> bool {
        let others = || (0..self.hosts.len()).filter(|&other| other != host);
        let is_about_to = |other: usize| {
            let here = self.hosts[other].last_copy();
            let is_one = here.is_some_and(|here| {
                !matches!(
                    here.role,
                    Role::Moved { .. } | Role::Incoming { .. } | Role::Incomplete
                )
            });
            is_one && !self.lacks_data(other)
        };
        let is_gone = self.was_gone || others().any(|other| self.lacks_data(other));
        is_gone && !others().any(is_about_to)
    }

    /// In the place of an agent. It is true if the session is decided so, and if all copies are told the same.
    fn keep_together(&mut self, host: usize, by: u8, is_source: bool, rules: &Rules) {
        let here = self.copy(host).expect("it waits").clone();
        let keep = match is_source {
            true => Keep::Source,
            false => Keep::Destination,
        };
        let mut next = together::forced(&here, keep).expect("it waits");
        let is_source_here = matches!(here.role, Role::Held { .. });
        let is_kept_source = is_source && is_source_here;
        if rules.quirk == Some(Quirk::KeepsTogetherWithoutAsking) && is_kept_source
            || rules.quirk == Some(Quirk::LeavesWithoutAsking) && !is_kept_source
        {
            next.overruled.clear();
        }
        let serves = next.may_serve();
        let generation = next.generation;
        if !self.put(host, Some(Record::Copy(next)), true) {
            return;
        }
        let agents = self.agents.iter_mut().find(|agents| agents.by == by);
        let agents = agents.expect("it goes");
        let said = !is_source;
        let is_other = |other: Option<bool>| other.is_some_and(|other| other != said);
        self.has_lied |= is_other(agents.decision) || is_other(agents.said);
        agents.said = Some(said);
        if is_kept_source {
            agents.kept = Some(generation);
            self.overruled.push(by);
        } else {
            self.have_said(host, by, generation, serves);
        }
        if serves && !is_source_here {
            self.process_mut(host).filling = None;
            self.committed(host, by, rules);
        }
        self.open(host, rules);
    }

    pub fn accept(&mut self, host: usize, rules: &Rules) {
        // All of a suspect copy is written again first.
        let is_refused = self.copy(host).is_some() && self.hosts[host].medium == Medium::ReadOnly;
        if is_refused {
            return;
        }
        // An operator's word is that what can be read is what there is.
        self.hosts[host].dropped = [0; CELLS];
        if self.serves(host) {
            let length = self.copy(host).expect("it serves").length;
            self.acknowledged = within(self.disk(host).cache, length);
        }
        if let Some(suspect) = self.copy(host).cloned() {
            if let Some(next) = trust::accepted(&suspect)
                && self.put(host, Some(Record::Copy(next)), true)
            {
                let is_so = self.hosts[host]
                    .place
                    .as_ref()
                    .is_some_and(|disk| disk.cache == disk.durable);
                self.has_lied |= !is_so;
                let process = self.process_mut(host);
                if process.is_open {
                    process.trust.is_accepted();
                }
            }
            return;
        }
        let record = self.hosts[host].record.clone();
        // The record describes an earlier state; its truth is unknown here.
        self.has_lied = true;
        self.hosts[host].is_old = false;
        self.process_mut(host).row = Row::Known(record);
        self.open(host, rules);
    }
}

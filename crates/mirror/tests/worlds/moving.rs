//! A copy is filled at another host.

use verbatim_mirror::decision::{Here, Offer, Record, Role, Sidecar, all_overruled, prepare};
use verbatim_mirror::trust;

use super::steps::{name, session};
use super::{Agents, CELLS, Disk, Filling, ID, Medium, Moving, Poison, Quirk, Rules, Value, World};

impl World {
    pub(super) fn migrate(&mut self, host: usize, to: usize, is_rescue: bool, rules: &Rules) {
        self.moves -= 1;
        let sidecar = self.copy(host).expect("it serves").clone();
        if trust::may_move(&sidecar, is_rescue).is_err() {
            return;
        }
        if rules.sessions && sidecar.suspect {
            return;
        }
        // A host of which an operator has said that it has not committed answers first.
        if all_overruled(&sidecar).any(|(_, it)| it.to == name(to) && !it.was_destination)
            && rules.quirk != Some(Quirk::KeepsWithoutAsking)
        {
            return;
        }
        // Clients that have not been told of a resize are told now.
        if rules.quirk != Some(Quirk::MovesWithToldLength) {
            self.process_mut(host).told = sidecar.length as u8;
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
                said: None,
                kept: None,
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
    pub(super) fn connect(&mut self, host: usize, rules: &Rules) {
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

    /// Whether acknowledgements so far count; `None` for a refusal.
    pub(super) fn offered(&mut self, from: usize, moving: &Moving, rules: &Rules) -> Option<bool> {
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
            if !self.opens(to, offer.length, false, rules) || !self.first_to_fill(to, rules) {
                return None;
            }
            let here = self.copy(to).expect("it is there").clone();
            let compares = trust::may_compare(Here::Copy(&here));
            self.fill(to, moving.session, compares);
            return Some(moving.keeps);
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
            // The file is made; a file of another owner is refused.
            let place = &self.hosts[to];
            if place.place.is_some() || place.away.is_some() || place.medium == Medium::ReadOnly {
                return None;
            }
        } else if !self.opens(to, length_before, false, rules) {
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
        if !self.first_to_fill(to, rules) {
            return None;
        }
        compares &= self.copy(to).is_some_and(|here| !here.suspect)
            || rules.quirk == Some(Quirk::ComparesWithTheCache);
        self.process_mut(to).poison = Poison::None;
        self.fill(to, moving.session, compares);
        Some(false)
    }

    pub fn fills(&self, host: usize, session: u8) -> bool {
        let filling = self.process(host).and_then(|process| process.filling.as_ref());
        filling.is_some_and(|filling| filling.session == session) && self.hosts[host].place.is_some()
    }

    pub(super) fn fill(&mut self, host: usize, session: u8, compares: bool) {
        self.hosts[host].dropped = [0; CELLS];
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

    pub(super) fn copy_cell(&mut self, host: usize, cell: usize, rules: &Rules) {
        let value = self.disk(host).cache[cell];
        let moving = self.process_mut(host).moving.as_mut().expect("it moves");
        let (to, session) = (moving.to, moving.session);
        if !self.fills(to, session) {
            self.unlink(host);
            return;
        }
        let filling = self.process_mut(to).filling.as_mut().expect("it fills");
        let is_same = filling.compares && self.disk(to).cache[cell] == value;
        if is_same || self.arrives((host, to), cell, value, rules) {
            let moving = self.process_mut(host).moving.as_mut().expect("it moves");
            moving.has[cell] = true;
        }
    }

    /// A chunk cannot be read: that ends the attempt.
    pub(super) fn cannot_read(&mut self, host: usize, cell: usize, rules: &Rules) {
        let moving = self.process_mut(host).moving.as_mut().expect("it moves");
        let (to, session) = (moving.to, moving.session);
        if rules.quirk != Some(Quirk::UnreadableIsZeros) {
            self.process_mut(host).moving = None;
        } else if self.fills(to, session) && self.arrives((host, to), cell, 0, rules) {
            let moving = self.process_mut(host).moving.as_mut().expect("it moves");
            moving.has[cell] = true;
        }
    }

    /// Data arrive at the destination. False if they cannot be written: that ends the attempt, and poisons this process.
    pub(super) fn arrives(
        &mut self,
        (host, to): (usize, usize),
        cell: usize,
        value: Value,
        rules: &Rules,
    ) -> bool {
        let takes = self.hosts[to].takes(cell, value);
        if takes {
            self.disk(to).write(cell, value);
        }
        let process = self.process_mut(to);
        process.filling.as_mut().expect("it fills").is_flushed = false;
        if takes || rules.quirk == Some(Quirk::FailedWriteCounts) {
            return true;
        }
        process.poison = Poison::Noted;
        self.process_mut(host).moving = None;
        if self.hosts[to].medium == Medium::Full {
            self.give_back(to);
        }
        false
    }

    /// There was no room: the copy is given up, and its room goes back.
    fn give_back(&mut self, host: usize) {
        let given_up = self.copy(host).expect("it is filled").given_up();
        if self.put(host, Some(Record::Copy(given_up)), true) {
            self.process_mut(host).filling = None;
            let disk = self.disk(host);
            (disk.durable, disk.cache, disk.is_dirty) = ([0; CELLS], [0; CELLS], [false; CELLS]);
        }
    }

    pub fn unlink(&mut self, host: usize) {
        if let Some(process) = &mut self.hosts[host].process
            && let Some(moving) = &mut process.moving
        {
            (moving.is_linked, moving.is_flushed) = (false, false);
        }
    }

    /// The destination flushes, with success or not.
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
            // The failure is reported with the first one.
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
}

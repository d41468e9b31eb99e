//! The way out of a world: everything is started and mounted again, and operators decide as the documentation
//! tells them.

use verbatim_mirror::decision::{Here, Keep, Record, Role, Sidecar};
use verbatim_mirror::together;

use super::{Folder, Medium, Path, Rules, Step, World};

/// More than any way out needs.
const LONG: usize = 300;

impl World {
    /// The fault in the way out of this world, if there is one.
    pub fn way_out(&self, rules: &Rules) -> Result<(), String> {
        if self.is_lost {
            return Ok(());
        }
        let rules = *rules;
        if self.has_lied {
            return self.is_told(&rules);
        }
        let mut world = self.clone();
        // Folders stay full, and processes go on: nothing may wait for room.
        if world
            .hosts
            .iter()
            .all(|host| matches!(host.folder, Folder::Good | Folder::Full) && host.medium != Medium::ReadOnly)
        {
            let mut full = world.clone();
            full.repair(false);
            full.settle(&rules)?;
            if !full.has_lied {
                full.is_served("with full folders", &rules)?;
            }
        }
        world.repair(true);
        world.settle(&rules)?;
        // A question may have been in flight when an operator decided.
        if world.has_lied {
            return world.is_told(&rules);
        }
        world.nobody_waits()?;
        let Some(host) = world.is_served("at last", &rules)? else {
            return Ok(());
        };
        if rules.sessions {
            return Ok(());
        }
        for to in (0..world.hosts.len()).filter(|&to| to != host) {
            let mut there = world.clone();
            there.moves_to(host, to, &rules)?;
        }
        Ok(())
    }

    /// A destination that has known the volume answers; and a commit that was told is followed.
    fn nobody_waits(&self) -> Result<(), String> {
        for host in 0..self.hosts.len() {
            let by = self.copy(host).and_then(promised_to);
            let told = self.agents.iter().find(|agents| Some(agents.by) == by);
            if told.is_some_and(|agents| agents.decision == Some(true) && agents.notes == [false; 2]) {
                return Err(format!(
                    "{host} was told that its session was committed, and waits for that"
                ));
            }
            if let Some(Role::Deciding { to, .. }) = self.copy(host).map(|here| &here.role) {
                let to: usize = to.parse().expect("a host");
                if !self.hosts[to].has_forgotten && self.here(to) != Here::Unknown {
                    return Err(format!("{host} waits for {to}, which has known it"));
                }
            }
        }
        Ok(())
    }

    pub(super) fn repair(&mut self, has_room: bool) {
        for place in &mut self.hosts {
            if has_room {
                (place.folder, place.medium) = (Folder::Good, Medium::Good);
            }
            if let Some(away) = place.away.take() {
                place.place = Some(away);
            }
            if place.path == Path::Elsewhere {
                place.path = Path::There;
            }
        }
        (self.faults, self.moves, self.writes) = (0, 0, 0);
    }

    /// Carries out everything that goes on by itself, to its end.
    pub(super) fn settle(&mut self, rules: &Rules) -> Result<(), String> {
        let quiet = Rules {
            grows: false,
            ..*rules
        };
        for _ in 0..LONG {
            for host in 0..self.hosts.len() {
                if let Some(process) = &mut self.hosts[host].process {
                    process.moving = None;
                    // A resize that has not ended was not told.
                    process.grows &= process.told > 1;
                }
            }
            let before = self.clone();
            let steps = self.steps(&quiet);
            let is_due = |step: &&Step| match step {
                Step::Start(_) | Step::Note(_) => true,
                // A copy that is being filled again does not learn the end of an old session, and nothing
                // waits for that.
                Step::Look(_) | Step::Tell { .. } => {
                    let mut tried = self.clone();
                    tried.go(**step, &quiet);
                    tried != *self
                }
                Step::Decide { is_committed, .. } => !is_committed,
                _ => false,
            };
            // Answers come before questions: otherwise these would be asked again and again. A host without
            // an answer blocks no other.
            let next = steps.iter().find(is_due).copied();
            let next = next.or(self.letters.len().checked_sub(1).map(Step::Deliver));
            let is_heard = |step: &&Step| matches!(step, Step::Ask(_)) && self.is_heard(**step, &quiet);
            let next = next.or_else(|| steps.iter().find(is_heard).copied());
            let Some(step) = next else {
                return self.well();
            };
            self.go(step, &quiet);
            self.well()?;
            if *self == before {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Whether an answer to this question changes anything.
    fn is_heard(&self, question: Step, rules: &Rules) -> bool {
        let mut world = self.clone();
        world.go(question, rules);
        for _ in 0..8 {
            if world.letters.is_empty() {
                break;
            }
            world.go(Step::Deliver(world.letters.len() - 1), rules);
        }
        world.letters.clear();
        world != *self
    }

    fn well(&self) -> Result<(), String> {
        match &self.wrong {
            Some(wrong) => Err(wrong.clone()),
            None => Ok(()),
        }
    }

    /// The host that serves, after the necessary decisions of operators. `None` if nothing is promised any
    /// more.
    fn is_served(&mut self, when: &str, rules: &Rules) -> Result<Option<usize>, String> {
        for _ in 0..2 {
            let serving = (0..self.hosts.len()).find(|&host| self.serves(host));
            if serving.is_some() {
                self.is_cleared(when, rules)?;
                return Ok(serving);
            }
            if (0..self.hosts.len()).any(|host| self.lacks_data(host)) || self.was_gone {
                return self.is_left(when, rules);
            }
            for host in 0..self.hosts.len() {
                if self.here(host) == Here::Unknown && self.hosts[host].is_old {
                    // The old sidecar may be wrong, and then nothing is promised.
                    return Ok(None);
                }
                // A promise that came after the end of its session gets no decision.
                let is_told = self.agents.iter().all(|agents| agents.notes == [false; 2]);
                if let Some(here) = self.copy(host).cloned()
                    && is_told
                    && let Some(by) = promised_to(&here)
                {
                    let is_committed = self
                        .agents
                        .iter()
                        .any(|it| it.by == by && it.decision == Some(true));
                    let keep = match is_committed {
                        true => Keep::Destination,
                        false => Keep::Source,
                    };
                    let next = together::forced(&here, keep).expect("it waits");
                    self.put(host, Some(Record::Copy(next)), true);
                    self.open(host, rules);
                }
                // The destination's disks are gone.
                if self
                    .copy(host)
                    .is_some_and(|here| matches!(here.role, Role::Deciding { .. }))
                {
                    let session = self.copy(host).and_then(|here| match here.role {
                        Role::Deciding { session, .. } => Some(session.0 as u8),
                        _ => None,
                    });
                    let has_committed = session.is_some_and(|session| self.committed.contains(&session));
                    if has_committed {
                        return Ok(None);
                    }
                    let to = self.copy(host).and_then(|here| match &here.role {
                        Role::Deciding { to, .. } => to.parse::<usize>().ok(),
                        _ => None,
                    });
                    // A host with the answer must have given it.
                    let knows = |to: usize| {
                        let has_record = self.hosts[to].record.is_some() || !self.hosts[to].has_other;
                        has_record && !matches!(self.here(to), Here::Nothing | Here::Unknown)
                    };
                    if to.is_some_and(knows) {
                        return Err(format!("{when}: {host} waits for a host that knows"));
                    }
                    self.keep(host, true, rules);
                }
            }
            self.settle(rules)?;
        }
        Err(format!("{when}: no copy serves"))
    }

    /// Operators delete, by force, copies whose data are gone for good. The copy that serves may hear that
    /// their hosts had the volume, and its operator says that they have it no more.
    fn is_cleared(&mut self, when: &str, rules: &Rules) -> Result<(), String> {
        for host in 0..self.hosts.len() {
            if self.lacks_data(host) && !self.delete(host, rules) {
                return Err(format!(
                    "{when}: the data of {host} are gone, and it cannot be deleted"
                ));
            }
        }
        self.settle(rules)?;
        self.nobody_waits()?;
        let serving = (0..self.hosts.len()).find(|&host| self.serves(host));
        if let Some(host) = serving.filter(|_| self.is_shouted) {
            let mut next = self.copy(host).expect("it serves").clone();
            next.overruled.clear();
            self.put(host, Some(Record::Copy(next)), true);
        }
        Ok(())
    }

    /// The data of the volume were lost: the youngest copy that stayed behind serves again. `None` if there
    /// is none.
    fn is_left(&mut self, when: &str, rules: &Rules) -> Result<Option<usize>, String> {
        self.is_cleared(when, rules)?;
        let is_whole = |host: &usize| {
            let here = self
                .copy(*host)
                .filter(|here| matches!(here.role, Role::Moved { .. }));
            here.is_some_and(|here| {
                let data = self.own_data(*host);
                data.is_some_and(|disk| u64::from(disk.length) >= here.length)
            })
        };
        let left = (0..self.hosts.len()).filter(is_whole);
        let Some(host) = left.max_by_key(|&host| self.copy(host).map(|here| here.generation)) else {
            return Ok(None);
        };
        self.revive(host, rules);
        self.is_cleared(when, rules)?;
        match self.serves(host) {
            true => Ok(Some(host)),
            false => Err(format!("{when}: {host} does not serve again")),
        }
    }

    /// Moves the volume, with the decisions that refusals ask for.
    fn moves_to(&mut self, host: usize, to: usize, rules: &Rules) -> Result<(), String> {
        let plain = Rules {
            grows: false,
            ..*rules
        };
        let mut way = Vec::new();
        self.letters.clear();
        for _ in 0..4 {
            let is_rescue = self.copy(host).is_some_and(|here| here.suspect);
            (self.moves, self.faults) = (1, 1);
            self.go(Step::Migrate { host, to, is_rescue }, &plain);
            for _ in 0..40 {
                let due = self.steps(&plain).into_iter().filter(|step| match step {
                    Step::Ask(who) => *who == host,
                    step => matches!(
                        step,
                        Step::Connect(_) | Step::Copy { .. } | Step::FlushMirror(_) | Step::Hold(_)
                    ),
                });
                // Questions come last: a host that does not know its own copy answers none, and is asked
                // forever. A move to another host does not wait for it.
                let due = due.min_by_key(|step| matches!(step, Step::Ask(_)));
                let letters = self.letters.len().checked_sub(1);
                let next = letters.map(Step::Deliver).or(due);
                let Some(step) = next else {
                    break;
                };
                way.push(step);
                self.go(step, &plain);
                self.well()?;
                if self.serves(to) {
                    return Ok(());
                }
            }
            self.well()?;
            if self.here(to) == Here::Nothing {
                // A file that is in the way is moved away.
                (self.hosts[to].place, self.hosts[to].away) = (None, None);
            }
            if self.here(to) != Here::Nothing && !self.serves(to) && self.serves(host) {
                let is_there = self.copy(to).is_none_or(|here: &Sidecar| !here.may_serve());
                if !is_there {
                    return Err(format!("{to} serves, too"));
                }
                self.delete(to, &plain);
                self.is_lost = false;
            }
        }
        Err(format!(
            "from {host} it does not move to {to}; {} steps",
            way.len()
        ))
    }
}

fn promised_to(here: &Sidecar) -> Option<u8> {
    match here.role {
        Role::Held { by, .. } | Role::Ready { by, .. } => Some(by as u8),
        _ => None,
    }
}

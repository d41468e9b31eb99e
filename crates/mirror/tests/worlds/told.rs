//! Reports of wrong decisions: two copies serve, or none, and the copy of that decision says so.

use verbatim_mirror::decision::{Overruled, Role, Sidecar, serves_by_word};

use super::{Rules, World};

impl World {
    /// After a wrong decision of an operator, the copy of that decision hears of the error.
    pub(super) fn is_told(&self, rules: &Rules) -> Result<(), String> {
        self.commit_is_missed(rules)?;
        let mut world = self.clone();
        let is_two = world
            .overruled
            .iter()
            .any(|session| world.committed.contains(session));
        // A host that has forgotten the session, or does not know its copy, cannot tell.
        let cannot = world.hosts.iter().any(|host| host.has_forgotten || host.is_old);
        if world.is_shouted || cannot {
            return Ok(());
        }
        if !is_two {
            return world.is_said(rules);
        }
        for host in 0..world.hosts.len() {
            let here = world.durable_copy(host);
            let is_older = |here: &Sidecar| {
                let mut kept = here.overruled.iter().filter(|it| !it.was_destination);
                serves_by_word(here) && kept.any(|it| here.generation <= it.base + 1)
            };
            if here.is_some_and(is_older) {
                return Err(format!(
                    "the copy that was kept at {host} is no younger than the other"
                ));
            }
        }
        // A source that has got a later copy no longer knows.
        let is_committed = |it: &Overruled| world.committed.contains(&(it.session.0 as u8));
        let kept = (0..world.hosts.len()).any(|host| {
            let here = world.durable_copy(host);
            here.is_some_and(|here| here.may_serve() && here.overruled.iter().any(is_committed))
        });
        // After a session of the agents the copy need not have a note, and has to learn it.
        let kept_together = world.agents.iter().any(|agents| {
            let here = world.durable_copy(agents.from);
            agents.kept.is_some()
                && here.is_some_and(|here| here.may_serve() && Some(here.generation) == agents.kept)
        });
        let kept = kept || kept_together;
        world.repair(true);
        world.settle(rules)?;
        let serves = |host: usize| world.serves(host);
        let both = (0..world.hosts.len()).filter(|&host| serves(host)).count() > 1;
        match both && !world.is_shouted && kept {
            true => Err("two copies serve, and nobody says so".into()),
            false => Ok(()),
        }
    }

    /// A commit whose copy was given up by a word is reported, and asked for until an operator ends that: the copy that has left serves
    /// again, and the one that was given up is deleted.
    fn commit_is_missed(&self, rules: &Rules) -> Result<(), String> {
        let mut world = self.clone();
        let misses = |world: &Self, which: usize| {
            let agents = &world.agents[which];
            let is_given_up = world
                .copy(agents.to)
                .is_some_and(|here| here.role == Role::Incomplete);
            agents.decision == Some(true) && agents.notes[1] && is_given_up
        };
        if !self
            .agents
            .iter()
            .any(|agents| agents.decision == Some(true) && agents.notes[1])
        {
            return Ok(());
        }
        world.repair(true);
        world.settle(rules)?;
        for which in 0..world.agents.len() {
            if !misses(&world, which) {
                continue;
            }
            let (from, to) = (world.agents[which].from, world.agents[which].to);
            if !world.is_shouted {
                return Err(format!(
                    "the session of {to} was committed, its copy was given up, and nobody says so"
                ));
            }
            let has_left =
                |here: &Sidecar| matches!(&here.role, Role::Moved { to: there } if *there == to.to_string());
            if world.copy(from).is_some_and(has_left) {
                world.revive(from, rules);
                if !rules.disks && !world.serves(from) {
                    return Err(format!("{from} has everything, and does not serve again"));
                }
            }
            world.delete(to, rules);
            world.settle(rules)?;
            if world.agents[which].notes[1] {
                return Err(format!("{to} is told for ever that its session was committed"));
            }
        }
        Ok(())
    }

    /// Of a copy that waited, or had left, an operator has said that it serves, or does not: if two serve then, or none, it says so.
    fn is_said(&mut self, rules: &Rules) -> Result<(), String> {
        self.repair(true);
        self.settle(rules)?;
        let waits = |host: usize| {
            let here = self.durable_copy(host);
            here.is_some_and(|here| {
                matches!(
                    here.role,
                    Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. }
                )
            })
        };
        // Somebody waits, which is seen; and that one gives no answer.
        if self.is_shouted || (0..self.hosts.len()).any(waits) {
            return Ok(());
        }
        let serving: Vec<_> = (0..self.hosts.len()).filter(|&host| self.serves(host)).collect();
        for said in &self.said {
            let Some(here) = self.durable_copy(said.host) else {
                continue;
            };
            let agents = self.agents.iter().find(|agents| agents.by == said.session);
            let is_destination = agents.is_some_and(|agents| agents.to == said.host);
            let is_as_said = here.generation == said.generation && here.may_serve() == said.serves;
            if !is_as_said {
                continue;
            }
            if said.serves && serving.len() > 1 && serving.contains(&said.host) {
                let other = match agents {
                    // Only its source is asked.
                    Some(agents) => serving.contains(&agents.from),
                    None => true,
                };
                if other {
                    return Err(format!(
                        "{} serves by a word, and another one, too: nobody says so",
                        said.host
                    ));
                }
            }
            let has_left = match is_destination {
                // The source has left, and this one was not to stay.
                true => agents.is_some_and(|agents| {
                    let source = self.durable_copy(agents.from);
                    let leaves = |source: &Sidecar| matches!(&source.role, Role::Moved { to } if *to == said.host.to_string());
                    here.role == Role::Incomplete && source.is_some_and(leaves)
                }),
                false => matches!(here.role, Role::Moved { .. }) && !self.committed.contains(&said.session),
            };
            if !said.serves && serving.is_empty() && has_left {
                return Err(format!(
                    "no copy serves by a word about {}, and nobody says so",
                    said.host
                ));
            }
        }
        Ok(())
    }
}

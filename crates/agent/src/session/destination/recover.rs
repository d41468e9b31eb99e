//! What an agent does that comes after one that took part in a session as its destination.

use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_session::decision::destination::{Action, Destination as Machine, Event, State};
use verbatim_session::recovery::Touches;

use super::{Destination, Destinations, Kept};
use crate::agent::Shared;
use crate::instances::Instance;
use crate::instances::home::Paths;
use crate::journal::Known;
use crate::keeper::Keeper;
use crate::standby::StandbyContext;

impl Destinations {
    /// Goes on where the earlier agent was cut off.
    pub fn take_up(agent: &Shared, known: &Known, touches: Option<Touches>) {
        let name = known.told.instance.as_deref().unwrap_or_default();
        let is_latest = agent.journal.latest(name) == Some((known.session, known.role));
        let would_be_here = is_latest && known.boot == agent.journal.boot();
        let (machine, actions) = Machine::recover(known.part.standing, would_be_here);
        if let State::Ended(_) = machine.state() {
            return;
        }
        let paths = Paths::new(&agent.config.runtime_dir, name);
        let mut destination = Destination::new(agent, known.session, &paths, machine, None);
        destination.partners = known.told.partners.clone();
        // The name is the session's until it is known what has become of the instance.
        destination.touches = touches;
        if touches.is_none_or(Touches::anything) {
            destination._reservation = agent.instances.reserve(name).ok();
        }
        let destination = Self::insert(agent, known.session, destination);
        let (agent, session) = (Arc::clone(agent), known.session);
        tokio::spawn(async move {
            let mut destination = destination.lock().await;
            debug_assert_eq!(actions, [Action::Probe]);
            let fact = destination.probe().await;
            destination.decide(Event::Fact(fact)).await;
            if destination.is_over() {
                agent.destinations.close(session);
            }
        });
    }
}

impl Destination {
    /// The instance runs here. What it needs to go on is at the keeper.
    pub(super) fn take_up(&mut self, instance: Arc<Instance>) -> anyhow::Result<()> {
        instance.home.attach()?;
        instance
            .home
            .gate()?
            .open_up()
            .context("the gate does not open")?;
        self.turn = Some(self.agent.turns.have(instance.name(), self.session));
        self._reservation = None;
        self.instance = Some(instance);
        let Some(keeper) = Keeper::find(&self.agent.config, self.session) else {
            tracing::error!(
                session = format!("{:016x}", self.session),
                "nobody has kept the instance's RNIC connections; it runs, but its connections are lost"
            );
            return Ok(());
        };
        for (label, fds) in keeper.take::<Kept>()? {
            match (label, fds.into_iter().next()) {
                (Kept::Context { pid, claimed }, Some(connection)) => {
                    let context = StandbyContext::take_over(connection, claimed);
                    self.contexts.push((pid, context));
                }
                (Kept::Context { .. }, None) => bail!("a connection is missing at the keeper"),
                (
                    Kept::Session {
                        keys,
                        moved,
                        partners,
                    },
                    _,
                ) => {
                    (self.keys, self.moved) = (keys, moved);
                    self.partners = partners;
                }
                (Kept::ToMake(to_make), _) => self.to_make = to_make,
            }
        }
        self.keeper = Some(keeper);
        Ok(())
    }
}

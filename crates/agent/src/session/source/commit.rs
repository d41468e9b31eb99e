//! The decision, and what is left to do after it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::task::JoinHandle;
use verbatim_channel::Endpoint;

use super::{Source, cancelled};
use crate::faults::Point;
use crate::forwarding::{self, Forward, Moved};
use crate::instances::home::Undecided;
use crate::journal::{Event, Role, Told};
use crate::peers::reason;
use crate::session::control::{Keep, Stage};

/// How long one question to the destination may take before it is asked again.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause before it is asked again.
const COMMIT_PAUSE: Duration = Duration::from_millis(200);

impl Source {
    /// The decision. Returns when it is known: an error means that the instance is the source's.
    ///
    /// While the destination is out of reach the instance stays frozen here, also if this agent dies; the destination
    /// knows from its journal what became of the question, so that it can be asked again at any time.
    pub(super) async fn commit(&mut self) -> anyhow::Result<()> {
        if self.watches.values().any(JoinHandle::is_finished) {
            // A host that lost sight of this one has undone its part, or will.
            bail!("another host lost this one, and with it the session; try again");
        }
        if self.pauses() {
            self.forward_resumes().await?;
        }
        if !self.control.decide() {
            return Err(cancelled());
        }
        let (to, name) = (self.request.destination.clone(), self.instance.name().to_owned());
        self.agent
            .journal
            .write(self.session, Role::Source, Event::Committed, Told::default())?;
        // Until the old place is cleared no new one may be made under its name.
        self.reservation = Some(self.agent.instances.reserve(&name)?);
        let (home, init_pid) = (&self.instance.home, self.instance.init_pid());
        let forward = self.forwarding();
        let dumped = self.dumped.as_mut().context("the instance is not frozen")?;
        let undecided = Undecided {
            session: self.session,
            destination: to.clone(),
            held: dumped.held_path(),
            forward: forward.clone(),
        };
        home.keep_record(init_pid, Some(undecided))?;
        dumped.hold().await?;
        self.pass(Point::SourceAsk).await?;
        self.ask().await?;
        self.committed = true;
        self.control.committed();
        // There is no way back any more: nothing that fails from here on may look like one.
        if let Err(error) = self.pass(Point::SourceCommitted).await {
            tracing::warn!("{error:#}");
        }
        self.journal(Event::Running, Told::default());
        self.timeline.running();
        self.instance.moved(&to);
        // Connections that ask for the instance here are sent on.
        self.agent.forwarding.insert(forward);
        self.hold = None;
        Ok(())
    }

    /// Asks the destination until it answers, or an operator decides. An error means that the instance is the source's.
    async fn ask(&self) -> anyhow::Result<()> {
        let (to, control) = (&self.request.destination, Arc::clone(&self.control));
        loop {
            let asked =
                async { tokio::time::timeout(COMMIT_TIMEOUT, self.destination().commit(self.id())).await };
            let answer = tokio::select! {
                answer = asked => answer,
                keep = control.resolved() => return resolved(keep),
            };
            match answer {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(status)) if status.code() == tonic::Code::FailedPrecondition => {
                    // The destination's own word that the tasks have not run, and will not.
                    bail!("{to} could not let the instance run: {}", reason(&status));
                }
                unknown => {
                    tracing::error!(
                        instance = self.instance.name(),
                        ?unknown,
                        "frozen until {to} says whether the instance runs there"
                    );
                    let doubt = format!(
                        "{to} is out of reach at the commit; the instance is frozen until it is known what {to} did"
                    );
                    if control.stage() != Stage::InDoubt {
                        self.note(&doubt);
                        let told = Told::error(&anyhow::anyhow!("{doubt}"));
                        self.agent.journal.note(self.session, Role::Source, told);
                    }
                    control.doubt();
                    tokio::select! {
                        () = tokio::time::sleep(COMMIT_PAUSE) => {}
                        keep = control.resolved() => return resolved(keep),
                    }
                }
            }
        }
    }

    /// Where the instance's queue pairs are found if it moves: by their numbers here.
    fn forwarding(&self) -> Vec<(u32, Forward)> {
        let Some(destination) = self.agent.peers.directory().host(&self.request.destination) else {
            return Vec::new();
        };
        let gid = destination.gid();
        let mut entries = Vec::new();
        for process in &self.processes {
            let pid = process.guest.pid;
            let keys = self.keys.iter().find(|(owner, _)| *owner == pid);
            let keys = keys.map(|(_, keys)| keys.clone()).unwrap_or_default();
            for qp in process.road_map.contexts.iter().flat_map(|context| &context.qps) {
                if let Some(new) = self.new_qp(pid, qp.qpn) {
                    let endpoint = Endpoint {
                        gid,
                        qpn: new.physical_qpn,
                    };
                    let keys = keys.clone();
                    entries.push((qp.physical_qpn, Forward { endpoint, keys }));
                }
            }
        }
        entries
    }

    /// Entries on other hosts that led to the instance here lead to where it is now, so that who asks for it asks once,
    /// however often it has moved.
    async fn retarget(&self) {
        let gid = self.agent.gid();
        let left = self.forwarding();
        let moved = left.into_iter().map(|(qpn, forward)| Moved {
            from: Endpoint { gid, qpn },
            to: forward.endpoint,
            keys: Some(forward.keys),
        });
        let moved: Vec<_> = moved.collect();
        let visited = self.record().visited.iter().map(String::as_str);
        if forwarding::tell(&self.agent, visited, &moved).await {
            // Nothing leads here but what was told a moment ago: older numbers of this host are not asked for.
            let keep = self.processes.iter().flat_map(|process| {
                let pid = process.guest.pid;
                let qps = process.road_map.contexts.iter().flat_map(|context| &context.qps);
                qps.map(move |qp| ((pid, qp.qpn), [qp.qpn, qp.physical_qpn]))
            });
            let keep: HashMap<_, _> = keep.collect();
            let by_place = self.new_qps.values().filter_map(|new| {
                let keep = keep.get(&(new.pid, new.qpn))?;
                let gid = self
                    .agent
                    .peers
                    .directory()
                    .host(&self.request.destination)?
                    .gid();
                let qpn = new.physical_qpn;
                Some((Endpoint { gid, qpn }, *keep))
            });
            self.agent.forwarding.prune(&by_place.collect());
        }
    }

    /// Removes what is left here: the frozen tasks, the old contexts, the place.
    pub(super) async fn reclaim(&mut self) {
        if let Err(error) = self.pass(Point::SourceReclaim).await {
            tracing::warn!("{error:#}");
        }
        self.retarget().await;
        // Closing the connections destroys the contexts.
        if let Some(keeper) = self.keeper.take() {
            keeper.end();
        }
        self.quiesced.clear();
        if let Some(dumped) = self.dumped.take()
            && let Err(error) = dumped.commit().await
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "removing the moved container"
            );
        }
        let instance = Arc::clone(&self.instance);
        let _ = tokio::task::spawn_blocking(move || instance.home.remove()).await;
        self.reservation = None;
    }
}

/// What an operator decided in the place of the hosts.
fn resolved(keep: Keep) -> anyhow::Result<()> {
    match keep {
        Keep::Destination => Ok(()),
        Keep::Source => bail!("an operator decided that the instance stays"),
    }
}

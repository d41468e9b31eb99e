//! The decision, and what is left to do after it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use verbatim_channel::{Endpoint, MovedEndpoint};
use verbatim_device::control::QpType;

use super::{Source, told};
use crate::journal::{Event, Role};
use crate::peers::reason;
use crate::proto;
use crate::session::encode;

/// How long one question to the destination may take before it is asked again.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause before it is asked again.
const COMMIT_PAUSE: Duration = Duration::from_millis(200);

/// How long the pause may be for those who send datagrams to the instance.
const DATAGRAMS_TIMEOUT: Duration = Duration::from_millis(200);

impl Source {
    /// The decision. Returns when it is known: an error means that the instance is the source's.
    ///
    /// While the destination is out of reach the instance stays frozen here, also if this agent dies; the destination
    /// knows from its journal what became of the question, so that it can be asked again at any time.
    pub(super) async fn commit(&mut self) -> anyhow::Result<()> {
        if self.watches.iter().any(JoinHandle::is_finished) {
            // A host that lost sight of this one has undone its part, or will.
            bail!("another host lost this one, and with it the session; try again");
        }
        let (to, name) = (self.request.destination.clone(), self.instance.name().to_owned());
        self.agent
            .journal
            .write(self.session, Role::Source, Event::Committed, &name, &to)?;
        // Until the old place is cleared no new one may be made under its name.
        self.reservation = Some(self.agent.instances.reserve(&name)?);
        let (home, init_pid) = (&self.instance.home, self.instance.init_pid());
        home.keep_record(init_pid, true)?;
        self.dumped
            .as_mut()
            .context("the instance is not frozen")?
            .hold()
            .await?;
        loop {
            match tokio::time::timeout(COMMIT_TIMEOUT, self.destination().commit(self.id())).await {
                Ok(Ok(_)) => break,
                Ok(Err(status)) if status.code() == tonic::Code::FailedPrecondition => {
                    // The destination's own word that the tasks have not run, and will not.
                    home.keep_record(init_pid, false)?;
                    bail!("{to} could not let the instance run: {}", reason(&status));
                }
                unknown => {
                    tracing::error!(
                        instance = name,
                        ?unknown,
                        "frozen until {to} says whether the instance runs there"
                    );
                    self.note(&format!(
                        "{to} is out of reach at the commit; the instance is frozen until it is known"
                    ));
                    tokio::time::sleep(COMMIT_PAUSE).await;
                }
            }
        }
        self.committed = true;
        self.timeline.running();
        self.instance.moved(&to);
        Ok(())
    }

    /// Both sides take the new queues; RECVs that nothing has consumed are posted.
    pub(super) async fn claim_and_switch(&mut self) -> anyhow::Result<()> {
        self.forward();
        let datagrams = crate::datagrams::tell_all(&self.agent, &self.moved_datagrams());
        let tables: HashMap<u32, u32> = self
            .keys
            .iter()
            .enumerate()
            .map(|(index, (pid, _))| (*pid, index as u32))
            .collect();
        let keys = encode(&self.keys.iter().map(|(_, keys)| keys).collect::<Vec<_>>());
        let switched = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let tables = partner.connections.iter().filter_map(|index| {
                let table = *tables.get(&self.connections[*index].pid)?;
                Some(proto::PartnerTable {
                    connection: *index as u32,
                    table,
                })
            });
            let request = proto::PartnerSwitchRequest {
                session: self.session,
                keys: keys.clone(),
                tables: tables.collect(),
            };
            async move {
                let reply = client.partner_switch(request).await;
                anyhow::Ok(told(&partner.host, "switch to the new connections", reply)?.count)
            }
        });
        let mut destination = self.destination();
        let claimed = destination.claim(self.id());
        let (switched, claimed) = tokio::join!(join_all(switched), claimed);
        // Who is slow to hear of it loses datagrams, and no more.
        let _ = tokio::time::timeout(DATAGRAMS_TIMEOUT, join_all(datagrams)).await;
        let claimed = told(
            &self.request.destination,
            "give the processes their queues",
            claimed,
        );
        for count in switched.into_iter().chain([claimed.map(|reply| reply.count)]) {
            self.replayed += count?;
        }
        Ok(())
    }

    /// The instance's datagram queue pairs, which anybody may send to.
    fn moved_datagrams(&self) -> Vec<MovedEndpoint> {
        let destination = self.agent.peers.directory().host(&self.request.destination);
        let Some(gid) = destination.map(|host| host.gid()) else {
            return Vec::new();
        };
        let mut moved = Vec::new();
        for process in &self.processes {
            for context in &process.road_map.contexts {
                let datagram = context.qps.iter().filter(|qp| qp.qp_type == QpType::Ud);
                moved.extend(datagram.filter_map(|qp| {
                    let new = self.new_qp(process.guest.pid, qp.qpn)?;
                    Some(MovedEndpoint {
                        known: Endpoint {
                            gid: context.gid,
                            qpn: qp.qpn,
                        },
                        now: Endpoint {
                            gid,
                            qpn: new.physical_qpn,
                        },
                        moves: context.moves + 1,
                    })
                }));
            }
        }
        moved
    }

    /// Connections that ask for the instance here are sent on.
    fn forward(&self) {
        let Some(destination) = self.agent.peers.directory().host(&self.request.destination) else {
            return;
        };
        let gid = destination.gid();
        for process in &self.processes {
            let pid = process.guest.pid;
            let keys = self
                .keys
                .iter()
                .find(|(owner, _)| *owner == pid)
                .map(|(_, keys)| keys.clone());
            for qp in process.road_map.contexts.iter().flat_map(|context| &context.qps) {
                if let Some(new) = self.new_qp(pid, qp.qpn) {
                    let endpoint = Endpoint {
                        gid,
                        qpn: new.physical_qpn,
                    };
                    let keys = keys.clone().unwrap_or_default();
                    self.agent
                        .forwarding
                        .insert(qp.physical_qpn, crate::forwarding::Forward { endpoint, keys });
                }
            }
        }
    }

    /// Lets the requests of both sides reach their RNICs.
    pub(super) async fn resume(&mut self) -> anyhow::Result<()> {
        let resumed = self.partners.iter().map(|partner| {
            let (mut client, id) = (partner.client.clone(), self.id());
            async move {
                let reply = client.partner_resume(id).await;
                anyhow::Ok(told(&partner.host, "resume its connections", reply)?.count)
            }
        });
        let mut destination = self.destination();
        let own = destination.resume(self.id());
        let (resumed, own) = tokio::join!(join_all(resumed), own);
        let own = told(
            &self.request.destination,
            "resume the instance's connections",
            own,
        );
        self.timeline.resumed();
        for count in resumed.into_iter().chain([own.map(|reply| reply.count)]) {
            let count = count?;
            self.intercepted += count;
            self.replayed += count;
        }
        Ok(())
    }

    /// Removes what is left here: the frozen tasks, the old contexts, the place.
    pub(super) async fn reclaim(&mut self) {
        // Closing the connections destroys the contexts.
        self.quiesced.clear();
        if let Some(dumped) = self.dumped.take()
            && let Err(error) = dumped.commit().await
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "removing the moved container"
            );
        }
        let instance = std::sync::Arc::clone(&self.instance);
        let _ = tokio::task::spawn_blocking(move || instance.home.remove()).await;
        self.reservation = None;
    }
}

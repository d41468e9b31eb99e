//! The decision, and what is left to do after it.

use std::collections::HashMap;

use anyhow::bail;
use futures_util::future::join_all;
use verbatim_channel::Endpoint;

use super::{Decision, Source, told};
use crate::journal::Event;
use crate::peers::reason;
use crate::proto;
use crate::session::encode;

/// How long the destination may be out of reach at the commit before the decision is left open.
const COMMIT_PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);

impl Source {
    /// The decision.
    pub(super) async fn commit(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        self.agent.journal.write(
            self.session,
            crate::journal::Role::Source,
            Event::Committed,
            self.record().name.as_str(),
            &to,
        )?;
        self.decision = Decision::Open;
        let deadline = tokio::time::Instant::now() + COMMIT_PATIENCE;
        loop {
            match self.destination().commit(self.id()).await {
                Ok(_) => break,
                Err(status) if status.code() == tonic::Code::FailedPrecondition => {
                    // The destination's own word that the tasks have not run.
                    self.decision = Decision::Source;
                    bail!("{to} could not let the instance run: {}", reason(&status));
                }
                Err(status) if tokio::time::Instant::now() > deadline => bail!(
                    "{to} was lost at the commit ({}): the instance stays frozen here until it is known whether it \
                     runs there",
                    reason(&status)
                ),
                // The same question again gets the same answer.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(200)).await,
            }
        }
        self.decision = Decision::Destination;
        self.timeline.running();
        self.instance.moved(&to);
        Ok(())
    }

    /// Both sides take the new queues; RECVs that nothing has consumed are posted.
    pub(super) async fn claim_and_switch(&mut self) -> anyhow::Result<()> {
        self.forward();
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
    }
}

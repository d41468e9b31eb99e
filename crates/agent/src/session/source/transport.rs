//! By which way memory goes to the destination.

use std::sync::Arc;

use anyhow::Context;
use verbatim_bulk::{Operation, Outgoing};

use super::Source;
use crate::load;
use crate::memory::transport::{Choice, Transport};
use crate::proto::OfferBulkRequest;
use crate::protocol::{BULK, FILE_ATTRIBUTES};
use crate::session::{decode, told};

/// By how many percent more the source's tasks must wait for their processors until the destination fetches what it gets.
const BUSIER_PERCENT: u32 = 10;

/// How memory would go from here to `to`, in words for an operator, if that is left to the list of hosts.
pub fn transport_note(agent: &crate::agent::Shared, to: &str) -> String {
    let choice = first(agent, crate::memory::transport::Wanted::Auto, to);
    format!(
        "memory goes over TLS unless asked otherwise; --memory-transport auto would take {}: {}",
        choice.transport, choice.reason
    )
}

fn first(agent: &crate::agent::Shared, wanted: crate::memory::transport::Wanted, to: &str) -> Choice {
    let directory = agent.peers.directory();
    let hosts = [Some(directory.own()), directory.host(to)];
    let untrusted: Vec<&str> = hosts
        .into_iter()
        .flatten()
        .filter(|host| !host.trusted_network)
        .map(|host| host.name.as_str())
        .collect();
    Choice::first(wanted, to, agent.peers.can(to, BULK), &untrusted)
}

impl Source {
    /// Chooses it, once the session is open there. Where RDMA cannot be, it is TLS, and the report says why.
    pub(super) async fn choose_transport(&mut self) {
        let pace = Arc::clone(&self.route.pace);
        // How busy the RNIC is shows in two looks.
        _ = tokio::task::spawn_blocking(move || pace.look()).await;
        let to = self.request.destination.clone();
        if self.agent.peers.can(&to, FILE_ATTRIBUTES) && !self.is_machine() {
            // QEMU makes its own sockets there, and is no restored process.
            self.files.send_everything();
        }
        self.route.packs = self.agent.peers.can(&to, BULK) && self.request.tuning.packs;
        let choice = match self.no_rdma.clone() {
            Some(why) => Choice::tls(why),
            None => first(&self.agent, self.request.transport, &to),
        };
        self.transport = match choice.transport {
            Transport::Tls => choice,
            Transport::Rdma => match self.offer_bulk().await {
                Ok(device) => Choice {
                    reason: format!("{}; by {device}", choice.reason),
                    ..choice
                },
                Err(error) => {
                    self.note(&format!(
                        "memory does not go by RDMA: {error:#}; going on with TLS"
                    ));
                    Choice::tls(format!("RDMA cannot be used: {error:#}"))
                }
            },
        };
        self.files.go_by(&self.route);
    }

    /// Makes this host's end of a connection and has the destination make its own. The name of this host's RNIC.
    async fn offer_bulk(&mut self) -> anyhow::Result<String> {
        let (rnic, tuning) = (Arc::clone(&self.agent.rnic), self.request.tuning);
        let own_load = load::waiting_percent();
        // Who carries is known only when the destination has told how busy it is.
        let opened = tokio::task::spawn_blocking(move || {
            let device = rnic.device()?;
            let options = tuning.options(tuning.operation.unwrap_or(Operation::Write));
            let (outgoing, offer) = Outgoing::open(&device, options)?;
            Ok::<_, verbatim_bulk::Error>((outgoing, offer, device.name().to_owned()))
        });
        let (mut outgoing, offer, name) = opened.await.context("making a connection panicked")??;
        let request = OfferBulkRequest {
            session: self.session,
            offer: postcard::to_allocvec(&offer)?,
        };
        let to = self.request.destination.clone();
        let answer = self.destination().offer_bulk(request).await;
        let answer = told(&to, "take memory by RDMA", answer)?;
        let accepted = decode(&answer.accepted).context("a malformed answer")?;
        if tuning.operation.is_none() && own_load > answer.waiting_percent + BUSIER_PERCENT {
            outgoing.have_it_fetched();
        }
        let accepting = tokio::task::spawn_blocking(move || {
            outgoing.accept(&accepted)?;
            anyhow::Ok(outgoing)
        });
        let outgoing = accepting.await.context("connecting panicked")??;
        self.route.pace.goes_by(outgoing.number());
        self.route.bulk.set(outgoing);
        Ok(name)
    }
}

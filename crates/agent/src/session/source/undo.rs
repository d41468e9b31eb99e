//! The way back: everything that an attempt did before the commit is undone, in an order in which no partner can see it.
//!
//! The instance first gets its queues and its RECVs back, then the partners resume on the old connections, and last the
//! instance's own requests flow: a message that arrives before its RECV would be refused with an RNR NAK, and those may
//! be counted.

use futures_util::future::join_all;
use verbatim_session::decision::Outcome;

use super::Source;
use crate::instances::machine::leaving;
use crate::proto::SessionId;
use crate::session::{behind, members};

/// How long another agent may take to undo its part; a dead one does not keep the instance waiting.
const ABORT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

impl Source {
    pub(super) async fn undo(&mut self) {
        // Before the tasks, which may wait for them at once.
        self.take_volumes_back().await;
        if let Some(dumped) = self.dumped.take()
            && let Err(error) = dumped.abort().await
        {
            tracing::error!(error = format!("{error:#}"), "thawing the instance");
        }
        if self.detached {
            self.detached = false;
            if let Err(error) = self.instance.home.attach() {
                tracing::error!(
                    error = format!("{error:#}"),
                    "attaching the instance's network again"
                );
            }
        }
        self.take_connections();
        self.timeline.running();
        let keeper = self.keeper.take();
        let returned = if std::mem::take(&mut self.gate_closed) {
            self.give_back().await
        } else {
            Vec::new()
        };
        self.abort_partners().await;
        if std::mem::take(&mut self.suspended) {
            // Which requests stay intercepted is told there.
            let _ = self.members().take_back(&returned).await;
        }
        if let Some(keeper) = keeper {
            keeper.end();
        }
        self.timeline.resumed();
        if let Some(checkpoint) = self.checkpoint.take()
            && let Err(error) = checkpoint.cancel().await
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "cancelling the checkpoint"
            );
        }
        // Its tracker goes with it, and its connection with QEMU, which serves one.
        if self.machine.take().is_some() {
            leaving::take_back(&self.instance).await;
        }
        behind::over(&self.agent, self.session, Outcome::RolledBack);
        self.ahead.clear(&self.instance.home.paths).await;
        if let Some(mut destination) = self.destination.take() {
            let abort = destination.abort(SessionId {
                session: self.session,
            });
            match tokio::time::timeout(ABORT_TIMEOUT, abort).await {
                Ok(Ok(_)) => {}
                failed => tracing::warn!(
                    ?failed,
                    "the destination did not confirm that it undid the session"
                ),
            }
        }
        if self.reservation.take().is_some()
            && let Err(error) = self.instance.home.keep_record(self.instance.init_pid(), None)
        {
            tracing::error!(
                error = format!("{error:#}"),
                "an agent that comes after this one is misled"
            );
        }
        self.hold = None;
        for (_, watch) in self.watches.drain() {
            watch.abort();
        }
    }

    /// Opens the gate and gives every process that waited there its own RNIC connections back. Returns which have them.
    async fn give_back(&mut self) -> Vec<u32> {
        let gate = self.instance.home.gate();
        if let Err(error) = gate.and_then(|gate| Ok(gate.open_up()?)) {
            tracing::error!(error = format!("{error:#}"), "the gate does not open");
        }
        let quiesced = std::mem::take(&mut self.quiesced);
        let returned = members::give_back(&self.agent, self.instance.name(), self.session, quiesced).await;
        // They have new channels.
        let guests = self.agent.guests.of_instance(self.instance.name());
        for process in &mut self.processes {
            if let Some(guest) = guests.iter().find(|guest| guest.pid == process.guest.pid) {
                process.guest = guest.clone();
            }
        }
        returned.into_iter().map(|(pid, _)| pid).collect()
    }

    async fn abort_partners(&mut self) {
        let session = self.session;
        let aborted = std::mem::take(&mut self.partners)
            .into_iter()
            .map(|mut partner| async move {
                let abort = partner.client.abort(SessionId { session });
                match tokio::time::timeout(ABORT_TIMEOUT, abort).await {
                    Ok(Ok(_)) => {}
                    failed => tracing::warn!(
                        host = partner.host,
                        ?failed,
                        "a partner did not confirm that it resumed"
                    ),
                }
            });
        join_all(aborted).await;
    }
}

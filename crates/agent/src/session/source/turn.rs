//! Waiting for moves at the other ends of the instance's connections ([`crate::turns`]).

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use verbatim_session::turns::keeps;

use super::{Source, told};
use crate::proto::{LetGoRequest, SessionId};

/// How long other moves are waited for.
const LIMIT: Duration = Duration::from_secs(120);

/// How long a host may take to note that this session lets go.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Others were waited for in vain.
#[derive(Debug, thiserror::Error)]
#[error("{others} still being moved after {LIMIT:?}; try again later")]
pub(super) struct StillMoved {
    others: String,
}

impl Source {
    /// Waits until nobody moves the other ends, and sees to it that it stays so. The road maps are those of then.
    pub(super) async fn take_turn(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut waiting_for = String::new();
        loop {
            if self.turn.is_none() {
                if let Some(other) = self.agent.turns.joined_by(self.instance.name()) {
                    self.note_wait(&mut waiting_for, &other);
                }
                let taken = self.agent.turns.take(self.instance.name(), self.session);
                let Ok(turn) = tokio::time::timeout(LIMIT, taken).await else {
                    let others = format!("instances that {} is connected with are", self.instance.name());
                    return Err(StillMoved { others }.into());
                };
                self.turn = Some(turn);
            }
            self.describe().await?;
            self.find_partners().await?;
            let Some((host, other)) = self.join_partners().await? else {
                return Ok(());
            };
            if begun.elapsed() > LIMIT {
                let others = format!("{other}, at the other end of a connection, is");
                return Err(StillMoved { others }.into());
            }
            self.note_wait(&mut waiting_for, &other);
            // Programs that ask where its queue pairs are get their answers: the other move may wait for those.
            self.hold = None;
            if !keeps(&self.instance.name(), &other.as_str()) {
                self.let_go().await;
            }
            let mut client = self.agent.peers.connect(&host).await?;
            let request = LetGoRequest {
                instance: other,
                session: self.session,
            };
            told(&host, "tell when a move has ended", client.let_go(request).await)?;
        }
    }

    /// Tells once that `other` is waited for.
    fn note_wait(&self, waiting_for: &mut String, other: &str) {
        if waiting_for != other {
            self.note(&format!(
                "{other}, at the other end of a connection, is being moved; going on when that has ended"
            ));
            other.clone_into(waiting_for);
        }
    }

    /// Joins the other ends at their hosts, or says which of them is being moved, and where.
    async fn join_partners(&self) -> anyhow::Result<Option<(String, String)>> {
        let joined = self.partners.iter().map(|partner| {
            let (mut client, request) = (partner.client.clone(), self.partner_request(partner));
            async move {
                let reply = client.partner_join(request).await;
                let reply = told(&partner.host, "join the move", reply)?;
                anyhow::Ok((!reply.moving.is_empty()).then(|| (partner.host.clone(), reply.moving)))
            }
        });
        let joined: anyhow::Result<Vec<_>> = join_all(joined).await.into_iter().collect();
        Ok(joined?.into_iter().flatten().next())
    }

    /// Another session goes first.
    async fn let_go(&mut self) {
        let session = self.session;
        let left = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            async move {
                let left =
                    tokio::time::timeout(LEAVE_TIMEOUT, client.partner_leave(SessionId { session })).await;
                if !matches!(left, Ok(Ok(_))) {
                    // It notices the end of this session.
                    tracing::warn!(host = partner.host, ?left, "did not note that this session waits");
                }
            }
        });
        join_all(left).await;
        self.turn = None;
    }
}

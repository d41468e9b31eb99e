//! Who may ask for what.
//!
//! [`rule`] has one line for each RPC that agents offer each other, and no RPC is without one: its argument is made from the
//! descriptor of the service. A request reaches its handler only through [`Agent::admit`], which asks three things:
//!
//! 1. Which host calls? Its certificate says so ([`caller::identify`]), and nothing that a message says.
//! 2. What does the message say of the caller ([`Says`])? It may call itself nobody else, and speak for no queue pairs but its own.
//! 3. Does the rule let that host ask, in this session? Which hosts take part in a session, and as what, this host knows from its
//!    journal ([`Parties`]), so that an agent that comes after this one knows it, too; and, before there is anything in the
//!    journal, from the call by which the source watches the session.
//!
//! A number that a session has, or had, is its source's: no other host begins anything under it here.

#[cfg(test)]
mod matrix;
mod says;

use std::collections::BTreeSet;

use tonic::{Request, Status};
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_session::record::Standing;

use crate::agent::Agent;
use crate::caller;
use crate::directory::HostEntry;
use crate::rpcs::PeerRpc;
pub use says::Says;

/// Who may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Any host of the directory.
    Host,
    /// A host on which all the queue pairs lie that the request speaks for.
    Owner,
    /// The host that the request names as the source of a move, and on which the moving ends lie. Nothing is begun.
    NamedSource,
    /// The host that watches the session, which nobody else does: the number is free, or the caller's already.
    Begins,
    /// The session's source, which the request names, and on which the moving ends lie.
    Opens,
    /// The session's source.
    Source,
    /// The session's source. For a session that is not known here there is nothing to do, whoever asks.
    SourceOrNothing,
    /// The session's source. When that is gone, and the instance is the destination's: the destination.
    SourceOrSuccessor,
    /// The session's destination.
    Destination,
    /// A party of the session: its source, its destination, a partner's host. A session that is not known here is unknown to
    /// whoever asks.
    Party,
}

/// The rule for each RPC.
pub fn rule(rpc: PeerRpc) -> Rule {
    match rpc {
        PeerRpc::Hello | PeerRpc::Gids | PeerRpc::Resolve => Rule::Host,
        // The entries that it changes are those that lead to the caller.
        PeerRpc::Retarget => Rule::Host,
        PeerRpc::Publish | PeerRpc::Moved | PeerRpc::FindPartners => Rule::Owner,
        PeerRpc::ConfirmPeers | PeerRpc::PeersGone => Rule::Owner,
        PeerRpc::ShareSecrets | PeerRpc::PauseEnds | PeerRpc::ResumeEnds => Rule::Owner,
        PeerRpc::CheckInstance | PeerRpc::CheckPartner | PeerRpc::MeasureDrain => Rule::NamedSource,
        PeerRpc::Watch => Rule::Begins,
        PeerRpc::Open | PeerRpc::PartnerJoin | PeerRpc::PartnerPrepare => Rule::Opens,
        PeerRpc::Place | PeerRpc::OfferBulk | PeerRpc::PlaceLanded => Rule::Source,
        PeerRpc::PreSetup | PeerRpc::ConnectStandby => Rule::Source,
        PeerRpc::PrepareRestore | PeerRpc::Restore | PeerRpc::Commit => Rule::Source,
        PeerRpc::PartnerSuspend | PeerRpc::PartnerDrain => Rule::Source,
        PeerRpc::PartnerStop | PeerRpc::PartnerSettle | PeerRpc::LetGo => Rule::Source,
        PeerRpc::Abort | PeerRpc::PartnerLeave => Rule::SourceOrNothing,
        PeerRpc::Claim | PeerRpc::Resume => Rule::SourceOrSuccessor,
        // What is made again at the destination is connected after the decision, by whoever drives the session then.
        PeerRpc::PartnerConnect => Rule::SourceOrSuccessor,
        PeerRpc::PartnerSwitch | PeerRpc::PartnerResume => Rule::SourceOrSuccessor,
        PeerRpc::Outcome => Rule::Party,
        PeerRpc::Lack => Rule::Source,
        PeerRpc::ReadBehind | PeerRpc::LendBehind => Rule::Destination,
    }
}

/// Who takes part in a session, as far as this host knows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Parties {
    source: String,
    destination: Option<String>,
    partners: BTreeSet<String>,
    /// The source is there.
    watched: bool,
    /// This host is the destination, and the instance is its own.
    arrived: bool,
}

/// A request that was admitted.
pub struct Admitted<T> {
    /// The host that asks.
    pub caller: HostEntry,
    /// What it asks.
    pub message: T,
}

impl Agent {
    /// The only way to the message of a request: if its sender may ask that.
    pub async fn admit<T: Says>(&self, rpc: PeerRpc, request: Request<T>) -> Result<Admitted<T>, Status> {
        let caller = caller::identify(&request, self.peers.directory())?.clone();
        let message = request.into_inner();
        self.permit(rpc, &caller, &message).await?;
        Ok(Admitted { caller, message })
    }

    /// May `caller` send this message?
    pub async fn permit(&self, rpc: PeerRpc, caller: &HostEntry, message: &impl Says) -> Result<(), Status> {
        let permitted = self.judge(rpc, caller, message).await;
        if let Err(status) = &permitted {
            let (rpc, host) = (rpc.name(), &caller.name);
            tracing::warn!(rpc, host, reason = status.message(), "not admitted");
        }
        permitted
    }

    async fn judge(&self, rpc: PeerRpc, caller: &HostEntry, message: &impl Says) -> Result<(), Status> {
        if let Some(source) = message.source() {
            caller::is_source(caller, source)?;
        }
        let ends = message.ends()?;
        if !ends.is_empty() {
            let gids = self.gids_among(caller, ends.iter().map(|end| end.gid)).await;
            caller::owns(caller, &gids, &ends)?;
        }
        let rule = rule(rpc);
        if matches!(rule, Rule::Host | Rule::Owner | Rule::NamedSource) {
            return Ok(());
        }
        let session = message
            .session()
            .ok_or_else(|| Status::invalid_argument("a request of a session without its number"))?;
        let parties = self.parties(session);
        if may(rule, caller, parties.as_ref(), self.name())? {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "{} asks {} in session {session:016x}, in which it has no such part",
            caller.name,
            rpc.name()
        )))
    }

    /// Who takes part in a session; `None` if it is not known here.
    fn parties(&self, session: u64) -> Option<Parties> {
        let parts = self.journal.parts(session);
        let watched = self.watched.by(session);
        let source = parts.iter().find_map(|part| part.told.source.clone());
        let mut parties = Parties {
            source: source.or_else(|| watched.clone())?,
            watched: watched.is_some(),
            ..Parties::default()
        };
        for part in parts {
            if part.role == Role::Destination {
                parties.arrived = matches!(
                    part.part.standing,
                    Standing::Committed | Standing::Ran | Standing::Closed(Outcome::Committed)
                );
            }
            parties.destination = parties.destination.or(part.told.destination);
            parties.partners.extend(part.told.partners);
        }
        Some(parties)
    }
}

/// Whether a rule lets `caller` ask in a session with these parties, at the host `own`.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
fn may(rule: Rule, caller: &HostEntry, parties: Option<&Parties>, own: &str) -> Result<bool, Status> {
    let Some(parties) = parties else {
        return match rule {
            Rule::Begins | Rule::SourceOrNothing | Rule::Party => Ok(true),
            _ => Err(Status::not_found(format!(
                "{own} knows no such session (any more); was its journal lost with a restart of the machine?"
            ))),
        };
    };
    let name = &caller.name;
    let is_source = parties.source == *name;
    let is_destination = parties.destination.as_ref() == Some(name);
    Ok(match rule {
        Rule::Host | Rule::Owner | Rule::NamedSource => true,
        Rule::Begins | Rule::Opens | Rule::Source | Rule::SourceOrNothing => is_source,
        Rule::SourceOrSuccessor => {
            // The destination knows what became of the instance; a partner knows that nobody else finishes the session.
            let succeeds = match name == own {
                true => parties.arrived,
                false => !parties.watched,
            };
            is_source || (is_destination && succeeds)
        }
        Rule::Destination => is_destination,
        Rule::Party => is_source || is_destination || name == own || parties.partners.contains(name),
    })
}

//! Who may send what in a session.
//!
//! A host is known by its certificate, never by what a message says. Which hosts are a session's source, destination and
//! partners, its first message says, and the journal keeps.

use strum::{IntoStaticStr, VariantArray};

use crate::Role;

/// What one party of a session sends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
pub enum Message {
    /// To a destination: a step before the decision.
    Prepare,
    /// To a destination: the decision.
    Commit,
    /// To all: the session is rolled back.
    Abort,
    /// To all: what is known of the decision?
    Outcome,
    /// To a partner: a step before the decision.
    Quiesce,
    /// To all after the decision: change to the new connections, let requests flow.
    Switch,
}

/// What the sender is to the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
pub enum Party {
    /// Its source.
    Source,
    /// Its destination.
    Destination,
    /// The host of a partner.
    Partner,
    /// A host of the cluster that does not take part.
    Stranger,
}

/// Whether a host that is `party` to a session may send `message` to one whose part is `to`.
pub fn may(party: Party, message: Message, to: Role) -> bool {
    match (message, party) {
        (Message::Prepare | Message::Commit, Party::Source) => to == Role::Destination,
        (Message::Quiesce, Party::Source) => to == Role::Partner,
        (Message::Abort, Party::Source) => to != Role::Source,
        // A destination finishes in the place of a source that is gone; its own part it asks of itself.
        (Message::Switch, Party::Source | Party::Destination) => to != Role::Source,
        (Message::Outcome, Party::Source | Party::Destination | Party::Partner) => true,
        _ => false,
    }
}

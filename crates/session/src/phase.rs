//! Where a session stands, and a host's part in it.

use strum::{Display, EnumString, IntoStaticStr, VariantArray};

/// The phases of a session, in their order.
///
/// The papers' names (WaitBeforeStop, DumpRDMA and so on) are spans within phases, which resources report.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Display, EnumString, IntoStaticStr, VariantArray,
)]
pub enum Phase {
    /// The hosts agree that the session can begin; the place at the destination is made.
    Open,
    /// Memory is sent while the instance runs.
    Converge,
    /// The objects are made at the destination; runc and CRIU are started.
    Prepare,
    /// Nothing is in flight any more, or the connections are paused.
    Quiesce,
    /// The tasks do not run any more; their images are written.
    Freeze,
    /// The last pages and the images are sent.
    Transfer,
    /// The tasks are restored at the destination; they do not run yet.
    Restore,
    /// Everything that the decision relies on is looked at once more.
    Verify,
    /// The destination is asked to commit.
    Decide,
    /// Both ends change to the new connections.
    Switch,
    /// Requests reach the RNIC again.
    Resume,
    /// What is left at the source is removed.
    Reclaim,
}

/// A host's part in a session.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Display, EnumString, IntoStaticStr, VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum Role {
    /// The instance is here when the session begins.
    Source,
    /// The instance comes here.
    Destination,
    /// Programs with connections to the instance are here.
    Partner,
}

impl Role {
    /// Its name, as in the journal.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for phase in Phase::VARIANTS {
            assert_eq!(phase.to_string().parse(), Ok(*phase));
        }
        for role in Role::VARIANTS {
            assert_eq!(role.name().parse(), Ok(*role));
        }
    }
}

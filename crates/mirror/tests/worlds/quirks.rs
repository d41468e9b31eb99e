//! Faults that can be put back.

/// Faults of earlier code, each put back by one condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// After a failed flush the next session compares with the page cache.
    ComparesWithTheCache,
    /// A failed flush is forgotten when the data are opened again.
    ForgetsAtReopen,
    /// A connection of the same session goes on after a failed flush.
    RetriesWithinTheSession,
    /// A flush that a killed process has left without a result is not looked for.
    ForgetsCutOffFlush,
    /// A page cache that was dropped with the process is compared, and equals the disk.
    ComparesDroppedCache,
    /// The success of a simultaneous flush, or of a write, is answered before the failure is written down.
    AnswersBeforeNoted,
    /// An `Incoming` of a higher base proves nothing.
    BaseProvesNothing,
    /// A deletion leaves no tombstone, and the base of an offer is not noted.
    DeleteForgets,
    /// The deletion of a copy whose data are gone leaves none.
    DeleteOfGoneForgets,
    /// Opening makes missing data.
    OpenMakes,
    /// Opening cuts longer data.
    OpenCuts,
    /// Opening lengthens shorter data.
    OpenLengthens,
    /// Opening takes any data.
    OpenTakesAnother,
    /// A host that does not know its copy's state acknowledges a decision.
    SettlesUnknown,
    /// Each start writes the sidecar again.
    RewritesAtStart,
    /// A new size is announced before it is durable.
    TellsSizeFirst,
    /// The commit's sidecar needs room.
    CommitNeedsRoom,
    /// A copy that an operator keeps keeps its generation.
    KeepsWithoutRaising,
    /// A copy that an operator keeps no longer asks.
    KeepsWithoutAsking,
    /// The same for a copy in a session of the agents.
    KeepsTogetherWithoutAsking,
    /// A copy that an operator has made an old one, or a destination that he has decided, asks no more.
    LeavesWithoutAsking,
    /// An old copy that serves again asks nobody.
    RevivesWithoutAsking,
    /// A host that knows nothing is one without a copy.
    NotKnownConfirms,
    /// A sidecar that was restored is believed.
    BelievesOldSidecar,
    /// A copy that was given up takes a commit for delivered.
    GivenUpIsTold,
    /// A volume moves with the length that its clients know, after a resize that gave up.
    MovesWithToldLength,
    /// Another volume of the name hides the tombstone.
    AnotherHidesTombstone,
    /// A write at the destination that has failed counts as one that has not.
    FailedWriteCounts,
    /// A chunk that cannot be read is sent as zeros.
    UnreadableIsZeros,
    /// A copy is committed in a file that was deleted while it was filled.
    CommitsDeletedFile,
}

pub const QUIRKS: [Quirk; 30] = [
    Quirk::ComparesWithTheCache,
    Quirk::ForgetsAtReopen,
    Quirk::RetriesWithinTheSession,
    Quirk::ForgetsCutOffFlush,
    Quirk::ComparesDroppedCache,
    Quirk::AnswersBeforeNoted,
    Quirk::BaseProvesNothing,
    Quirk::DeleteForgets,
    Quirk::DeleteOfGoneForgets,
    Quirk::OpenMakes,
    Quirk::OpenCuts,
    Quirk::OpenLengthens,
    Quirk::OpenTakesAnother,
    Quirk::SettlesUnknown,
    Quirk::RewritesAtStart,
    Quirk::TellsSizeFirst,
    Quirk::CommitNeedsRoom,
    Quirk::KeepsWithoutRaising,
    Quirk::KeepsWithoutAsking,
    Quirk::KeepsTogetherWithoutAsking,
    Quirk::LeavesWithoutAsking,
    Quirk::RevivesWithoutAsking,
    Quirk::NotKnownConfirms,
    Quirk::BelievesOldSidecar,
    Quirk::GivenUpIsTold,
    Quirk::MovesWithToldLength,
    Quirk::AnotherHidesTombstone,
    Quirk::FailedWriteCounts,
    Quirk::UnreadableIsZeros,
    Quirk::CommitsDeletedFile,
];

//! What has been counted.

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that came and were understood.
    pub received: u64,
    /// Among them repetitions of what had been received before.
    pub duplicates: u64,
    /// Messages sent, each repetition too.
    pub sent: u64,
    /// Among them repetitions, by a timer or as an answer to one.
    pub resent: u64,
    /// Bytes that came and are no message.
    pub dropped_malformed: u64,
    /// Messages for ids that do not exist or do not wait for them.
    pub dropped_unexpected: u64,
    /// Requests beyond a listener's backlog.
    pub dropped_backlog: u64,
    /// Requests beyond [`crate::Limits`].
    pub dropped_limits: u64,
    /// Requests that were rejected without asking a program: no listener, stale, not supported.
    pub rejected: u64,
    /// Ids without an owner that were forgotten before their time.
    pub forgotten: u64,
}

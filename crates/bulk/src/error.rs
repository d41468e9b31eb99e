//! What can go wrong.

/// Why something did not work. After each of them the two sides are of no use to each other any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The RNIC, the network or the other side's RNIC.
    #[error(transparent)]
    Far(#[from] verbatim_far::Error),
    /// What arrived is not what was sent.
    #[error(
        "what arrived by RDMA is not what was sent: the first of {damaged} damaged pages is at {offset} of a run of {length} bytes"
    )]
    Damaged {
        /// How many pages.
        damaged: u64,
        /// The first of them, in bytes from the run's beginning.
        offset: u64,
        /// The run's length.
        length: u64,
    },
    /// The other side says what cannot be.
    #[error("the other side's word cannot be true: {0}")]
    Malformed(&'static str),
}

//! What the RNIC says to an index that cannot be.

/// A counter in shared memory claims more than the queue can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadIndex {
    /// What the other side wrote.
    pub claimed: u32,
    /// What this side has seen so far.
    pub seen: u32,
    /// How many slots there are.
    pub slots: u32,
}

impl std::fmt::Display for BadIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { claimed, seen, slots } = self;
        write!(
            f,
            "producer index {claimed} is more than {slots} slots ahead of {seen}"
        )
    }
}

impl std::error::Error for BadIndex {}

//! What reading a namespace finds.

use crate::state::State;

/// What is in a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Found {
    /// What moves.
    pub state: State,
    /// What does not, in words for an operator.
    pub obstacles: Vec<String>,
    /// What is another afterwards, in words for an operator.
    pub notes: Vec<String>,
}

//! Why a command was refused.

use crate::State;

/// Nothing has changed where one of these came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `ENOENT`.
    #[error("there is no such id")]
    NoSuchId,
    /// `EINVAL`.
    #[error("the id is {0}")]
    WrongState(State),
    /// `EINVAL`.
    #[error("{given} bytes of private data, of which there are at most {most}")]
    PrivateData {
        /// As many as were given.
        given: usize,
        /// As many as there is room for.
        most: usize,
    },
    /// `EINVAL`.
    #[error("{0}")]
    Invalid(&'static str),
    /// `EADDRINUSE`.
    #[error("somebody listens there")]
    InUse,
    /// `ENOMEM`.
    #[error("there are as many ids as there may be")]
    TooManyIds,
}

/// Why an id from elsewhere was not taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// Another id has its number here.
    #[error("the number {0} is another id's here")]
    Taken(crate::CommId),
    /// It does not hold together.
    #[error("the image is not valid: {0}")]
    Invalid(&'static str),
    /// Somebody listens there already.
    #[error("somebody listens there")]
    InUse,
    /// No room.
    #[error("there are as many ids as there may be")]
    TooManyIds,
}

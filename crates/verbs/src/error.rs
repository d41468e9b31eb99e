//! What can go wrong, each with the errno that a C caller gets.

use std::io;

use verbatim_device::control::{QpState, Reply};

/// Why a control verb failed.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// There is no such device.
    #[error("there is no device {name}; is the software RNIC running and its socket in {runtime}?")]
    NoDevice {
        /// What was asked for.
        name: String,
        /// The runtime folder.
        runtime: String,
    },
    /// The RNIC refused.
    #[error("{verb} was refused: {message}")]
    Refused {
        /// The verb.
        verb: &'static str,
        /// Its errno.
        errno: i32,
        /// Its words.
        message: String,
    },
    /// The RNIC answered something else than what was asked.
    #[error("the RNIC answered {verb} with {reply:?}")]
    WrongReply {
        /// The verb.
        verb: &'static str,
        /// The answer.
        reply: Box<Reply>,
    },
    /// The connection to the RNIC or the agent failed.
    #[error("{verb} failed: no answer from {peer}")]
    Channel {
        /// The verb.
        verb: &'static str,
        /// Who should have answered.
        peer: &'static str,
        /// Why not.
        #[source]
        source: verbatim_seqpacket::Error,
    },
    /// The object is still in use.
    #[error("{object} is still used by {users} other objects")]
    Busy {
        /// The object.
        object: String,
        /// How many use it.
        users: usize,
    },
    /// The program asked for something that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The object was destroyed already.
    #[error("{object} was destroyed")]
    Gone {
        /// The object.
        object: String,
    },
    /// The operating system refused.
    #[error("{call} failed")]
    Os {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// No backend here does that.
    #[error("{0}")]
    Unsupported(String),
    /// Bytes that are to be restored are no dump, or are damaged.
    #[error("this cannot be restored")]
    Dump(#[from] DumpError),
    /// The region's memory could not be made reachable for the RNIC.
    #[error("the memory of the region cannot be registered")]
    Memory(#[source] verbatim_adopt::AdoptError),
}

impl VerbsError {
    pub(crate) fn os(call: &'static str, errno: rustix::io::Errno) -> Self {
        Self::Os {
            call,
            source: errno.into(),
        }
    }

    /// Whether the RNIC is gone. A forked child, which has no connection, gets another error.
    pub(crate) fn is_loss_of_device(&self) -> bool {
        matches!(
            self,
            Self::Channel {
                source: verbatim_seqpacket::Error::Closed,
                ..
            }
        )
    }

    /// The positive errno for a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoDevice { .. } => libc::ENODEV,
            Self::Refused { errno, .. } => *errno,
            Self::WrongReply { .. } => libc::EPROTO,
            Self::Channel { source, .. } => source.errno(),
            Self::Busy { .. } => libc::EBUSY,
            Self::Invalid(_) | Self::Gone { .. } => libc::EINVAL,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Self::Dump(error) => error.errno(),
            Self::Memory(error) => error.errno(),
        }
    }
}

/// Why a work request was not taken. A small value, since a full queue is an everyday answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// As many requests are outstanding as the queue was made for.
    #[error("the queue is full; poll completions first")]
    Full,
    /// The queue pair's state does not allow it.
    #[error("a queue pair in {0:?} does not take this request")]
    State(QpState),
    /// More scatter/gather entries than the queue was made for.
    #[error("too many scatter/gather entries")]
    TooManyEntries,
    /// More inline data than the queue was made for.
    #[error("too much inline data")]
    InlineTooLong,
    /// The request is not for this queue: a RECV for a queue pair that takes them from a shared receive queue, a bind of
    /// a window of another type.
    #[error("this queue does not take such a request")]
    Invalid,
    /// The queue was destroyed, or its RNIC is gone.
    #[error("the queue's RNIC is gone")]
    Gone,
    /// The RNIC's library did not take it, with this errno.
    #[error("the RNIC's library refuses the request (errno {0})")]
    Refused(i32),
}

impl PostError {
    /// The positive errno for a C caller.
    #[inline]
    pub fn errno(self) -> i32 {
        match self {
            Self::Full => libc::ENOMEM,
            Self::State(_) | Self::TooManyEntries | Self::InlineTooLong | Self::Invalid => libc::EINVAL,
            Self::Gone => libc::EIO,
            Self::Refused(errno) => errno,
        }
    }
}

/// Why bytes are not a dump, or not a record, that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// Something else altogether.
    #[error("these bytes are no dump of a context")]
    NoDump,
    /// Made by a later release.
    #[error("it has version {0}, which is not known here")]
    Version(u16),
    /// Some bytes are not those that were written.
    #[error("it is damaged: its checksum is wrong")]
    Damaged,
    /// It is not so long as it says.
    #[error("its length is wrong")]
    Length,
    /// There are more records, or fewer, than it says.
    #[error("the number of its records is wrong")]
    Count,
    /// Of an object that there is not.
    #[error("there are no objects of type {0}")]
    Type(u16),
    /// The checksum is right, and yet the content cannot be.
    #[error("it cannot be restored: {0}")]
    Content(&'static str),
    /// More than 4 GiB of one object.
    #[error("it would be too long")]
    TooLong,
}

impl DumpError {
    /// The positive errno for a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Version(_) => libc::EPROTONOSUPPORT,
            Self::Damaged => libc::EBADMSG,
            Self::TooLong => libc::EFBIG,
            Self::NoDump | Self::Length | Self::Count | Self::Type(_) | Self::Content(_) => libc::EINVAL,
        }
    }
}

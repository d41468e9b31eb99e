//! What can go wrong.

use std::io;

/// Why a process cannot be tracked, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process has ended, or its memory has.
    #[error("it has ended")]
    Gone,
    /// It has become another program (execve), whose memory is another one.
    #[error("it has become another program")]
    Changed,
    /// One of its threads does not come out of the kernel.
    #[error("a thread does not leave the kernel ({tid}); what it waits for is in /proc/{tid}/stack")]
    Busy {
        /// The thread.
        tid: u32,
    },
    /// Somebody else traces it.
    #[error("it is traced by somebody else, a debugger for one; end that")]
    Traced,
    /// It is a 32-bit program.
    #[error("it runs 32-bit code, into which no system call can be put")]
    ThirtyTwoBit,
    /// The process refused the userfaultfd.
    #[error("it gets no userfaultfd: {0}")]
    Refused(#[source] io::Error),
    /// Anything else.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// What an error of the system means where a process is looked at that may end at any time.
    pub(crate) fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            Some(libc::ESRCH) => Self::Gone,
            _ if source.kind() == io::ErrorKind::NotFound => Self::Gone,
            _ => Self::Io { what, source },
        }
    }
}

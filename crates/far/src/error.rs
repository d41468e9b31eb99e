//! What can go wrong.

use verbatim_verbs::VerbsError;

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This host has no RNIC.
    #[error(
        "this host has no RNIC{}: neither one that the kernel drives (`rdma link` lists them) nor the software RNIC at {runtime}; \
         start `verbatim nic`",
        name.as_ref().map(|name| format!(" {name}")).unwrap_or_default()
    )]
    NoDevice {
        /// The name that it should have.
        name: Option<String>,
        /// Where it was looked for.
        runtime: String,
    },
    /// A verb failed.
    #[error("{what}: {source}")]
    Verbs {
        /// What was to be done.
        what: &'static str,
        /// Why it cannot be.
        #[source]
        source: VerbsError,
    },
    /// A request failed, and with it the connection.
    #[error("{request} of {bytes} bytes failed ({status}); the connection is of no use any more")]
    Failed {
        /// READ or WRITE.
        request: &'static str,
        /// Its length.
        bytes: u64,
        /// The completion's status, in the words of `ibv_wc_status_str`.
        status: &'static str,
    },
    /// It was not done in time.
    #[error("it took longer than it may: {done} of {posted} requests are done")]
    Late {
        /// How many are done.
        done: u64,
        /// Of how many.
        posted: u64,
    },
    /// Somebody has cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// A range that is not in its buffer.
    #[error("{length} bytes at {offset} are not in a buffer of {buffer} bytes")]
    Range {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// The buffer's length.
        buffer: u64,
    },
    /// A request that is longer than a message can be.
    #[error("a request of {length} bytes is longer than the RNIC's messages, {most} bytes; divide it")]
    TooLong {
        /// Its length.
        length: u64,
        /// The longest message.
        most: u32,
    },
    /// The operating system refused.
    #[error("{call} failed: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn verbs(what: &'static str) -> impl FnOnce(VerbsError) -> Self {
        move |source| Self::Verbs { what, source }
    }

    pub(crate) fn os(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Os {
            call,
            source: errno.into(),
        }
    }
}

/// As `ibv_wc_status_str` says it.
pub(crate) fn status(status: u32) -> &'static str {
    const NAMES: [&str; 23] = [
        "success",
        "local length error",
        "local QP operation error",
        "local EE context operation error",
        "local protection error",
        "Work Request Flushed Error",
        "memory management operation error",
        "bad response error",
        "local access error",
        "remote invalid request error",
        "remote access error",
        "remote operation error",
        "transport retry counter exceeded",
        "RNR retry counter exceeded",
        "local RDD violation error",
        "remote invalid RD request",
        "aborted error",
        "invalid EE context number",
        "invalid EE context state",
        "fatal error",
        "response timeout error",
        "general error",
        "TM error",
    ];
    NAMES.get(status as usize).copied().unwrap_or("unknown")
}

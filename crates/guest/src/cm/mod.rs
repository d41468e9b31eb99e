//! rdma_cm(7): programs keep their own librdmacm, and what is below it is here.
//!
//! librdmacm opens `/dev/infiniband/rdma_cm`, writes commands to it (`rdma_user_cm.h`) and polls it. It does so through the entries of
//! its global offset table for `open`, `fstat`, `write` and `close`, and those are made to lead here ([`got`]), as soon as it
//! asks for the devices, which it does before it opens anything. No other library's calls are touched, and no device file is needed.
//!
//! ```text
//!  librdmacm ── open, write, close ──► [hooks] ──► [channels]   descriptors that are channels
//!                                         │
//!                                         ▼
//!                                     [commands] ── CmRequest ──► verbatim_verbs::CmChannel ──► RNIC
//!                                      [answers] ◄─ CmReply ───
//! ```
//!
//! The state of ids and connections is the RNIC's, as it is the kernel's elsewhere.

mod address;
mod answers;
mod channels;
mod commands;
mod got;
mod hooks;
mod plain;

/// The programs that say so get rdma_cm. Others find none, as where there is no device file: UCX and other libraries open a channel in
/// any case, use it for nothing, and a process with a channel is not moved yet.
const VARIABLE: &str = "VERBATIM_RDMA_CM";

/// Looks whether there is a librdmacm that does not come here yet, and leads it here, if the program is to have rdma_cm.
pub fn attach() {
    if std::env::var_os(VARIABLE).is_some_and(|value| value == "1") {
        got::patch(&hooks::HOOKS);
    }
}

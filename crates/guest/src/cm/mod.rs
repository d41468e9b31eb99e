//! rdma_cm(7): programs keep their own librdmacm, and what is below it is here.
//!
//! librdmacm opens `/dev/infiniband/rdma_cm`, writes commands to it (`rdma_user_cm.h`) and polls it. It does so through the entries of
//! its global offset table for `open`, `fstat`, `write` and `close`, and those are made to lead here ([`verbatim_got`]), as soon as it
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
mod fork;
mod hooks;
mod plain;

use std::sync::atomic::AtomicU64;

use crate::log::log;

/// Looks whether there is a librdmacm that does not come here yet, and leads it here.
pub fn attach() {
    /// What the loader had counted when it was looked last.
    static LOADED: AtomicU64 = AtomicU64::new(0);
    for patched in verbatim_got::patch("librdmacm.so", &hooks::HOOKS, &LOADED) {
        match patched.entries {
            Ok(entries) => log!("{}: {entries} calls lead to the RNIC", patched.path),
            Err(error) => log!("where {} calls cannot be changed: {error}", patched.path),
        }
    }
}

//! `libverbatim.so`: the C ABI of libibverbs, to be loaded with `LD_PRELOAD` into unmodified programs.
//!
//! ```text
//!  program ── ibv_reg_mr, ibv_create_qp, … ──► [verbs]   control verbs, exported by name
//!     │                                           │
//!     │── context->ops, qp_ex, cq_ex ─► [data]    │      data verbs, called through tables
//!     │                                   │       │
//!     └── reads ibv_qp, ibv_wc, … [abi]   ▼       ▼
//!                                  crate verbatim-verbs   the objects themselves, safe Rust
//! ```
//!
//! This crate is the boundary and nothing else: it checks pointers, turns panics and errors into each verb's own
//! convention ([`ffi`]), and translates the header's structures. What it exports is listed in `exports.txt`, one line
//! for each symbol of libibverbs with its version there, and compared with the list by a test.
//!
//! A preloaded library is a guest: it starts nothing before the program opens a device, keeps `errno`, and writes
//! nothing unless `VERBATIM_LOG` is set. Only a command that an agent adds to a container is met before its `main` ([`detach`]). Of the
//! C library it stands before a few functions that wait ([`sleep`]), and before `dlopen` ([`loader`]).

pub mod abi;
mod clock;
mod cm;
mod convert;
pub mod data;
mod detach;
pub mod ffi;
pub mod handles;
#[cfg(target_arch = "x86_64")]
mod loader;
mod log;
#[cfg(feature = "measure")]
pub mod measure;
mod process;
#[cfg(target_arch = "x86_64")]
mod sleep;
pub mod verbs;

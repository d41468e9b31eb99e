//! The control verbs, exported by name.

mod ah;
mod channel;
mod clock;
mod context;
mod cq;
mod device;
mod dm;
mod dump;
mod events;
mod grh;
mod kern;
mod mr;
mod mw;
mod names;
mod old;
mod pd;
mod port;
mod qp;
mod rate;
mod refused;
mod srq;
mod sysfs;
mod users;

pub(crate) use context::ContextHandle;
pub use refused::REFUSED;
#[cfg(feature = "measure")]
pub(crate) use {cq::handle_of as cq_handle_of, qp::handle_of as qp_handle_of};

use std::error::Error;

use verbatim_verbs::VerbsError;

use crate::ffi::Errno;
use crate::log::log;

impl From<VerbsError> for Errno {
    fn from(error: VerbsError) -> Self {
        log!("{}", chain(&error));
        Self::new(error.errno())
    }
}

/// An error and what it came from, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}

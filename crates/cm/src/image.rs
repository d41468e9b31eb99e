//! One id as data: it goes on at another RNIC.

use serde::{Deserialize, Serialize};

use crate::num::CommId;

/// The version of [`IdImage`]: another form has another number. Whoever writes images down puts it in front.
pub const IMAGE_VERSION: u16 = 1;

/// All of an id: numbers, timers (as what is left of them), what is sent again, events that nobody has polled yet.
///
/// Everything of it is checked when it is taken up ([`crate::Cm::adopt`]), so it may come from anywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdImage {
    pub(crate) comm_id: CommId,
}

impl IdImage {
    /// Its number, which stays.
    pub fn comm_id(&self) -> CommId {
        self.comm_id
    }
}

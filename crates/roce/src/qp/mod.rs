//! Queue pair states and attributes: what `ibv_modify_qp` may ask for, as data.

mod attributes;
mod flags;
mod state;
mod table;

pub use attributes::{AddressVector, QpAttributes};
pub use flags::{AccessFlags, AttrMask};
pub use state::{ModifyError, QpState, QpType};
pub use table::{Transition, transition};

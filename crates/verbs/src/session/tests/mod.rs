//! Suspension, drain, replay and switch, one thing at a time.

mod destroyed;
mod events;
mod objects;
mod orders;
mod receives;
mod requests;

use crate::SendOpcode;

const SEND: SendOpcode = SendOpcode::SendWithImm;

//! A program's ids as data: what is kept free for them, and all of them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

use verbatim_cm::{CommId, PortSpace};

use super::channels::Waiting;
use super::ids::{Id, Membership};
use super::ports::Sharing;
use super::ways::Known;
use crate::error::Refused;

/// The first byte of either: another form has another one.
const VERSION: u8 = 1;

/// What ids need at the place where they go.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// Ports of ids that peers may look for.
    pub ports: Vec<(PortSpace, SocketAddr, Sharing)>,
    /// Communication IDs.
    pub numbers: Vec<CommId>,
    /// How many ids.
    pub ids: u32,
}

/// All that a program has.
#[derive(Debug, Serialize, Deserialize)]
pub struct Image {
    /// Where it began.
    pub known: Known,
    /// The GID table of the RNIC where it was.
    pub gids: Vec<[u8; 16]>,
    /// By number, with the events that wait.
    pub channels: Vec<(u32, Vec<Waiting>)>,
    /// By number, with those of the communication manager.
    pub ids: Vec<(u32, Id, Option<Vec<u8>>)>,
    /// By number.
    pub memberships: Vec<(u32, Membership)>,
}

/// In bytes.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, Refused> {
    postcard::to_extend(value, vec![VERSION])
        .map_err(|error| Refused::new(libc::EIO, format!("ids cannot be written down: {error}")))
}

/// From its bytes, which may come from anybody.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refused> {
    let Some((version, bytes)) = bytes.split_first() else {
        return Err(Refused::invalid("an image of ids is empty"));
    };
    if *version != VERSION {
        return Err(Refused::new(
            libc::EPROTO,
            format!("an image of ids is of version {version}, and this RNIC knows {VERSION}: upgrade it"),
        ));
    }
    verbatim_bounded::decode(bytes)
        .map_err(|error| Refused::invalid(format!("an image of ids is malformed: {error}")))
}

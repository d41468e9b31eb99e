//! Options of ids (the kernel's `ucma_set_option`).

use super::ids::{Id, Stage};
use crate::error::Refused;

const LEVEL_ID: u32 = 0;
const LEVEL_IB: u32 = 1;

const TOS: u32 = 0;
const REUSEADDR: u32 = 1;
const AFONLY: u32 = 2;
const ACK_TIMEOUT: u32 = 3;

/// An exponent of five bits.
const MOST_ACK_TIMEOUT: u8 = 31;

/// Sets an option of an id.
pub fn set(id: &mut Id, level: u32, name: u32, value: &[u8]) -> Result<(), Refused> {
    match (level, name) {
        (LEVEL_ID, TOS) => {
            id.traffic_class = byte(value)?;
            if let Some(path) = &mut id.path {
                path.traffic_class = id.traffic_class;
            }
        }
        (LEVEL_ID, REUSEADDR) => {
            let reuse = is_set(value)?;
            unless_bound(id)?;
            id.sharing.reuse = reuse;
        }
        (LEVEL_ID, AFONLY) => {
            let family_only = is_set(value)?;
            unless_bound(id)?;
            id.sharing.family_only = family_only;
        }
        (LEVEL_ID, ACK_TIMEOUT) => {
            let timeout = byte(value)?;
            if timeout > MOST_ACK_TIMEOUT || id.is_datagrams() {
                return Err(Refused::invalid(format!(
                    "{timeout} is no ACK timeout of a connection"
                )));
            }
            id.ack_timeout = Some(timeout);
        }
        (LEVEL_IB, _) => {
            return Err(Refused::new(
                libc::EOPNOTSUPP,
                "ways on RoCE follow from addresses, and are not given",
            ));
        }
        _ => {
            return Err(Refused::new(
                libc::ENOSYS,
                format!("there is no option {name} of level {level}"),
            ));
        }
    }
    Ok(())
}

/// What others may do with a port is fixed once an id has one.
fn unless_bound(id: &Id) -> Result<(), Refused> {
    match id.stage {
        Stage::Idle => Ok(()),
        stage => Err(Refused::invalid(format!("the id is {stage:?} already"))),
    }
}

fn byte(value: &[u8]) -> Result<u8, Refused> {
    match value {
        [value] => Ok(*value),
        _ => Err(Refused::invalid("the option is one byte")),
    }
}

fn is_set(value: &[u8]) -> Result<bool, Refused> {
    let value: [u8; 4] = value
        .try_into()
        .map_err(|_| Refused::invalid("the option is a number of four bytes"))?;
    Ok(i32::from_ne_bytes(value) != 0)
}

//! Checks of a copy's data when they are opened. Opening never creates, cuts or lengthens data: other
//! functions do that, for a copy that is made.
//!
//! A copy that has a sidecar has data. If its path has none, or other data, they are elsewhere: on a file
//! system that is not mounted yet, on a device that comes late, on a disk with another name. The daemon waits
//! for them and reports that.

use serde::{Deserialize, Serialize};

/// The kind of file that has the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A file.
    File,
    /// A block device.
    Device,
}

/// Notes about the data from when they were made, or first opened by a release that makes such notes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Noted {
    /// `None`: nothing was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Identity of the file (its file system and an id of its own), or of the device (WWN, dm-uuid, serial
    /// number, signature). No part of it changes over a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

/// The result of a look at the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Missing,
    /// The path cannot be examined now: an error of the disk, or of the file system.
    Unreachable,
    /// Neither a regular file nor a block device.
    Neither,
    /// Data.
    Data {
        /// Kind of the file.
        kind: Kind,
        /// `None`: the file has no identity, or does not show it (yet).
        identity: Option<String>,
        /// The length in bytes.
        length: u64,
    },
}

/// The action to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// These are the data.
    Serve {
        /// Kind or identity were not noted yet: note them first.
        notes: bool,
    },
    /// The data are not there (yet): look again from time to time, and report it.
    Wait(Awaited),
    /// The path has something that must not be touched. Look again when an operator orders it.
    Refuse(Wrong),
}

/// The reason for the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// There is nothing at the path.
    Missing,
    /// The path cannot be examined.
    Unreachable,
    /// A device that does not show its identity (yet).
    Unnamed,
    /// Data with another identity: a disk that has taken the name of this one, or files under an unused mount
    /// point.
    Another,
}

/// The reason for a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// A file in place of a device, a device in place of a file, or neither.
    OtherKind,
    /// Shorter than the sidecar's length: something has cut it.
    Shorter,
}

/// The action for the data that were found. `length`: the sidecar's. Longer data come from an interrupted
/// resize, or from a larger device: the sidecar's length counts.
pub fn open(noted: &Noted, length: u64, found: &Found) -> Opening {
    let (kind, identity, there) = match found {
        Found::Missing => return Opening::Wait(Awaited::Missing),
        Found::Unreachable => return Opening::Wait(Awaited::Unreachable),
        Found::Neither => return Opening::Refuse(Wrong::OtherKind),
        Found::Data {
            kind,
            identity,
            length,
        } => (*kind, identity, *length),
    };
    if noted.kind.is_some_and(|noted| noted != kind) {
        return Opening::Refuse(Wrong::OtherKind);
    }
    match (&noted.identity, identity, kind) {
        (Some(noted), Some(found), _) if noted != found => return Opening::Wait(Awaited::Another),
        (Some(_), None, Kind::Device) => return Opening::Wait(Awaited::Unnamed),
        (Some(_), None, Kind::File) => return Opening::Wait(Awaited::Another),
        _ => {}
    }
    if there < length {
        return Opening::Refuse(Wrong::Shorter);
    }
    let notes = noted.kind.is_none() || (noted.identity.is_none() && identity.is_some());
    Opening::Serve { notes }
}

/// Whether the file or device at the path may become the data of a volume that is **made** there, or comes
/// there for the first time. Nothing is cut. A file with content is refused unless the operator has confirmed
/// it (`is_meant`).
pub fn make(length: u64, found: &Found, is_meant: bool) -> Result<Making, Obstacle> {
    match found {
        Found::Missing => Ok(Making::Create),
        Found::Unreachable => Err(Obstacle::Unreachable),
        Found::Neither => Err(Obstacle::Neither),
        Found::Data { length: there, .. } if *there < length => match found {
            Found::Data {
                kind: Kind::Device, ..
            } => Err(Obstacle::TooSmall),
            _ if *there == 0 || is_meant => Ok(Making::Lengthen),
            _ => Err(Obstacle::Exists),
        },
        Found::Data { kind: Kind::File, .. } if !is_meant => Err(Obstacle::Exists),
        Found::Data {
            kind: Kind::File,
            length: there,
            ..
        } if *there > length => Err(Obstacle::Longer),
        Found::Data { .. } => Ok(Making::Take),
    }
}

/// How data are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Making {
    /// A file is made (O_EXCL).
    Create,
    /// An empty file, or one that the operator has confirmed, gets its length.
    Lengthen,
    /// The file or device is long enough.
    Take,
}

/// The reason why nothing is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// A file with content that the operator has not confirmed.
    Exists,
    /// A file that would have to be cut.
    Longer,
    /// A device that is smaller.
    TooSmall,
    /// Neither a file nor a block device.
    Neither,
    /// The path cannot be examined.
    Unreachable,
}

/// Age of a sidecar, by a number that rises with each of its writes. The number in the sidecar becomes
/// durable first, and then the one kept with the data. The new role takes effect only when both are durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// The sidecar is the latest one. The number with the data is written again if it is lower.
    Current,
    /// A later sidecar was written: this one comes from a backup. The copy's state is unknown
    /// ([`crate::decision::Here::Unknown`]).
    Old,
}

/// Compares the two numbers. `in_sidecar`: 0 from a release without the number. `with_data`: `None` if the
/// data cannot keep a number. A restore of both from one backup is not noticed.
pub fn age(in_sidecar: u64, with_data: Option<u64>) -> Age {
    match with_data {
        Some(with_data) if with_data > in_sidecar => Age::Old,
        _ => Age::Current,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(kind: Kind, identity: Option<&str>, length: u64) -> Found {
        let identity = identity.map(str::to_owned);
        Found::Data {
            kind,
            identity,
            length,
        }
    }

    /// All combinations of notes, found data and lengths.
    #[test]
    fn only_the_very_data_are_served() {
        let kinds = [Kind::File, Kind::Device];
        let names = [None, Some("a"), Some("b")];
        let mut served = 0;
        for noted_kind in [None, Some(Kind::File), Some(Kind::Device)] {
            for noted_name in names {
                let noted = Noted {
                    kind: noted_kind,
                    identity: noted_name.map(str::to_owned),
                };
                for found in [Found::Missing, Found::Unreachable] {
                    assert!(matches!(open(&noted, 10, &found), Opening::Wait(_)));
                }
                assert!(matches!(open(&noted, 10, &Found::Neither), Opening::Refuse(_)));
                for kind in kinds {
                    for name in names {
                        for length in [0, 9, 10, 11] {
                            let opening = open(&noted, 10, &data(kind, name, length));
                            let is_kind = noted_kind.is_none_or(|noted| noted == kind);
                            let is_it = noted_name.is_none() || noted_name == name;
                            let is_served = matches!(opening, Opening::Serve { .. });
                            assert_eq!(
                                is_served,
                                is_kind && is_it && length >= 10,
                                "{noted:?} {opening:?}"
                            );
                            served += u32::from(is_served);
                        }
                    }
                }
            }
        }
        assert!(served > 0);
    }

    #[test]
    fn what_exists_is_neither_cut_nor_taken_without_a_word() {
        let file = |length| data(Kind::File, None, length);
        assert_eq!(make(10, &Found::Missing, false), Ok(Making::Create));
        assert_eq!(make(10, &file(0), false), Ok(Making::Lengthen));
        for length in [5, 10, 20] {
            assert_eq!(make(10, &file(length), false), Err(Obstacle::Exists));
        }
        assert_eq!(make(10, &file(5), true), Ok(Making::Lengthen));
        assert_eq!(make(10, &file(10), true), Ok(Making::Take));
        assert_eq!(make(10, &file(20), true), Err(Obstacle::Longer));
        assert_eq!(
            make(10, &data(Kind::Device, None, 9), true),
            Err(Obstacle::TooSmall)
        );
        assert_eq!(make(10, &data(Kind::Device, None, 11), false), Ok(Making::Take));
    }

    #[test]
    fn a_sidecar_that_was_restored_is_found() {
        assert_eq!(age(3, Some(4)), Age::Old);
        for with_data in [None, Some(3), Some(2)] {
            assert_eq!(age(3, with_data), Age::Current);
        }
    }
}

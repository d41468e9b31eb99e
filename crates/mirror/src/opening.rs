//! What a copy's data must be when they are opened. Opening makes nothing, cuts nothing and lengthens nothing: those are other functions, for a copy that is made.
//!
//! A copy that has a sidecar has data. If they are not there, or are not those, they are elsewhere: a file system that is not mounted yet, a device
//! that comes late, a disk that somebody has put in another place. They are waited for, and that is said.

use serde::{Deserialize, Serialize};

/// What kind of thing data are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A file.
    File,
    /// A block device.
    Device,
}

/// What was noted when the data were made, or were opened for the first time by a release that notes it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Noted {
    /// None: nothing was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// Of the file (its file system and an id of its own), or of the device (WWN, dm-uuid, serial number, signature). Never what changes over a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

/// What is at the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Missing,
    /// Something that cannot be looked at now: an error of the disk, or of the file system.
    Unreachable,
    /// A file that is no file with data, and no block device.
    Neither,
    /// Data.
    Data {
        /// In what.
        kind: Kind,
        /// None: it has none, or does not say it (yet).
        identity: Option<String>,
        /// In bytes.
        length: u64,
    },
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// These are the data.
    Serve {
        /// What was found is to be noted first: nothing was.
        notes: bool,
    },
    /// They are not there (yet): looked for again from time to time, and told.
    Wait(Awaited),
    /// What is there is not to be touched. Looked at again when somebody says so.
    Refuse(Wrong),
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// There is nothing at the path.
    Missing,
    /// It cannot be looked at.
    Unreachable,
    /// A device that does not say which it is (yet).
    Unnamed,
    /// Something that belongs to another one lies there: a disk that has got the name of this one, or what lies under a mount point.
    Another,
}

/// What is wrong with what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// A file in the place of a device, or a device in the place of a file; or neither.
    OtherKind,
    /// Less than the sidecar's length: something has cut it.
    Shorter,
}

/// What is to be done with what was found. `length`: the sidecar's. Longer data are those of a resize that was cut off, or a larger device: the
/// sidecar's length counts.
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

/// Whether what is found may become the data of a volume that is **made** there, or comes there for the first time. It is not cut, and
/// not taken without a word: an existing file is refused unless the operator has said that it is meant (`is_meant`).
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
    /// An empty file, or one that is meant, gets its length.
    Lengthen,
    /// What is there is as long as it must be.
    Take,
}

/// Why nothing is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// A file with something in it, of which nobody has said that it is meant.
    Exists,
    /// A file that would have to be cut.
    Longer,
    /// A device that is smaller.
    TooSmall,
    /// Neither a file nor a block device.
    Neither,
    /// It cannot be looked at.
    Unreachable,
}

/// How old a sidecar is, by a number that each writing of it raises. The sidecar's becomes durable first, and then that which is kept with the data;
/// nothing is done by the role that was written before both are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// It is the last one. The number with the data is written again if it is lower.
    Current,
    /// A later one was written: this one comes from a backup. What the copy is cannot be said ([`crate::decision::Here::Unknown`]).
    Old,
}

/// `in_sidecar`: 0 from a release that does not count; `with_data`: none where it cannot be kept there. Where both are in one folder that is restored as a whole nothing is found.
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

    /// Every world: what was noted, what is found, and how long.
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

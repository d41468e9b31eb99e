//! Which versions of a contract work together.
//!
//! Parts of this project that are replaced one by one speak to each other: agents, guest libraries, RNICs, commands. Each
//! contract between two of them has a version, and each part speaks a range of [`Versions`]. Who is spoken to takes any
//! version in its range, and then speaks that one to that peer. A peer outside is refused at once, with a
//! [`Mismatch`] that names both ranges and the side to upgrade.
//!
//! Recordings (`verbatim-recorded`) keep what is sent under a version from changing.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The versions of one contract that one side speaks: all from `oldest` to `newest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub oldest: u32,
    /// The newest, which is spoken wherever the other side can.
    pub newest: u32,
}

impl Versions {
    /// A range.
    pub const fn new(oldest: u32, newest: u32) -> Self {
        assert!(oldest <= newest, "the oldest version is the smaller number");
        Self { oldest, newest }
    }

    /// One version: that of a side which says no range.
    pub const fn only(version: u32) -> Self {
        Self::new(version, version)
    }

    /// Numbers that another party has named. `None` if they are no range.
    pub fn named(oldest: u32, newest: u32) -> Option<Self> {
        (oldest <= newest).then_some(Self { oldest, newest })
    }

    /// Whether it has this version.
    pub const fn accepts(self, version: u32) -> bool {
        self.oldest <= version && version <= self.newest
    }

    /// The newest version that both have.
    pub fn common(self, other: Self) -> Option<u32> {
        let version = self.newest.min(other.newest);
        (version >= self.oldest.max(other.oldest)).then_some(version)
    }

    /// The version to try after the other side has refused `version` without saying what it speaks.
    pub fn below(self, version: u32) -> Option<u32> {
        version.checked_sub(1).filter(|below| self.accepts(*below))
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(to, "version {}", self.newest),
            false => write!(to, "versions {} to {}", self.oldest, self.newest),
        }
    }
}

/// One side of a contract, for an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// Who it is.
    pub who: String,
    /// What it speaks.
    pub versions: Versions,
    /// What to do if it is the one that is too old: "upgrade the agent of src".
    pub remedy: String,
}

impl Side {
    /// One that is upgraded by installing another release of it.
    pub fn new(who: impl Into<String>, versions: Versions) -> Self {
        let who = who.into();
        Self {
            remedy: format!("upgrade {who}"),
            who,
            versions,
        }
    }

    /// One for which something else is to be done.
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: remedy.into(),
            ..self
        }
    }
}

/// Two sides have no version in common.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} speaks {} of the {contract} contract and {} {}: {}",
    older.who, older.versions, newer.who, newer.versions, older.remedy
)]
pub struct Mismatch {
    /// The contract.
    pub contract: &'static str,
    /// The side that is too old.
    pub older: Box<Side>,
    /// The other.
    pub newer: Box<Side>,
}

/// The version in which two sides speak.
pub fn agree(contract: &'static str, one: Side, other: Side) -> Result<u32, Mismatch> {
    one.versions.common(other.versions).ok_or_else(|| {
        let (older, newer) = match one.versions.newest < other.versions.newest {
            true => (one, other),
            false => (other, one),
        };
        Mismatch {
            contract,
            older: Box::new(older),
            newer: Box::new(newer),
        }
    })
}

/// A message that has a form in each version of its contract.
///
/// What is provided is right for as long as there is one form. Who changes a message keeps the older form as a type of its
/// own, and implements both for the versions below (`docs/versions.md`).
pub trait Versioned: Serialize + DeserializeOwned {
    /// Its bytes in the form of a version.
    fn encode(&self, version: u32) -> postcard::Result<Vec<u8>> {
        let _ = version;
        postcard::to_stdvec(self)
    }

    /// What these bytes say in the form of a version; an error if that takes more bytes of memory than the budget, of which
    /// there is less afterwards.
    fn decode(version: u32, bytes: &[u8], budget: &mut usize) -> Result<Self, verbatim_bounded::Error> {
        let _ = version;
        verbatim_bounded::within(bytes, budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    #[test]
    fn the_newest_that_both_have_is_spoken() {
        let range = Versions::new;
        for (one, other, common) in [
            (range(7, 7), range(7, 7), Some(7)),
            (range(7, 8), range(7, 7), Some(7)),
            (range(7, 8), range(8, 9), Some(8)),
            (range(7, 9), range(8, 8), Some(8)),
            (range(7, 7), range(8, 9), None),
        ] {
            assert_eq!(one.common(other), common, "{one} and {other}");
            assert_eq!(other.common(one), common, "{other} and {one}");
        }
    }

    proptest! {
        #[test]
        fn what_is_agreed_is_spoken_by_both_and_nothing_newer_is(a in 0u32..9, b in 0u32..9, c in 0u32..9, d in 0u32..9) {
            let one = Versions::new(a.min(b), a.max(b));
            let other = Versions::new(c.min(d), c.max(d));
            let newest = (0..9).rev().find(|version| one.accepts(*version) && other.accepts(*version));
            prop_assert_eq!(one.common(other), newest);
        }
    }

    #[test]
    fn who_is_refused_without_a_word_goes_down_to_the_oldest() {
        let range = Versions::new(5, 7);
        let tried: Vec<_> = std::iter::successors(Some(7), |version| range.below(*version)).collect();
        assert_eq!(tried, [7, 6, 5]);
        assert_eq!(Versions::only(0).below(0), None);
        assert_eq!(Versions::named(3, 2), None);
    }

    #[test]
    fn a_mismatch_names_both_ranges_and_the_older_side() {
        let agent = || Side::new("the agent of src", Versions::new(8, 9));
        let library = Side::new("the library of web", Versions::only(7)).with_remedy("start web again");
        let wanted = "the library of web speaks version 7 of the channel contract and the agent of src versions 8 to 9: \
                      start web again";
        for (one, other) in [(agent(), library.clone()), (library, agent())] {
            assert_eq!(agree("channel", one, other).unwrap_err().to_string(), wanted);
        }
        let newer = Side::new("the agent of dst", Versions::only(10));
        let refused = agree("agent", agent(), newer).unwrap_err().to_string();
        assert!(refused.ends_with("upgrade the agent of src"), "{refused}");
    }

    /// A message with an older form, as `docs/versions.md` says to keep one.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Order {
        session: u64,
        limit_ms: u32,
    }

    /// Up to version 7.
    #[derive(Serialize, Deserialize)]
    struct OrderOf7 {
        session: u64,
    }

    impl Versioned for Order {
        fn encode(&self, version: u32) -> postcard::Result<Vec<u8>> {
            match version {
                ..=7 => postcard::to_stdvec(&OrderOf7 {
                    session: self.session,
                }),
                _ => postcard::to_stdvec(self),
            }
        }

        fn decode(version: u32, bytes: &[u8], budget: &mut usize) -> Result<Self, verbatim_bounded::Error> {
            match version {
                ..=7 => verbatim_bounded::within(bytes, budget).map(|OrderOf7 { session }| Self {
                    session,
                    limit_ms: 100,
                }),
                _ => verbatim_bounded::within(bytes, budget),
            }
        }
    }

    #[test]
    fn each_version_has_its_form() {
        let order = Order {
            session: 1,
            limit_ms: 200,
        };
        let (old, new) = (order.encode(7).unwrap(), order.encode(8).unwrap());
        assert_ne!(old, new);
        assert_eq!(Order::decode(8, &new, &mut 0).unwrap(), order);
        assert_eq!(Order::decode(7, &old, &mut 0).unwrap().limit_ms, 100);
    }
}

//! Which GID of an RNIC takes the place of one of another RNIC.
//!
//! A program that moves keeps the GIDs that it knows. At the new place each of them stands for one that packets can use in
//! its place: of the same kind, since an address reaches only others of its kind.

use std::fmt;
use std::net::Ipv6Addr;

/// What a GID can reach (RoCEv2, IBA annex A17).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// An IPv4 address, mapped into IPv6.
    V4,
    /// An IPv6 address of one link, `fe80::/10`.
    V6LinkLocal,
    /// Any other IPv6 address.
    V6,
}

impl GidKind {
    /// The kind of a GID; `None` for an entry of the table that is empty.
    pub fn of(gid: [u8; 16]) -> Option<Self> {
        let address = Ipv6Addr::from(gid);
        if address.is_unspecified() {
            None
        } else if address.to_ipv4_mapped().is_some() {
            Some(Self::V4)
        } else if address.is_unicast_link_local() {
            Some(Self::V6LinkLocal)
        } else {
            Some(Self::V6)
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6LinkLocal => "link-local IPv6",
            Self::V6 => "global IPv6",
        })
    }
}

/// The index in the GID table `there` of what takes the place of `gid`, of the GID table `here`; `None` if there is none of
/// its kind.
///
/// The tables' first entries, by which hosts know each other, stand for each other. Else it is the one with the longest
/// common prefix, which is likeliest to be in the same network, and the first of several.
pub fn counterpart(here: &[[u8; 16]], gid: [u8; 16], there: &[[u8; 16]]) -> Option<usize> {
    let kind = GidKind::of(gid)?;
    let fits = |other: &[u8; 16]| GidKind::of(*other) == Some(kind);
    if here.first() == Some(&gid) && there.first().is_some_and(fits) {
        return Some(0);
    }
    let common = |other: [u8; 16]| (u128::from_be_bytes(other) ^ u128::from_be_bytes(gid)).leading_zeros();
    let candidates = there.iter().enumerate().filter(|(_, other)| fits(other));
    // Of equals, `max_by_key` gives the last.
    let best = candidates.rev().max_by_key(|(_, other)| common(**other));
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gids<const N: usize>(texts: [&str; N]) -> [[u8; 16]; N] {
        texts.map(|text| text.parse::<Ipv6Addr>().unwrap().octets())
    }

    #[test]
    fn an_entry_stands_for_one_of_its_kind() {
        let here = gids(["::ffff:10.0.0.1", "fd76::1", "fe80::1"]);
        let there = gids(["::ffff:10.0.0.2", "fe80::2", "fd76::2"]);
        let found = here.map(|gid| counterpart(&here, gid, &there));
        assert_eq!(found, [Some(0), Some(2), Some(1)]);
        assert_eq!(counterpart(&here, here[1], &there[..2]), None);
        assert_eq!(counterpart(&here, here[2], &there[..1]), None);
        assert_eq!(counterpart(&here, here[0], &[]), None);
        assert_eq!(
            counterpart(&here, [0; 16], &[[0; 16]]),
            None,
            "an empty entry is no address"
        );
    }

    #[test]
    fn the_first_stands_for_the_first_and_others_for_their_network() {
        let here = gids(["::ffff:10.0.0.1", "::ffff:10.9.0.1", "fd01::1"]);
        let there = gids([
            "::ffff:10.7.0.2",
            "::ffff:10.0.0.2",
            "::ffff:10.9.0.2",
            "fd02::2",
            "fd01::2",
        ]);
        let found = here.map(|gid| counterpart(&here, gid, &there));
        assert_eq!(found, [Some(0), Some(2), Some(4)]);
        let equals = gids(["::ffff:10.7.0.2", "fd02::2", "fd02::3"]);
        assert_eq!(
            counterpart(&here, here[2], &equals),
            Some(1),
            "the first of equals"
        );
        let same = there.map(|gid| counterpart(&there, gid, &there));
        assert_eq!(
            same,
            [0, 1, 2, 3, 4].map(Some),
            "each stands for itself where nothing differs"
        );
        let by_ipv6 = gids(["fd01::1", "::ffff:10.0.0.1"]);
        assert_eq!(counterpart(&by_ipv6, by_ipv6[0], &there), Some(4));
    }
}

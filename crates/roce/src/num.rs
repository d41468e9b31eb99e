//! Numbers of the specification as types, each with the arithmetic that is right for it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A packet sequence number: 24 bits, wrapping (IBA §9.7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct Psn(u32);

impl Psn {
    /// The bits that a PSN has.
    pub const MASK: u32 = 0x00ff_ffff;

    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & Self::MASK)
    }

    /// The value, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The PSN `count` packets later.
    #[must_use]
    pub const fn add(self, count: u32) -> Psn {
        Psn::new(self.0.wrapping_add(count))
    }

    /// The PSN `count` packets earlier.
    #[must_use]
    pub const fn sub(self, count: u32) -> Psn {
        Psn::new(self.0.wrapping_sub(count))
    }

    /// The next PSN.
    #[must_use]
    pub const fn next(self) -> Psn {
        self.add(1)
    }

    /// How many packets from `base` forward to `self`, modulo 2^24.
    pub const fn offset_from(self, base: Psn) -> u32 {
        self.0.wrapping_sub(base.0) & Self::MASK
    }

    /// The signed distance from `base`, in `-2^23 .. 2^23`: negative PSNs are duplicates (IBA §9.7.2).
    pub const fn distance_from(self, base: Psn) -> i32 {
        ((self.offset_from(base) << 8) as i32) >> 8
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A queue pair number: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct Qpn(u32);

impl Qpn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & 0x00ff_ffff)
    }

    /// The value, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl From<u32> for Psn {
    /// The low 24 bits.
    fn from(value: u32) -> Psn {
        Psn::new(value)
    }
}

impl From<Psn> for u32 {
    fn from(psn: Psn) -> u32 {
        psn.0
    }
}

impl From<u32> for Qpn {
    /// The low 24 bits.
    fn from(value: u32) -> Qpn {
        Qpn::new(value)
    }
}

impl From<Qpn> for u32 {
    fn from(qpn: Qpn) -> u32 {
        qpn.0
    }
}

/// Key of a memory region for the program that registered it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Lkey(pub u32);

/// Key of a memory region for its partners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rkey(pub u32);

/// Number of a protection domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pd(pub u32);

/// Path MTU: the most payload that a packet carries (IBA §9.2.1). The numbers are those of `enum ibv_mtu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1,024 bytes.
    #[default]
    Mtu1024 = 3,
    /// 2,048 bytes.
    Mtu2048 = 4,
    /// 4,096 bytes.
    Mtu4096 = 5,
}

/// A number that is no `enum ibv_mtu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("path mtu code {0} is not one of 1 (256 bytes) to 5 (4096 bytes)")]
pub struct InvalidMtu(pub u8);

impl Mtu {
    /// Every MTU, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024, Mtu::Mtu2048, Mtu::Mtu4096];

    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    /// How many packets a message of `len` bytes takes: at least one.
    pub const fn packets(self, len: u32) -> u32 {
        if len == 0 { 1 } else { len.div_ceil(self.bytes()) }
    }
}

impl TryFrom<u8> for Mtu {
    type Error = InvalidMtu;
    fn try_from(code: u8) -> Result<Mtu, InvalidMtu> {
        Mtu::ALL
            .into_iter()
            .find(|mtu| *mtu as u8 == code)
            .ok_or(InvalidMtu(code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_wraps_at_24_bits() {
        let last = Psn::new(0x00ff_ffff);
        assert_eq!(last.next(), Psn::new(0));
        assert_eq!(Psn::new(0).sub(1), last);
        assert_eq!(Psn::new(2).offset_from(last), 3);
        assert_eq!(Psn::new(2).distance_from(last), 3);
        assert_eq!(last.distance_from(Psn::new(2)), -3);
        assert_eq!(Psn::new(0x80_0000).distance_from(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0x7f_ffff).distance_from(Psn::new(0)), 0x7f_ffff);
    }

    #[test]
    fn mtu_codes_and_sizes() {
        assert_eq!(Mtu::ALL.map(Mtu::bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::try_from(5), Ok(Mtu::Mtu4096));
        assert_eq!(Mtu::try_from(0), Err(InvalidMtu(0)));
        assert_eq!(Mtu::Mtu256.packets(0), 1);
        assert_eq!(Mtu::Mtu256.packets(256), 1);
        assert_eq!(Mtu::Mtu256.packets(257), 2);
        assert_eq!(Mtu::Mtu256.packets(1 << 31), 1 << 23);
    }
}

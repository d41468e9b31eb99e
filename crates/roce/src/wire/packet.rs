//! A whole packet: parsed from a datagram, or written into a buffer.

use super::aeth::{AETH_BYTES, Aeth};
use super::atomiceth::{ATOMIC_ACK_ETH_BYTES, ATOMIC_ETH_BYTES, AtomicEth};
use super::bth::{BTH_BYTES, Bth, TRANSPORT_VERSION};
use super::deth::{DETH_BYTES, Deth};
use super::grh::GRH_BYTES;
use super::icrc::ICRC_BYTES;
use super::immdt::IMMDT_BYTES;
use super::migeth::MIGETH_BYTES;
use super::opcode::{MIGRATION_ACKNOWLEDGE, Opcode, OpcodeInfo};
use super::reth::{RETH_BYTES, Reth};
use crate::{Immediate, Rkey};

/// Why a datagram is no packet of ours (IBA §9.6: such packets are dropped without an answer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not even a BTH and an ICRC.
    #[error("{0} bytes are too few for a packet")]
    TooShort(usize),
    /// Another version of the transport headers.
    #[error("transport header version {0} is not known")]
    Version(u8),
    /// A reserved opcode.
    #[error("opcode {:#04x} is not known", .0.0)]
    UnknownOpcode(Opcode),
    /// The headers that the opcode promises, or the padding, do not fit in.
    #[error("{bytes} bytes are too few for {opcode:?}")]
    Truncated {
        /// The packet's opcode.
        opcode: Opcode,
        /// Bytes after the BTH, without ICRC.
        bytes: usize,
    },
    /// Packets are multiples of four bytes, padding included (IBA §9.2.1).
    #[error("{0} bytes are no multiple of four")]
    Unaligned(usize),
    /// Payload where there can be none.
    #[error("{bytes} bytes of payload in {opcode:?}")]
    UnexpectedPayload {
        /// The packet's opcode.
        opcode: Opcode,
        /// Bytes of payload.
        bytes: usize,
    },
}

/// A parsed packet; the payload is borrowed from the receive buffer. The extension headers that are there are exactly
/// those that `info.headers` names.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// The opcode's row of the table.
    pub info: &'static OpcodeInfo,
    /// Datagram header.
    pub deth: Option<Deth>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Atomic header.
    pub atomic_eth: Option<AtomicEth>,
    /// ACK header.
    pub aeth: Option<Aeth>,
    /// Old value, answered to an atomic.
    pub atomic_ack: Option<u64>,
    /// Immediate data.
    pub imm: Option<Immediate>,
    /// R_Key to invalidate.
    pub invalidate: Option<Rkey>,
    /// Payload without padding; of a message of the migration extension, its header.
    pub payload: &'a [u8],
    /// Not part of the datagram: the IP header that it came with, which a datagram queue pair gives to the program. Set
    /// by the NIC, see [`super::grh`]; where it is absent, the program gets zeros.
    pub grh: Option<&'a [u8; GRH_BYTES]>,
}

/// The row of an opcode whose packet carries a migration header, if there are such.
#[cold]
fn migration_row(opcode: Opcode) -> Option<&'static OpcodeInfo> {
    match opcode {
        Opcode::RC_ACKNOWLEDGE => Some(&MIGRATION_ACKNOWLEDGE),
        Opcode::RC_RESUME => opcode.info(),
        _ => None,
    }
}

/// Takes a header off the front, if it is `there`.
fn take<'a, const N: usize>(there: bool, rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    if !there {
        return None;
    }
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(head)
}

impl<'a> Packet<'a> {
    /// Reads a packet from the payload of a UDP datagram, ICRC included. The ICRC is not checked here, since it needs
    /// the addresses: see [`super::icrc::Flow::verify`].
    pub fn parse(datagram: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let too_short = ParseError::TooShort(datagram.len());
        let (body, _icrc) = datagram.split_last_chunk::<ICRC_BYTES>().ok_or(too_short)?;
        let (bth, mut rest) = body.split_first_chunk::<BTH_BYTES>().ok_or(too_short)?;
        let bth = Bth::parse(bth);
        if bth.version != TRANSPORT_VERSION {
            return Err(ParseError::Version(bth.version));
        }
        if !datagram.len().is_multiple_of(4) {
            return Err(ParseError::Unaligned(datagram.len()));
        }
        let opcode = bth.opcode;
        let info = opcode.info().ok_or(ParseError::UnknownOpcode(opcode))?;
        let truncated = ParseError::Truncated {
            opcode,
            bytes: rest.len(),
        };
        if rest.len() < info.headers.bytes() + usize::from(bth.pad_count) {
            return Err(truncated);
        }
        // The order is that of the wire.
        let headers = &info.headers;
        let deth = take::<DETH_BYTES>(headers.deth, &mut rest).map(Deth::parse);
        let reth = take::<RETH_BYTES>(headers.reth, &mut rest).map(Reth::parse);
        let atomic_eth = take::<ATOMIC_ETH_BYTES>(headers.atomic_eth, &mut rest).map(AtomicEth::parse);
        let aeth = take::<AETH_BYTES>(headers.aeth, &mut rest).map(Aeth::parse);
        let atomic_ack = take::<ATOMIC_ACK_ETH_BYTES>(headers.atomic_ack_eth, &mut rest);
        let atomic_ack = atomic_ack.map(|bytes| u64::from_be_bytes(*bytes));
        let imm = take::<IMMDT_BYTES>(headers.immdt, &mut rest).map(Immediate::parse);
        let invalidate = take::<4>(headers.ieth, &mut rest).map(|bytes| Rkey(u32::from_be_bytes(*bytes)));
        let payload = rest
            .get(..rest.len() - usize::from(bth.pad_count))
            .ok_or(truncated)?;
        if !info.has_payload && !payload.is_empty() && bth.opcode != Opcode::CNP {
            if payload.len() == MIGETH_BYTES
                && let Some(info) = migration_row(opcode)
            {
                return Ok(Packet {
                    payload,
                    ..Packet::bare(bth, info, aeth)
                });
            }
            return Err(ParseError::UnexpectedPayload {
                opcode,
                bytes: payload.len(),
            });
        }
        Ok(Packet {
            bth,
            info,
            deth,
            reth,
            atomic_eth,
            aeth,
            atomic_ack,
            imm,
            invalidate,
            payload,
            grh: None,
        })
    }

    /// A packet with an ACK header at most.
    fn bare(bth: Bth, info: &'static OpcodeInfo, aeth: Option<Aeth>) -> Packet<'static> {
        Packet {
            bth,
            info,
            deth: None,
            reth: None,
            atomic_eth: None,
            aeth,
            atomic_ack: None,
            imm: None,
            invalidate: None,
            payload: &[],
            grh: None,
        }
    }
}

/// The headers of a packet to be sent; the builder's side of [`Packet`]. Those that its opcode does not have are not
/// looked at.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Base transport header; the pad count is set by [`Head::emit`].
    pub bth: Bth,
    /// Datagram header, where the opcode has one.
    pub deth: Option<Deth>,
    /// RDMA header, where the opcode has one.
    pub reth: Option<Reth>,
    /// Atomic header, where the opcode has one.
    pub atomic_eth: Option<AtomicEth>,
    /// ACK header, where the opcode has one.
    pub aeth: Option<Aeth>,
    /// Old value, where the opcode has one.
    pub atomic_ack: Option<u64>,
    /// Immediate data, where the opcode has it.
    pub imm: Option<Immediate>,
    /// R_Key to invalidate, where the opcode has one.
    pub invalidate: Option<Rkey>,
}

/// Bytes of padding after a payload of this length: packets are multiples of four bytes (IBA §9.2.1).
pub const fn pad_bytes(payload_bytes: usize) -> usize {
    payload_bytes.wrapping_neg() & 3
}

/// Size in bytes of a whole packet, ICRC included; 16 for an opcode that is not known.
pub fn packet_bytes(opcode: Opcode, payload_bytes: usize) -> usize {
    let headers = opcode.info().map_or(BTH_BYTES, OpcodeInfo::header_bytes);
    headers + payload_bytes + pad_bytes(payload_bytes) + ICRC_BYTES
}

/// Takes the place of a header off the front.
fn place<'p, const N: usize>(rest: &mut &'p mut [u8]) -> &'p mut [u8; N] {
    let (head, tail) = std::mem::take(rest).split_first_chunk_mut().expect(SIZE);
    *rest = tail;
    head
}

const SIZE: &str = "the packet has the size that its opcode and payload need";

impl Head {
    /// A packet with nothing but a base transport header.
    pub fn new(bth: Bth) -> Head {
        Head {
            bth,
            deth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack: None,
            imm: None,
            invalidate: None,
        }
    }

    /// Writes headers and padding of a packet with `payload_bytes` of payload into `packet` ([`packet_bytes`] without
    /// the ICRC), and gives back the place for the payload.
    ///
    /// # Panics
    /// If `packet` has another size, or a header is missing that the opcode has.
    pub fn emit<'p>(&self, packet: &'p mut [u8], payload_bytes: usize) -> &'p mut [u8] {
        const HEADER: &str = "the headers are those of the opcode";
        let headers = self
            .bth
            .opcode
            .info()
            .expect("only known opcodes are sent")
            .headers;
        let pad = pad_bytes(payload_bytes);
        let mut rest = packet;
        Bth {
            pad_count: pad as u8,
            ..self.bth
        }
        .emit(place(&mut rest));
        if headers.deth {
            self.deth.expect(HEADER).emit(place(&mut rest));
        }
        if headers.reth {
            self.reth.expect(HEADER).emit(place(&mut rest));
        }
        if headers.atomic_eth {
            self.atomic_eth.expect(HEADER).emit(place(&mut rest));
        }
        if headers.aeth {
            self.aeth.expect(HEADER).emit(place(&mut rest));
        }
        if headers.atomic_ack_eth {
            *place(&mut rest) = self.atomic_ack.expect(HEADER).to_be_bytes();
        }
        if headers.immdt {
            self.imm.expect(HEADER).emit(place(&mut rest));
        }
        if headers.ieth {
            *place(&mut rest) = self.invalidate.expect(HEADER).0.to_be_bytes();
        }
        let (payload, padding) = rest.split_at_mut(payload_bytes);
        assert_eq!(padding.len(), pad, "{SIZE}");
        padding.fill(0);
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Psn, Qpn};
    use proptest::prelude::*;

    fn head(opcode: Opcode) -> Head {
        let headers = opcode.info().unwrap().headers;
        Head {
            bth: Bth {
                opcode,
                solicited: true,
                migrated: true,
                pad_count: 0,
                version: 0,
                pkey: 0xffff,
                fecn: false,
                becn: false,
                dest_qpn: Qpn::new(0x123456),
                ack_request: true,
                psn: Psn::new(0xfedcba),
            },
            deth: headers.deth.then_some(Deth {
                qkey: 0x8001_0203,
                source_qpn: Qpn::new(77),
            }),
            reth: headers.reth.then_some(Reth {
                virtual_addr: 1 << 63,
                rkey: Rkey(5),
                dma_len: 77,
            }),
            atomic_eth: headers.atomic_eth.then_some(AtomicEth {
                virtual_addr: 8,
                rkey: Rkey(6),
                swap_or_add: u64::MAX - 1,
                compare: 1 << 40,
            }),
            aeth: headers.aeth.then_some(Aeth::parse(&[0x1f, 0, 0, 9])),
            atomic_ack: headers.atomic_ack_eth.then_some(0x0102_0304_0506_0708),
            imm: headers.immdt.then_some(Immediate([1, 2, 3, 4])),
            invalidate: headers.ieth.then_some(Rkey(0xdead_beef)),
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            code in prop_oneof![0u8..=0x17, 0x20u8..=0x2b, 0x64u8..=0x65],
            payload in proptest::collection::vec(any::<u8>(), 0..70),
        ) {
            let opcode = Opcode(code);
            let payload = if opcode.info().unwrap().has_payload { payload } else { vec![] };
            let head = head(opcode);
            let mut bytes = vec![0xee; packet_bytes(opcode, payload.len())];
            let body = bytes.len() - ICRC_BYTES;
            head.emit(&mut bytes[..body], payload.len()).copy_from_slice(&payload);
            prop_assert_eq!(bytes.len() % 4, 0);

            let packet = Packet::parse(&bytes).unwrap();
            prop_assert_eq!(packet.payload, &payload[..]);
            prop_assert_eq!(Bth { pad_count: 0, ..packet.bth }, head.bth);
            prop_assert_eq!((packet.reth, packet.aeth, packet.imm), (head.reth, head.aeth, head.imm));
            prop_assert_eq!((packet.deth, packet.atomic_eth), (head.deth, head.atomic_eth));
            prop_assert_eq!((packet.atomic_ack, packet.invalidate), (head.atomic_ack, head.invalidate));
        }

        #[test]
        fn only_what_is_as_long_as_a_migration_header_is_one(
            code in prop::sample::select(vec![0x0c, 0x11, 0x12, 0x13, 0x14, 0xd0]),
            bytes in prop_oneof![0usize..100, Just(MIGETH_BYTES / 4)],
        ) {
            let opcode = Opcode(code);
            let mut datagram = vec![0; opcode.info().unwrap().header_bytes() + bytes * 4 + ICRC_BYTES];
            datagram[0] = code;
            let migrates = matches!(opcode, Opcode::RC_ACKNOWLEDGE | Opcode::RC_RESUME);
            match Packet::parse(&datagram) {
                Ok(packet) if bytes == 0 => prop_assert_eq!(packet.payload.len(), 0),
                Ok(packet) => {
                    prop_assert!(migrates && bytes * 4 == MIGETH_BYTES);
                    prop_assert_eq!(packet.info.kind, crate::wire::opcode::Kind::Migration);
                    prop_assert_eq!(packet.payload.len(), MIGETH_BYTES);
                }
                Err(error) => {
                    let expected = ParseError::UnexpectedPayload { opcode, bytes: bytes * 4 };
                    prop_assert_eq!(error, expected);
                    prop_assert!(!migrates || bytes * 4 != MIGETH_BYTES);
                }
            }
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = Packet::parse(&bytes);
        }

        #[test]
        fn truncation_is_noticed(code in 0u8..=0x17, len in 0usize..44) {
            let mut bytes = vec![0; len];
            if let Some(first) = bytes.first_mut() {
                *first = code;
            }
            let enough = Opcode(code).info().is_some_and(|info| len >= info.header_bytes() + ICRC_BYTES);
            prop_assert!(enough || Packet::parse(&bytes).is_err());
        }
    }
}

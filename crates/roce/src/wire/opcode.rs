//! The table of opcodes (IBA §9.2.1): what each packet is and which headers follow its BTH.
//!
//! One row per opcode, a struct with named fields; the parser, the builder, the responder and the requester all read
//! this table and nothing else.

use std::fmt;

/// The opcode byte: service in the top three bits, operation in the others. Unknown ones survive a round trip.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

/// Transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification (annex A17.9.3).
    Cnp,
}

/// What a packet is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Request: a SEND.
    Send,
    /// Request: an RDMA WRITE.
    Write,
    /// Request: an RDMA READ.
    ReadRequest,
    /// Response with the data of an RDMA READ.
    ReadResponse,
    /// Response without data.
    Acknowledge,
    /// Response to an atomic operation.
    AtomicAcknowledge,
    /// Request: an atomic operation.
    Atomic,
    /// Request: an atomic WRITE.
    AtomicWrite,
    /// Request of a kind that is not defined: invalid (IBA §9.7.4.1.5).
    Reserved,
    /// Congestion notification.
    Congestion,
    /// A message of the migration extension: RESUME, or an acknowledgement with a migration header.
    Migration,
}

/// The extension headers after the BTH, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Headers {
    /// Datagram header.
    pub deth: bool,
    /// RDMA header.
    pub reth: bool,
    /// Atomic header.
    pub atomic_eth: bool,
    /// ACK header.
    pub aeth: bool,
    /// Answer of an atomic.
    pub atomic_ack_eth: bool,
    /// Immediate data.
    pub immdt: bool,
    /// Invalidate header: an R_Key.
    pub ieth: bool,
}

impl Headers {
    const NONE: Headers = Headers {
        deth: false,
        reth: false,
        atomic_eth: false,
        aeth: false,
        atomic_ack_eth: false,
        immdt: false,
        ieth: false,
    };
    const DETH: Headers = Headers {
        deth: true,
        ..Headers::NONE
    };
    const RETH: Headers = Headers {
        reth: true,
        ..Headers::NONE
    };
    const ATOMIC: Headers = Headers {
        atomic_eth: true,
        ..Headers::NONE
    };
    const AETH: Headers = Headers {
        aeth: true,
        ..Headers::NONE
    };
    const ATOMIC_ACK: Headers = Headers {
        aeth: true,
        atomic_ack_eth: true,
        ..Headers::NONE
    };
    const IETH: Headers = Headers {
        ieth: true,
        ..Headers::NONE
    };

    const fn and_immdt(self) -> Headers {
        Headers { immdt: true, ..self }
    }

    /// Their size in bytes, BTH not included.
    pub const fn bytes(&self) -> usize {
        self.deth as usize * super::deth::DETH_BYTES
            + self.reth as usize * super::reth::RETH_BYTES
            + self.atomic_eth as usize * super::atomiceth::ATOMIC_ETH_BYTES
            + self.aeth as usize * super::aeth::AETH_BYTES
            + self.atomic_ack_eth as usize * super::atomiceth::ATOMIC_ACK_ETH_BYTES
            + self.immdt as usize * super::immdt::IMMDT_BYTES
            + self.ieth as usize * 4
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpcodeInfo {
    /// Its name in the specification.
    pub name: &'static str,
    /// Transport service.
    pub service: Service,
    /// What it is part of.
    pub kind: Kind,
    /// The headers that follow.
    pub headers: Headers,
    /// First packet of its message.
    pub starts: bool,
    /// Last packet of its message.
    pub ends: bool,
    /// Completes a RECV.
    pub consumes_receive: bool,
    /// May have payload.
    pub has_payload: bool,
}

impl OpcodeInfo {
    /// Goes from requester to responder.
    pub const fn is_request(&self) -> bool {
        matches!(
            self.kind,
            Kind::Send | Kind::Write | Kind::ReadRequest | Kind::Atomic | Kind::AtomicWrite | Kind::Reserved
        )
    }

    /// Size in bytes of all headers, BTH included.
    pub const fn header_bytes(&self) -> usize {
        super::bth::BTH_BYTES + self.headers.bytes()
    }
}

#[allow(missing_docs, reason = "the names are those of the specification")]
impl Opcode {
    pub const RC_SEND_FIRST: Opcode = Opcode(0x00);
    pub const RC_SEND_MIDDLE: Opcode = Opcode(0x01);
    pub const RC_SEND_LAST: Opcode = Opcode(0x02);
    pub const RC_SEND_LAST_IMM: Opcode = Opcode(0x03);
    pub const RC_SEND_ONLY: Opcode = Opcode(0x04);
    pub const RC_SEND_ONLY_IMM: Opcode = Opcode(0x05);
    pub const RC_WRITE_FIRST: Opcode = Opcode(0x06);
    pub const RC_WRITE_MIDDLE: Opcode = Opcode(0x07);
    pub const RC_WRITE_LAST: Opcode = Opcode(0x08);
    pub const RC_WRITE_LAST_IMM: Opcode = Opcode(0x09);
    pub const RC_WRITE_ONLY: Opcode = Opcode(0x0a);
    pub const RC_WRITE_ONLY_IMM: Opcode = Opcode(0x0b);
    pub const RC_READ_REQUEST: Opcode = Opcode(0x0c);
    pub const RC_READ_RESPONSE_FIRST: Opcode = Opcode(0x0d);
    pub const RC_READ_RESPONSE_MIDDLE: Opcode = Opcode(0x0e);
    pub const RC_READ_RESPONSE_LAST: Opcode = Opcode(0x0f);
    pub const RC_READ_RESPONSE_ONLY: Opcode = Opcode(0x10);
    pub const RC_ACKNOWLEDGE: Opcode = Opcode(0x11);
    pub const RC_ATOMIC_ACKNOWLEDGE: Opcode = Opcode(0x12);
    pub const RC_COMPARE_SWAP: Opcode = Opcode(0x13);
    pub const RC_FETCH_ADD: Opcode = Opcode(0x14);
    pub const RC_SEND_LAST_INVALIDATE: Opcode = Opcode(0x16);
    pub const RC_SEND_ONLY_INVALIDATE: Opcode = Opcode(0x17);
    /// IBA Vol 1 release 1.5 and later.
    pub const RC_ATOMIC_WRITE: Opcode = Opcode(0x1d);
    pub const UD_SEND_ONLY: Opcode = Opcode(0x64);
    pub const UD_SEND_ONLY_IMM: Opcode = Opcode(0x65);
    pub const CNP: Opcode = Opcode(0x81);
    /// Not of the specification: one of those that it leaves to manufacturers (IBA §9.2.1: 11000000 to 11111111). "I am
    /// here now", see `docs/wire-extension.md`.
    pub const RC_RESUME: Opcode = Opcode(0xd0);

    /// Its row of the table; `None` for a reserved opcode, but for those of RC, which want an answer.
    pub fn info(self) -> Option<&'static OpcodeInfo> {
        TABLE[usize::from(self.0)].as_ref()
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.info() {
            Some(info) => f.write_str(info.name),
            None => write!(f, "Opcode({:#04x})", self.0),
        }
    }
}

/// First or middle packet, or the end of a message: the columns of the table that depend on the position.
#[derive(Clone, Copy)]
enum At {
    First,
    Middle,
    Last,
    Only,
}

const fn row(name: &'static str, service: Service, kind: Kind, at: At, headers: Headers) -> OpcodeInfo {
    let ends = matches!(at, At::Last | At::Only);
    OpcodeInfo {
        name,
        service,
        kind,
        headers,
        starts: matches!(at, At::First | At::Only),
        ends,
        consumes_receive: ends
            && (matches!(kind, Kind::Send) || matches!(kind, Kind::Write) && headers.immdt),
        has_payload: matches!(
            kind,
            Kind::Send | Kind::Write | Kind::ReadResponse | Kind::AtomicWrite | Kind::Reserved
        ),
    }
}

const TABLE: [Option<OpcodeInfo>; 256] = {
    use At::{First, Last, Middle, Only};
    use Headers as H;
    use Kind::{
        Acknowledge, Atomic, AtomicAcknowledge, AtomicWrite, Congestion, Migration, ReadRequest,
        ReadResponse, Reserved, Send, Write,
    };
    use Service::{Cnp, Rc, Uc, Ud};
    let mut t = [None; 256];
    t[0x00] = Some(row("RC_SEND_FIRST", Rc, Send, First, H::NONE));
    t[0x01] = Some(row("RC_SEND_MIDDLE", Rc, Send, Middle, H::NONE));
    t[0x02] = Some(row("RC_SEND_LAST", Rc, Send, Last, H::NONE));
    t[0x03] = Some(row("RC_SEND_LAST_IMM", Rc, Send, Last, H::NONE.and_immdt()));
    t[0x04] = Some(row("RC_SEND_ONLY", Rc, Send, Only, H::NONE));
    t[0x05] = Some(row("RC_SEND_ONLY_IMM", Rc, Send, Only, H::NONE.and_immdt()));
    t[0x06] = Some(row("RC_WRITE_FIRST", Rc, Write, First, H::RETH));
    t[0x07] = Some(row("RC_WRITE_MIDDLE", Rc, Write, Middle, H::NONE));
    t[0x08] = Some(row("RC_WRITE_LAST", Rc, Write, Last, H::NONE));
    t[0x09] = Some(row("RC_WRITE_LAST_IMM", Rc, Write, Last, H::NONE.and_immdt()));
    t[0x0a] = Some(row("RC_WRITE_ONLY", Rc, Write, Only, H::RETH));
    t[0x0b] = Some(row("RC_WRITE_ONLY_IMM", Rc, Write, Only, H::RETH.and_immdt()));
    t[0x0c] = Some(row("RC_READ_REQUEST", Rc, ReadRequest, Only, H::RETH));
    t[0x0d] = Some(row("RC_READ_RESPONSE_FIRST", Rc, ReadResponse, First, H::AETH));
    t[0x0e] = Some(row("RC_READ_RESPONSE_MIDDLE", Rc, ReadResponse, Middle, H::NONE));
    t[0x0f] = Some(row("RC_READ_RESPONSE_LAST", Rc, ReadResponse, Last, H::AETH));
    t[0x10] = Some(row("RC_READ_RESPONSE_ONLY", Rc, ReadResponse, Only, H::AETH));
    t[0x11] = Some(row("RC_ACKNOWLEDGE", Rc, Acknowledge, Only, H::AETH));
    t[0x12] = Some(row(
        "RC_ATOMIC_ACKNOWLEDGE",
        Rc,
        AtomicAcknowledge,
        Only,
        H::ATOMIC_ACK,
    ));
    t[0x13] = Some(row("RC_COMPARE_SWAP", Rc, Atomic, Only, H::ATOMIC));
    t[0x14] = Some(row("RC_FETCH_ADD", Rc, Atomic, Only, H::ATOMIC));
    t[0x1d] = Some(row("RC_ATOMIC_WRITE", Rc, AtomicWrite, Only, H::RETH));
    let reserved = [0x15, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1e, 0x1f];
    let mut i = 0;
    while i < reserved.len() {
        t[reserved[i]] = Some(row("RC_RESERVED", Rc, Reserved, Only, H::NONE));
        i += 1;
    }
    t[0x16] = Some(row("RC_SEND_LAST_INVALIDATE", Rc, Send, Last, H::IETH));
    t[0x17] = Some(row("RC_SEND_ONLY_INVALIDATE", Rc, Send, Only, H::IETH));

    t[0x20] = Some(row("UC_SEND_FIRST", Uc, Send, First, H::NONE));
    t[0x21] = Some(row("UC_SEND_MIDDLE", Uc, Send, Middle, H::NONE));
    t[0x22] = Some(row("UC_SEND_LAST", Uc, Send, Last, H::NONE));
    t[0x23] = Some(row("UC_SEND_LAST_IMM", Uc, Send, Last, H::NONE.and_immdt()));
    t[0x24] = Some(row("UC_SEND_ONLY", Uc, Send, Only, H::NONE));
    t[0x25] = Some(row("UC_SEND_ONLY_IMM", Uc, Send, Only, H::NONE.and_immdt()));
    t[0x26] = Some(row("UC_WRITE_FIRST", Uc, Write, First, H::RETH));
    t[0x27] = Some(row("UC_WRITE_MIDDLE", Uc, Write, Middle, H::NONE));
    t[0x28] = Some(row("UC_WRITE_LAST", Uc, Write, Last, H::NONE));
    t[0x29] = Some(row("UC_WRITE_LAST_IMM", Uc, Write, Last, H::NONE.and_immdt()));
    t[0x2a] = Some(row("UC_WRITE_ONLY", Uc, Write, Only, H::RETH));
    t[0x2b] = Some(row("UC_WRITE_ONLY_IMM", Uc, Write, Only, H::RETH.and_immdt()));

    t[0x64] = Some(row("UD_SEND_ONLY", Ud, Send, Only, H::DETH));
    t[0x65] = Some(row("UD_SEND_ONLY_IMM", Ud, Send, Only, H::DETH.and_immdt()));

    t[0x81] = Some(row("CNP", Cnp, Congestion, Only, H::NONE));

    t[0xd0] = Some(row("RC_RESUME", Rc, Migration, Only, H::NONE));
    t
};

/// The row of an acknowledgement with a migration header behind the ACK header. It has the opcode of the others, so that
/// no packet pays for it but those that are longer than an acknowledgement.
pub(crate) static MIGRATION_ACKNOWLEDGE: OpcodeInfo = row(
    "RC_ACKNOWLEDGE",
    Service::Rc,
    Kind::Migration,
    At::Only,
    Headers::AETH,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_sizes() {
        let bytes = |opcode: Opcode| opcode.info().unwrap().header_bytes();
        assert_eq!(bytes(Opcode::RC_SEND_ONLY), 12);
        assert_eq!(bytes(Opcode::RC_WRITE_FIRST), 28);
        assert_eq!(bytes(Opcode::RC_WRITE_MIDDLE), 12);
        assert_eq!(bytes(Opcode::RC_WRITE_ONLY_IMM), 32);
        assert_eq!(bytes(Opcode::RC_READ_RESPONSE_MIDDLE), 12);
        assert_eq!(bytes(Opcode::RC_ACKNOWLEDGE), 16);
        assert_eq!(bytes(Opcode(0x12)), 24);
        assert_eq!(bytes(Opcode(0x13)), 40);
        assert_eq!(bytes(Opcode(0x65)), 24);
    }

    #[test]
    fn columns_agree() {
        for code in 0..=255 {
            let Some(info) = Opcode(code).info() else { continue };
            assert!(
                !info.consumes_receive || info.ends && info.is_request(),
                "{}",
                info.name
            );
            assert!(!info.headers.immdt || info.consumes_receive, "{}", info.name);
            assert!(!info.headers.reth || info.starts, "{}", info.name);
            assert_eq!(format!("{:?}", Opcode(code)), info.name);
        }
        assert_eq!(format!("{:?}", Opcode(0x2c)), "Opcode(0x2c)");
    }
}

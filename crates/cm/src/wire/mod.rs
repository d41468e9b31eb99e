//! Messages of the communication manager (IBA §12.6 and §12.11) as they lie in management datagrams (MADs, §13.4.3), byte for byte.
//!
//! ```text
//!   0     base version 1        4..6   status 0           16..18  attribute: which message
//!   1     class 0x07            6..8   class specific 0   18..20  reserved
//!   2     class version 2       8..16  transaction ID     20..24  attribute modifier 0
//!   3     method 0x03, Send                               24..256 the message
//! ```

mod data;
mod ip;
mod other;
mod path;
mod reason;
mod rep;
mod req;
mod sidr;

pub use data::MESSAGE_BYTES;
pub use ip::{IP_HEADER_BYTES, IpHeader, IpHeaderError};
pub use other::{Drep, Dreq, Mra, Rej, Rejected, Rtu};
pub use path::WirePath;
pub use reason::{RejectReason, SidrStatus};
pub use rep::Rep;
pub use req::Req;
pub use sidr::{SidrRep, SidrReq};

use crate::num::{CommId, ServiceId};
use data::{get, put};

/// Size of a MAD in bytes.
pub const MAD_BYTES: usize = 256;
/// Size of its header in bytes.
pub const HEADER_BYTES: usize = 24;

const BASE_VERSION: u8 = 1;
const CLASS: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 0x03;

/// A message and the transaction that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mad {
    /// Transaction ID.
    pub tid: u64,
    /// The message.
    pub message: Message,
}

/// The messages that there are. LAP and APR, which are about alternate paths, are [`ParseError::Unsupported`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each has a type with documentation")]
pub enum Message {
    Req(Box<Req>),
    Mra(Box<Mra>),
    Rej(Box<Rej>),
    Rep(Box<Rep>),
    Rtu(Box<Rtu>),
    Dreq(Box<Dreq>),
    Drep(Box<Drep>),
    SidrReq(Box<SidrReq>),
    SidrRep(Box<SidrRep>),
}

/// Bytes that are no message of the communication manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A MAD has 256 bytes.
    #[error("{0} bytes are no MAD")]
    Length(usize),
    /// Another management class or version, or not the method Send.
    #[error("class {class:#x} version {version} method {method:#x} is not the communication manager's")]
    Class {
        /// Management class.
        class: u8,
        /// Its version.
        version: u8,
        /// Method.
        method: u8,
    },
    /// A message that is not supported.
    #[error("attribute {0:#x} is not supported")]
    Unsupported(u16),
}

/// By what a message finds the id that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// By its number.
    Id(CommId),
    /// By the service, and whether it is a repetition by who asks.
    Service {
        /// What is asked for.
        service: ServiceId,
        /// The number of the asking id there.
        remote: CommId,
        /// The asking RNIC, of a REQ.
        remote_guid: Option<u64>,
    },
    /// By the peer: a peer gives up whose request has not been answered.
    Peer {
        /// The peer's RNIC.
        remote_guid: u64,
        /// The number of the peer's id there.
        remote: CommId,
    },
}

impl Mad {
    /// Reads a MAD. Reserved fields are not looked at.
    pub fn parse(bytes: &[u8]) -> Result<Mad, ParseError> {
        let mad: &[u8; MAD_BYTES] = bytes.try_into().map_err(|_| ParseError::Length(bytes.len()))?;
        let [base, class, version, method, ..] = *mad;
        if (base, class, version, method) != (BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND) {
            return Err(ParseError::Class {
                class,
                version,
                method,
            });
        }
        let body: &[u8; MESSAGE_BYTES] = mad.last_chunk().expect("it is a part of it");
        let message = match u16::from_be_bytes(get(mad, 16)) {
            Req::ATTRIBUTE => Message::Req(Box::new(Req::parse(body))),
            Mra::ATTRIBUTE => Message::Mra(Box::new(Mra::parse(body))),
            Rej::ATTRIBUTE => Message::Rej(Box::new(Rej::parse(body))),
            Rep::ATTRIBUTE => Message::Rep(Box::new(Rep::parse(body))),
            Rtu::ATTRIBUTE => Message::Rtu(Box::new(Rtu::parse(body))),
            Dreq::ATTRIBUTE => Message::Dreq(Box::new(Dreq::parse(body))),
            Drep::ATTRIBUTE => Message::Drep(Box::new(Drep::parse(body))),
            SidrReq::ATTRIBUTE => Message::SidrReq(Box::new(SidrReq::parse(body))),
            SidrRep::ATTRIBUTE => Message::SidrRep(Box::new(SidrRep::parse(body))),
            other => return Err(ParseError::Unsupported(other)),
        };
        let tid = u64::from_be_bytes(get(mad, 8));
        Ok(Mad { tid, message })
    }

    /// Writes the MAD, reserved fields zero.
    pub fn emit(&self) -> [u8; MAD_BYTES] {
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        put(&mut mad, 8, self.tid.to_be_bytes());
        let body: &mut [u8; MESSAGE_BYTES] = mad.last_chunk_mut().expect("it is a part of it");
        let attribute = match &self.message {
            Message::Req(message) => (message.emit(body), Req::ATTRIBUTE).1,
            Message::Mra(message) => (message.emit(body), Mra::ATTRIBUTE).1,
            Message::Rej(message) => (message.emit(body), Rej::ATTRIBUTE).1,
            Message::Rep(message) => (message.emit(body), Rep::ATTRIBUTE).1,
            Message::Rtu(message) => (message.emit(body), Rtu::ATTRIBUTE).1,
            Message::Dreq(message) => (message.emit(body), Dreq::ATTRIBUTE).1,
            Message::Drep(message) => (message.emit(body), Drep::ATTRIBUTE).1,
            Message::SidrReq(message) => (message.emit(body), SidrReq::ATTRIBUTE).1,
            Message::SidrRep(message) => (message.emit(body), SidrRep::ATTRIBUTE).1,
        };
        put(&mut mad, 16, attribute.to_be_bytes());
        mad
    }

    /// By what it finds its id: for whoever passes messages on to another host.
    pub fn recipient(&self) -> Recipient {
        match &self.message {
            Message::Req(req) => Recipient::Service {
                service: req.service,
                remote: req.local_comm_id,
                remote_guid: Some(req.local_guid),
            },
            Message::SidrReq(req) => Recipient::Service {
                service: req.service,
                remote: req.request_id,
                remote_guid: None,
            },
            Message::Rej(rej) if rej.reason == RejectReason::TIMEOUT => Recipient::Peer {
                remote_guid: u64::from_be_bytes(get(&rej.additional, 0)),
                remote: rej.local_comm_id,
            },
            Message::Rej(rej) => Recipient::Id(rej.remote_comm_id),
            Message::Mra(mra) => Recipient::Id(mra.remote_comm_id),
            Message::Rep(rep) => Recipient::Id(rep.remote_comm_id),
            Message::Rtu(rtu) => Recipient::Id(rtu.remote_comm_id),
            Message::Dreq(dreq) => Recipient::Id(dreq.remote_comm_id),
            Message::Drep(drep) => Recipient::Id(drep.remote_comm_id),
            Message::SidrRep(rep) => Recipient::Id(rep.request_id),
        }
    }
}

//! What a queue pair puts into every packet.

use crate::tx::{BatchFull, TxBatch};
use crate::wire::bth::{Bth, TRANSPORT_VERSION};
use crate::wire::opcode::Opcode;
use crate::wire::packet::{Head, packet_bytes};
use crate::{AccessError, Counters, Mtu, Psn, Qpn};

/// The connection as the packets see it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Link {
    pub pkey: u16,
    pub dest_qpn: Qpn,
    pub mtu: Mtu,
}

/// Why a packet could not be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendError {
    /// The batch has to go first.
    Full,
    /// The payload could not be read.
    Access,
}

impl From<BatchFull> for SendError {
    fn from(BatchFull: BatchFull) -> SendError {
        SendError::Full
    }
}

impl From<AccessError> for SendError {
    fn from(AccessError: AccessError) -> SendError {
        SendError::Access
    }
}

/// What one poll sends into.
pub(crate) struct Outlet<'a> {
    pub link: &'a Link,
    pub batch: &'a mut TxBatch,
    pub counters: &'a mut Counters,
    /// Packets with requests or READ data that may still be sent.
    pub budget: usize,
}

impl Outlet<'_> {
    /// Appends a packet whose payload `fill` writes. Gives the size of the payload.
    pub fn send(
        &mut self,
        head: &Head,
        payload_bytes: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), AccessError>,
    ) -> Result<usize, SendError> {
        let payload_bytes = payload_bytes as usize;
        let bytes = packet_bytes(head.bth.opcode, payload_bytes);
        self.batch.fits(bytes)?;
        self.batch.append(bytes, |body| {
            let payload = head.emit(body, payload_bytes);
            if payload.is_empty() { Ok(()) } else { fill(payload) }
        })?;
        Ok(payload_bytes)
    }
}

impl Link {
    /// A base transport header without flags.
    pub fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited: false,
            migrated: true,
            pad_count: 0,
            version: TRANSPORT_VERSION,
            pkey: self.pkey,
            fecn: false,
            becn: false,
            dest_qpn: self.dest_qpn,
            ack_request: false,
            psn,
        }
    }
}

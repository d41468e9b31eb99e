//! Datagrams that a NIC sends by itself, from a queue pair that no program has: those of management (IBA §10.2.4).

use crate::tx::{BatchFull, TxBatch};
use crate::wire::bth::{Bth, TRANSPORT_VERSION};
use crate::wire::deth::Deth;
use crate::wire::opcode::Opcode;
use crate::wire::packet::{Head, packet_bytes};
use crate::{Psn, Qpn};

/// A datagram, but for its payload.
#[derive(Clone, Copy, Debug)]
pub struct Datagram {
    /// The receiver's queue pair.
    pub destination: Qpn,
    /// The sender's.
    pub source: Qpn,
    /// The receiver's queue key.
    pub qkey: u32,
    /// Partition key.
    pub pkey: u16,
    /// The sender counts; nobody checks.
    pub psn: Psn,
}

impl Datagram {
    /// Appends it to a batch whose flow goes to its destination; false if it does not fit, and the batch is to be sent first.
    pub fn append(&self, payload: &[u8], batch: &mut TxBatch) -> bool {
        let bytes = packet_bytes(Opcode::UD_SEND_ONLY, payload.len());
        if batch.fits(bytes).is_err() {
            return false;
        }
        let head = Head {
            deth: Some(Deth {
                qkey: self.qkey,
                source_qpn: self.source,
            }),
            ..Head::new(Bth {
                opcode: Opcode::UD_SEND_ONLY,
                solicited: false,
                migrated: true,
                pad_count: 0,
                version: TRANSPORT_VERSION,
                pkey: self.pkey,
                fecn: false,
                becn: false,
                dest_qpn: self.destination,
                ack_request: false,
                psn: self.psn,
            })
        };
        let appended: Result<(), BatchFull> = batch.append(bytes, |body| {
            head.emit(body, payload.len()).copy_from_slice(payload);
            Ok(())
        });
        appended.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::{Flow, Packet, UDP_PORT};

    #[test]
    fn a_datagram_is_read_as_it_was_written() {
        let end = |host| SocketAddr::from(([10, 0, 0, host], UDP_PORT));
        let flow = Flow::new(end(1), end(2)).unwrap();
        let mut batch = TxBatch::new(flow);
        let datagram = Datagram {
            destination: Qpn::new(1),
            source: Qpn::new(1),
            qkey: 0x8001_0000,
            pkey: 0xffff,
            psn: Psn::new(77),
        };
        assert!(datagram.append(&[5; 256], &mut batch));
        assert!(!datagram.append(&[5; 512], &mut batch), "longer than the first");
        let bytes = batch.packets().next().unwrap();
        assert!(flow.verify(bytes, 0).is_good());
        let packet = Packet::parse(bytes).unwrap();
        assert_eq!((packet.bth.dest_qpn, packet.bth.psn), (Qpn::new(1), Psn::new(77)));
        assert_eq!(packet.deth.unwrap().qkey, 0x8001_0000);
        assert_eq!(packet.payload, [5; 256]);
    }
}

//! Datagrams that a partner, or anybody, sends to the RNIC's port.

use std::net::SocketAddr;

use verbatim_roce::wire::bth::Bth;
use verbatim_roce::wire::icrc::ICRC_BYTES;
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{Flow, Packet, Psn, Qpn, Verdict};

fn flow(ipv6: bool) -> Flow {
    let address = |host: u16| match ipv6 {
        false => SocketAddr::from(([10, 0, 0, host as u8], 4791)),
        true => SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, host], 4791)),
    };
    Flow::new(address(1), address(2)).expect("of one family")
}

/// Parses; checks the ICRC; what this side could have sent is the same when it is written again.
pub fn packet(datagram: &[u8]) {
    for ipv6 in [false, true] {
        for segment in [0, 1, u16::MAX] {
            let _: Verdict = flow(ipv6).verify(datagram, segment);
        }
    }
    let Ok(packet) = Packet::parse(datagram) else {
        return;
    };
    let headers = packet.info.headers;
    assert_eq!(packet.deth.is_some(), headers.deth);
    assert_eq!(packet.reth.is_some(), headers.reth);
    assert_eq!(packet.atomic_eth.is_some(), headers.atomic_eth);
    assert_eq!(packet.aeth.is_some(), headers.aeth);
    assert_eq!(packet.atomic_ack.is_some(), headers.atomic_ack_eth);
    assert_eq!(packet.imm.is_some(), headers.immdt);
    assert_eq!(packet.invalidate.is_some(), headers.ieth);
    let parts =
        packet.info.header_bytes() + packet.payload.len() + usize::from(packet.bth.pad_count) + ICRC_BYTES;
    if packet.info.has_payload {
        assert_eq!(parts, datagram.len(), "every byte belongs to some part");
    }
}

/// One of each opcode.
pub fn seeds() -> Vec<Vec<u8>> {
    let known = (0..=u8::MAX).map(Opcode).filter(|opcode| opcode.info().is_some());
    let seeds = known.map(|opcode| {
        let mut bth = [0; 12];
        Bth {
            opcode,
            solicited: false,
            migrated: true,
            pad_count: 0,
            version: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            dest_qpn: Qpn::new(0x11),
            ack_request: true,
            psn: Psn::new(200),
        }
        .emit(&mut bth);
        let info = opcode.info().expect("a known one");
        let mut bytes = bth.to_vec();
        bytes.resize(info.header_bytes(), 1);
        bytes.extend(vec![7; if info.has_payload { 64 } else { 0 }]);
        bytes.extend(flow(false).icrc(&bytes, 0).to_le_bytes());
        bytes
    });
    seeds.collect()
}

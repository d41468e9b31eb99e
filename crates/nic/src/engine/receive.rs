//! Packets in.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use verbatim_roce::icrc::Flow;
use verbatim_roce::{Packet, Time, UDP_PORT};

use super::Nic;

/// Batches taken in a turn, so that sending has its turn too: ACKs for what came, above all.
const BATCHES_PER_TURN: usize = 16;

impl Nic {
    /// Takes what has arrived and hands it to its queue pairs; says whether that was all.
    pub(super) fn receive(&mut self, now: Time) -> bool {
        let local = SocketAddr::V4(SocketAddrV4::new(self.device.interface.address, UDP_PORT));
        let Self {
            udp,
            objects,
            effects,
            touched,
            counters,
            ..
        } = self;
        for _ in 0..BATCHES_PER_TURN {
            let arrival = match udp.receive() {
                Ok(Some(arrival)) => arrival,
                Ok(None) => return true,
                // Out of memory, say. What is lost is sent again.
                Err(error) => {
                    tracing::debug!(%error, "recvmsg");
                    counters.rx_errors += 1;
                    return true;
                }
            };
            counters.rx_batches += 1;
            counters.rx_bytes += arrival.bytes.len() as u64;
            let source = *arrival.source.ip();
            let flow = Flow::new(SocketAddr::V4(arrival.source), local).expect("both are IPv4 addresses");
            for (index, datagram) in arrival.bytes.chunks(arrival.segment_bytes).enumerate() {
                let Ok(packet) = Packet::parse(datagram) else {
                    counters.rx_malformed += 1;
                    continue;
                };
                let qpn = packet.bth.dest_qpn.get();
                let Some(qp) = objects.qps.get_mut(qpn) else {
                    counters.rx_unknown_qp += 1;
                    continue;
                };
                if !flow.verify(datagram, index as u16).is_good() {
                    counters.rx_icrc_errors += 1;
                    continue;
                }
                counters.rx_packets += 1;
                if qp.route.is_some_and(|route| IpAddr::V4(route.remote) != source) {
                    counters.rx_wrong_source += 1;
                    continue;
                }
                if qp.parked {
                    counters.rx_parked += 1;
                    continue;
                }
                touched.add(qpn, qp);
                let (transport, mut host) = qp.split(&mut objects.cqs, &objects.regions, effects, now);
                transport.handle_packet(now, &packet, &mut host);
            }
        }
        false
    }
}

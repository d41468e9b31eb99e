//! Copies of packets for who captures them: `Request::StartCapture`. Costs one look at an empty list while nobody does.

use std::net::{IpAddr, SocketAddr};

use rustix::time::{ClockId, clock_gettime};
use verbatim_device::control::{Captured, Reply};
use verbatim_roce::icrc::{Flow, Verdict};
use verbatim_roce::wire::grh;
use verbatim_roce::{Packet, Traffic};
use verbatim_seqpacket::Socket;

use super::Nic;
use crate::error::Refused;
use crate::objects::Objects;

/// The shortest beginning of a packet that may be asked for, and the longest, which holds any packet.
const SNAP_BYTES: std::ops::RangeInclusive<u32> = 64..=65_535;

const UDP_BYTES: usize = 8;

/// Who captures.
#[derive(Debug)]
pub struct Sink {
    /// The connection.
    pub id: u32,
    snap_bytes: usize,
    qpn: Option<u32>,
    missed: u64,
}

/// A packet as the capture sees it.
#[derive(Debug)]
pub struct Seen<'a> {
    pub flow: &'a Flow,
    pub traffic: Traffic,
    pub datagram: &'a [u8],
    /// Its place in its batch, which Linux makes the IPv4 identification.
    pub index: u16,
    /// It was sent from here; otherwise it arrived.
    pub sent: bool,
}

impl Nic {
    /// A connection captures from now on.
    pub(super) fn start_capture(
        &mut self,
        id: u32,
        snap_bytes: u32,
        qpn: Option<u32>,
    ) -> Result<Reply, Refused> {
        if !SNAP_BYTES.contains(&snap_bytes) {
            return Err(Refused::invalid(format!(
                "{snap_bytes} bytes of a packet: between {} and {} can be captured",
                SNAP_BYTES.start(),
                SNAP_BYTES.end()
            )));
        }
        if self.captures.iter().any(|sink| sink.id == id) {
            return Err(Refused::invalid("this connection captures already"));
        }
        self.captures.push(Sink {
            id,
            snap_bytes: snap_bytes as usize,
            qpn,
            missed: 0,
        });
        Ok(Reply::Done)
    }

    /// The batch has left.
    pub(super) fn capture_sent(&mut self) {
        if self.captures.is_empty() {
            return;
        }
        for (index, datagram) in (0..).zip(self.batch.packets()) {
            let seen = Seen {
                flow: self.batch.flow(),
                traffic: self.batch.traffic(),
                datagram,
                index,
                sent: true,
            };
            for sink in &mut self.captures {
                sink.take(&seen, &self.objects, |id| self.clients.socket(id));
            }
        }
    }
}

impl Sink {
    /// Sends a copy, if the packet is one of those asked for and there is room.
    pub fn take<'s>(
        &mut self,
        seen: &Seen<'_>,
        objects: &Objects,
        socket: impl Fn(u32) -> Option<&'s Socket>,
    ) {
        if self.qpn.is_some_and(|qpn| !concerns(seen, qpn, objects)) {
            return;
        }
        let Some(socket) = socket(self.id) else { return };
        let mut bytes = headers(seen);
        let length = bytes.len() + seen.datagram.len();
        let rest = self
            .snap_bytes
            .saturating_sub(bytes.len())
            .min(seen.datagram.len());
        bytes.extend_from_slice(&seen.datagram[..rest]);
        let time = clock_gettime(ClockId::Realtime);
        let captured = Captured {
            time_ns: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64,
            length: length as u32,
            missed: self.missed,
            bytes,
        };
        match socket.send_now(&captured) {
            Ok(()) => self.missed = 0,
            // No room; or closed, which the control path notices.
            Err(_) => self.missed += 1,
        }
    }
}

/// Whether a packet is from or for a queue pair. What is sent names its receiver only, except for datagrams.
fn concerns(seen: &Seen<'_>, qpn: u32, objects: &Objects) -> bool {
    let Ok(packet) = Packet::parse(seen.datagram) else {
        return false;
    };
    if !seen.sent {
        return packet.bth.dest_qpn.get() == qpn;
    }
    if let Some(deth) = packet.deth {
        return deth.source_qpn.get() == qpn;
    }
    objects.qps.get(qpn).is_some_and(|qp| {
        let to = qp.transport.query().dest_qpn;
        to == Some(packet.bth.dest_qpn)
            && qp
                .route
                .is_some_and(|route| route.remote == seen.flow.destination().ip())
    })
}

/// The IP and UDP headers of a packet, made again from what a UDP socket tells of them.
fn headers(seen: &Seen<'_>) -> Vec<u8> {
    let ip = grh::from_flow(seen.flow, seen.datagram.len(), seen.traffic);
    let (source, destination) = (seen.flow.source(), seen.flow.destination());
    let udp_bytes = (UDP_BYTES + seen.datagram.len()) as u16;
    let mut bytes = match source.ip() {
        IpAddr::V4(_) => {
            let mut ip = ip[20..].to_vec();
            // The ICRC covers the identification, and tells it where the socket does not.
            let identification = match seen.flow.verify(seen.datagram, seen.index) {
                Verdict::Identification(other) => other,
                Verdict::Expected | Verdict::Damaged => seen.index,
            };
            ip[4..6].copy_from_slice(&identification.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = finish(sum(&ip));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            ip
        }
        IpAddr::V6(_) => ip.to_vec(),
    };
    let mut udp = [0; UDP_BYTES];
    udp[..2].copy_from_slice(&source.port().to_be_bytes());
    udp[2..4].copy_from_slice(&destination.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
    let pseudo = sum_of_address(source) + sum_of_address(destination) + 17 + u64::from(udp_bytes);
    // RFC 768: a sum of zero is sent as ones.
    let checksum = match finish(pseudo + sum(&udp) + sum(seen.datagram)) {
        0 => 0xffff,
        checksum => checksum,
    };
    udp[6..].copy_from_slice(&checksum.to_be_bytes());
    bytes.extend_from_slice(&udp);
    bytes
}

fn sum_of_address(end: SocketAddr) -> u64 {
    match end.ip() {
        IpAddr::V4(address) => sum(&address.octets()),
        IpAddr::V6(address) => sum(&address.octets()),
    }
}

/// The sum of RFC 1071, not folded yet.
fn sum(bytes: &[u8]) -> u64 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
    bytes.chunks(2).map(word).sum()
}

fn finish(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebuilt_headers_have_right_checksums() {
        let end = |host: u8| SocketAddr::from(([10, 0, 0, host], 4791));
        let v6 = |host: u16| SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, host], 4791));
        for flow in [Flow::new(end(1), end(2)), Flow::new(v6(1), v6(2))] {
            let flow = flow.unwrap();
            let seen = Seen {
                flow: &flow,
                traffic: Traffic::default(),
                datagram: &[1, 2, 3, 4, 5],
                index: 7,
                sent: true,
            };
            let bytes = headers(&seen);
            let (ip, udp) = bytes.split_at(bytes.len() - UDP_BYTES);
            let pseudo = sum_of_address(flow.source()) + sum_of_address(flow.destination()) + 17 + 13;
            assert_eq!(finish(pseudo + sum(udp) + sum(seen.datagram)), 0);
            if ip.len() == 20 {
                assert_eq!((finish(sum(ip)), ip[5]), (0, 7));
            } else {
                assert_eq!((ip.len(), ip[0]), (40, 0x60));
            }
        }
    }
}

//! Queue pair 1: what the communication manager sends, and its channels.

use std::net::{IpAddr, SocketAddr};

use verbatim_cm::{QP1_QKEY, Transmit};
use verbatim_device::gids::counterpart;
use verbatim_roce::icrc::Flow;
use verbatim_roce::{Datagram, Psn, Qpn, Time, Traffic, UDP_PORT};

use super::Nic;
use crate::cm::{PASS_ON_QKEY, PassingOn};
use crate::error::NicError;
use crate::socket::UdpPort;

/// The partition of all.
const DEFAULT_PKEY: u16 = 0xffff;

/// Queue pair 1, at both ends (IBA Vol 1 §10.2.4).
const QP1: Qpn = Qpn::new(1);

fn end(gid: verbatim_cm::Gid) -> SocketAddr {
    SocketAddr::new(gid.ip(), UDP_PORT)
}

impl Nic {
    /// Sends what the communication manager has to send. What the socket has no room for is lost: it comes again.
    pub(super) fn send_management(&mut self, now: Time) -> Result<(), NicError> {
        while let Some(transmit) = self.objects.cm.next_transmit() {
            // Its own addresses are this RNIC's; a peer's may be anything.
            if !self.gids.contains(&transmit.from.0) || !self.send_batch(now)? {
                tracing::debug!(to = %transmit.to, "a management datagram is lost");
                continue;
            }
            self.put_into_batch(&transmit);
        }
        while let Some(passing_on) = self.objects.cm.next_passing_on() {
            if self.send_batch(now)? {
                self.put_on(&passing_on);
            }
        }
        Ok(())
    }

    /// Sends a message on to where its id has gone.
    fn put_on(&mut self, passing_on: &PassingOn) {
        let own = counterpart(&[passing_on.to.0], passing_on.to.0, &self.gids);
        let own = match passing_on.own.ip().is_ipv4() == passing_on.to.ip().is_ipv4() {
            true => Some(passing_on.own),
            false => own.map(|index| verbatim_cm::Gid(self.gids[index])),
        };
        let Some(Ok(flow)) = own.map(|own| Flow::new(end(own), end(passing_on.to))) else {
            return;
        };
        tracing::debug!(to = %passing_on.to, "a management datagram is passed on");
        self.batch.restart_with(flow, Traffic::default());
        self.put_datagram(PASS_ON_QKEY, DEFAULT_PKEY, &passing_on.bytes);
    }

    fn put_into_batch(&mut self, transmit: &Transmit) {
        let mut from = end(transmit.from);
        if transmit.asks() {
            from.set_port(self.requests_port(from.ip()));
        }
        let Ok(flow) = Flow::new(from, end(transmit.to)) else {
            return;
        };
        let default = Traffic::default();
        let traffic = Traffic {
            traffic_class: transmit.traffic_class,
            hop_limit: match transmit.hop_limit {
                // A way without routers; the kernel's default works there, too.
                0 | 1 => default.hop_limit,
                limit => limit,
            },
            flow_label: default.flow_label,
        };
        self.batch.restart_with(flow, traffic);
        self.put_datagram(QP1_QKEY, transmit.pkey, &transmit.bytes[..]);
    }

    /// The port from which requests of an own address go out.
    fn requests_port(&self, own: IpAddr) -> u16 {
        let port = self.ports.iter().find(|port| port.socket.address() == own);
        let requests = port.and_then(|port| port.requests.as_ref());
        requests.map_or(UDP_PORT, |(_, port)| *port)
    }

    /// Hosts have said that nobody takes requests there.
    pub(super) fn take_refusals(&mut self, port: usize, now: Time) {
        let Some((socket, _)) = &self.ports[port].requests else {
            return;
        };
        for host in socket.take_refusals() {
            tracing::debug!(%host, "no RNIC is there");
            self.objects.cm.refused(now, host);
        }
    }

    fn put_datagram(&mut self, qkey: u32, pkey: u16, bytes: &[u8]) {
        self.management_psn = self.management_psn.next();
        let datagram = Datagram {
            destination: QP1,
            source: QP1,
            qkey,
            pkey,
            psn: self.management_psn,
        };
        datagram.append(bytes, &mut self.batch);
    }

    /// Ends a channel of rdma_cm, and all its ids.
    pub(super) fn remove_cm_channel(&mut self, channel: u32, now: Time) {
        if let Some(outbox) = self.objects.cm.outbox(channel) {
            self.poller.remove(outbox);
        }
        self.objects.cm.remove_channel(now, channel);
    }
}

/// The socket from which requests go out at an own address, and its port. Without one they go out as everything does, and whoever
/// asks where nobody is waits until all repetitions are over.
pub fn bind_for_requests(own: IpAddr, ifindex: u32) -> Option<(UdpPort, u16)> {
    let socket = UdpPort::bind_for_requests(own, ifindex)
        .inspect_err(|error| tracing::warn!(%own, %error, "refusals of hosts are not heard of"))
        .ok()?;
    let port = socket.port()?;
    Some((socket, port))
}

/// The first PSN of queue pair 1.
pub fn first_psn() -> Psn {
    Psn::new(rand::random())
}

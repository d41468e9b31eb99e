//! Packets in.

use std::net::SocketAddr;

use verbatim_roce::icrc::Flow;
use verbatim_roce::wire::grh;
use verbatim_roce::wire::opcode::{Kind, Opcode, Service};
use verbatim_roce::{Packet, ParseError, Time, UDP_PORT};

use super::capture::{Seen, Sink};
use super::control::Clients;
use super::lineup::Lineup;
use super::{Nic, Touched};
use crate::cm::PASS_ON_QKEY;
use crate::device::gid;
use crate::objects::Objects;
use crate::qp::Effects;
use crate::socket::Arrival;
use crate::stats::NicCounters;

/// Batches taken in a turn, so that sending has its turn too: ACKs for what came, above all.
const BATCHES_PER_TURN: usize = 16;

/// Queue pair 1 (IBA Vol 1 §10.2.4).
const MANAGEMENT_QPN: u32 = 1;

/// The destination of multicast packets (IBA Vol 1 §10.5).
const MULTICAST_QPN: u32 = 0xff_ffff;

/// Where something has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// At an own address, by its index in the GID table.
    Port(usize),
    /// At a multicast group.
    Group(u32),
}

impl Nic {
    /// Takes what has arrived and hands it to its queue pairs; says whether that was all.
    pub(super) fn receive(&mut self, now: Time) -> bool {
        let mut budget = BATCHES_PER_TURN;
        // The port of the last arrival first would be unfair to the others; each begins in its turn.
        let count = self.ports.len();
        let polls = !self.spin.is_zero() || self.busy_poll.is_on(now);
        for step in 0..count {
            let index = (self.first_port + step) % count;
            if self.ports[index].attention.begin(polls) {
                self.receive_at(At::Port(index), now, &mut budget);
            }
        }
        self.first_port = (self.first_port + 1) % count;
        if !self.objects.groups.is_empty() {
            let mut next = self.objects.groups.readable().next();
            while let Some(number) = next {
                self.receive_at(At::Group(number), now, &mut budget);
                next = self.objects.groups.readable().find(|other| *other > number);
            }
        }
        budget > 0
    }

    fn receive_at(&mut self, at: At, now: Time, budget: &mut usize) {
        let mut again = true;
        while again && *budget > 0 {
            let Self {
                ports,
                objects,
                effects,
                touched,
                counters,
                buffer,
                captures,
                clients,
                lineup,
                gids,
                ..
            } = self;
            let received = match at {
                At::Port(index) => {
                    let port = &mut ports[index];
                    let received = port.socket.receive(buffer);
                    match &received {
                        Ok(Some(arrival)) => again = port.attention.take(now, arrival.bytes.len()),
                        _ => port.attention.miss(),
                    }
                    received.map(|arrival| Some((arrival?, port.socket.address())))
                }
                At::Group(number) => {
                    let Some(group) = objects.groups.get_mut(number) else {
                        return;
                    };
                    let received = group.socket.receive(buffer);
                    group.readable = matches!(received, Ok(Some(_)));
                    received.map(|arrival| Some((arrival?, group.address)))
                }
            };
            let (arrival, address) = match received {
                Ok(Some(received)) => received,
                Ok(None) => return,
                // Out of memory, say. What is lost is sent again.
                Err(error) => {
                    tracing::debug!(%error, "recvmsg");
                    counters.rx_errors += 1;
                    return;
                }
            };
            *budget -= 1;
            if !captures.is_empty() {
                capture(
                    &arrival,
                    SocketAddr::new(address, UDP_PORT),
                    captures,
                    objects,
                    clients,
                );
            }
            let mut intake = Intake {
                objects,
                effects,
                touched,
                lineup,
                counters,
                at,
                gids,
                now,
            };
            intake.take(&arrival, SocketAddr::new(address, UDP_PORT));
        }
    }
}

/// Copies of all datagrams, good or not, for who captures.
#[cold]
fn capture(
    arrival: &Arrival<'_>,
    local: SocketAddr,
    captures: &mut [Sink],
    objects: &Objects,
    clients: &Clients,
) {
    let Ok(flow) = Flow::new(arrival.source, local) else {
        return;
    };
    for (index, datagram) in (0..).zip(arrival.bytes.chunks(arrival.segment_bytes)) {
        let seen = Seen {
            flow: &flow,
            traffic: arrival.traffic,
            datagram,
            index,
            sent: false,
        };
        for sink in &mut *captures {
            sink.take(&seen, objects, |id| clients.socket(id));
        }
    }
}

/// What a batch of datagrams meets.
struct Intake<'a> {
    objects: &'a mut Objects,
    effects: &'a mut Effects,
    touched: &'a mut Touched,
    lineup: &'a mut Lineup,
    counters: &'a mut NicCounters,
    at: At,
    gids: &'a [[u8; 16]],
    now: Time,
}

impl Intake<'_> {
    fn take(&mut self, arrival: &Arrival<'_>, local: SocketAddr) {
        self.counters.rx_batches += 1;
        self.counters.rx_bytes += arrival.bytes.len() as u64;
        let (Ok(flow), false) = (Flow::new(arrival.source, local), arrival.bytes.is_empty()) else {
            self.counters.rx_malformed += 1;
            return;
        };
        for (index, datagram) in arrival.bytes.chunks(arrival.segment_bytes).enumerate() {
            let mut packet = match Packet::parse(datagram) {
                Ok(packet) => packet,
                Err(ParseError::UnknownOpcode(_)) => {
                    self.counters.rx_unknown_opcode += 1;
                    continue;
                }
                Err(ParseError::Version(_)) => {
                    self.counters.rx_wrong_version += 1;
                    continue;
                }
                Err(_) => {
                    self.counters.rx_malformed += 1;
                    continue;
                }
            };
            let qpn = packet.bth.dest_qpn.get();
            let known = match self.at {
                At::Port(_) => self.objects.qps.get(qpn).is_some(),
                At::Group(_) => qpn == MULTICAST_QPN,
            };
            if self.at_management(qpn) {
                self.manage(&flow, datagram, index as u16, &packet);
                continue;
            }
            if !known {
                self.forward(&flow, datagram, index as u16, &packet);
                self.counters.rx_unknown_qp += 1;
                continue;
            }
            if !flow.verify(datagram, index as u16).is_good() {
                self.counters.rx_icrc_errors += 1;
                continue;
            }
            self.counters.rx_packets += 1;
            let header;
            if packet.info.service == Service::Ud {
                header = grh::from_flow(&flow, datagram.len(), arrival.traffic);
                packet.grh = Some(&header);
            }
            match self.at {
                At::Port(port) => self.deliver(qpn, Some(port), &flow, &packet),
                At::Group(number) => {
                    let mut next = 0;
                    while let Some(member) = self
                        .objects
                        .groups
                        .get_mut(number)
                        .and_then(|group| group.members.get(next).copied())
                    {
                        next += 1;
                        self.deliver(member, None, &flow, &packet);
                    }
                }
            }
        }
    }

    #[inline]
    fn at_management(&self, qpn: u32) -> bool {
        qpn == MANAGEMENT_QPN && matches!(self.at, At::Port(_))
    }

    /// A packet for queue pair 1, which is the RNIC's own (IBA Vol 1 §13.5): a message of the communication manager, or nothing.
    #[cold]
    fn manage(&mut self, flow: &Flow, datagram: &[u8], index: u16, packet: &Packet<'_>) {
        if !flow.verify(datagram, index).is_good() {
            self.counters.rx_icrc_errors += 1;
            return;
        }
        self.counters.rx_packets += 1;
        let qkey = packet.deth.map(|deth| deth.qkey);
        let qkey = qkey.filter(|_| packet.bth.opcode == Opcode::UD_SEND_ONLY);
        let (from, to) = (gid(flow.source().ip()), gid(flow.destination().ip()));
        let Objects { cm, qps, .. } = &mut *self.objects;
        let (now, payload, gids) = (self.now, packet.payload, self.gids);
        let outcome = match qkey {
            Some(verbatim_cm::QP1_QKEY) => Some(cm.handle_mad(now, from, to, payload, gids, qps)),
            Some(PASS_ON_QKEY) => cm.handle_passed_on(now, from, payload, gids, qps),
            _ => None,
        };
        tracing::debug!(from = %flow.source().ip(), ?outcome, "a management datagram");
    }

    /// A packet for a queue pair that is not here, but may have been: RESUME is passed on.
    #[cold]
    fn forward(&mut self, flow: &Flow, datagram: &[u8], index: u16, packet: &Packet<'_>) {
        if packet.info.kind == Kind::Migration
            && flow.verify(datagram, index).is_good()
            && let Some(forwarded) = self.objects.forwarding.forward(self.now, packet)
        {
            self.counters.resumes_forwarded += 1;
            self.effects.forwarded.push((forwarded, flow.destination().ip()));
        }
    }

    #[inline]
    fn deliver(&mut self, qpn: u32, port: Option<usize>, flow: &Flow, packet: &Packet<'_>) {
        let Objects {
            qps,
            shared,
            forwarding,
            confirming,
            ..
        } = &mut *self.objects;
        let Some(qp) = qps.get_mut(qpn) else { return };
        let expected = qp.route.is_none_or(|route| {
            route.remote == flow.source().ip() && port.is_none_or(|port| port == usize::from(route.port))
        });
        if !expected {
            // RESUME comes from where the partner has gone, and perhaps this end is not here any more either.
            if packet.info.kind != Kind::Migration {
                self.counters.rx_wrong_source += 1;
                return;
            }
            if let Some(forwarded) = forwarding.forward(self.now, packet) {
                self.counters.resumes_forwarded += 1;
                self.effects.forwarded.push((forwarded, flow.destination().ip()));
                return;
            }
        }
        if (qp.parked || qp.stopped) && !qp.is_paused() {
            self.counters.rx_parked += 1;
            return;
        }
        if !qp.confirmation.is_open() {
            confirming.note_sign(qpn, self.now);
        }
        self.touched.add(qpn, qp);
        self.lineup.note(qp.class, 1, packet.payload.len());
        let (transport, mut host) = qp.split(shared, self.effects, self.now);
        transport.handle_packet(self.now, packet, &mut host);
        if packet.info.kind == Kind::Migration {
            for heard in &mut self.effects.heard_peers {
                heard.is_direct &= heard.qpn != qpn || heard.partner.address == flow.source().ip();
            }
        }
    }
}

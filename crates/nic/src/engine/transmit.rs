//! Packets out: queue pairs in turn, each into the batch that is being filled.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use verbatim_roce::icrc::Flow;
use verbatim_roce::{Time, Transmit, UDP_PORT};

use super::Nic;
use crate::error::NicError;
use crate::objects::Objects;
use crate::poller::Token;

/// Packets of one queue pair before the next has its turn: two full batches of the largest MTU.
const PACKETS_PER_QP: usize = 32;

/// Batches sent in a turn, so that receiving has its turn too.
const BATCHES_PER_TURN: u64 = 16;

/// How long to leave the kernel alone when it is out of buffers (`ENOBUFS` comes without a promise to tell).
const NO_BUFFERS_PAUSE: Duration = Duration::from_micros(100);

/// Whether a batch waits for room in the socket's buffer, and for what.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Blocked {
    #[default]
    No,
    /// Until the socket of that own address says that there is room.
    Room(usize),
    /// Until then.
    Until(Time),
}

impl Blocked {
    /// When to try again, if it is a matter of time.
    pub fn until(self) -> Option<Time> {
        match self {
            Self::Until(time) => Some(time),
            Self::No | Self::Room(_) => None,
        }
    }
}

impl Nic {
    /// Sends for those whose turn it is.
    pub(super) fn transmit(&mut self, now: Time) -> Result<(), NicError> {
        if let Blocked::Until(time) = self.blocked
            && time <= now
        {
            self.blocked = Blocked::No;
        }
        if !self.send_batch(now)? {
            return Ok(());
        }
        if !self.effects.forwarded.is_empty() {
            self.pass_on(now)?;
        }
        let most = self.counters.tx_batches + BATCHES_PER_TURN;
        while self.counters.tx_batches < most {
            let Some(qpn) = self.ready.pop_front() else { break };
            if !self.transmit_one(qpn, now)? {
                self.ready.push_front(qpn);
                return Ok(());
            }
        }
        self.send_batch(now)?;
        Ok(())
    }

    /// Passes RESUMEs on. Those for which there is no room are lost: they come again.
    #[cold]
    fn pass_on(&mut self, now: Time) -> Result<(), NicError> {
        for (forwarded, own) in std::mem::take(&mut self.effects.forwarded) {
            let end = |address| SocketAddr::new(address, UDP_PORT);
            let Ok(flow) = Flow::new(end(own), end(forwarded.to.address)) else {
                continue;
            };
            if !self.send_batch(now)? {
                return Ok(());
            }
            self.batch.restart(flow);
            forwarded.append(&mut self.batch);
        }
        self.send_batch(now)?;
        Ok(())
    }

    /// Sends for one queue pair until it has nothing more or its share is used up; false: the socket is blocked.
    fn transmit_one(&mut self, qpn: u32, now: Time) -> Result<bool, NicError> {
        let Some(qp) = self.objects.qps.get_mut(qpn) else {
            return Ok(true);
        };
        if qp.stopped {
            qp.queued = false;
            return Ok(true);
        }
        // A datagram queue pair starts the batch for each of its destinations by itself.
        if let Some(route) = &qp.route {
            let window = self
                .objects
                .peers
                .window(route.peer, self.device.limits.window_bytes);
            qp.transport.set_window(window);
            if *self.batch.flow() != route.flow || self.batch.traffic() != route.traffic {
                let (flow, traffic) = (route.flow, route.traffic);
                if !self.send_batch(now)? {
                    return Ok(false);
                }
                self.batch.restart_with(flow, traffic);
            }
        }
        let mut budget = PACKETS_PER_QP;
        loop {
            let Self {
                objects,
                effects,
                touched,
                batch,
                ..
            } = self;
            let Objects { qps, shared, .. } = objects;
            let Some(qp) = qps.get_mut(qpn) else {
                return Ok(true);
            };
            touched.add(qpn, qp);
            let before = batch.segments();
            let (transport, mut host) = qp.split(shared, effects, now);
            let outcome = transport.poll_transmit(now, &mut host, batch, budget);
            budget = budget.saturating_sub(usize::from(batch.segments() - before));
            match outcome {
                Transmit::Idle => {
                    qp.queued = false;
                    self.withheld.note(qpn, qp.transport.ack_deadline());
                    return Ok(true);
                }
                Transmit::Full => {
                    if !self.send_batch(now)? {
                        return Ok(false);
                    }
                    if budget == 0 {
                        self.ready.push_back(qpn);
                        return Ok(true);
                    }
                }
                Transmit::More => {
                    self.ready.push_back(qpn);
                    return Ok(true);
                }
            }
        }
    }

    /// Sends the batch, if there is one; false: it has to wait.
    fn send_batch(&mut self, now: Time) -> Result<bool, NicError> {
        if self.blocked != Blocked::No {
            return Ok(false);
        }
        if self.batch.is_empty() {
            return Ok(true);
        }
        let Self {
            ports, batch, poller, ..
        } = self;
        let (source, destination) = (batch.flow().source().ip(), batch.flow().destination().ip());
        let Some(index) = ports.iter().position(|port| port.socket.address() == source) else {
            unreachable!("ways begin at an address of the GID table");
        };
        let socket = &mut ports[index].socket;
        let end = SocketAddr::new(destination, UDP_PORT);
        match socket.send(end, batch.as_bytes(), batch.segment_bytes(), batch.traffic()) {
            Ok(()) => {
                self.counters.tx_batches += 1;
                self.counters.tx_packets += u64::from(self.batch.segments());
                self.counters.tx_bytes += self.batch.as_bytes().len() as u64;
                self.capture_sent();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.counters.tx_blocked += 1;
                poller.watch_room(socket, Token::Port(index as u32), true)?;
                self.blocked = Blocked::Room(index);
                return Ok(false);
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                self.counters.tx_blocked += 1;
                self.blocked = Blocked::Until(now + NO_BUFFERS_PAUSE);
                return Ok(false);
            }
            // No route, a firewall, a smaller path MTU: for the transport the packets are lost, as on any link.
            Err(error) => {
                tracing::debug!(%destination, %error, "a batch could not be sent");
                self.counters.tx_batches += 1;
                self.counters.tx_errors += 1;
            }
        }
        self.batch.clear();
        Ok(true)
    }

    /// The socket has room again.
    pub(super) fn unblock(&mut self) -> Result<(), NicError> {
        if let Blocked::Room(index) = self.blocked {
            self.blocked = Blocked::No;
            let socket = &self.ports[index].socket;
            self.poller.watch_room(socket, Token::Port(index as u32), false)?;
        }
        Ok(())
    }
}

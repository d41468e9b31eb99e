//! Packets out: queue pairs in turn, each into the batch that is being filled.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use verbatim_device::control::QpClass;
use verbatim_roce::icrc::Flow;
use verbatim_roce::{Time, Transmit, UDP_PORT};

use super::lineup::Turn;
use super::{Nic, ring};
use crate::error::NicError;
use crate::objects::Objects;
use crate::poller::Token;

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

/// What became of a queue pair's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    /// There was no turn: the queue pair is not there, or has left the line.
    Nothing,
    /// It has nothing more to send.
    All,
    /// Its share is used up, and it has more.
    Part,
    /// The socket is blocked.
    Blocked,
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
        self.send_management(now)?;
        let most = self.counters.tx_batches + self.withheld_batches + BATCHES_PER_TURN;
        while self.counters.tx_batches + self.withheld_batches < most {
            let Some(turn) = self.lineup.take(now, self.turns_behind == 0) else {
                break;
            };
            match self.serve_turn(turn, now)? {
                Served::Nothing => {}
                Served::All => {
                    if let Some(qp) = self.objects.qps.get_mut(turn.qpn) {
                        qp.line = None;
                    }
                }
                Served::Part => self.lineup.queue_again(turn, now),
                Served::Blocked => {
                    self.lineup.put_back(turn);
                    return Ok(());
                }
            }
        }
        self.send_batch(now)?;
        Ok(())
    }

    /// A queue pair's turn, if it is in the line from which it was taken.
    fn serve_turn(&mut self, turn: Turn, now: Time) -> Result<Served, NicError> {
        let Turn { qpn, class, .. } = turn;
        let Some(qp) = self.objects.qps.get_mut(qpn) else {
            return Ok(Served::Nothing);
        };
        if qp.line != Some(class) {
            return Ok(Served::Nothing);
        }
        if class == QpClass::Background && !qp.stopped {
            qp.background.all += 1;
            qp.background.starved += u64::from(turn.starved);
            if qp.transport.next_timeout().is_some_and(|due| due <= now) {
                ring(qpn, &mut self.objects, &mut self.effects, now);
            }
        }
        self.transmit_one(qpn, turn.packets, now)
    }

    /// Acknowledgements that wait for a turn in the background are sent now.
    pub(super) fn acknowledge_in_background(&mut self, now: Time) -> Result<(), NicError> {
        let waiting: Vec<_> = self.lineup.in_background().collect();
        for qpn in waiting {
            if let Served::Blocked = self.transmit_one(qpn, 0, now)? {
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

    /// Sends for one queue pair until it has nothing more or its share of packets is used up, which acknowledgements do not count
    /// for.
    fn transmit_one(&mut self, qpn: u32, share: usize, now: Time) -> Result<Served, NicError> {
        let Some(qp) = self.objects.qps.get_mut(qpn) else {
            return Ok(Served::Nothing);
        };
        if qp.stopped {
            return Ok(Served::All);
        }
        if qp.is_kept_from_sending() {
            return self.transmit_unconfirmed(qpn, share, now);
        }
        // A datagram queue pair starts the batch for each of its destinations by itself.
        if let Some(route) = &qp.route {
            let window = self
                .objects
                .peers
                .window(route.peer, self.device.limits.window_bytes);
            qp.transport.set_window(self.lineup.window(qp.class, window, now));
            if *self.batch.flow() != route.flow || self.batch.traffic() != route.traffic {
                let (flow, traffic) = (route.flow, route.traffic);
                if !self.send_batch(now)? {
                    return Ok(Served::Blocked);
                }
                self.batch.restart_with(flow, traffic);
            }
        }
        let mut budget = share;
        loop {
            let Self {
                objects,
                effects,
                touched,
                batch,
                lineup,
                ..
            } = self;
            let Objects { qps, shared, .. } = objects;
            let Some(qp) = qps.get_mut(qpn) else {
                return Ok(Served::Nothing);
            };
            touched.add(qpn, qp);
            let class = qp.class;
            let before = (batch.segments(), batch.as_bytes().len());
            let (transport, mut host) = qp.split(shared, effects, now);
            let outcome = transport.poll_transmit(now, &mut host, batch, budget);
            let sent = usize::from(batch.segments() - before.0);
            lineup.note(class, sent, batch.as_bytes().len() - before.1);
            budget = budget.saturating_sub(sent);
            match outcome {
                Transmit::Idle => {
                    self.withheld.note(qpn, qp.transport.ack_deadline());
                    return Ok(Served::All);
                }
                Transmit::Full => {
                    if !self.send_batch(now)? {
                        return Ok(Served::Blocked);
                    }
                    if budget == 0 && share > 0 {
                        return Ok(Served::Part);
                    }
                }
                Transmit::More => return Ok(Served::Part),
            }
        }
    }

    /// The turn of a queue pair whose other end is not known to name it. What two RNICs say to each other by a secret is sent all the same.
    /// Nothing else is: either it stays where it is, or, if there is to be no answer, goes nowhere.
    #[cold]
    fn transmit_unconfirmed(&mut self, qpn: u32, share: usize, now: Time) -> Result<Served, NicError> {
        if !self.send_batch(now)? {
            return Ok(Served::Blocked);
        }
        let Self {
            objects,
            effects,
            touched,
            batch,
            withheld_batches,
            ..
        } = self;
        let Objects {
            qps,
            shared,
            confirming,
            ..
        } = objects;
        let Some(qp) = qps.get_mut(qpn) else {
            return Ok(Served::Nothing);
        };
        let Some((flow, traffic)) = qp.route.map(|route| (route.flow, route.traffic)) else {
            return Ok(Served::All);
        };
        touched.add(qpn, qp);
        batch.restart_with(flow, traffic);
        let (is_moving, is_awaiting) = (qp.is_between_rnics(), qp.is_awaiting());
        let (transport, mut host) = qp.split(shared, effects, now);
        let served = match transport.as_rc_mut() {
            Some(transport) if is_moving || is_awaiting => {
                // One message at most: it fits.
                transport.poll_messages(now, &mut host, batch);
                Served::All
            }
            _ => {
                let outcome = transport.poll_transmit(now, &mut host, batch, share);
                confirming.withheld += u64::from(batch.segments());
                batch.clear();
                // It has taken its time all the same.
                *withheld_batches += 1;
                match outcome {
                    Transmit::Idle => Served::All,
                    Transmit::Full | Transmit::More => Served::Part,
                }
            }
        };
        self.send_batch(now)?;
        Ok(served)
    }

    /// Sends the batch, if there is one; false: it has to wait.
    pub(super) fn send_batch(&mut self, now: Time) -> Result<bool, NicError> {
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
        let source_port = batch.flow().source().port();
        let Some(index) = ports.iter().position(|port| port.socket.address() == source) else {
            unreachable!("ways begin at an address of the GID table");
        };
        let port = &mut ports[index];
        let (socket, is_request) = match &mut port.requests {
            Some((requests, own)) if *own == source_port => (requests, true),
            _ => (&mut port.socket, false),
        };
        let end = SocketAddr::new(destination, UDP_PORT);
        match socket.send(end, batch.as_bytes(), batch.segment_bytes(), batch.traffic()) {
            Ok(()) => {
                self.counters.tx_batches += 1;
                self.counters.tx_packets += u64::from(self.batch.segments());
                self.counters.tx_bytes += self.batch.as_bytes().len() as u64;
                self.capture_sent();
            }
            // A request for which there is no room is lost: it comes again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !is_request => {
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

//! A queue pair: the transport's state machine, its rings, and the surroundings in which it runs.

mod connected;
mod effects;
mod host;
mod rings;
mod stream;

use std::net::IpAddr;
use std::time::Duration;

use verbatim_device::control::{QpCap, QpClass, QpType};
use verbatim_roce::icrc::Flow;
use verbatim_roce::{Counters, Mtu, Qp, QpConfig, Standing, Time, Traffic};

pub use effects::{Effects, Heard};
pub use host::Surroundings;
pub use rings::{Rings, Scratch};
pub use stream::{Stream, Turn};

use crate::config::Limits;
use crate::confirming::Confirmation;
use crate::memory::Domain;
use crate::objects::Shared;
use crate::timers::Alarm;

/// A partner's RNIC is a process: it may have to wait for a core longer than the shortest timeouts that a program can
/// ask for, and sending again what it has already received makes it later still.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(50);

/// How long an acknowledgement waits for a program that answers each message. It is what a program that polls needs to see
/// a message and answer it, if it has to wait for the core that the RNIC leaves. Only the last message of a dialogue is
/// acknowledged so late.
const ACK_DELAY: Duration = Duration::from_micros(100);

/// Receive requests that are posted to a queue pair in ERR must be flushed, and no doorbell announces them: the RNIC
/// looks at this interval, and less often the longer there are none.
pub const FLUSH_INTERVAL: Duration = Duration::from_millis(5);

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    pub context: u32,
    /// Its doorbell.
    pub slot: u32,
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    /// The shared receive queue in place of an own one.
    pub srq: Option<u32>,
    pub qp_type: QpType,
    pub cap: QpCap,
    /// The transport's settings, as they were given to it.
    pub config: QpConfig,
    pub transport: Qp,
    pub rings: Rings,
    /// Where its packets go, once it is connected.
    pub route: Option<Route>,
    /// Multicast groups that it is attached to.
    pub groups: u32,
    /// Its context is parked: no packet is taken in.
    pub parked: bool,
    /// It was stopped: no packet is taken in, none is sent, and no time passes.
    pub stopped: bool,
    /// Whether it may send to its other end.
    pub confirmation: Confirmation,
    /// It serves the host itself: nobody is asked about its other end. A swap disk may not wait for an agent.
    pub serves_host: bool,
    /// Something that concerns several queue pairs has broken it while it was stopped: it goes to ERR when it goes on.
    pub doomed: bool,
    /// Who goes before it.
    pub class: QpClass,
    /// The line in which it waits for its turn to transmit. It is that of its class, but for the time until the next turn after
    /// that was changed.
    pub line: Option<QpClass>,
    /// The turns that it had in the background.
    pub background: Turns,
    /// It is in the list of those whose counters may have changed.
    pub touched: bool,
    /// It counts as one of those that share what its destination can take.
    pub active: bool,
    pub alarm: Alarm,
    pub stream: Stream,
    /// In ERR: when to look for receive requests to flush.
    pub flush_interval: Duration,
    /// The transport's counters as they were added to the RNIC's last.
    pub counted: Counters,
}

/// Turns in the background.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turns {
    /// All of them.
    pub all: u64,
    /// Those that it had although users had something to send.
    pub starved: u64,
}

/// The way to the partner.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    pub remote: IpAddr,
    /// The own address in the GID table: packets come there.
    pub port: u8,
    /// Who shares the way, see [`crate::budget`].
    pub peer: u32,
    pub flow: Flow,
    pub traffic: Traffic,
}

impl QueuePair {
    /// The transport's settings that are not attributes.
    pub fn transport_config(limits: &Limits, port_mtu: Mtu, srq: bool) -> QpConfig {
        QpConfig {
            shared_receive_queue: srq,
            port_mtu,
            window_bytes: limits.window_bytes.min(crate::budget::WIDEST_WINDOW_BYTES),
            min_ack_timeout: MIN_ACK_TIMEOUT,
            ack_delay: ACK_DELAY,
            pause_limit: limits.pause_limit,
            ..QpConfig::default()
        }
    }

    /// Is its connection paused, to go on here or elsewhere?
    #[cold]
    pub fn is_paused(&self) -> bool {
        let transport = self.transport.as_rc();
        transport.is_some_and(|transport| transport.standing() == Standing::Stopped)
    }

    /// The state machine and its surroundings.
    #[inline]
    pub fn split<'a>(
        &'a mut self,
        shared: &'a mut Shared,
        effects: &'a mut Effects,
        now: Time,
    ) -> (&'a mut Qp, Surroundings<'a>) {
        let qpn = self.transport.qpn().get();
        let surroundings = Surroundings {
            context: self.context,
            domain: Domain { pd: self.pd, qpn },
            qp_type: self.qp_type,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srq: self.srq,
            rings: &mut self.rings,
            route: &mut self.route,
            shared,
            effects,
            now,
        };
        (&mut self.transport, surroundings)
    }
}

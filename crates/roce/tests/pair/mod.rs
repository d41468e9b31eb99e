//! Two queue pairs in memory, joined by a link that delays, loses, doubles, reorders and damages packets; time is
//! simulated, and one seed reproduces everything.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]

mod host;
mod link;

pub use host::{SEND, TestHost, read, send_imm, sge, write, write_imm};
pub use link::{Faults, Link};

use std::net::SocketAddr;
use std::time::Duration;

use verbatim_roce::{
    AccessFlags, AddressVector, Flow, Mtu, Packet, Psn, QpAttributes, QpState, Qpn, RcConfig, RcQp, Time,
    Transmit, TxBatch, UDP_PORT,
};

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that most stories tell about.
    A,
    /// Its partner.
    B,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }
}

pub struct End {
    pub qp: RcQp,
    pub host: TestHost,
    batch: TxBatch,
    /// The flow that comes in.
    inbound: Flow,
}

/// The attributes of a connection, with the values that tests vary.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub mtu: Mtu,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub max_rd_atomic: u8,
    pub access: AccessFlags,
    pub config: RcConfig,
    pub faults: Faults,
    pub seed: u64,
    /// Packets per poll.
    pub budget: usize,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            mtu: Mtu::Mtu1024,
            psn: [100, 200],
            timeout: 10,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 4,
            access: AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE,
            config: RcConfig {
                min_ack_timeout: Duration::from_millis(1),
                ..RcConfig::default()
            },
            faults: Faults::default(),
            seed: 0,
            budget: 16,
        }
    }
}

pub struct Pair {
    pub a: End,
    pub b: End,
    pub link: Link,
    pub now: Time,
    pub setup: Setup,
}

pub fn qpn(side: Side) -> Qpn {
    Qpn::new(match side {
        Side::A => 0x11,
        Side::B => 0x22,
    })
}

pub fn address(side: Side) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1 + side as u8], UDP_PORT))
}

/// Attributes for the way to RTS, in three steps.
pub fn steps(setup: &Setup, side: Side) -> [QpAttributes; 3] {
    let init = QpAttributes {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port_num: Some(1),
        access_flags: Some(setup.access),
        ..QpAttributes::default()
    };
    let rtr = QpAttributes {
        state: Some(QpState::Rtr),
        av: Some(AddressVector::default()),
        path_mtu: Some(setup.mtu),
        dest_qpn: Some(qpn(side.other())),
        rq_psn: Some(Psn::new(setup.psn[side.other() as usize])),
        max_dest_rd_atomic: Some(setup.max_rd_atomic),
        min_rnr_timer: Some(setup.min_rnr_timer),
        ..QpAttributes::default()
    };
    let rts = QpAttributes {
        state: Some(QpState::Rts),
        sq_psn: Some(Psn::new(setup.psn[side as usize])),
        timeout: Some(setup.timeout),
        retry_cnt: Some(setup.retry_cnt),
        rnr_retry: Some(setup.rnr_retry),
        max_rd_atomic: Some(setup.max_rd_atomic),
        ..QpAttributes::default()
    };
    [init, rtr, rts]
}

impl End {
    fn new(setup: &Setup, side: Side) -> End {
        let flow = |from, to| Flow::new(address(from), address(to)).expect("both are IPv4");
        let mut end = End {
            qp: RcQp::new(qpn(side), setup.config),
            host: TestHost::new(),
            batch: TxBatch::new(flow(side, side.other())),
            inbound: flow(side.other(), side),
        };
        for step in steps(setup, side) {
            end.qp
                .modify(&step, &mut end.host)
                .expect("the steps are complete");
        }
        end
    }
}

impl Pair {
    pub fn new(setup: Setup) -> Pair {
        Pair {
            a: End::new(&setup, Side::A),
            b: End::new(&setup, Side::B),
            link: Link::new(setup.faults, setup.seed),
            now: Time::from_nanos(1_000_000),
            setup,
        }
    }

    pub fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    /// One turn of transmitting for a side; says whether there is more.
    pub fn transmit(&mut self, side: Side) -> bool {
        let (now, budget) = (self.now, self.setup.budget);
        let end = match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        };
        let outcome = end.qp.poll_transmit(now, &mut end.host, &mut end.batch, budget);
        for (segment, packet) in end.batch.packets().enumerate() {
            self.link.push(now, side.other(), packet, segment as u16);
        }
        end.batch.clear();
        outcome != Transmit::Idle
    }

    /// Delivers what is due now.
    pub fn deliver(&mut self) {
        while let Some((side, bytes, segment)) = self.link.pop_due(self.now) {
            let now = self.now;
            let end = self.end(side);
            if !end.inbound.verify(&bytes, segment).is_good() {
                continue;
            }
            if let Ok(packet) = Packet::parse(&bytes) {
                end.qp.handle_packet(now, &packet, &mut end.host);
            }
        }
    }

    /// Lets everything happen that happens now, then goes to the next point in time at which something does. Says
    /// whether there is one.
    pub fn step(&mut self) -> bool {
        for side in [Side::A, Side::B] {
            while self.transmit(side) {}
        }
        let timeouts = [self.a.qp.next_timeout(), self.b.qp.next_timeout()];
        let next = timeouts.into_iter().flatten().chain(self.link.next_due()).min();
        let Some(next) = next else { return false };
        self.now = self.now.max(next);
        let now = self.now;
        for side in [Side::A, Side::B] {
            let end = self.end(side);
            end.qp.handle_timeout(now, &mut end.host);
        }
        self.deliver();
        true
    }

    /// Steps until nothing more happens.
    pub fn run(&mut self) {
        for _ in 0..2_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("no end in sight at {:?}, seed {}", self.now, self.setup.seed);
    }
}

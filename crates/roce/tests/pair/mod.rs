//! Two queue pairs in memory, joined by a link that delays, loses, doubles, reorders and damages packets; time is
//! simulated, and one seed reproduces everything.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]

pub mod exchange;
mod host;
mod link;
pub mod world;

pub use host::{By, SEND, TestHost, compare_swap, fetch_add, read, send_imm, sge, write, write_imm};
pub use link::{Bottleneck, Faults, Link};

use std::net::SocketAddr;
use std::time::Duration;

use verbatim_roce::{
    AccessFlags, AddressVector, Destination, Flow, Mtu, Packet, Path, Psn, Qp, QpAttributes, QpConfig,
    QpState, QpType, Qpn, Time, Traffic, Transmit, TxBatch, UDP_PORT,
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
    pub qp: Qp,
    pub host: TestHost,
    batch: TxBatch,
    /// The flow that comes in.
    inbound: Flow,
}

/// The attributes of a connection, with the values that tests vary.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub qp_type: QpType,
    pub mtu: Mtu,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub max_rd_atomic: u8,
    pub access: AccessFlags,
    pub config: QpConfig,
    pub faults: Faults,
    pub seed: u64,
    /// Packets per poll.
    pub budget: usize,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            qp_type: QpType::Rc,
            mtu: Mtu::Mtu1024,
            psn: [100, 200],
            timeout: 10,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 4,
            access: AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC,
            config: QpConfig {
                min_ack_timeout: Duration::from_millis(1),
                ..QpConfig::default()
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

/// The queue key of a datagram queue pair.
pub fn qkey(side: Side) -> u32 {
    0x1111_0000 + side as u32
}

/// The way to a side, with its queue key.
pub fn destination(to: Side) -> Destination {
    Destination {
        path: Path {
            source: address(to.other()).ip(),
            destination: address(to).ip(),
            source_port: UDP_PORT,
            traffic: Traffic::default(),
        },
        qpn: qpn(to),
        qkey: qkey(to),
    }
}

/// Attributes for the way to RTS, in three steps.
pub fn steps(setup: &Setup, side: Side) -> [QpAttributes; 3] {
    let to = |state| QpAttributes {
        state: Some(state),
        ..QpAttributes::default()
    };
    if setup.qp_type == QpType::Ud {
        let init = QpAttributes {
            pkey_index: Some(0),
            port_num: Some(1),
            qkey: Some(qkey(side)),
            ..to(QpState::Init)
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(setup.psn[side as usize])),
            ..to(QpState::Rts)
        };
        return [init, to(QpState::Rtr), rts];
    }
    let init = QpAttributes {
        pkey_index: Some(0),
        port_num: Some(1),
        access_flags: Some(setup.access),
        ..to(QpState::Init)
    };
    if setup.qp_type == QpType::Uc {
        let rtr = QpAttributes {
            av: Some(AddressVector::default()),
            path_mtu: Some(setup.mtu),
            dest_qpn: Some(qpn(side.other())),
            rq_psn: Some(Psn::new(setup.psn[side.other() as usize])),
            ..to(QpState::Rtr)
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(setup.psn[side as usize])),
            ..to(QpState::Rts)
        };
        return [init, rtr, rts];
    }
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
            qp: Qp::new(setup.qp_type, qpn(side), setup.config),
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
        let Some(next) = self.next_event() else {
            return false;
        };
        self.go_to(next);
        true
    }

    /// When something happens next, if all has been sent that can be.
    pub fn next_event(&self) -> Option<Time> {
        let of = |end: &End| [end.qp.next_timeout(), end.qp.ack_deadline()];
        let timeouts = [of(&self.a), of(&self.b)].concat();
        timeouts.into_iter().flatten().chain(self.link.next_due()).min()
    }

    /// Lets happen what happens at that time, or should have before.
    pub fn go_to(&mut self, time: Time) {
        self.now = self.now.max(time);
        let now = self.now;
        for side in [Side::A, Side::B] {
            let end = self.end(side);
            end.qp.handle_timeout(now, &mut end.host);
        }
        self.deliver();
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

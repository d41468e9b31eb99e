//! Two queue pairs and several places where they can be, joined by a network that loses, doubles and reorders packets.
//! One step is one packet: sent, or delivered.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_roce::{
    Flow, Forwarding, Location, Packet, Qp, Qpn, RcImage, RcQp, Secret, SecretEnd, Standing, Time, Transmit,
    TxBatch, UDP_PORT,
};

use super::{Faults, Setup, Side, TestHost, qpn, steps};

/// A queue pair where its program is, or one that was left behind.
pub struct Tenant {
    pub qp: RcQp,
    pub host: TestHost,
    batch: TxBatch,
}

/// An RNIC at an address.
struct Place {
    tenants: BTreeMap<Qpn, Tenant>,
    forwarding: Forwarding,
}

type InFlight = (Time, u64, IpAddr, IpAddr, Vec<u8>, u16);

/// Sees each packet that is sent, and may keep it from arriving.
type Filter = Box<dyn FnMut(Time, &Packet<'_>) -> bool>;

/// Sees each packet that is sent, with where it goes.
type Capture = Box<dyn FnMut(Time, IpAddr, &[u8])>;

pub struct World {
    pub now: Time,
    pub setup: Setup,
    places: BTreeMap<IpAddr, Place>,
    /// Where the two ends are.
    pub at: [Location; 2],
    in_flight: BinaryHeap<Reverse<InFlight>>,
    sequence: u64,
    rng: StdRng,
    pub faults: Faults,
    pub filter: Option<Filter>,
    pub capture: Option<Capture>,
    pub latency: Duration,
}

/// An end between two places.
pub struct Moving {
    pub image: Vec<u8>,
    pub host: TestHost,
    old: Location,
}

pub fn address(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

pub fn flow(from: IpAddr, to: IpAddr) -> Flow {
    let end = |address| SocketAddr::new(address, UDP_PORT);
    Flow::new(end(from), end(to)).expect("all are IPv4")
}

pub const SECRET: [u8; 32] = [0x5e; 32];

pub fn secret(side: Side) -> Secret {
    let end = match side {
        Side::A => SecretEnd::First,
        Side::B => SecretEnd::Second,
    };
    Secret::new(SECRET, end)
}

impl World {
    /// A at 10.0.0.1 and B at 10.0.0.2, connected, with a secret.
    pub fn new(setup: Setup) -> World {
        let mut world = World {
            now: Time::from_nanos(1_000_000),
            setup,
            places: BTreeMap::new(),
            at: [Side::A, Side::B].map(|side| Location {
                address: address(1 + side as u8),
                qpn: qpn(side),
            }),
            in_flight: BinaryHeap::new(),
            sequence: 0,
            rng: StdRng::seed_from_u64(setup.seed),
            faults: setup.faults,
            filter: None,
            capture: None,
            latency: Duration::from_micros(10),
        };
        for side in [Side::A, Side::B] {
            let mut host = TestHost::new();
            let mut qp = Qp::new(setup.qp_type, qpn(side), setup.config);
            for step in steps(&setup, side) {
                qp.modify(&step, &mut host).expect("the steps are complete");
            }
            let Qp::Rc(mut qp) = qp else {
                panic!("only reliable connections move")
            };
            qp.set_secret(Some(secret(side)));
            let [own, other] = [side, side.other()].map(|side| world.at[side as usize].address);
            let batch = TxBatch::new(flow(own, other));
            world.settle_at(world.at[side as usize], Tenant { qp, host, batch });
        }
        world
    }

    fn place(&mut self, address: IpAddr) -> &mut Place {
        self.places.entry(address).or_insert_with(|| Place {
            tenants: BTreeMap::new(),
            forwarding: Forwarding::new(16),
        })
    }

    fn settle_at(&mut self, at: Location, tenant: Tenant) {
        let place = self.place(at.address);
        place.forwarding.remove(at.qpn);
        assert!(place.tenants.insert(at.qpn, tenant).is_none());
    }

    pub fn end(&mut self, side: Side) -> &mut Tenant {
        let at = self.at[side as usize];
        self.place(at.address)
            .tenants
            .get_mut(&at.qpn)
            .expect("each end is where it is")
    }

    /// Stops an end and saves it. The program goes with it; what stays answers NAK "stopped".
    pub fn take_out(&mut self, side: Side) -> Moving {
        let now = self.now;
        let end = self.end(side);
        assert!(end.qp.halt(now), "{:?}", end.qp.state());
        let image = end.qp.save().expect("it is stopped").encode();
        let host = std::mem::take(&mut end.host);
        let old = self.at[side as usize];
        Moving { image, host, old }
    }

    /// The end goes on at another place.
    pub fn put_in(&mut self, side: Side, moving: Moving, to: Location) {
        let image = RcImage::decode(&moving.image).expect("nobody has touched it");
        // As an RNIC does: the way to the partner follows from the attributes, and from where it has gone since.
        let partner = image
            .peer()
            .map_or(address(1 + side.other() as u8), |peer| peer.address);
        let qp = RcQp::restore(to.qpn, self.setup.config, image).expect("it is one of ours");
        assert!(moving.host.trusting || qp.standing() == Standing::Stopped);
        self.leave(moving.old, to);
        let batch = TxBatch::new(flow(to.address, partner));
        let host = moving.host;
        self.settle_at(to, Tenant { qp, host, batch });
        self.at[side as usize] = to;
        let now = self.now;
        self.end(side).qp.resume(now);
    }

    /// What was left behind goes, and an entry stays.
    fn leave(&mut self, old: Location, to: Location) {
        let now = self.now;
        let place = self.place(old.address);
        place.tenants.remove(&old.qpn);
        let until = now + Duration::from_secs(100);
        assert!(place.forwarding.insert(now, old.qpn, to, until));
    }

    fn happens(&mut self, percent: u32) -> bool {
        percent > 0 && self.rng.random_range(0..100) < percent
    }

    fn send(&mut self, from: IpAddr, to: IpAddr, bytes: &[u8], segment: u16) {
        if let Some(filter) = &mut self.filter {
            let packet = Packet::parse(bytes).expect("only whole packets are sent");
            if !filter(self.now, &packet) {
                return;
            }
        }
        if let Some(capture) = &mut self.capture {
            capture(self.now, to, bytes);
        }
        let copies = 1 + u32::from(self.happens(self.faults.duplication));
        for _ in 0..copies {
            if self.happens(self.faults.loss) {
                continue;
            }
            let mut due = self.now + self.latency;
            if self.happens(self.faults.reordering) {
                due = due + self.latency.mul_f64(self.rng.random_range(0.0..10.0));
            }
            self.sequence += 1;
            self.in_flight
                .push(Reverse((due, self.sequence, from, to, bytes.to_vec(), segment)));
        }
    }

    /// Sends a packet of anybody's making.
    pub fn inject(&mut self, to: IpAddr, from: IpAddr, bytes: Vec<u8>) {
        self.sequence += 1;
        self.in_flight
            .push(Reverse((self.now, self.sequence, from, to, bytes, 0)));
    }

    /// One poll of each queue pair that there is, until one has sent something.
    fn transmit(&mut self) -> bool {
        let (now, budget) = (self.now, self.setup.budget);
        let all: Vec<Location> = self
            .places
            .iter()
            .flat_map(|(address, place)| {
                place.tenants.keys().map(|qpn| Location {
                    address: *address,
                    qpn: *qpn,
                })
            })
            .collect();
        for at in all {
            let tenants = &mut self.place(at.address).tenants;
            let tenant = tenants.get_mut(&at.qpn).expect("nobody leaves meanwhile");
            let Tenant { qp, host, batch } = tenant;
            // As an RNIC does: the partner's new place is the flow of the next batch.
            if let Some(to) = host.peer.take() {
                batch.restart(flow(at.address, to.address));
            }
            let outcome = qp.poll_transmit(now, host, batch, budget);
            let to = batch.flow().destination().ip();
            let sent: Vec<Vec<u8>> = batch.packets().map(<[u8]>::to_vec).collect();
            batch.clear();
            for (segment, bytes) in sent.iter().enumerate() {
                self.send(at.address, to, bytes, segment as u16);
            }
            if !sent.is_empty() || outcome != Transmit::Idle {
                return true;
            }
        }
        false
    }

    fn deliver(&mut self) -> bool {
        let due = |Reverse((due, ..)): &Reverse<InFlight>| *due <= self.now;
        if !self.in_flight.peek().is_some_and(due) {
            return false;
        }
        let Some(Reverse((_, _, from, to, bytes, segment))) = self.in_flight.pop() else {
            return false;
        };
        assert!(flow(from, to).verify(&bytes, segment).is_good());
        let packet = Packet::parse(&bytes).expect("it was sent as one");
        let now = self.now;
        let place = self.place(to);
        if let Some(forwarded) = place.forwarding.forward(now, &packet) {
            let mut batch = TxBatch::new(flow(to, forwarded.to.address));
            assert!(forwarded.append(&mut batch));
            let bytes = batch.as_bytes().to_vec();
            self.send(to, forwarded.to.address, &bytes, 0);
        } else if let Some(tenant) = place.tenants.get_mut(&packet.bth.dest_qpn) {
            tenant.qp.handle_packet(now, &packet, &mut tenant.host);
        }
        true
    }

    fn next_event(&self) -> Option<Time> {
        let tenants = self.places.values().flat_map(|place| place.tenants.values());
        let timeouts = tenants.flat_map(|tenant| [tenant.qp.next_timeout(), tenant.qp.ack_deadline()]);
        let due = self.in_flight.peek().map(|Reverse((due, ..))| *due);
        timeouts.flatten().chain(due).min()
    }

    fn pass_to(&mut self, time: Time) {
        self.now = self.now.max(time);
        let now = self.now;
        for place in self.places.values_mut() {
            for tenant in place.tenants.values_mut() {
                tenant.qp.handle_timeout(now, &mut tenant.host);
            }
        }
    }

    /// One packet is sent or delivered, or else time passes to when one is. Says whether there is anything to come.
    pub fn step(&mut self) -> bool {
        if self.transmit() || self.deliver() {
            return true;
        }
        let Some(next) = self.next_event() else {
            return false;
        };
        self.pass_to(next);
        true
    }

    /// Steps until that time.
    pub fn run_until(&mut self, end: Time) {
        loop {
            if self.transmit() || self.deliver() {
                continue;
            }
            match self.next_event().filter(|next| *next <= end) {
                Some(next) => self.pass_to(next),
                None => return self.pass_to(end),
            }
        }
    }

    pub fn run_for(&mut self, duration: Duration) {
        self.run_until(self.now + duration);
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

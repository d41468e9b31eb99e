//! Communication managers on a network with faults.
#![allow(dead_code, reason = "each test uses a part")]

pub mod story;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_cm::wire::IpHeader;
use verbatim_cm::{
    Accept, Accepts, Cm, CommId, Config, Connect, Gid, Listen, ListenAddress, Mtu, Notice, Outcome, Owner,
    Path, PortSpace, Psn, Qpn, QueuePairs, Resolve, ServiceId, Time,
};

/// A packet is under way for 134 ms at most: this is the exponent of that time.
pub const LIFE_TIME: u8 = 15;
/// 268 ms.
pub const RESPONSE: u8 = 16;
pub const PORT: u16 = 7471;
pub const OWNER: Owner = Owner(1);

/// What goes wrong, in percent of the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: u32,
    pub duplication: u32,
    /// Each message takes a random time, so that others overtake.
    pub reordering: bool,
}

/// Where the queue pairs of a host are connected to.
#[derive(Clone, Debug, Default)]
pub struct Connected(HashMap<Qpn, (Gid, Qpn)>);

impl Connected {
    pub fn to(&mut self, local: u32, remote: Gid, remote_qpn: u32) {
        self.0.insert(Qpn::new(local), (remote, Qpn::new(remote_qpn)));
    }

    pub fn remove(&mut self, local: u32) {
        self.0.remove(&Qpn::new(local));
    }
}

impl QueuePairs for Connected {
    fn are_connected(&self, local: Qpn, remote: Gid, remote_qpn: Qpn) -> bool {
        self.0.get(&local) == Some(&(remote, remote_qpn))
    }
}

type InFlight = (Time, u64, usize, Gid, Gid, Vec<u8>);

pub struct World {
    pub now: Time,
    pub hosts: Vec<Cm>,
    pub queue_pairs: Vec<Connected>,
    pub faults: Faults,
    /// Nothing of this host gets through.
    pub mute: Option<usize>,
    /// Where ids are that have gone from where they were.
    pub places: HashMap<CommId, usize>,
    /// How many messages were passed on.
    pub passed_on: usize,
    rng: StdRng,
    in_flight: BinaryHeap<Reverse<InFlight>>,
    sequence: u64,
    /// Everything that was sent, in order: from which host, which message.
    pub sent: Vec<(usize, u8)>,
}

pub fn address(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, host as u8 + 1])
}

pub fn gid(host: usize) -> Gid {
    address(host).into()
}

pub fn path(from: usize, to: usize) -> Path {
    Path {
        packet_life_time: LIFE_TIME,
        ..Path::new(gid(from), gid(to), Mtu::Mtu1024)
    }
}

pub fn config(host: usize) -> Config {
    Config {
        ack_delay: 10,
        ..Config::new(0x1000 + host as u64, 0x0100_0000 * (host as u32 + 1))
    }
}

pub fn listen(space: PortSpace) -> Listen {
    Listen {
        service: ServiceId::of_port(space, PORT),
        address: ListenAddress::Any,
        accepts: Accepts::Both,
        backlog: 64,
    }
}

pub fn header(from: usize, to: usize) -> IpHeader {
    IpHeader {
        source: address(from),
        source_port: 40_000,
        destination: address(to),
    }
}

/// A request for a connection, on a queue pair of this number.
pub fn connect(from: usize, to: usize, qpn: u32) -> Connect {
    Connect {
        ip: Some(header(from, to)),
        responder_resources: 3,
        initiator_depth: 2,
        remote_response_timeout: RESPONSE,
        local_response_timeout: RESPONSE,
        private_data: b"request".to_vec(),
        ..Connect::new(
            ServiceId::of_port(PortSpace::TCP, PORT),
            path(from, to),
            Qpn::new(qpn),
            Psn::new(qpn + 1000),
        )
    }
}

pub fn resolve(from: usize, to: usize) -> Resolve {
    Resolve {
        ip: Some(header(from, to)),
        response_timeout: RESPONSE,
        private_data: b"question".to_vec(),
        ..Resolve::new(ServiceId::of_port(PortSpace::UDP, PORT), path(from, to))
    }
}

pub fn accept(qpn: u32) -> Accept {
    Accept {
        qpn: Qpn::new(qpn),
        starting_psn: Psn::new(qpn + 2000),
        responder_resources: 2,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 6,
        srq: false,
        private_data: b"reply".to_vec(),
    }
}

impl World {
    pub fn new(hosts: usize, faults: Faults, seed: u64) -> World {
        World {
            now: Time::from_nanos(1),
            hosts: (0..hosts).map(|host| Cm::new(config(host))).collect(),
            queue_pairs: vec![Connected::default(); hosts],
            faults,
            mute: None,
            places: Default::default(),
            passed_on: 0,
            rng: StdRng::seed_from_u64(seed),
            in_flight: BinaryHeap::new(),
            sequence: 0,
            sent: Vec::new(),
        }
    }

    /// Puts on the wire what the hosts want to send.
    pub fn transmit(&mut self) {
        for host in 0..self.hosts.len() {
            while let Some(transmit) = self.hosts[host].poll_transmit() {
                self.sent.push((host, transmit.bytes[17]));
                if self.mute == Some(host) {
                    continue;
                }
                let copies = 1 + u32::from(self.chance(self.faults.duplication));
                for _ in 0..copies {
                    if self.chance(self.faults.loss) {
                        continue;
                    }
                    let to = (0..self.hosts.len()).find(|other| gid(*other) == transmit.to);
                    let Some(to) = to else { continue };
                    let micros = match self.faults.reordering {
                        true => self.rng.random_range(10..130_000),
                        false => 10,
                    };
                    let due = self.now + Duration::from_micros(micros);
                    self.sequence += 1;
                    self.in_flight.push(Reverse((
                        due,
                        self.sequence,
                        to,
                        transmit.from,
                        transmit.to,
                        transmit.bytes.to_vec(),
                    )));
                }
            }
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        percent > 0 && self.rng.random_range(0..100) < percent
    }

    /// When the next thing happens by itself.
    pub fn next(&self) -> Option<Time> {
        let timers = self.hosts.iter().filter_map(Cm::next_deadline);
        let wire = self.in_flight.peek().map(|Reverse(first)| first.0);
        timers.chain(wire).min()
    }

    /// Goes on to that time, and does what is due then.
    pub fn step_to(&mut self, time: Time) {
        self.now = self.now.max(time);
        while let Some(Reverse(first)) = self.in_flight.peek()
            && first.0 <= self.now
        {
            let Some(Reverse((_, _, to, from_gid, to_gid, bytes))) = self.in_flight.pop() else {
                break;
            };
            self.deliver(to, from_gid, to_gid, &bytes);
        }
        for host in &mut self.hosts {
            host.handle_timeout(self.now);
        }
        self.transmit();
    }

    fn deliver(&mut self, host: usize, from: Gid, to: Gid, bytes: &[u8]) {
        let outcome = self.hosts[host].handle_mad(self.now, from, to, bytes, &self.queue_pairs[host]);
        if let Outcome::Away(id) = outcome {
            // One that is held is nowhere.
            let Some(place) = self.places.get(&id).copied() else {
                return;
            };
            assert_ne!(place, host, "what has come back is not away");
            self.passed_on += 1;
            let outcome =
                self.hosts[place].handle_mad(self.now, from, gid(place), bytes, &self.queue_pairs[place]);
            assert!(
                !matches!(outcome, Outcome::Away(_)),
                "{id} is at the place that is known"
            );
        }
    }

    /// One more thing; false if nothing is left.
    pub fn step(&mut self) -> bool {
        self.transmit();
        let Some(next) = self.next() else {
            return false;
        };
        self.step_to(next);
        true
    }

    /// Until this time is over, or nothing is left.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.transmit();
        while let Some(next) = self.next()
            && next <= end
        {
            self.step_to(next);
        }
        self.now = end;
    }

    /// Until the wire is empty: no time that a timer would notice.
    pub fn settle(&mut self) {
        self.run_for(Duration::from_millis(5));
    }

    pub fn event(&mut self, host: usize) -> Option<Notice> {
        self.hosts[host].poll_event()
    }

    /// Takes an id to another host, as bytes.
    pub fn move_id(&mut self, id: CommId, from: usize, to: usize) {
        let image = self.hosts[from].take(self.now, id).expect("it is there");
        let bytes = postcard::to_stdvec(&image).expect("it can be written");
        assert!(bytes.len() < 2048, "{} bytes", bytes.len());
        let image = postcard::from_bytes(&bytes).expect("it can be read");
        let adopted = self.hosts[to].adopt(self.now, OWNER, image, Some(gid(to)));
        assert_eq!(adopted, Ok(id));
        self.places.insert(id, to);
    }

    /// Nothing is kept but the listeners, and nothing is waited for.
    pub fn assert_over(&mut self, listeners: usize) {
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let left = host.ids_of(OWNER);
            assert_eq!(host.poll_event(), None, "host {number}");
            assert_eq!(host.next_deadline(), None, "host {number}");
            assert_eq!(host.len(), left.len(), "host {number}");
        }
        let all: usize = self.hosts.iter().map(Cm::len).sum();
        assert_eq!(all, listeners);
    }
}

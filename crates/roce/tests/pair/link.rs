//! A link with faults.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_roce::{Packet, Time};

use super::Side;

/// What goes wrong on the link, in percent of the packets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: u32,
    pub duplication: u32,
    /// Delayed by up to ten times the latency, so that others overtake.
    pub reordering: u32,
    /// One to eight bits flipped, which the ICRC must find.
    pub corruption: u32,
}

/// A wire of a certain rate behind a queue of a certain length; several links may share one.
#[derive(Debug)]
pub struct Bottleneck {
    pub bits_per_second: u64,
    pub queue_bytes: u64,
    /// When the last packet that was taken in is through.
    free_at: Time,
    /// Packets that found the queue full.
    pub dropped: u64,
}

/// Ethernet with preamble and gap, IPv4 and UDP: what each packet takes on the wire beside itself.
const OVERHEAD_BYTES: u64 = 38 + 20 + 8;

impl Bottleneck {
    pub fn new(bits_per_second: u64, queue_bytes: u64) -> Rc<RefCell<Bottleneck>> {
        Rc::new(RefCell::new(Bottleneck {
            bits_per_second,
            queue_bytes,
            free_at: Time::ZERO,
            dropped: 0,
        }))
    }

    /// When a packet is through, if there is room for it.
    fn pass(&mut self, now: Time, bytes: usize) -> Option<Time> {
        let nanos = |bytes: u64| Duration::from_nanos(bytes * 8 * 1_000_000_000 / self.bits_per_second);
        let start = self.free_at.max(now);
        if start - now > nanos(self.queue_bytes) {
            self.dropped += 1;
            return None;
        }
        self.free_at = start + nanos(bytes as u64 + OVERHEAD_BYTES);
        Some(self.free_at)
    }
}

/// Says whether a packet gets through: for stories that lose a certain one.
type Filter = Box<dyn FnMut(Side, &Packet<'_>) -> bool>;

type InFlight = (Time, u64, u8, Vec<u8>, u16);

pub struct Link {
    faults: Faults,
    rng: StdRng,
    in_flight: BinaryHeap<Reverse<InFlight>>,
    sequence: u64,
    pub latency: Duration,
    pub filter: Option<Filter>,
    /// Lost packets, in a million; in addition to the faults.
    pub loss_ppm: u32,
    /// On the way to each side.
    pub bottlenecks: [Option<Rc<RefCell<Bottleneck>>>; 2],
    /// Packets sent, dropped ones included.
    pub sent: u64,
}

impl Link {
    pub fn new(faults: Faults, seed: u64) -> Link {
        Link {
            faults,
            rng: StdRng::seed_from_u64(seed),
            in_flight: BinaryHeap::new(),
            sequence: 0,
            latency: Duration::from_micros(10),
            filter: None,
            loss_ppm: 0,
            bottlenecks: [None, None],
            sent: 0,
        }
    }

    /// Loses what is on its way.
    pub fn lose_all(&mut self) {
        self.in_flight.clear();
    }

    fn happens(&mut self, percent: u32) -> bool {
        percent > 0 && self.rng.random_range(0..100) < percent
    }

    pub fn push(&mut self, now: Time, to: Side, bytes: &[u8], segment: u16) {
        self.sent += 1;
        if let Some(filter) = &mut self.filter {
            let packet = Packet::parse(bytes).expect("only whole packets are sent");
            if !filter(to, &packet) {
                return;
            }
        }
        let copies = if self.happens(self.faults.duplication) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            if self.happens(self.faults.loss) {
                continue;
            }
            if self.loss_ppm > 0 && self.rng.random_range(0..1_000_000) < self.loss_ppm {
                continue;
            }
            let through = match &self.bottlenecks[to as usize] {
                None => Some(now),
                Some(bottleneck) => bottleneck.borrow_mut().pass(now, bytes.len()),
            };
            let Some(through) = through else { continue };
            let mut bytes = bytes.to_vec();
            if self.happens(self.faults.corruption) {
                for _ in 0..self.rng.random_range(1..=8) {
                    let at = self.rng.random_range(0..bytes.len());
                    bytes[at] ^= 1 << self.rng.random_range(0..8);
                }
            }
            let mut due = through + self.latency;
            if self.happens(self.faults.reordering) {
                due = due + self.latency.mul_f64(self.rng.random_range(0.0..10.0));
            }
            self.sequence += 1;
            self.in_flight
                .push(Reverse((due, self.sequence, to as u8, bytes, segment)));
        }
    }

    pub fn next_due(&self) -> Option<Time> {
        self.in_flight.peek().map(|Reverse((due, ..))| *due)
    }

    pub fn pop_due(&mut self, now: Time) -> Option<(Side, Vec<u8>, u16)> {
        if self.next_due()? > now {
            return None;
        }
        let Reverse((_, _, to, bytes, segment)) = self.in_flight.pop()?;
        Some((if to == 0 { Side::A } else { Side::B }, bytes, segment))
    }
}

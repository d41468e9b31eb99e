//! RNICs that carry data: the transport of the software RNIC between queues in memory, one packet at a time.
//!
//! Time stands still until there is nothing else to do, and then goes to the next timeout.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use verbatim_roce::wire::opcode::Kind;
use verbatim_roce::{
    Flow, Forwarding, Location, Packet, Path, Qp, Qpn, Time, Traffic, Transmit, TxBatch, UDP_PORT,
};

use super::faults::Faults;
use super::host::Surroundings;
use super::memory::MEMORY;
use super::rnic::{Rnic, WireQp};
use crate::backend::Device;

/// Packets that a queue pair sends before the next one has its turn.
const PACKETS_PER_TURN: usize = 2;

/// So long RESUMEs are passed on.
const FORWARDED_FOR: Duration = Duration::from_secs(60);

/// Longer than anything else takes.
pub const PAUSE_LIMIT: Duration = Duration::from_secs(100);

/// After so many steps without a request that is finished, only the same is tried again and again.
const IN_VAIN: usize = 100;

#[derive(Debug)]
struct InFlight {
    from: u8,
    to: u8,
    bytes: Vec<u8>,
}

#[derive(Debug)]
pub struct State {
    pub now: Time,
    pub rnics: BTreeMap<u8, Rnic>,
    packets: VecDeque<InFlight>,
    ram: Vec<u8>,
    /// Taken out while it is filled.
    batch: Option<TxBatch>,
    /// Requests that were finished, and completions made.
    progress: u64,
    /// So many moves are under way.
    moves: u32,
    pub faults: Faults,
}

/// All RNICs.
#[derive(Debug, Clone)]
pub struct Wire(pub Arc<Mutex<State>>);

/// Where a device is.
pub fn address(id: u8) -> IpAddr {
    [10, 0, 0, id].into()
}

/// The device that is there.
pub fn device_at(address: IpAddr) -> u8 {
    let IpAddr::V4(address) = address else {
        unreachable!("there is no other family here")
    };
    address.octets()[3]
}

/// From one device to another.
pub fn path(from: u8, to: u8) -> Path {
    Path {
        source: address(from),
        destination: address(to),
        source_port: UDP_PORT,
        traffic: Traffic::default(),
    }
}

fn flow(from: u8, to: u8) -> Flow {
    let end = |id| SocketAddr::new(address(id), UDP_PORT);
    Flow::new(end(from), end(to)).expect("both are of one family")
}

impl Wire {
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            now: Time::ZERO,
            rnics: BTreeMap::new(),
            packets: VecDeque::new(),
            ram: vec![0; 2 * MEMORY],
            batch: Some(TxBatch::new(flow(1, 2))),
            progress: 0,
            moves: 0,
            faults: Faults::default(),
        })))
    }

    /// A device.
    pub fn device(&self, id: u8) -> Arc<dyn Device> {
        self.0.lock().rnics.entry(id).or_default();
        super::device::open(self, id)
    }

    pub fn with_rnic<T>(&self, id: u8, run: impl FnOnce(&mut Rnic) -> T) -> T {
        run(self.0.lock().rnics.get_mut(&id).expect("an RNIC"))
    }

    /// A device of which no packet is taken in until it is taken up.
    pub fn parked_device(&self, id: u8) -> Arc<dyn Device> {
        let device = self.device(id);
        self.park(id, true);
        device
    }

    pub fn park(&self, id: u8, parked: bool) {
        self.0.lock().rnics.entry(id).or_default().parked = parked;
    }

    /// A move begins, or is over.
    pub fn count_move(&self, begins: bool) {
        let moves = &mut self.0.lock().moves;
        *moves = if begins { *moves + 1 } else { *moves - 1 };
    }

    /// A queue pair has left: RESUMEs for it go on to where it is.
    pub fn forward(&self, left: (u8, u32), to: (u8, u32)) {
        let mut state = self.0.lock();
        let now = state.now;
        let rnic = state.rnics.get_mut(&left.0).expect("an RNIC");
        let entries = rnic.left.get_or_insert_with(|| Forwarding::new(16));
        let to = Location {
            address: address(to.0),
            qpn: Qpn::new(to.1),
        };
        assert!(entries.insert(now, Qpn::new(left.1), to, now + FORWARDED_FOR));
    }

    /// Queue pairs of a device.
    pub fn qpns(&self, id: u8) -> Vec<u32> {
        self.with_rnic(id, |rnic| rnic.qps.keys().copied().collect())
    }

    /// Requests that the RNICs have not finished.
    pub fn unfinished(&self) -> usize {
        let state = self.0.lock();
        let qps = state.rnics.values().flat_map(|rnic| rnic.qps.values());
        qps.map(|qp| qp.queues.unfinished.len()).sum()
    }

    /// What an end's program finds in its memory.
    pub fn ram(&self, end: usize) -> Vec<u8> {
        self.0.lock().ram[end * MEMORY..][..MEMORY].to_vec()
    }

    /// What an end's program writes into its memory.
    pub fn fill(&self, end: usize, at: usize, bytes: &[u8]) {
        self.0.lock().ram[end * MEMORY + at..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Lets one packet arrive; if there is none, lets all send; if they do not, lets time pass. Says whether there was
    /// anything to do.
    pub fn step(&self) -> bool {
        let mut state = self.0.lock();
        let state = &mut *state;
        if let Some(packet) = state.packets.pop_front() {
            if !state.faults.losses.pop_front().unwrap_or_default() {
                state.deliver(&packet);
            }
            return true;
        }
        state.transmit() || state.pass_time()
    }

    /// Lets the RNICs work until they have nothing to do, or only try in vain: to send a message that finds no RECV.
    pub fn settle(&self) {
        let progress = || self.0.lock().progress;
        let (mut seen, mut in_vain) = (progress(), 0);
        while in_vain < IN_VAIN && self.step() {
            in_vain = if progress() == seen { in_vain + 1 } else { 0 };
            seen = progress();
        }
    }
}

impl State {
    /// Splits off a queue pair and its surroundings.
    pub fn with_qp<T>(
        &mut self,
        device: u8,
        qpn: u32,
        run: impl FnOnce(&mut Qp, &mut Surroundings<'_>) -> T,
    ) -> Option<T> {
        let Rnic { qps, shared, .. } = self.rnics.get_mut(&device)?;
        let qp = qps.get_mut(&qpn)?;
        let mut surroundings = Surroundings {
            device,
            queues: &mut qp.queues,
            shared,
            ram: &mut self.ram,
            remote: &mut qp.remote,
            progress: &mut self.progress,
        };
        Some(run(&mut qp.transport, &mut surroundings))
    }

    fn deliver(&mut self, packet: &InFlight) {
        let parsed = Packet::parse(&packet.bytes).expect("what a transport has made");
        let qpn = parsed.bth.dest_qpn.get();
        if self.pass_on(packet.to, &parsed) {
            return;
        }
        let takes = |rnic: &Rnic, qp: &WireQp| {
            // Datagrams come from anybody, RESUME from where the partner has gone.
            let from_anybody = matches!(qp.transport, Qp::Ud(_)) || parsed.info.kind == Kind::Migration;
            let expected = from_anybody || qp.remote == packet.from;
            expected && !qp.stopped && !rnic.dead && (!rnic.parked || qp.is_paused())
        };
        let rnic = self.rnics.get(&packet.to);
        if rnic.is_some_and(|rnic| rnic.qps.get(&qpn).is_some_and(|qp| takes(rnic, qp))) {
            let now = self.now;
            self.with_qp(packet.to, qpn, |qp, host| qp.handle_packet(now, &parsed, host));
        }
    }

    /// Passes on what is for a queue pair that has left this device.
    fn pass_on(&mut self, id: u8, packet: &Packet<'_>) -> bool {
        let left = self.rnics.get_mut(&id).and_then(|rnic| rnic.left.as_mut());
        let Some(forwarded) = left.and_then(|left| left.forward(self.now, packet)) else {
            return false;
        };
        let to = device_at(forwarded.to.address);
        let mut batch = TxBatch::new(flow(id, to));
        assert!(forwarded.append(&mut batch), "it fits an empty batch");
        self.packets.extend(batch.packets().map(|bytes| InFlight {
            from: id,
            to,
            bytes: bytes.to_vec(),
        }));
        true
    }

    /// The queue pairs that are not stopped.
    fn names(&self) -> Vec<(u8, u32)> {
        let of_rnic = |(id, rnic): (&u8, &Rnic)| {
            let running = rnic.qps.iter().filter(|(_, qp)| !qp.stopped);
            running.map(|(qpn, _)| (*id, *qpn)).collect::<Vec<_>>()
        };
        let alive = self.rnics.iter().filter(|(_, rnic)| !rnic.dead);
        alive.flat_map(of_rnic).collect()
    }

    fn transmit(&mut self) -> bool {
        let before = self.progress;
        let mut batch = self.batch.take().expect("it was put back");
        for (id, qpn) in self.names() {
            let remote = self.rnics[&id].qps[&qpn].remote;
            let now = self.now;
            loop {
                batch.restart(flow(id, remote));
                let outcome = self.with_qp(id, qpn, |qp, host| {
                    qp.poll_transmit(now, host, &mut batch, PACKETS_PER_TURN)
                });
                // Where a datagram goes, its request says.
                let to = device_at(batch.flow().destination().ip());
                let packets = batch.packets().map(|bytes| InFlight {
                    from: id,
                    to,
                    bytes: bytes.to_vec(),
                });
                self.packets.extend(packets);
                if outcome != Some(Transmit::Full) {
                    break;
                }
            }
        }
        self.batch = Some(batch);
        !self.packets.is_empty() || self.progress > before
    }

    fn pass_time(&mut self) -> bool {
        let names = self.names();
        let deadline = |(id, qpn): &(u8, u32)| self.rnics[id].qps[qpn].transport.next_timeout();
        // While somebody moves, whoever pauses waits for that, and not for the limit.
        let soon = self.now + PAUSE_LIMIT / 2;
        let counts = |deadline: &Time| self.moves == 0 || *deadline < soon;
        let Some(next) = names.iter().filter_map(deadline).filter(counts).min() else {
            return false;
        };
        self.now = self.now.max(next);
        let now = self.now;
        for (id, qpn) in names {
            self.with_qp(id, qpn, |qp, host| qp.handle_timeout(now, host));
        }
        true
    }
}

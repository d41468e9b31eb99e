//! RNICs that carry data: the transport of the software RNIC between queues in memory, one packet at a time.
//!
//! Memory of the programs is simulated too: what is registered are addresses of [`memory`], whose bytes lie here. Time
//! stands still until there is nothing else to do, and then goes to the next timeout.

mod again;
mod device;
mod host;
mod pair;
mod rings;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use verbatim_device::control::{Access, QpCap};
use verbatim_device::layout::{Cqe, SendWqe};
use verbatim_roce::wire::opcode::Kind;
use verbatim_roce::{
    Flow, Forwarding, Location, Packet, Qp, QpConfig, QpType, Qpn, RcQp, ReceiveRequest, SendData, Standing,
    Time, Transmit, TxBatch, UDP_PORT,
};

use self::host::Surroundings;
pub use self::pair::{Move, Outcome, Pair, Patience};
use crate::backend::Device;

/// Bytes of each end's memory.
pub const MEMORY: usize = 4096;

/// What the ends register: read-only, so that it is never adopted, and never touched.
static ADDRESSES: Addresses = Addresses([0; 2 * MEMORY]);

#[repr(align(4096))]
struct Addresses([u8; 2 * MEMORY]);

/// Where the memory of an end starts.
pub fn memory(end: usize) -> u64 {
    (&raw const ADDRESSES.0) as u64 + (end * MEMORY) as u64
}

/// Packets that a queue pair sends before the next one has its turn.
const PACKETS_PER_TURN: usize = 2;

/// So long RESUMEs are passed on.
const FORWARDED_FOR: Duration = Duration::from_secs(60);

/// Longer than anything else takes.
const PAUSE_LIMIT: Duration = Duration::from_secs(100);

#[derive(Debug)]
struct Region {
    address: u64,
    length: u64,
    access: Access,
}

/// A request in a send queue.
#[derive(Debug, Clone)]
struct Posted {
    wqe: SendWqe,
    data: SendData,
}

#[derive(Debug)]
struct Queues {
    qpn: u32,
    send_cq: u32,
    recv_cq: u32,
    cap: QpCap,
    /// Pushed and not published.
    pushed: Vec<Posted>,
    /// Published and not taken.
    sends: VecDeque<Posted>,
    /// Published and not retired.
    unfinished: VecDeque<Posted>,
    pushed_recvs: Vec<ReceiveRequest>,
    recvs: VecDeque<ReceiveRequest>,
}

#[derive(Debug)]
struct WireQp {
    transport: Qp,
    queues: Queues,
    /// The device at the other end.
    remote: u8,
    stopped: bool,
    attr: verbatim_device::control::QpAttr,
}

impl WireQp {
    fn connection(&mut self) -> &mut RcQp {
        self.transport.as_rc_mut().expect("a reliable connection")
    }

    fn is_paused(&self) -> bool {
        let connection = self.transport.as_rc().expect("a reliable connection");
        connection.standing() == Standing::Stopped
    }
}

#[derive(Debug, Default)]
struct Rnic {
    next: u32,
    qps: BTreeMap<u32, WireQp>,
    cqs: BTreeMap<u32, VecDeque<Cqe>>,
    regions: BTreeMap<u32, Region>,
    /// Queue pairs that have left.
    left: Option<Forwarding>,
    /// Its context is parked: no packet is taken in.
    parked: bool,
}

#[derive(Debug)]
struct InFlight {
    from: u8,
    to: u8,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct State {
    now: Time,
    rnics: BTreeMap<u8, Rnic>,
    packets: VecDeque<InFlight>,
    ram: Vec<u8>,
    /// Taken out while it is filled.
    batch: Option<TxBatch>,
    /// Completions made.
    completions: u64,
    /// Says for the next packets whether they are lost; none is when it is empty.
    losses: VecDeque<bool>,
    /// So many moves are under way.
    moves: u32,
    /// Nobody knows the original values of atomics for longer than it takes to send them.
    forgetful: bool,
}

/// All RNICs.
#[derive(Debug, Clone)]
pub struct Wire(Arc<Mutex<State>>);

/// Where a device is.
fn address(id: u8) -> IpAddr {
    [10, 0, 0, id].into()
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
            completions: 0,
            losses: VecDeque::new(),
            moves: 0,
            forgetful: false,
        })))
    }

    /// A device.
    pub fn device(&self, id: u8) -> Arc<dyn Device> {
        self.0.lock().rnics.entry(id).or_default();
        device::open(self, id)
    }

    /// A device of which no packet is taken in until it is taken up.
    pub fn parked_device(&self, id: u8) -> Arc<dyn Device> {
        let device = self.device(id);
        self.park(id, true);
        device
    }

    fn park(&self, id: u8, parked: bool) {
        self.0.lock().rnics.entry(id).or_default().parked = parked;
    }

    /// A move begins, or is over.
    pub fn count_move(&self, begins: bool) {
        let moves = &mut self.0.lock().moves;
        *moves = if begins { *moves + 1 } else { *moves - 1 };
    }

    /// A queue pair has left: RESUMEs for it go on to where it is.
    fn forward(&self, left: (u8, u32), to: (u8, u32)) {
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

    /// A region of a device has the key that it had elsewhere.
    fn rekey(&self, id: u8, from: u32, to: u32) {
        let mut state = self.0.lock();
        let regions = &mut state.rnics.get_mut(&id).expect("an RNIC").regions;
        let region = regions.remove(&from).expect("a region");
        regions.insert(to, region);
    }

    /// The next packets to arrive: `true` is lost.
    pub fn lose(&self, losses: impl IntoIterator<Item = bool>) {
        self.0.lock().losses.extend(losses);
    }

    /// From now on RNICs do not keep the original values of atomics.
    pub fn forget_atomics(&self) {
        self.0.lock().forgetful = true;
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
            if !state.losses.pop_front().unwrap_or_default() {
                state.deliver(&packet);
            }
            return true;
        }
        state.transmit() || state.pass_time()
    }
}

impl State {
    /// Splits off a queue pair and its surroundings.
    fn with_qp<T>(
        &mut self,
        device: u8,
        qpn: u32,
        run: impl FnOnce(&mut Qp, &mut Surroundings<'_>) -> T,
    ) -> Option<T> {
        let Rnic {
            qps, cqs, regions, ..
        } = self.rnics.get_mut(&device)?;
        let qp = qps.get_mut(&qpn)?;
        let mut surroundings = Surroundings {
            queues: &mut qp.queues,
            cqs,
            regions,
            ram: &mut self.ram,
            remote: &mut qp.remote,
            completions: &mut self.completions,
        };
        Some(run(&mut qp.transport, &mut surroundings))
    }

    fn deliver(&mut self, packet: &InFlight) {
        let parsed = Packet::parse(&packet.bytes).expect("what a transport has made");
        let qpn = parsed.bth.dest_qpn.get();
        if self.pass_on(packet.to, &parsed) {
            return;
        }
        let rnic = self.rnics.get(&packet.to);
        let qp = rnic.and_then(|rnic| Some((rnic, rnic.qps.get(&qpn)?)));
        let expected = qp.is_some_and(|(rnic, qp)| {
            // RESUME comes from where the partner has gone.
            let from = qp.remote == packet.from || parsed.info.kind == Kind::Migration;
            from && !qp.stopped && (!rnic.parked || qp.is_paused())
        });
        if expected {
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
        let IpAddr::V4(to) = forwarded.to.address else {
            panic!("there is no other family here")
        };
        let to = to.octets()[3];
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
        self.rnics.iter().flat_map(of_rnic).collect()
    }

    fn transmit(&mut self) -> bool {
        let before = self.completions;
        let mut batch = self.batch.take().expect("it was put back");
        for (id, qpn) in self.names() {
            let remote = self.rnics[&id].qps[&qpn].remote;
            let now = self.now;
            loop {
                batch.restart(flow(id, remote));
                let outcome = self.with_qp(id, qpn, |qp, host| {
                    qp.poll_transmit(now, host, &mut batch, PACKETS_PER_TURN)
                });
                let packets = batch.packets().map(|bytes| InFlight {
                    from: id,
                    to: remote,
                    bytes: bytes.to_vec(),
                });
                self.packets.extend(packets);
                if outcome != Some(Transmit::Full) {
                    break;
                }
            }
        }
        self.batch = Some(batch);
        !self.packets.is_empty() || self.completions > before
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

fn config() -> QpConfig {
    QpConfig {
        pause_limit: PAUSE_LIMIT,
        ..QpConfig::default()
    }
}

fn new_qp(qpn: u32, cap: QpCap, send_cq: u32, recv_cq: u32) -> WireQp {
    WireQp {
        transport: Qp::new(QpType::Rc, Qpn::new(qpn), config()),
        queues: Queues {
            qpn,
            send_cq,
            recv_cq,
            cap,
            pushed: Vec::new(),
            sends: VecDeque::new(),
            unfinished: VecDeque::new(),
            pushed_recvs: Vec::new(),
            recvs: VecDeque::new(),
        },
        remote: 0,
        stopped: false,
        attr: verbatim_device::control::QpAttr::default(),
    }
}

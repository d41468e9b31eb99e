//! What virtualisation costs per operation (MigrRDMA §5.5.1, table 4): cycles and instructions of the verbs as C programs
//! call them, of a provider that virtualises nothing and of the guest library, before and after a move.
//!
//! Both backends: the software RNIC, and the system's libibverbs, of which the provider of the tests takes the place (it completes at
//! once: rxe's own cost would hide ours).
//!
//! The paper compares an RNIC's library with and without its changes. Ours is compared with what the same rings need
//! without it: lock, checks, the request into the ring, the doorbell; the lock, the completion out of the ring. The RNIC's
//! side is played by the same thread between the measured stretches.
//!
//! Cycles are those of the time-stamp counter, which has a constant rate; they are measured in batches, of which the best
//! tenth counts, layer after layer in turn. Instructions are counted by valgrind and are the same in each run.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;
use verbatim::abi::*;
use verbatim::measure::{KEY, Layer, Measured, MeasuredSystem, Target};

use crate::context::Context;
use crate::programs;

/// Operations between two looks at the clock.
const BATCH: u32 = 32;
/// Turns of all layers for one figure.
const TURNS: u32 = 30;
/// Batches of a layer in one turn.
const BATCHES: u32 = 2000;
/// Batches that valgrind counts.
const COUNTED_BATCHES: u32 = 50;
/// 64 B, as in the paper.
const BYTES: u32 = 64;

const OPERATIONS: [Operation; 5] = [
    Operation::Send,
    Operation::Recv,
    Operation::Write,
    Operation::Read,
    Operation::Poll,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Operation {
    Send,
    Recv,
    Write,
    Read,
    /// Of the completion of a WRITE.
    Poll,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Provider,
    Guest,
    GuestAfterAMove,
}

const WAYS: [Way; 3] = [Way::Provider, Way::Guest, Way::GuestAfterAMove];

/// What is below the verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Backend {
    /// The software RNIC's rings.
    Soft,
    /// A libibverbs.
    RdmaCore,
}

const BACKENDS: [Backend; 2] = [Backend::Soft, Backend::RdmaCore];

fn soft() -> anyhow::Result<Measured> {
    Ok(Measured::new())
}

fn system() -> anyhow::Result<MeasuredSystem> {
    Ok(MeasuredSystem::new(programs::program("libinstant.so")?.as_ref())?)
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Write => "write",
            Self::Read => "read",
            Self::Poll => "poll",
        }
    }

    /// Cycles without and with virtualisation, by the paper.
    fn paper(self) -> Option<[f64; 2]> {
        match self {
            Self::Send => Some([123.7, 128.3]),
            Self::Recv => Some([59.4, 64.7]),
            Self::Write => Some([125.0, 133.3]),
            Self::Read => Some([127.3, 133.8]),
            Self::Poll => None,
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    /// Cycles of the time-stamp counter in a nanosecond.
    cycles_per_ns: f64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    backend: Backend,
    operation: Operation,
    way: Way,
    cycles: f64,
    /// Without valgrind: unknown.
    instructions: Option<f64>,
    /// Cycles more than the provider's.
    extra_cycles: f64,
    /// The same of the paper.
    paper_extra_cycles: Option<f64>,
    /// As a part of the provider's.
    overhead: f64,
    paper_overhead: Option<f64>,
    /// The extra cycles as a part of what the paper's provider needs: one that does more than the provider here.
    of_paper: Option<f64>,
}

/// Measures, prints and writes.
pub fn run(out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let cycles_per_ns = clock_rate();
    let has_valgrind = Command::new("valgrind").arg("--version").output().is_ok();
    if !has_valgrind {
        println!("instructions are not counted: install valgrind for that");
    }
    println!("cost of an operation of 64 B, {cycles_per_ns:.2} cycles to the ns");
    println!(
        "{:6} {:18} {:>8} {:>8} {:>8} {:>9} | {:>8} {:>9} {:>12}",
        "", "", "instr.", "cycles", "extra", "overhead", "paper", "overhead", "extra of its"
    );
    let mut rows = Vec::new();
    for backend in BACKENDS {
        println!("{}", serde_json::to_value(backend)?.as_str().unwrap_or_default());
        for operation in OPERATIONS {
            let cycles = cycles(backend, operation)?;
            for (way, cycles_of_it) in WAYS.into_iter().zip(cycles) {
                let extra = cycles_of_it - cycles[0];
                let paper = operation.paper().filter(|_| way != Way::Provider);
                let count = || instructions(backend, operation, way);
                let row = Row {
                    backend,
                    operation,
                    way,
                    cycles: cycles_of_it,
                    instructions: has_valgrind.then(count).transpose()?,
                    extra_cycles: extra,
                    overhead: extra / cycles[0],
                    paper_extra_cycles: paper.map(|[without, with]| with - without),
                    paper_overhead: paper.map(|[without, with]| with / without - 1.0),
                    of_paper: paper.map(|[without, _]| extra / without),
                };
                print(&row);
                rows.push(row);
            }
        }
    }
    let report = Report {
        context,
        cycles_per_ns,
        rows,
    };
    std::fs::write(out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}\n", out.display());
    Ok(())
}

fn print(row: &Row) {
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    let way = match row.way {
        Way::Provider => "provider",
        Way::Guest => "guest library",
        Way::GuestAfterAMove => "... after a move",
    };
    println!(
        "{:6} {way:18} {:>8} {:>8.1} {:>8.1} {:>8.1}% | {:>8} {:>8}% {:>11}%",
        row.operation.name(),
        optional(row.instructions),
        row.cycles,
        row.extra_cycles,
        100.0 * row.overhead,
        optional(row.paper_extra_cycles),
        optional(row.paper_overhead.map(|part| 100.0 * part)),
        optional(row.of_paper.map(|part| 100.0 * part)),
    );
}

/// One way to do one operation, again and again.
struct Subject<T> {
    measured: T,
    layer: Layer,
    operation: Operation,
    sge: Box<ibv_sge>,
    send: Box<ibv_send_wr>,
    recv: Box<ibv_recv_wr>,
}

impl<T: Target> Subject<T> {
    fn new(measured: T, operation: Operation, way: Way) -> Self {
        if way == Way::GuestAfterAMove {
            measured.is_moved();
        }
        let mut sge = Box::new(ibv_sge {
            addr: 4096,
            length: BYTES,
            lkey: KEY,
        });
        let opcode = match operation {
            Operation::Send => IBV_WR_SEND,
            Operation::Read => IBV_WR_RDMA_READ,
            _ => IBV_WR_RDMA_WRITE,
        };
        // SAFETY: numbers, unions of numbers and pointers, of all of which zero is one.
        let mut send: Box<ibv_send_wr> = unsafe { Box::new(std::mem::zeroed()) };
        send.sg_list = &raw mut *sge;
        send.num_sge = 1;
        send.opcode = opcode;
        send.send_flags = IBV_SEND_SIGNALED;
        send.wr.rdma = ibv_send_wr_rdma {
            remote_addr: 8192,
            rkey: KEY,
        };
        let recv = Box::new(ibv_recv_wr {
            wr_id: 1,
            next: std::ptr::null_mut(),
            sg_list: &raw mut *sge,
            num_sge: 1,
        });
        Self {
            measured,
            layer: match way {
                Way::Provider => Layer::Provider,
                _ => Layer::Guest,
            },
            operation,
            sge,
            send,
            recv,
        }
    }

    /// A batch, of which only the operation itself is measured: cycles.
    fn batch(&mut self) -> u64 {
        std::hint::black_box(&mut self.sge);
        match self.operation {
            Operation::Recv => {
                let cycles = measured(self, Self::post_recvs);
                self.measured.complete();
                self.polls();
                cycles
            }
            Operation::Poll => {
                self.post_sends();
                self.measured.complete();
                measured(self, Self::polls)
            }
            _ => {
                let cycles = measured(self, Self::post_sends);
                self.measured.complete();
                self.polls();
                cycles
            }
        }
    }

    #[inline(always)]
    fn post_sends(&mut self) {
        for wr_id in 0..BATCH {
            self.send.wr_id = wr_id.into();
            // SAFETY: the request and what it points to live as long as self.
            let posted = unsafe { self.measured.post_send(self.layer, &raw mut *self.send) };
            assert_eq!(posted, 0, "there is room");
        }
    }

    #[inline(always)]
    fn post_recvs(&mut self) {
        for wr_id in 0..BATCH {
            self.recv.wr_id = wr_id.into();
            // SAFETY: as above.
            let posted = unsafe { self.measured.post_recv(self.layer, &raw mut *self.recv) };
            assert_eq!(posted, 0, "there is room");
        }
    }

    #[inline(always)]
    fn polls(&mut self) {
        for _ in 0..BATCH {
            // SAFETY: numbers.
            let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
            assert_eq!(self.measured.poll(self.layer, &mut wc), 1, "all has completed");
            std::hint::black_box(&wc);
        }
    }
}

/// What valgrind is told to count, by this name.
#[inline(never)]
fn measured<T>(subject: &mut Subject<T>, stretch: impl FnOnce(&mut Subject<T>)) -> u64 {
    let start = now();
    stretch(subject);
    now() - start
}

/// The time-stamp counter, after everything before it.
fn now() -> u64 {
    // SAFETY: every x86-64 processor has them.
    unsafe {
        std::arch::x86_64::_mm_lfence();
        let now = std::arch::x86_64::_rdtsc();
        std::arch::x86_64::_mm_lfence();
        now
    }
}

/// Cycles of one operation, each way.
fn cycles(backend: Backend, operation: Operation) -> anyhow::Result<[f64; 3]> {
    match backend {
        Backend::Soft => cycles_of(soft, operation),
        Backend::RdmaCore => cycles_of(system, operation),
    }
}

fn cycles_of<T: Target>(make: fn() -> anyhow::Result<T>, operation: Operation) -> anyhow::Result<[f64; 3]> {
    let subject = |way| anyhow::Ok((Subject::new(make()?, operation, way), Vec::new()));
    let [one, two, three] = WAYS.map(subject);
    let mut subjects = [one?, two?, three?];
    for _ in 0..TURNS {
        for (subject, batches) in &mut subjects {
            batches.extend((0..BATCHES).map(|_| subject.batch()));
        }
    }
    Ok(subjects.map(|(_, mut batches)| {
        batches.sort_unstable();
        batches[batches.len() / 10] as f64 / f64::from(BATCH)
    }))
}

/// Cycles of the counter in a nanosecond.
fn clock_rate() -> f64 {
    let (start, cycles) = (std::time::Instant::now(), now());
    while start.elapsed().as_millis() < 50 {
        std::hint::spin_loop();
    }
    (now() - cycles) as f64 / start.elapsed().as_nanos() as f64
}

/// Instructions of one operation: this program's once more, under valgrind.
fn instructions(backend: Backend, operation: Operation, way: Way) -> anyhow::Result<f64> {
    let place = |of: usize| of.to_string();
    let operation = OPERATIONS.iter().position(|other| *other == operation);
    let way = WAYS.iter().position(|other| *other == way);
    let backend = BACKENDS.iter().position(|other| *other == backend);
    let (Some(backend), Some(operation), Some(way)) = (backend, operation, way) else {
        unreachable!("the lists are complete");
    };
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--collect-atstart=no",
            "--toggle-collect=verbatim_bench::cost::measured*",
        ])
        .arg(std::env::current_exe()?)
        .args(["cost-batches", &place(backend), &place(operation), &place(way)])
        .output()
        .context("cannot start valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind has failed:\n{text}");
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .and_then(|(_, count)| count.trim().parse::<f64>().ok());
    let Some(collected) = collected.filter(|collected| *collected > 0.0) else {
        bail!("valgrind has counted nothing:\n{text}");
    };
    Ok(collected / f64::from(COUNTED_BATCHES * BATCH))
}

/// What runs under valgrind.
pub fn batches(arguments: &[String]) -> anyhow::Result<()> {
    let [backend, operation, way] = arguments else {
        bail!("cost-batches wants a backend, an operation and a way");
    };
    let backend = BACKENDS
        .get(backend.parse::<usize>()?)
        .context("no such backend")?;
    let operation = OPERATIONS
        .get(operation.parse::<usize>()?)
        .context("no such operation")?;
    let way = WAYS.get(way.parse::<usize>()?).context("no such way")?;
    match backend {
        Backend::Soft => count(Subject::new(soft()?, *operation, *way)),
        Backend::RdmaCore => count(Subject::new(system()?, *operation, *way)),
    }
    Ok(())
}

fn count(mut subject: Subject<impl Target>) {
    for _ in 0..COUNTED_BATCHES {
        subject.batch();
    }
}

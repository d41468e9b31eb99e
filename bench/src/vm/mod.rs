//! Virtual machines: how long a move takes, how long the guest stands still, and what processor time it takes, beside QEMU's own migration.
//!
//! Guest, hosts and links are the same for all, by turns. The guest is a program without an operating system (`crates/vm/guest/pool.c`); what
//! it says in each millisecond is heard outside of all hosts, so that its silence is measured in the same way whoever moves it.

mod observer;
mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;
use tokio::runtime::Runtime;
use verbatim_e2e::{Instance, Migration, TestLab, Tools};

use crate::context::Context;
use crate::migrrdma::write;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::stock::now;
use crate::summary::Summary;
use observer::Observer;
use peer::{DoesNotEnd, Way};

/// MiB of RAM.
const SIZES: [u32; 4] = [128, 256, 512, 1024];
/// MiB of RAM of which nothing was ever written. What the second costs more than the first is what zeroes cost, without a QEMU that is started.
const ZERO_SIZES: [u32; 2] = [1024, 5120];
/// MiB that are written all the time, of [`HOT_RAM`].
const POOLS: [u32; 3] = [0, 64, 256];
/// MiB of the guest with a pool.
const HOT_RAM: u32 = 512;
/// MiB that guest and BIOS have for themselves.
const OWN: u32 = 32;
/// MiB of each that moves together with others, and how many do.
const TOGETHER: (u32, usize) = (256, 3);

/// Who moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mover {
    Tls,
    Rdma,
    /// TLS, and what rounds do not bring comes when the guest runs.
    PostCopy,
    /// The same by RDMA.
    PostCopyRdma,
    QemuTcp,
    QemuMultifd,
    QemuRdma,
}

impl Mover {
    const ALL: [Self; 7] = [
        Self::Tls,
        Self::Rdma,
        Self::PostCopy,
        Self::PostCopyRdma,
        Self::QemuTcp,
        Self::QemuMultifd,
        Self::QemuRdma,
    ];

    /// Whether it differs from the others for such a guest: one that writes nothing leaves nothing behind.
    fn is_for(self, guest: &Guest) -> bool {
        !matches!(self, Self::PostCopy | Self::PostCopyRdma) || guest.ticks
    }

    /// Options of ours; `None` of QEMU's own.
    fn options(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Tls => Some(&["--memory-transport", "tls"]),
            Self::Rdma => Some(&["--memory-transport", "rdma"]),
            Self::PostCopy => Some(&["--memory-transport", "tls", "--post-copy"]),
            Self::PostCopyRdma => Some(&["--memory-transport", "rdma", "--post-copy"]),
            Self::QemuTcp | Self::QemuMultifd | Self::QemuRdma => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tls => "ours, TLS",
            Self::Rdma => "ours, RDMA",
            Self::PostCopy => "ours, post-copy",
            Self::PostCopyRdma => "ours, post-copy by RDMA",
            Self::QemuTcp => "QEMU, TCP",
            Self::QemuMultifd => "QEMU, multifd",
            Self::QemuRdma => "QEMU, RDMA",
        }
    }
}

/// The guest that is moved.
#[derive(Debug, Clone, Copy, Serialize)]
struct Guest {
    ram_mebibytes: u32,
    /// Not zero.
    full_mebibytes: u32,
    /// Written all the time.
    hot_mebibytes: u32,
    /// It says something in each millisecond; else it halts when it is ready.
    ticks: bool,
}

impl Guest {
    fn idle(ram: u32, full: bool) -> Self {
        Self {
            ram_mebibytes: ram,
            full_mebibytes: if full { ram - OWN } else { 0 },
            hot_mebibytes: 0,
            ticks: false,
        }
    }

    fn with_pool(pool: u32) -> Self {
        Self {
            ram_mebibytes: HOT_RAM,
            full_mebibytes: HOT_RAM - OWN,
            hot_mebibytes: pool,
            ticks: true,
        }
    }

    /// QEMU's.
    fn arguments(self, program: &str, observer: &Observer) -> Vec<String> {
        let line = format!(
            "full={} hot={} ticks={}",
            self.full_mebibytes,
            self.hot_mebibytes,
            u8::from(self.ticks)
        );
        let (ram, serial) = (self.ram_mebibytes.to_string(), observer.serial());
        let usual = ["-M", "pc", "-accel", "tcg", "-nodefaults", "-no-user-config"];
        let own = [
            "-display", "none", "-m", &ram, "-serial", &serial, "-kernel", program, "-append", &line,
        ];
        usual.iter().chain(&own).map(|word| (*word).to_owned()).collect()
    }
}

/// One move.
#[derive(Debug, Clone, Copy, Serialize)]
struct Moved {
    /// Until the guest runs at the other host.
    total_ms: f64,
    /// How long it was not heard; only of one that ticks.
    silent_ms: Option<f64>,
    /// Of all processors, by whatever used it: nothing else runs.
    cpu_s: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    guest: Guest,
    moves: BTreeMap<Mover, Vec<Moved>>,
    /// By whom a move did not come to an end; it was tried once.
    never: BTreeSet<Mover>,
    /// What we say ourselves of ours.
    migrations: Vec<Migration>,
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    qemu: String,
    /// Nothing of the RAM is zero, and the guest halts.
    sizes: Vec<Row>,
    /// The same, and all of it is zero but what the guest and its BIOS have.
    zero: Vec<Row>,
    pools: Vec<Row>,
    /// So many at once, in ms, by RDMA.
    together: Vec<Vec<f64>>,
}

/// Measures, prints, draws and writes.
pub fn run(tools: &Tools, repeats: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    let version = version.context("qemu-system-x86_64 is missing: run ./setup.sh")?;
    let qemu = String::from_utf8_lossy(&version.stdout);
    let bench = Bench {
        tools,
        runtime: tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
        program: program()?,
        repeats,
    };
    println!("virtual machines, {repeats} of each by turns; medians (worst)");
    let mut sizes = Vec::new();
    for size in SIZES {
        sizes.push(bench.row(Guest::idle(size, true))?);
    }
    let mut zero = Vec::new();
    for size in ZERO_SIZES {
        zero.push(bench.row(Guest::idle(size, false))?);
    }
    print_more(&zero);
    let mut pools = Vec::new();
    for pool in POOLS {
        pools.push(bench.row(Guest::with_pool(pool))?);
    }
    let together = bench.together()?;
    let report = Report {
        context,
        qemu: qemu.lines().next().unwrap_or_default().to_owned(),
        sizes,
        zero,
        pools,
        together,
    };
    report.draw(out)?;
    write(&report, out)
}

/// The guest's program, built here.
fn program() -> anyhow::Result<String> {
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/vm/guest");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-programs");
    std::fs::create_dir_all(&folder)?;
    let folder = folder.canonicalize()?;
    let made = Command::new("make")
        .args(["-s", "-C"])
        .arg(guest)
        .arg(format!("OUT={}", folder.display()))
        .status();
    ensure!(
        made.context("make is missing: run ./setup.sh")?.success(),
        "the guest cannot be built"
    );
    let path: PathBuf = folder.join("pool");
    Ok(path.to_str().context("a path that is not UTF-8")?.to_owned())
}

struct Bench<'a> {
    tools: &'a Tools,
    runtime: Runtime,
    program: String,
    repeats: u32,
}

impl Bench<'_> {
    /// Moves it by each mover by turns.
    fn row(&self, guest: Guest) -> anyhow::Result<Row> {
        let lab = TestLab::up(self.tools, &["src", "dst"])?;
        let observer = Observer::start()?;
        let arguments = guest.arguments(&self.program, &observer);
        let mut row = Row {
            guest,
            moves: BTreeMap::new(),
            never: BTreeSet::new(),
            migrations: Vec::new(),
        };
        for turn in 0..self.repeats {
            for mover in Mover::ALL {
                if row.never.contains(&mover) || !mover.is_for(&guest) {
                    continue;
                }
                let moved = match mover {
                    Mover::Tls | Mover::Rdma | Mover::PostCopy | Mover::PostCopyRdma => {
                        self.ours(&lab, &observer, mover, &arguments, turn, &mut row.migrations)
                    }
                    Mover::QemuTcp => self.theirs(&lab, &observer, Way::Tcp, guest, &arguments),
                    Mover::QemuMultifd => self.theirs(&lab, &observer, Way::Multifd, guest, &arguments),
                    Mover::QemuRdma => self.theirs(&lab, &observer, Way::Rdma, guest, &arguments),
                };
                if moved.as_ref().is_err_and(|error| error.is::<DoesNotEnd>()) {
                    row.never.insert(mover);
                    continue;
                }
                let moved = moved.with_context(|| format!("{guest:?}, {}{}", mover.name(), lab.logs()))?;
                row.moves.entry(mover).or_default().push(moved);
            }
        }
        lab.down()?;
        row.print();
        Ok(row)
    }

    /// A new guest each time, as for QEMU: its memory was never touched at the destination before.
    fn ours(
        &self,
        lab: &TestLab,
        observer: &Observer,
        mover: Mover,
        arguments: &[String],
        turn: u32,
        migrations: &mut Vec<Migration>,
    ) -> anyhow::Result<Moved> {
        let name = format!("{mover:?}-{turn}").to_lowercase();
        let options = mover.options().context("it is not ours")?;
        let ticks = arguments.last().is_some_and(|line| line.ends_with("ticks=1"));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let instance = observer.ready(1, || lab.machine("src", &name, &arguments))?;
        let moved = observed(observer, ticks, || {
            let migration = instance.migrate_with("dst", options)?;
            migration.must_be_committed()?;
            ensure!(migration.memory_transport == options[1], "{migration:?}");
            migrations.push(migration);
            Ok(())
        })?;
        lab.ask(&["stop", &name])?;
        Ok(moved)
    }

    fn theirs(
        &self,
        lab: &TestLab,
        observer: &Observer,
        way: Way,
        guest: Guest,
        arguments: &[String],
    ) -> anyhow::Result<Moved> {
        let peer = peer::Pair::start(lab, &self.runtime, way, arguments, observer)?;
        observed(observer, guest.ticks, || peer.migrate())
    }

    /// One, two, three at once.
    fn together(&self) -> anyhow::Result<Vec<Vec<f64>>> {
        let (ram, most) = TOGETHER;
        let lab = TestLab::up(self.tools, &["src", "dst"])?;
        let observer = Observer::start()?;
        let arguments = Guest::idle(ram, true).arguments(&self.program, &observer);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut all = vec![Vec::new(); most];
        for turn in 0..self.repeats {
            for (count, times) in (1..).zip(&mut all) {
                let names: Vec<_> = (0..count)
                    .map(|index| format!("{turn}-{count}-{index}"))
                    .collect();
                let guests = observer.ready(count, || {
                    let started = names.iter().map(|name| lab.machine("src", name, &arguments));
                    started.collect::<anyhow::Result<Vec<_>>>()
                })?;
                times.push(at_once(&guests)?);
                for name in &names {
                    lab.ask(&["stop", name])?;
                }
            }
        }
        lab.down()?;
        let medians = all.iter().map(|times| Summary::of(times.iter().copied()).median);
        let medians: Vec<_> = medians.collect();
        println!("\n{ram} MiB each, by RDMA, so many at once");
        for (count, median) in (1..).zip(&medians) {
            let linear = median / (medians[0] * f64::from(count));
            println!("{count:>6} {median:>10.0} ms  {linear:>6.2} of linear");
        }
        Ok(all)
    }
}

/// Moves all of them at once; how long it took until the last was there, in ms.
fn at_once(guests: &[Instance<'_>]) -> anyhow::Result<f64> {
    let barrier = Barrier::new(guests.len());
    let begun = now();
    std::thread::scope(|scope| {
        let barrier = &barrier;
        let moves: Vec<_> = guests
            .iter()
            .map(|guest| {
                scope.spawn(move || {
                    barrier.wait();
                    let migration = guest.migrate_with("dst", &["--memory-transport", "rdma"])?;
                    migration.must_be_committed()
                })
            })
            .collect();
        moves.into_iter().try_for_each(|moved| match moved.join() {
            Ok(moved) => moved,
            Err(_) => bail!("a thread that moved a guest panicked"),
        })
    })?;
    Ok((now() - begun) * 1e3)
}

/// Has it moved, and says what that took.
fn observed(
    observer: &Observer,
    ticks: bool,
    move_it: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Moved> {
    let (mut total_ms, mut cpu_s) = (0.0, 0.0);
    let moved = || {
        let (begun, used) = (now(), busy()?);
        move_it()?;
        total_ms = (now() - begun) * 1e3;
        cpu_s = busy()? - used;
        anyhow::Ok(())
    };
    let silent_ms = match ticks {
        true => Some(observer.silence(moved)?),
        false => moved().map(|()| None)?,
    };
    Ok(Moved {
        total_ms,
        silent_ms,
        cpu_s,
    })
}

/// What all processors together have worked, in seconds: user, nice, system, irq and softirq of proc_stat(5).
fn busy() -> anyhow::Result<f64> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/stat")?;
    let all = stat.lines().next().context("/proc/stat is empty")?;
    let fields: Vec<f64> = all
        .split_ascii_whitespace()
        .skip(1)
        .map(str::parse)
        .collect::<Result<_, _>>()
        .context("/proc/stat")?;
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = fields[..] else {
        bail!("/proc/stat has too few fields");
    };
    Ok((user + nice + system + irq + softirq) / TICKS_PER_SECOND)
}

impl Row {
    /// `None` of whose moves did not come to an end.
    fn of(&self, mover: Mover, get: impl Fn(&Moved) -> f64) -> Option<Summary> {
        let moves = self.moves.get(&mover)?;
        Some(Summary::of(moves.iter().map(get)))
    }

    fn silent(&self, mover: Mover) -> Option<Summary> {
        self.of(mover, |moved| moved.silent_ms.unwrap_or_default())
    }

    fn print(&self) {
        let Guest {
            ram_mebibytes,
            full_mebibytes,
            hot_mebibytes,
            ticks,
        } = self.guest;
        println!("\n{ram_mebibytes} MiB of RAM, {full_mebibytes} full, {hot_mebibytes} hot");
        let to_tcp = |mover, get: fn(&Moved) -> f64| {
            let (ours, tcp) = (self.of(mover, get), self.of(Mover::QemuTcp, get));
            ours.zip(tcp)
                .map_or(f64::NAN, |(ours, tcp)| ours.median / tcp.median)
        };
        for mover in Mover::ALL.into_iter().filter(|mover| mover.is_for(&self.guest)) {
            let Some(total) = self.of(mover, |moved| moved.total_ms) else {
                println!("{:>22}  {DoesNotEnd}", mover.name());
                continue;
            };
            print!(
                "{:>22}  total {:>7.0} ({:.0}) ms, {:.2} ×",
                mover.name(),
                total.median,
                total.most,
                to_tcp(mover, |moved| moved.total_ms)
            );
            if let Some(silent) = self.silent(mover).filter(|_| ticks) {
                let ratio = to_tcp(mover, |moved| moved.silent_ms.unwrap_or_default());
                println!(
                    "   silent {:>6.0} ({:.0}) ms, {ratio:.2} ×",
                    silent.median, silent.most
                );
            } else if let Some(used) = self.of(mover, |moved| moved.cpu_s) {
                println!(
                    "   {:>6.2} s/GiB of processor time, {:.2} ×",
                    used.median * 1024.0 / f64::from(ram_mebibytes),
                    to_tcp(mover, |moved| moved.cpu_s)
                );
            }
        }
    }
}

/// What each GiB of zeroes more costs.
fn print_more(zero: &[Row]) {
    let [small, large] = zero else { return };
    let gibibytes = f64::from(large.guest.ram_mebibytes - small.guest.ram_mebibytes) / 1024.0;
    println!("\neach GiB of zeroes more");
    for mover in Mover::ALL {
        let more = |get: fn(&Moved) -> f64| {
            let (small, large) = (small.of(mover, get)?, large.of(mover, get)?);
            Some((large.median - small.median) / gibibytes)
        };
        if let (Some(total), Some(cpu)) = (more(|moved| moved.total_ms), more(|moved| moved.cpu_s)) {
            println!(
                "{:>22}  total {total:>7.1} ms   {:>7.1} ms of processor time",
                mover.name(),
                cpu * 1000.0
            );
        }
    }
}

impl Report {
    /// Beside the report: total time by RAM, silence by the hot pool.
    fn draw(&self, out: &Path) -> anyhow::Result<()> {
        let lines = |rows: &[Row], x: fn(&Guest) -> u32, get: &dyn Fn(&Row, Mover) -> Option<Summary>| {
            let line = |mover: Mover| Line {
                name: mover.name().to_owned(),
                points: rows
                    .iter()
                    .filter_map(|row| Some((f64::from(x(&row.guest)), get(row, mover)?.median)))
                    .collect(),
                peer: mover.options().is_none(),
            };
            let lines = Mover::ALL.map(line).into_iter();
            lines.filter(|line| !line.points.is_empty()).collect::<Vec<_>>()
        };
        let total = Axes {
            title: "How long the move of a virtual machine takes, by its RAM",
            x: "MiB",
            y: "ms",
            scale: Scale::Linear,
        };
        let drawn = lines(&self.sizes, |guest| guest.ram_mebibytes, &|row, mover| {
            row.of(mover, |moved| moved.total_ms)
        });
        draw(&out.with_extension("total.svg"), &total, &drawn)?;
        let silent = Axes {
            title: "How long a guest stands still, by what it writes all the time",
            ..total
        };
        let drawn = lines(&self.pools, |guest| guest.hot_mebibytes, &|row, mover| {
            row.silent(mover)
        });
        draw(&out.with_extension("silent.svg"), &silent, &drawn)
    }
}

//! RocksDB on a volume that is mounted, beside a copy of it: `readwhilewriting` as in the paper, "SmartNIC-Enabled Live Migration for Storage-Optimized
//! VMs" (APSys 2024), section 5, by the unmodified `db_bench`. Beside it the mirror of `qemu-storage-daemon`.
//!
//! The volume is lent as to a container: a block device by FUSE and a loop device, and copied as in a session of the agents. The
//! mirror's source has a process more on its way (`nbdfuse`), so its times are compared with its own without a copy.

mod db_bench;
mod mounted;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verbatim_e2e::{Tools, eventually};
use verbatim_volume::control::Order;

use super::servers::{LIMIT, Mirror, Ours};
use super::{ended, fill, folder_beside};
use crate::context::Context;
use crate::migrrdma::write;
use crate::summary::Summary;
use db_bench::Run;
use mounted::{Foreign, Mounted, VOLUME, Volume};

/// Of the disk; the paper's has 8 GiB. A copy of it lasts longer than a run, and what is not compacted has room.
const SIZE: u64 = 6 << 30;

/// As in the paper.
const BYTES_PER_SECOND: u64 = 110_000_000;

/// Of a run beside a copy with that limit, and of one beside a copy without one, in seconds.
const LIMITED: u32 = 10;
const UNLIMITED: u32 = 6;

/// Bytes a second that it writes at most: no limit, as in the paper, where this takes all of the disk that there is; and so few that the disk has room
/// for a copy.
const WRITTEN: [Option<u64>; 2] = [None, Some(20_000_000)];

/// What is asked of reads beside a copy: ratios to those without one. The paper's are 1.12 and 1.17, and none for the 99th.
const ASKED: Ratios = Ratios {
    mean: 1.05,
    p90: 1.08,
    p99: 1.2,
};

/// Packages of setup.sh's.
const PROGRAMS: [(&str, &str); 4] = [
    ("db_bench", "--version"),
    ("mkfs.ext4", "-V"),
    ("nbdfuse", "--version"),
    ("qemu-storage-daemon", "--version"),
];

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    Ours,
    Background,
    WriteBlocking,
}

impl Way {
    const ALL: [Self; 3] = [Self::Ours, Self::Background, Self::WriteBlocking];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours, TLS",
            Self::Background => "mirror, background",
            Self::WriteBlocking => "mirror, write-blocking",
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Ratios {
    mean: f64,
    p90: f64,
    p99: f64,
}

/// All of it.
#[derive(Debug, Serialize)]
pub struct Part {
    bytes: u64,
    keys: u32,
    asked_of_reads: Ratios,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    rocksdb: Part,
}

/// One way at one rate. Ratios are of the rounds' medians.
#[derive(Debug, Serialize)]
struct Row {
    way: Way,
    /// That RocksDB writes at most.
    written_bytes_per_second: Option<u64>,
    /// Of the copy; nothing where it takes what it gets.
    bytes_per_second: Option<u64>,
    /// To those without a copy.
    reads: Ratios,
    reads_a_second: f64,
    writes_a_second: f64,
    /// Bytes a second that were copied beside it.
    copied: Summary,
    runs: Vec<Measured>,
}

/// One run without a copy, and one beside it.
#[derive(Debug, Clone, Copy, Serialize)]
struct Measured {
    alone: Run,
    beside: Run,
    copied_bytes_a_second: f64,
    /// The copy went on until the end of the run.
    copied_all_along: bool,
}

/// This part alone: measures, prints and writes.
pub fn report(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    check()?;
    let context = Context::now();
    let folder = folder_beside(out)?;
    let ours = Ours::start(&tools.verbatim, folder.path())?;
    let rocksdb = run(&ours, folder.path(), rounds)?;
    write(&Report { context, rocksdb }, out)
}

/// Whether all is there.
pub fn check() -> anyhow::Result<()> {
    for (program, version) in PROGRAMS {
        let version = Command::new(program).arg(version).output();
        version.with_context(|| format!("{program} is missing: run ./setup.sh"))?;
    }
    Ok(())
}

/// Measures, by turns, and prints. Both copy the same image.
pub fn run(ours: &Ours, folder: &Path, rounds: u32) -> anyhow::Result<Part> {
    let folder = folder.join("rocksdb");
    std::fs::create_dir_all(&folder)?;
    let image = folder.join("image");
    fill(&image, SIZE)?;
    {
        let _volume = Volume::mount(ours, &image, SIZE, &folder.join("mnt"), true)?;
        db_bench::fill(&folder.join("mnt"))?;
    }
    let mut bench = Bench {
        ours,
        mirror: Mirror::start(&folder, &image, SIZE)?,
        folder,
        image,
        session: 0,
    };
    println!(
        "RocksDB's readwhilewriting, {} keys, on ext4 on a disk that is copied; medians of {rounds} runs by turns: alone, beside a copy, ratio \
         (asked of reads: {}, {}, {})",
        db_bench::KEYS,
        ASKED.mean,
        ASKED.p90,
        ASKED.p99
    );
    println!(
        "{:>24} {:>7} {:>6} {:>6} {:>22} {:>22} {:>24} {:>20} {:>20}",
        "", "written", "limit", "MB/s", "reads: mean, µs", "p90, µs", "p99, µs", "reads/s", "writes/s"
    );
    let mut rows = Vec::new();
    for written in WRITTEN {
        for limit in [Some(BYTES_PER_SECOND), None] {
            let load = Load { written, limit };
            let mut runs = Way::ALL.map(|_| Vec::new());
            for round in 0..rounds {
                for (way, runs) in Way::ALL.into_iter().zip(&mut runs) {
                    let measured = bench.measure(way, load, round);
                    runs.push(measured.with_context(|| way.name())?);
                }
            }
            for (way, runs) in Way::ALL.into_iter().zip(runs) {
                rows.push(row(way, load, runs));
            }
        }
    }
    Ok(Part {
        bytes: SIZE,
        keys: db_bench::KEYS,
        asked_of_reads: ASKED,
        rows,
    })
}

/// Limits, in bytes a second: of what RocksDB writes, and of the copy.
#[derive(Debug, Clone, Copy)]
struct Load {
    written: Option<u64>,
    limit: Option<u64>,
}

struct Bench<'a> {
    ours: &'a Ours,
    mirror: Mirror,
    folder: PathBuf,
    image: PathBuf,
    /// The last session by which our volume was copied.
    session: u64,
}

impl Bench<'_> {
    /// A run alone and one beside a copy; which comes first alternates, since data that are written over are not what they were.
    fn measure(&mut self, way: Way, load: Load, round: u32) -> anyhow::Result<Measured> {
        let at = self.folder.join("mnt");
        let _mounted = match way {
            Way::Ours => Mounted::Ours(Volume::mount(self.ours, &self.image, SIZE, &at, false)?),
            Way::Background | Way::WriteBlocking => {
                Mounted::Foreign(Foreign::mount(&self.mirror.uri, &self.folder, &at)?)
            }
        };
        let seconds = load.limit.map_or(UNLIMITED, |_| LIMITED);
        let run = || db_bench::run(&at, seconds, load.written, round + 1);
        let alone = || {
            db_bench::settle(&at)?;
            run()
        };
        let first = round.is_multiple_of(2).then(alone).transpose()?;
        db_bench::settle(&at)?;
        self.begin(way, load.limit)?;
        let (began, before) = (Instant::now(), self.copied(way)?.0);
        let beside = run()?;
        let (after, is_over) = self.copied(way)?;
        let copied_bytes_a_second = (after - before) as f64 / began.elapsed().as_secs_f64();
        self.end(way)?;
        Ok(Measured {
            alone: first.map_or_else(alone, Ok)?,
            beside,
            copied_bytes_a_second,
            copied_all_along: !is_over,
        })
    }

    fn begin(&mut self, way: Way, limit: Option<u64>) -> anyhow::Result<()> {
        let copy_mode = match way {
            Way::Ours => {
                self.session += 1;
                let order = Order::Follow {
                    name: VOLUME.to_owned(),
                    to: "b".to_owned(),
                    by: self.session,
                    bytes_per_second: limit,
                };
                self.ours.order("a", &order)?;
                return eventually("the copy's begin", LIMIT, || {
                    Ok((self.copied(way)?.0 > 0).then_some(()))
                });
            }
            Way::Background => "background",
            Way::WriteBlocking => "write-blocking",
        };
        self.mirror.begin(copy_mode, limit.unwrap_or(0))
    }

    /// Bytes that are copied so far, and whether that is all.
    fn copied(&mut self, way: Way) -> anyhow::Result<(u64, bool)> {
        if way != Way::Ours {
            return Ok((self.mirror.copied()?, self.mirror.is_ready()?));
        }
        let status = self.ours.status(VOLUME)?;
        ensure!(
            status["copy"]["transport"] == "tls",
            "the copy is not by TLS: {status}"
        );
        let migration = &status["migration"];
        let copied = migration["copied_bytes"].as_u64();
        let is_mirrored = migration["is_mirrored"].as_bool();
        copied
            .zip(is_mirrored)
            .with_context(|| format!("it is not copied: {status}"))
    }

    /// Gives the copy up, as a session that is rolled back. The next one begins with nothing.
    fn end(&mut self, way: Way) -> anyhow::Result<()> {
        if way != Way::Ours {
            return self.mirror.end();
        }
        for host in ["a", "b"] {
            let order = Order::Settle {
                name: VOLUME.to_owned(),
                by: self.session,
                is_committed: false,
            };
            self.ours.order(host, &order)?;
        }
        ended(&mut self.ours.command("b", &["delete", VOLUME])).map(drop)
    }
}

fn row(way: Way, load: Load, runs: Vec<Measured>) -> Row {
    let alone = |get: fn(&Run) -> f64| Summary::of(runs.iter().map(|run| get(&run.alone))).median;
    let beside = |get: fn(&Run) -> f64| Summary::of(runs.iter().map(|run| get(&run.beside))).median;
    let ratio = |get: fn(&Run) -> f64| beside(get) / alone(get);
    let copied = Summary::of(runs.iter().map(|run| run.copied_bytes_a_second));
    let told = |get: fn(&Run) -> f64| format!("{:.0} {:.0} {:.2}", alone(get), beside(get), ratio(get));
    let rate = |limit: Option<u64>| limit.map_or("all".to_owned(), |limit| (limit / 1_000_000).to_string());
    let note = match runs.iter().all(|run| run.copied_all_along) {
        true => "",
        false => " (a copy was over before)",
    };
    println!(
        "{:>24} {:>7} {:>6} {:>6.0} {:>22} {:>22} {:>24} {:>20} {:>20}{note}",
        way.name(),
        rate(load.written),
        rate(load.limit),
        copied.median / 1e6,
        told(|run| run.reads.mean),
        told(|run| run.reads.p90),
        told(|run| run.reads.p99),
        told(Run::reads_a_second),
        told(Run::writes_a_second),
    );
    Row {
        way,
        written_bytes_per_second: load.written,
        bytes_per_second: load.limit,
        reads: Ratios {
            mean: ratio(|run| run.reads.mean),
            p90: ratio(|run| run.reads.p90),
            p99: ratio(|run| run.reads.p99),
        },
        reads_a_second: ratio(Run::reads_a_second),
        writes_a_second: ratio(Run::writes_a_second),
        copied,
        runs,
    }
}

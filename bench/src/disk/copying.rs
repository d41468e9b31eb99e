//! What a tenant notices of a copy: reads and writes at depth 4 with and without it, the stall when the other host falls silent, and how
//! long requests wait at the end; beside the mirror of `qemu-storage-daemon`.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;
use verbatim_e2e::eventually;

use super::ended;
use super::fio::{self, Half, Load, Run};
use super::servers::{LIMIT, Mirror, Ours};
use crate::summary::Summary;

/// As in the paper.
const BYTES_PER_SECOND: u64 = 110_000_000;

const TENANT: Load = Load {
    pattern: "randrw",
    depth: 4,
    seconds: 6,
};

/// So long a copy without a limit is sure to last.
const SHORT: Load = Load { seconds: 2, ..TENANT };

/// The other host says nothing for this time.
const SILENCE: Duration = Duration::from_secs(2);

/// Who copies, and how.
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
            Self::Ours => "ours",
            Self::Background => "mirror, background",
            Self::WriteBlocking => "mirror, write-blocking",
        }
    }

    fn copy_mode(self) -> &'static str {
        match self {
            Self::Ours | Self::Background => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }
}

/// One way at one rate.
#[derive(Debug, Serialize)]
pub struct Row {
    way: Way,
    /// Of the copy; nothing where it takes what it gets.
    bytes_per_second: Option<u64>,
    /// Medians of the rounds.
    alone: [Times; 2],
    beside: [Times; 2],
    runs: Vec<(Run, Run)>,
}

/// In µs.
#[derive(Debug, Clone, Copy, Serialize)]
struct Times {
    mean: f64,
    p90: f64,
    p99: f64,
}

impl Times {
    fn of(runs: impl Iterator<Item = Half> + Clone) -> Self {
        let median = |get: fn(Half) -> f64| Summary::of(runs.clone().map(get)).median;
        Self {
            mean: median(|half| half.mean),
            p90: median(|half| half.p90),
            p99: median(|half| half.p99),
        }
    }
}

/// What was measured besides.
#[derive(Debug, Serialize)]
pub struct Ends {
    /// The longest request while the other host says nothing for two seconds, in ms.
    stall: Vec<(&'static str, Summary)>,
    /// Seconds of a copy without a tenant.
    copy: Vec<(&'static str, Summary)>,
    /// How long requests waited at the end of a move, in ms, beside a tenant.
    cut_over: Summary,
}

/// Who is measured, on what.
pub struct Bench<'a> {
    pub ours: &'a Ours,
    pub mirror: Mirror,
    pub image: &'a Path,
    pub size: u64,
    pub rounds: u32,
}

impl Bench<'_> {
    /// Measures, by turns, and prints.
    pub fn run(&mut self) -> anyhow::Result<(Vec<Row>, Ends)> {
        println!("70 % reads and 30 % writes of 4 KiB at depth 4, µs: alone, beside a copy, ratio");
        println!(
            "{:>24} {:>10} {:>7} {:>26} {:>26} {:>26}",
            "", "MB/s", "", "mean", "p90", "p99"
        );
        let mut rows = Vec::new();
        for limit in [Some(BYTES_PER_SECOND), None] {
            let mut runs = Way::ALL.map(|_| Vec::new());
            for _ in 0..self.rounds {
                for (way, runs) in Way::ALL.into_iter().zip(&mut runs) {
                    runs.push(self.tenant(way, limit)?);
                }
            }
            for (way, runs) in Way::ALL.into_iter().zip(runs) {
                rows.push(row(way, limit, runs)?);
            }
        }
        Ok((rows, self.ends()?))
    }

    fn tenant(&mut self, way: Way, limit: Option<u64>) -> anyhow::Result<(Run, Run)> {
        let load = if limit.is_some() { TENANT } else { SHORT };
        let uri = self.uri(way)?;
        let alone = fio::run(&uri, load)?;
        let copy = self.begin(way, limit)?;
        let beside = fio::run(&uri, load)?;
        self.end(way, copy)?;
        Ok((alone, beside))
    }

    fn uri(&self, way: Way) -> anyhow::Result<String> {
        match way {
            Way::Ours => self.ours.volume("db", self.size, self.image),
            Way::Background | Way::WriteBlocking => Ok(self.mirror.uri.clone()),
        }
    }

    /// The command that waits for our move, if it is ours.
    fn begin(&mut self, way: Way, limit: Option<u64>) -> anyhow::Result<Option<std::process::Child>> {
        if way != Way::Ours {
            self.mirror.begin(way.copy_mode(), limit.unwrap_or(0))?;
            return Ok(None);
        }
        let mut arguments = vec!["migrate", "db", "--to", "b"];
        let limit = limit.map(|limit| (limit >> 20).to_string());
        if let Some(limit) = &limit {
            arguments.extend(["--max-bandwidth", limit]);
        }
        let mut command = self.ours.command("a", &arguments);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        eventually("the copy's begin", LIMIT, || {
            let rows: Value = serde_json::from_str(&ended(&mut self.ours.command("a", &["list"]))?)?;
            Ok((!rows[0]["migration"].is_null()).then_some(()))
        })?;
        Ok(Some(child))
    }

    fn end(&mut self, way: Way, copy: Option<std::process::Child>) -> anyhow::Result<()> {
        if way != Way::Ours {
            return self.mirror.end();
        }
        self.ours.forget("db")?;
        copy.context("it was begun")?.wait()?;
        Ok(())
    }

    fn ends(&mut self) -> anyhow::Result<Ends> {
        let mut stalls = Way::ALL.map(|_| Vec::new());
        let mut copies = [Vec::new(), Vec::new()];
        let mut cut_over = Vec::new();
        for _ in 0..self.rounds {
            for (way, stalls) in Way::ALL.into_iter().zip(&mut stalls) {
                stalls.push(self.stall(way)?);
            }
            cut_over.push(self.move_beside_a_tenant()?);
            copies[0].push(self.our_copy()?);
            let begun = Instant::now();
            self.begin(Way::Background, None)?;
            eventually("the mirror", LIMIT, || Ok(self.mirror.is_ready()?.then_some(())))?;
            copies[1].push(begun.elapsed().as_secs_f64());
            self.end(Way::Background, None)?;
        }
        let told = |what: &str, summary: &Summary| {
            println!("{what}: {:.1} (at most {:.1})", summary.median, summary.most);
        };
        let mut ends = Ends {
            stall: Vec::new(),
            copy: Vec::new(),
            cut_over: Summary::of(cut_over),
        };
        for (way, stalls) in Way::ALL.into_iter().zip(stalls) {
            let summary = Summary::of(stalls);
            told(
                &format!(
                    "longest request, the other host is silent for {SILENCE:?}, ms, {}",
                    way.name()
                ),
                &summary,
            );
            ends.stall.push((way.name(), summary));
        }
        for (name, seconds) in ["ours", "mirror"].into_iter().zip(copies) {
            let summary = Summary::of(seconds);
            told(&format!("a copy without a tenant, s, {name}"), &summary);
            ends.copy.push((name, summary));
        }
        told("requests wait at the end of a move, ms, ours", &ends.cut_over);
        Ok(ends)
    }

    /// The longest request in ms.
    fn stall(&mut self, way: Way) -> anyhow::Result<f64> {
        let uri = self.uri(way)?;
        let copy = self.begin(way, Some(BYTES_PER_SECOND))?;
        let fio = fio::command(&uri, TENANT).stdout(Stdio::piped()).spawn()?;
        // Not an event that is awaited: the tenant's run is cut by the silence somewhere in its middle.
        std::thread::sleep(Duration::from_secs(2));
        let other = match way {
            Way::Ours => &self.ours.daemons[1],
            Way::Background | Way::WriteBlocking => &self.mirror.servers[1],
        };
        other.signal(Signal::STOP)?;
        std::thread::sleep(SILENCE);
        other.signal(Signal::CONT)?;
        let run = fio::parse(&String::from_utf8_lossy(&fio.wait_with_output()?.stdout))?;
        self.end(way, copy)?;
        Ok(run.most() / 1000.0)
    }

    /// How long requests waited at its end, in ms.
    fn move_beside_a_tenant(&mut self) -> anyhow::Result<f64> {
        let uri = self.uri(Way::Ours)?;
        let load = Load {
            seconds: 60,
            ..TENANT
        };
        // The end of the move is its end, too: its requests are refused then.
        let mut fio = fio::command(&uri, load)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let moved = ended(&mut self.ours.command("a", &["migrate", "db", "--to", "b"]));
        // It has ended, unless the move has failed.
        let _ = fio.kill();
        fio.wait()?;
        let moved: Value = serde_json::from_str(&moved?)?;
        self.ours.forget("db")?;
        moved["blackout_ms"].as_f64().context("no blackout")
    }

    fn our_copy(&mut self) -> anyhow::Result<f64> {
        self.uri(Way::Ours)?;
        let moved = ended(&mut self.ours.command("a", &["migrate", "db", "--to", "b"]))?;
        self.ours.forget("db")?;
        let moved: Value = serde_json::from_str(&moved)?;
        moved["seconds"].as_f64().context("no time")
    }
}

fn row(way: Way, limit: Option<u64>, runs: Vec<(Run, Run)>) -> anyhow::Result<Row> {
    let of = |get: fn(&(Run, Run)) -> Option<Half>| -> anyhow::Result<Times> {
        let halves: Option<Vec<Half>> = runs.iter().map(get).collect();
        Ok(Times::of(halves.context("fio did both")?.into_iter()))
    };
    let row = Row {
        way,
        bytes_per_second: limit,
        alone: [of(|(alone, _)| alone.reads)?, of(|(alone, _)| alone.writes)?],
        beside: [of(|(_, beside)| beside.reads)?, of(|(_, beside)| beside.writes)?],
        runs,
    };
    let rate = limit.map_or("all".to_owned(), |limit| (limit / 1_000_000).to_string());
    for (what, alone, beside) in [
        ("reads", row.alone[0], row.beside[0]),
        ("writes", row.alone[1], row.beside[1]),
    ] {
        let told = |alone: f64, beside: f64| format!("{alone:.0} {beside:.0} {:.2}", beside / alone);
        println!(
            "{:>24} {rate:>10} {what:>7} {:>26} {:>26} {:>26}",
            way.name(),
            told(alone.mean, beside.mean),
            told(alone.p90, beside.p90),
            told(alone.p99, beside.p99),
        );
    }
    Ok(row)
}

//! What a tenant notices of a copy: reads and writes at depth 4 with and without it, the stall when the other host falls silent, and how
//! long requests wait at the end; with chunks by TLS and by RDMA, and beside the mirror of `qemu-storage-daemon`.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;
use verbatim_e2e::eventually;

use super::ended;
use super::fio::{self, Half, Load, Run};
use super::servers::{LIMIT, Mirror, Ours, Server};
use crate::summary::Summary;

/// As in the paper.
const BYTES_PER_SECOND: u64 = 110_000_000;

const TENANT: Load = Load {
    pattern: "randrw",
    depth: 4,
    seconds: 6,
    processor: None,
};

/// So long a copy without a limit is sure to last.
const SHORT: Load = Load { seconds: 1, ..TENANT };

/// The other host says nothing for this time.
const SILENCE: Duration = Duration::from_secs(2);

/// Who copies, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    Tls,
    Rdma,
    Background,
    WriteBlocking,
}

impl Way {
    const ALL: [Self; 4] = [Self::Tls, Self::Rdma, Self::Background, Self::WriteBlocking];
    /// Those whose copy is timed without a tenant.
    const COPIES: [Self; 3] = [Self::Tls, Self::Rdma, Self::Background];

    fn name(self) -> &'static str {
        match self {
            Self::Tls => "ours, TLS",
            Self::Rdma => "ours, RDMA",
            Self::Background => "mirror, background",
            Self::WriteBlocking => "mirror, write-blocking",
        }
    }

    fn copy_mode(self) -> &'static str {
        match self {
            Self::Tls | Self::Rdma | Self::Background => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }

    fn transport(self) -> Option<&'static str> {
        match self {
            Self::Tls => Some("tls"),
            Self::Rdma => Some("rdma"),
            Self::Background | Self::WriteBlocking => None,
        }
    }
}

/// What goes on beside the tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Stage {
    /// A copy with a limit, of so many bytes a second.
    Limited(u64),
    /// A copy that takes what it gets.
    Unlimited,
    /// Nothing is copied any more: each write goes to both hosts.
    Mirrored,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Limited(BYTES_PER_SECOND), Self::Unlimited, Self::Mirrored];

    fn name(self) -> String {
        match self {
            Self::Limited(limit) => (limit / 1_000_000).to_string(),
            Self::Unlimited => "all".to_owned(),
            Self::Mirrored => "mirrored".to_owned(),
        }
    }

    fn limit(self) -> Option<u64> {
        match self {
            Self::Limited(limit) => Some(limit),
            Self::Unlimited | Self::Mirrored => None,
        }
    }

    fn load(self) -> Load {
        match self {
            Self::Limited(_) | Self::Mirrored => TENANT,
            Self::Unlimited => SHORT,
        }
    }

    /// Changes go by TLS in both of our ways.
    fn ways(self) -> impl Iterator<Item = Way> {
        let has = move |way: &Way| !(self == Self::Mirrored && *way == Way::Rdma);
        Way::ALL.into_iter().filter(has)
    }
}

/// One way at one stage.
#[derive(Debug, Serialize)]
pub struct Row {
    way: Way,
    stage: Stage,
    /// Medians of the rounds.
    alone: [Times; 2],
    beside: [Times; 2],
    /// Bytes a second that were copied beside the tenant.
    copied: Summary,
    runs: Vec<Measured>,
}

/// One run without a copy, and one beside it.
#[derive(Debug, Clone, Copy, Serialize)]
struct Measured {
    alone: Run,
    beside: Run,
    copied_bytes_a_second: f64,
}

/// A copy that is under way.
struct Copying {
    /// The command that waits for our move.
    command: Option<std::process::Child>,
    /// Those that it goes by.
    rnics: Vec<Server>,
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
    /// Seconds of a copy without a tenant, and seconds of processors that both servers and the RNICs have used for it.
    copy: Vec<(&'static str, Summary, Summary)>,
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
            "{:>24} {:>10} {:>10} {:>7} {:>26} {:>26} {:>26}",
            "", "limit", "MB/s", "", "mean", "p90", "p99"
        );
        let mut rows = Vec::new();
        for stage in Stage::ALL {
            let mut runs: Vec<(Way, Vec<Measured>)> = stage.ways().map(|way| (way, Vec::new())).collect();
            for _ in 0..self.rounds {
                for (way, runs) in &mut runs {
                    runs.push(self.tenant(*way, stage)?);
                }
            }
            for (way, runs) in runs {
                rows.push(row(way, stage, runs)?);
            }
        }
        Ok((rows, self.ends()?))
    }

    fn tenant(&mut self, way: Way, stage: Stage) -> anyhow::Result<Measured> {
        let uri = self.uri(way)?;
        let alone = fio::run(&uri, stage.load())?;
        if stage == Stage::Mirrored {
            return self.mirrored(way, &uri, alone);
        }
        let copy = self.begin(way, stage.limit())?;
        let (began, before) = (Instant::now(), self.copied(way)?);
        let beside = fio::run(&uri, stage.load())?;
        let copied = self.copied(way)? - before;
        let copied_bytes_a_second = copied as f64 / began.elapsed().as_secs_f64();
        self.end(way, copy)?;
        Ok(Measured {
            alone,
            beside,
            copied_bytes_a_second,
        })
    }

    /// When the other host has everything, as in a session of the agents that waits with its decision.
    fn mirrored(&mut self, way: Way, uri: &str, alone: Run) -> anyhow::Result<Measured> {
        let is_ours = way.transport().is_some();
        match is_ours {
            true => self.ours.mirror("db")?,
            false => {
                self.mirror.begin(way.copy_mode(), 0)?;
                eventually("the mirror", LIMIT, || Ok(self.mirror.is_ready()?.then_some(())))?;
            }
        }
        let beside = fio::run(uri, TENANT)?;
        match is_ours {
            true => self.ours.forget("db")?,
            false => self.mirror.end()?,
        }
        Ok(Measured {
            alone,
            beside,
            copied_bytes_a_second: 0.0,
        })
    }

    /// Bytes that are copied so far, in the way that is meant.
    fn copied(&mut self, way: Way) -> anyhow::Result<u64> {
        let Some(transport) = way.transport() else {
            return self.mirror.copied();
        };
        let status = self.ours.status("db")?;
        ensure!(
            status["copy"]["transport"] == transport,
            "the copy is not by {transport}: {}",
            status["copy"]
        );
        let copied = status["migration"]["copied_bytes"].as_u64();
        copied.context("the copy has ended before the tenant's run")
    }

    fn uri(&self, way: Way) -> anyhow::Result<String> {
        match way {
            Way::Tls | Way::Rdma => self.ours.volume("db", self.size, self.image),
            Way::Background | Way::WriteBlocking => Ok(self.mirror.uri.clone()),
        }
    }

    fn begin(&mut self, way: Way, limit: Option<u64>) -> anyhow::Result<Copying> {
        let Some(transport) = way.transport() else {
            self.mirror.begin(way.copy_mode(), limit.unwrap_or(0))?;
            return Ok(Copying {
                command: None,
                rnics: Vec::new(),
            });
        };
        let rnics = self.rnics(way)?;
        let mut arguments = vec!["migrate", "db", "--to", "b", "--copy-transport", transport];
        let limit = limit.map(|limit| (limit >> 20).to_string());
        if let Some(limit) = &limit {
            arguments.extend(["--max-bandwidth", limit]);
        }
        let mut command = self.ours.command("a", &arguments);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        eventually("the copy's begin", LIMIT, || {
            let copied = self.ours.status("db")?["migration"]["copied_bytes"].as_u64();
            Ok(copied.filter(|copied| *copied > 0))
        })?;
        Ok(Copying {
            command: Some(child),
            rnics,
        })
    }

    fn rnics(&self, way: Way) -> anyhow::Result<Vec<Server>> {
        match way {
            Way::Rdma => self.ours.rnics(),
            Way::Tls | Way::Background | Way::WriteBlocking => Ok(Vec::new()),
        }
    }

    fn end(&mut self, way: Way, copy: Copying) -> anyhow::Result<()> {
        if way.transport().is_none() {
            return self.mirror.end();
        }
        self.ours.forget("db")?;
        copy.command.context("it was begun")?.wait()?;
        drop(copy.rnics);
        Ok(())
    }

    fn ends(&mut self) -> anyhow::Result<Ends> {
        let mut stalls = Way::ALL.map(|_| Vec::new());
        let mut copies = Way::COPIES.map(|_| Vec::new());
        let mut cut_over = Vec::new();
        for _ in 0..self.rounds {
            for (way, stalls) in Way::ALL.into_iter().zip(&mut stalls) {
                stalls.push(self.stall(way)?);
            }
            cut_over.push(self.move_beside_a_tenant()?);
            for (way, copies) in Way::COPIES.into_iter().zip(&mut copies) {
                copies.push(self.copy(way)?);
            }
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
        for (way, copies) in Way::COPIES.into_iter().zip(copies) {
            let seconds = Summary::of(copies.iter().map(|copy| copy.0));
            let processor = Summary::of(copies.iter().map(|copy| copy.1));
            told(&format!("a copy without a tenant, s, {}", way.name()), &seconds);
            told(
                &format!("processor time of that copy, s, {}", way.name()),
                &processor,
            );
            ends.copy.push((way.name(), seconds, processor));
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
            Way::Tls | Way::Rdma => &self.ours.daemons[1],
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
        let uri = self.uri(Way::Tls)?;
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

    /// How long a copy takes without a tenant, and how long processors work for it, in seconds.
    fn copy(&mut self, way: Way) -> anyhow::Result<(f64, f64)> {
        let Some(transport) = way.transport() else {
            let before = used(&self.mirror.servers)?;
            let begun = Instant::now();
            let copy = self.begin(way, None)?;
            eventually("the mirror", LIMIT, || Ok(self.mirror.is_ready()?.then_some(())))?;
            let seconds = begun.elapsed().as_secs_f64();
            let processor = used(&self.mirror.servers)? - before;
            self.end(way, copy)?;
            return Ok((seconds, processor));
        };
        self.uri(way)?;
        let rnics = self.rnics(way)?;
        let before = used(&self.ours.daemons)? + used(&rnics)?;
        let arguments = ["migrate", "db", "--to", "b", "--copy-transport", transport];
        let moved = ended(&mut self.ours.command("a", &arguments))?;
        let processor = used(&self.ours.daemons)? + used(&rnics)? - before;
        self.ours.forget("db")?;
        let moved: Value = serde_json::from_str(&moved)?;
        ensure!(
            moved["copy"]["transport"] == transport,
            "the copy fell back: {moved}"
        );
        Ok((moved["seconds"].as_f64().context("no time")?, processor))
    }
}

/// Seconds of processors.
fn used(servers: &[Server]) -> anyhow::Result<f64> {
    servers.iter().map(Server::processor_time).sum()
}

fn row(way: Way, stage: Stage, runs: Vec<Measured>) -> anyhow::Result<Row> {
    let of = |get: fn(&Measured) -> Option<Half>| -> anyhow::Result<Times> {
        let halves: Option<Vec<Half>> = runs.iter().map(get).collect();
        Ok(Times::of(halves.context("fio did both")?.into_iter()))
    };
    let row = Row {
        way,
        stage,
        alone: [of(|run| run.alone.reads)?, of(|run| run.alone.writes)?],
        beside: [of(|run| run.beside.reads)?, of(|run| run.beside.writes)?],
        copied: Summary::of(runs.iter().map(|run| run.copied_bytes_a_second)),
        runs,
    };
    let rate = stage.name();
    for (what, alone, beside) in [
        ("reads", row.alone[0], row.beside[0]),
        ("writes", row.alone[1], row.beside[1]),
    ] {
        let told = |alone: f64, beside: f64| format!("{alone:.0} {beside:.0} {:.2}", beside / alone);
        println!(
            "{:>24} {rate:>10} {:>10.0} {what:>7} {:>26} {:>26} {:>26}",
            way.name(),
            row.copied.median / 1e6,
            told(alone.mean, beside.mean),
            told(alone.p90, beside.p90),
            told(alone.p99, beside.p99),
        );
    }
    Ok(row)
}

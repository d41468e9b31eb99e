//! One daemon for all volumes of a host beside a daemon for each, and beside nbdkit with its file plugin (a process for each): memory, threads, what
//! they cost while nobody asks for anything, and the 99th percentile of a tenant alone and beside the others' tenants.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;

use super::ended;
use super::fio::{self, Load};
use super::servers::{Server, until_there};
use crate::summary::Summary;

const SIZE: u64 = 64 << 20;
const COUNTS: [usize; 2] = [1, 50];
/// How long nobody asks for anything.
const IDLE: Duration = Duration::from_secs(10);
/// Of each neighbour, in a second.
const NEIGHBOURS_RATE: u32 = 20;
/// The measured tenant.
const LOAD: Load = Load {
    pattern: "randrw",
    depth: 4,
    seconds: 5,
    processor: None,
};

/// How the volumes are spread over processes.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Arrangement {
    /// All in one daemon of ours.
    One,
    /// Each in a daemon of its own.
    Each,
    /// Each in an nbdkit with its file plugin.
    Nbdkit,
}

impl Arrangement {
    fn name(self) -> &'static str {
        match self {
            Self::One => "one daemon",
            Self::Each => "a daemon for each",
            Self::Nbdkit => "nbdkit for each",
        }
    }
}

/// One number of volumes in one arrangement.
#[derive(Debug, Serialize)]
pub struct Row {
    arrangement: Arrangement,
    volumes: usize,
    processes: usize,
    threads: u64,
    /// Of all processes, in MiB; pages that several have are shared out among them. After the runs.
    memory: f64,
    /// Of all processes while nobody asks for anything, in ms for each second.
    idle: f64,
    /// The 99th percentile of one tenant, in µs: the others ask for nothing.
    alone: Summary,
    /// The same while each of the others asks for a little.
    beside: Summary,
}

/// Measures all by turns, and prints.
pub fn run(verbatim: &Path, folder: &Path, rounds: u32) -> anyhow::Result<Vec<Row>> {
    println!("volumes of {} MiB; medians of {rounds} runs", SIZE >> 20);
    println!(
        "{:>18} {:>8} {:>8} {:>12} {:>12} {:>16} {:>17}",
        "", "volumes", "threads", "memory, MiB", "idle, ms/s", "p99 alone, µs", "p99 beside, µs"
    );
    let mut rows = Vec::new();
    for volumes in COUNTS {
        for arrangement in [Arrangement::One, Arrangement::Each, Arrangement::Nbdkit] {
            let row = measure(arrangement, volumes, verbatim, folder, rounds)?;
            println!(
                "{:>18} {volumes:>8} {:>8} {:>12.1} {:>12.2} {:>16.0} {:>17.0}",
                arrangement.name(),
                row.threads,
                row.memory,
                row.idle,
                row.alone.median,
                row.beside.median,
            );
            rows.push(row);
        }
    }
    Ok(rows)
}

fn measure(
    arrangement: Arrangement,
    volumes: usize,
    verbatim: &Path,
    folder: &Path,
    rounds: u32,
) -> anyhow::Result<Row> {
    let folder = tempfile::tempdir_in(folder)?;
    let folder = folder.path();
    let (servers, uris) = match arrangement {
        Arrangement::One => {
            let daemon = Daemon::start(verbatim, folder, "all")?;
            let uris = (0..volumes).map(|index| daemon.volume(&format!("v{index}")));
            let uris = uris.collect::<anyhow::Result<Vec<_>>>()?;
            (vec![daemon.server], uris)
        }
        Arrangement::Each => each(volumes, |index| {
            let daemon = Daemon::start(verbatim, folder, &format!("d{index}"))?;
            let uri = daemon.volume("v")?;
            Ok((daemon.server, uri))
        })?,
        Arrangement::Nbdkit => each(volumes, |index| nbdkit(folder, index))?,
    };
    let idle = idle(&servers)?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(fio::run(&uris[0], LOAD)?.p99());
        beside.push(fio::parse(&ended(&mut crowd(&uris))?)?.p99());
    }
    let sum =
        |get: fn(&Server) -> anyhow::Result<f64>| -> anyhow::Result<f64> { servers.iter().map(get).sum() };
    Ok(Row {
        arrangement,
        volumes,
        processes: servers.len(),
        threads: sum(|server| number(server, "status", "Threads:"))? as u64,
        memory: sum(|server| number(server, "smaps_rollup", "Pss:"))? / 1024.0,
        idle,
        alone: Summary::of(alone),
        beside: Summary::of(beside),
    })
}

/// A server for each volume, and where its clients find it.
fn each(
    volumes: usize,
    start: impl Fn(usize) -> anyhow::Result<(Server, String)>,
) -> anyhow::Result<(Vec<Server>, Vec<String>)> {
    let started = (0..volumes).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(started.into_iter().unzip())
}

/// A daemon that belongs to no list of hosts.
struct Daemon<'a> {
    server: Server,
    verbatim: &'a Path,
    runtime: PathBuf,
}

impl<'a> Daemon<'a> {
    fn start(verbatim: &'a Path, folder: &Path, name: &str) -> anyhow::Result<Self> {
        let folder = folder.join(name);
        std::fs::create_dir(&folder)?;
        let runtime = folder.join("run");
        let mut command = Command::new(verbatim);
        command
            .args(["volume", "daemon", "--name", "a", "--config-dir"])
            .arg(folder.join("none"))
            .arg("--state-dir")
            .arg(folder.join("state"))
            .arg("--runtime-dir")
            .arg(&runtime);
        let server = Server::start(&mut command, &folder.join("log"))?;
        until_there(&runtime.join("volumes.sock"))?;
        Ok(Self {
            server,
            verbatim,
            runtime,
        })
    }

    /// A new volume that has all its room; its address.
    fn volume(&self, name: &str) -> anyhow::Result<String> {
        let size = SIZE.to_string();
        self.order(&["create", name, "--size", &size, "--preallocate"])?;
        let rows = self.order(&["attach", name])?;
        let rows: serde_json::Value = serde_json::from_str(&rows)?;
        Ok(rows[0]["uri"].as_str().context("it has no address")?.to_owned())
    }

    fn order(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(self.verbatim);
        command.arg("volume").args(arguments).arg("--json");
        ended(command.arg("--runtime-dir").arg(&self.runtime))
    }
}

/// nbdkit on a file of its own that has all its room.
pub fn nbdkit(folder: &Path, index: usize) -> anyhow::Result<(Server, String)> {
    let image = folder.join(format!("{index}.img"));
    ended(
        Command::new("fallocate")
            .args(["-l", &SIZE.to_string()])
            .arg(&image),
    )?;
    nbdkit_on(folder, &image, index)
}

/// nbdkit's file plugin on that file, and where its clients find it.
pub fn nbdkit_on(folder: &Path, image: &Path, index: usize) -> anyhow::Result<(Server, String)> {
    let socket = folder.join(format!("nbdkit-{index}.sock"));
    let mut command = Command::new("nbdkit");
    command
        .args([
            "--foreground",
            "--exit-with-parent",
            "--newstyle",
            "--export-name",
            "db",
            "--unix",
        ])
        .arg(&socket)
        .arg("file")
        .arg(image);
    let server = Server::start(&mut command, &folder.join(format!("nbdkit-{index}.log")))?;
    until_there(&socket)?;
    Ok((server, format!("nbd+unix:///db?socket={}", socket.display())))
}

/// Processor time of servers that nobody asks for anything, in ms for each second.
fn idle(servers: &[Server]) -> anyhow::Result<f64> {
    let used = || -> anyhow::Result<f64> { servers.iter().map(Server::processor_time).sum() };
    let (before, begin) = (used()?, Instant::now());
    // The time itself is measured: there is nothing to wait for.
    std::thread::sleep(IDLE);
    Ok((used()? - before) * 1000.0 / begin.elapsed().as_secs_f64())
}

/// The tenant of [`LOAD`] at the first of them, and one at each other that asks for a little.
fn crowd(uris: &[String]) -> Command {
    let mut command = fio::command(&uris[0], LOAD);
    for (index, uri) in uris.iter().enumerate().skip(1) {
        command
            .args([&format!("--name=neighbour{index}"), "--ioengine=nbd"])
            .arg(format!("--uri={uri}"))
            .args([
                "--rw=randrw",
                "--bs=4k",
                "--iodepth=1",
                "--size=100%",
                "--time_based",
            ])
            .arg(format!("--runtime={}", LOAD.seconds))
            .arg(format!("--rate_iops={NEIGHBOURS_RATE}"));
    }
    command
}

/// A number of a file of /proc.
fn number(server: &Server, file: &str, field: &str) -> anyhow::Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{}/{file}", server.id()))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next());
    let number: f64 = number.context("a process has no such field")?.parse()?;
    ensure!(number > 0.0, "{field} is {number}");
    Ok(number)
}

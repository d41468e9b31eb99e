//! A swap disk on another host's memory beside nbdkit's memory by TCP: how long 4 KiB take one at a time, and how many of them a second come of 32 at
//! once.
//!
//! The client is fio by NBD. All processes sleep until there is something, or one core per end never does ([`Cores`]). nbdkit is asked over a front on this host, as a
//! swap disk is (nbdkit's `nbd` plugin on a Unix socket), and by TCP right from fio, which is one process less on the way than any front.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verbatim_e2e::Tools;

use crate::context::Context;
use crate::disk::ended;
use crate::disk::fio::{self, Load, Run};
use crate::disk::servers::{Server, until_there};
use crate::migrrdma::write;
use crate::summary::Summary;

const SIZE: &str = "512M";
const ADDRESSES: [&str; 2] = ["127.95.0.1", "127.95.0.2"];
/// nbdkit's; on the second address.
const PORT: &str = "10810";

const LOADS: [(&str, u32); 4] = [
    ("randread", 1),
    ("randwrite", 1),
    ("randread", 32),
    ("randwrite", 32),
];

/// How the memory is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// A swap disk without a backup.
    Swap,
    /// One with a backup file.
    SwapFile,
    /// nbdkit behind a front.
    NbdkitFront,
    /// nbdkit by TCP.
    NbdkitTcp,
}

impl Way {
    const ALL: [Self; 4] = [Self::Swap, Self::SwapFile, Self::NbdkitFront, Self::NbdkitTcp];

    fn name(self) -> &'static str {
        match self {
            Self::Swap => "swap disk, no backup",
            Self::SwapFile => "swap disk, backup file",
            Self::NbdkitFront => "nbdkit behind a front",
            Self::NbdkitTcp => "nbdkit by TCP",
        }
    }
}

/// Cores that look for work all the time.
#[derive(Debug, Clone, Copy, Serialize)]
struct Cores {
    /// Of the disk's process and its RNIC, which give it to each other when they find nothing.
    near: usize,
    /// Of the server's RNIC.
    far: usize,
}

impl Cores {
    /// As long as anything can look for work.
    const SPIN: &str = "1000000";

    /// The last two; whoever else is there has the others, if there are some.
    fn last() -> anyhow::Result<Self> {
        let cores = std::thread::available_parallelism()?.get();
        ensure!(
            cores >= 2,
            "one core for each end is needed, and this machine has one"
        );
        Ok(Self {
            near: cores - 2,
            far: cores - 1,
        })
    }
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    polling: Option<Cores>,
    bytes: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    pattern: &'static str,
    depth: u32,
    way: Way,
    /// Of the rounds' means, in µs.
    latency: Summary,
    /// Of the rounds' 99th percentiles, in µs.
    p99: Summary,
    requests_a_second: Summary,
    /// To nbdkit's behind a front.
    latency_ratio: f64,
    requests_a_second_ratio: f64,
    runs: Vec<Run>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, rounds: u32, polls: bool, out: &Path) -> anyhow::Result<()> {
    for program in ["fio", "nbdkit"] {
        let version = Command::new(program).arg("--version").output();
        version.with_context(|| format!("{program} is missing: run ./setup.sh"))?;
    }
    let context = Context::now();
    // Registered memory must be on tmpfs, and a backup file must not.
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let folder = out
        .parent()
        .context("the report is in a folder")?
        .canonicalize()?;
    let folder = tempfile::tempdir_in(folder)?;
    let polling = polls.then(Cores::last).transpose()?;
    let site = Site::start(&tools.verbatim, memory.path(), folder.path(), polling)?;
    let meanwhile = if polls {
        "one core per end polls"
    } else {
        "all sleep meanwhile"
    };
    println!(
        "{SIZE} of another host's memory, 4 KiB through NBD, {meanwhile}; medians of {rounds} runs by turns"
    );
    println!(
        "{:>10} {:>5} {:>24} {:>12} {:>10} {:>10} {:>8} {:>8}",
        "", "depth", "", "latency, µs", "99 %", "a second", "latency", "rate"
    );
    let mut rows = Vec::new();
    for (pattern, depth) in LOADS {
        let load = Load {
            pattern,
            depth,
            seconds: 3,
            processor: None,
        };
        let mut runs = Way::ALL.map(|_| Vec::new());
        for _ in 0..rounds {
            for (way, runs) in Way::ALL.into_iter().zip(&mut runs) {
                runs.push(fio::run(&site.uri(way), load).with_context(|| way.name().to_owned())?);
            }
        }
        rows.extend(compare(pattern, depth, runs));
    }
    let report = Report {
        context,
        polling,
        bytes: SIZE,
        rows,
    };
    write(&report, out)
}

fn compare(pattern: &'static str, depth: u32, runs: [Vec<Run>; 4]) -> Vec<Row> {
    let of = |runs: &[Run], get: fn(&Run) -> f64| Summary::of(runs.iter().map(get));
    let front = &runs[Way::NbdkitFront as usize];
    let (latency, rate) = (of(front, Run::mean).median, of(front, Run::iops).median);
    let rows = Way::ALL.into_iter().zip(&runs).map(|(way, runs)| {
        let row = Row {
            pattern,
            depth,
            way,
            latency: of(runs, Run::mean),
            p99: of(runs, Run::p99),
            requests_a_second: of(runs, Run::iops),
            latency_ratio: of(runs, Run::mean).median / latency,
            requests_a_second_ratio: of(runs, Run::iops).median / rate,
            runs: runs.clone(),
        };
        println!(
            "{pattern:>10} {depth:>5} {:>24} {:>12.1} {:>10.1} {:>10.0} {:>8.2} {:>8.2}",
            way.name(),
            row.latency.median,
            row.p99.median,
            row.requests_a_second.median,
            row.latency_ratio,
            row.requests_a_second_ratio
        );
        row
    });
    rows.collect()
}

/// All servers, each with memory that was written once: what was not is zeros, which nobody sends.
struct Site {
    folder: PathBuf,
    memory: PathBuf,
    _servers: Vec<Server>,
}

impl Site {
    fn start(verbatim: &Path, memory: &Path, folder: &Path, polling: Option<Cores>) -> anyhow::Result<Self> {
        let hosts = folder.join("hosts");
        let names = ["a", "b"].into_iter().zip(ADDRESSES);
        let names = names.map(|(name, address)| format!("{name}={address}"));
        ended(Command::new(verbatim).arg("hosts").arg(&hosts).args(names))?;
        let mut servers = Vec::new();
        let mut start = |host: &str, log: &str, socket: &str, arguments: &[&str], config: bool| {
            let runtime = memory.join(host);
            std::fs::create_dir_all(runtime.join("mem"))?;
            let mut command = match polling.filter(|_| arguments[0] == "swap") {
                None => Command::new(verbatim),
                Some(cores) => {
                    let mut pinned = Command::new("taskset");
                    pinned.args(["--cpu-list", &cores.near.to_string()]).arg(verbatim);
                    pinned.env("VERBATIM_SWAP_SPIN", Cores::SPIN);
                    pinned
                }
            };
            command.args(arguments).arg("--runtime-dir").arg(&runtime);
            if config {
                command.arg("--config-dir").arg(hosts.join(host));
            }
            servers.push(Server::start(&mut command, &folder.join(log))?);
            until_there(&runtime.join(socket))
        };
        for (host, address) in ["a", "b"].into_iter().zip(ADDRESSES) {
            let mut nic = vec!["nic", "--only-address", "--address", address];
            let core = polling.map(|cores| if host == "a" { cores.near } else { cores.far }.to_string());
            if let Some(core) = &core {
                nic.extend(["--spin", Cores::SPIN, "--cpu", core, "--nice", "0"]);
            }
            start(host, &format!("{host}.nic.log"), "nic.sock", &nic, false)?;
        }
        let serve = ["memory", "serve", "--size", "2G", "--name", "b"];
        start("b", "memory.log", "memory.sock", &serve, true)?;
        let backup = format!("file={}", folder.join("backup").display());
        for (name, backup) in [("swap", "none"), ("swap-file", &backup)] {
            let attach = [
                "swap",
                "attach",
                "b",
                SIZE,
                "--foreground",
                "--own-name",
                "a",
                "--name",
                name,
                "--backup",
                backup,
            ];
            start(
                "a",
                &format!("{name}.log"),
                &format!("swap/{name}.control"),
                &attach,
                true,
            )?;
        }
        let mut nbdkit = |arguments: &[&str], socket: Option<&Path>| {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--exit-with-parent"]);
            if let Some(socket) = socket {
                command.arg("--unix").arg(socket);
            }
            servers.push(Server::start(
                command.args(arguments),
                &folder.join("nbdkit.log"),
            )?);
            anyhow::Ok(())
        };
        nbdkit(&["--ipaddr", ADDRESSES[1], "--port", PORT, "memory", SIZE], None)?;
        let socket = memory.join("nbdkit.sock");
        let far = format!("uri=nbd://{}:{PORT}", ADDRESSES[1]);
        nbdkit(&["nbd", &far, "retry=30"], Some(&socket))?;
        until_there(&socket)?;
        let site = Self {
            folder: folder.to_owned(),
            memory: memory.to_owned(),
            _servers: servers,
        };
        for way in [Way::Swap, Way::SwapFile, Way::NbdkitFront] {
            site.fill(way)?;
        }
        Ok(site)
    }

    fn uri(&self, way: Way) -> String {
        let unix = |name: &str, path: &str| {
            format!("nbd+unix:///{name}?socket={}", self.memory.join(path).display())
        };
        match way {
            Way::Swap => unix("swap", "a/swap/swap.sock"),
            Way::SwapFile => unix("swap-file", "a/swap/swap-file.sock"),
            Way::NbdkitFront => unix("", "nbdkit.sock"),
            Way::NbdkitTcp => format!("nbd://{}:{PORT}", ADDRESSES[1]),
        }
    }

    fn fill(&self, way: Way) -> anyhow::Result<()> {
        let mut command = Command::new("fio");
        command
            .args([
                "--name=fill",
                "--ioengine=nbd",
                "--rw=write",
                "--bs=128k",
                "--iodepth=4",
                "--size=100%",
            ])
            .arg(format!("--uri={}", self.uri(way)))
            .current_dir(&self.folder);
        ended(&mut command)
            .with_context(|| way.name().to_owned())
            .map(drop)
    }
}

//! Silent time of a guest that is moved in different ways: `moves --ignored --nocapture how_long`.
//!
//! Both ends are on this machine, pages go over TCP, and the guest writes a part of its memory all the time
//! (`guest/pool.c`).

use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use tempfile::TempDir;
use verbatim_vm::{Machine, Rounds, Run};

use crate::end::{End, Guest};
use crate::filler::{Faults, Server, Wanted, bring, fill};
use crate::post_copy::record;

/// MiB of RAM; of that, MiB that are full; and of those, MiB that are written all the time.
const RAM: &str = "512";
const FULL: u32 = 480;
const POOLS: [u32; 3] = [0, 64, 256];

/// Moves of each kind.
const TIMES: usize = 3;

/// Limit of rounds.
const ROUNDS: usize = 12;

/// A round of fewer bytes is not followed by another one.
const SMALL: u64 = 1 << 20;

/// Byte that ends the listener's thread.
const END: u8 = b'E';

const LIMIT: Duration = Duration::from_secs(60);

/// Listens to the guest's ticks, at each of its places.
struct Listener {
    folder: TempDir,
    pipe: File,
    /// Time and number of the ticks read together.
    heard: Arc<Mutex<Vec<(Instant, usize)>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Listener {
    fn start() -> anyhow::Result<Self> {
        let folder = TempDir::new_in("/dev/shm")?;
        // QEMU reads the first and writes the second.
        for name in ["serial.in", "serial.out"] {
            let path = folder.path().join(name);
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        }
        // Opened for writing, too, so that the pipe does not end with a QEMU.
        let pipe = File::options()
            .read(true)
            .write(true)
            .open(folder.path().join("serial.out"))?;
        let heard: Arc<Mutex<Vec<_>>> = Arc::default();
        let thread = std::thread::spawn({
            let (mut pipe, heard) = (pipe.try_clone()?, Arc::clone(&heard));
            move || {
                let mut bytes = [0; 4096];
                while let Ok(length) = pipe.read(&mut bytes) {
                    let at = Instant::now();
                    if bytes[..length].contains(&END) {
                        return;
                    }
                    heard.lock().expect("no panic").push((at, length));
                }
            }
        });
        Ok(Self {
            folder,
            pipe,
            heard,
            thread: Some(thread),
        })
    }

    fn serial(&self) -> String {
        format!("pipe:{}", self.folder.path().join("serial").display())
    }

    /// Waits for a number of ticks.
    async fn hears(&self, ticks: usize) -> anyhow::Result<()> {
        let (since, begun) = (Instant::now(), Instant::now());
        while self.ticks(since, Instant::now()) < ticks {
            ensure!(begun.elapsed() < LIMIT, "the guest is silent");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    fn ticks(&self, from: Instant, to: Instant) -> usize {
        let heard = self.heard.lock().expect("no panic");
        let within = heard.iter().filter(|(at, _)| (from..to).contains(at));
        within.map(|(_, ticks)| ticks).sum()
    }

    /// The longest time between two ticks.
    fn longest(&self, from: Instant) -> Duration {
        let heard = self.heard.lock().expect("no panic");
        let times: Vec<_> = heard.iter().map(|(at, _)| *at).filter(|at| *at >= from).collect();
        let gaps = times.windows(2).map(|two| two[1] - two[0]);
        gaps.max().unwrap_or_default()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.pipe.write_all(&[END]).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let (Ok(()) | Err(_)) = thread.join();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    PreCopy,
    PostCopy,
    Qemu,
}

/// Times of a move, in ms.
#[derive(Debug, Default, Clone, Copy)]
struct Took {
    silent: f64,
    /// Ticks that the guest missed, from the beginning until its RAM was complete.
    missed: f64,
    /// Time until the guest runs, and until its RAM is complete.
    until_it_runs: f64,
    until_whole: f64,
    missing: u64,
    faults: u64,
}

pub async fn by_pool() -> anyhow::Result<()> {
    println!(
        "pool  way        silent: median (most)   missed    runs after    whole after   missing MiB   faults"
    );
    for pool in POOLS {
        let mut all: Vec<(Way, Took)> = Vec::new();
        for _ in 0..TIMES {
            for way in [Way::PreCopy, Way::PostCopy, Way::Qemu] {
                let took = one(way, pool).await;
                all.push((way, took.with_context(|| format!("{way:?} with {pool} MiB"))?));
            }
        }
        for way in [Way::PreCopy, Way::PostCopy, Way::Qemu] {
            let of = |value: fn(&Took) -> f64| {
                let mut values: Vec<f64> = all
                    .iter()
                    .filter(|(other, _)| *other == way)
                    .map(|(_, took)| value(took))
                    .collect();
                values.sort_by(f64::total_cmp);
                (values[values.len() / 2], values[values.len() - 1])
            };
            println!(
                "{pool:4}  {:9}  {:7.0} ({:.0}) ms        {:7.0}  {:10.0}    {:10.0}   {:10.0}   {:8.0}",
                format!("{way:?}"),
                of(|took| took.silent).0,
                of(|took| took.silent).1,
                of(|took| took.missed).0,
                of(|took| took.until_it_runs).0,
                of(|took| took.until_whole).0,
                of(|took| (took.missing >> 20) as f64).0,
                of(|took| took.faults as f64).0,
            );
        }
    }
    Ok(())
}

async fn one(way: Way, pool: u32) -> anyhow::Result<Took> {
    let listener = Listener::start()?;
    let serial = listener.serial();
    let guest = Guest {
        program: "pool",
        mebibytes: RAM,
        serial: &serial,
    };
    let line = format!("full={FULL} hot={pool} ticks=1");
    let from = End::run_other(&guest, &["-append", &line]).await?;
    let to = End::arriving(&from).await?;
    listener.hears(200).await?;
    let begun = Instant::now();
    let mut took = match way {
        Way::PreCopy => pre_copy(&from, &to).await?,
        Way::PostCopy => post_copy(&from, &to).await?,
        Way::Qemu => qemu(&from, &to).await?,
    };
    let whole = Instant::now();
    listener.hears(100).await?;
    took.silent = milliseconds(listener.longest(begun));
    took.missed = milliseconds(whole - begun) - listener.ticks(begun, whole) as f64;
    Ok(took)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn bytes(runs: &[Run]) -> u64 {
    let of = |run: &Run| match run {
        Run::Data(range) => range.end - range.start,
        Run::Zero(_) => 0,
    };
    runs.iter().map(of).sum()
}

/// Rounds until one brings no less than the one before.
async fn bring_rounds(rounds: &mut Rounds, from: &Machine, to: &Machine) -> anyhow::Result<()> {
    let mut before = u64::MAX;
    for _ in 0..ROUNDS {
        let runs = rounds.round()?;
        let bytes = bytes(&runs);
        bring(&runs, from.ram(), to.ram()).await?;
        if bytes < SMALL || bytes > before / 10 * 9 {
            break;
        }
        before = bytes;
    }
    Ok(())
}

async fn pre_copy(from: &End, to: &End) -> anyhow::Result<Took> {
    let begun = Instant::now();
    let mut rounds = Rounds::begin(from.machine.ram(), from.machine.pid())?;
    bring_rounds(&mut rounds, &from.machine, &to.machine).await?;
    let (mut outgoing, mut state) = from.machine.leave().await?;
    let (mut incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    let runs = rounds.last()?;
    let missing = bytes(&runs);
    bring(&runs, from.machine.ram(), to.machine.ram()).await?;
    outgoing.hand_over().await?;
    incoming.loaded().await?;
    pump.await??;
    incoming.run().await?;
    let runs = milliseconds(begun.elapsed());
    Ok(Took {
        until_it_runs: runs,
        until_whole: runs,
        missing,
        ..Took::default()
    })
}

async fn post_copy(from: &End, to: &End) -> anyhow::Result<Took> {
    let begun = Instant::now();
    let mut rounds = Rounds::begin(from.machine.ram(), from.machine.pid())?;
    bring_rounds(&mut rounds, &from.machine, &to.machine).await?;
    let post_copy = to.machine.post_copy(&record(to)).await?;
    post_copy.lack(&rounds.leave_behind()?)?;
    let (mut outgoing, mut state) = from.machine.leave().await?;
    let (mut incoming, mut sink) = to.machine.arrive().await?;
    let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut sink).await });
    outgoing.stopped().await?;
    let (last, behind) = rounds.leave_last_behind()?;
    post_copy.lack(&last)?;
    post_copy.complete()?;
    let missing = post_copy.left();
    let server = Server::of(behind).await?;
    let faults = Faults::default();
    let mut runs = 0.0;
    let goes_on = async {
        outgoing.hand_over().await?;
        incoming.loaded().await?;
        pump.await??;
        incoming.run().await?;
        runs = milliseconds(begun.elapsed());
        Ok::<_, anyhow::Error>(())
    };
    tokio::try_join!(goes_on, fill(&post_copy, server.port, Wanted::All, &faults))?;
    post_copy.end()?;
    Ok(Took {
        until_it_runs: runs,
        until_whole: milliseconds(begun.elapsed()),
        missing,
        faults: faults.count(),
        ..Took::default()
    })
}

/// QEMU's own migration, over one TCP connection without a limit.
async fn qemu(from: &End, to: &End) -> anyhow::Result<Took> {
    let begun = Instant::now();
    let (source, destination) = (from.machine.qmp(), to.machine.qmp());
    for qmp in [source, destination] {
        let events = json!([{"capability": "events", "state": true}]);
        qmp.run("migrate-set-capabilities", json!({"capabilities": events}))
            .await?;
        qmp.run("migrate-set-parameters", json!({"max-bandwidth": 100u64 << 30}))
            .await?;
    }
    let mut events = destination.events();
    destination
        .run("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}))
        .await?;
    let status: Value = destination.ask("query-migrate", json!({})).await?;
    let port = status["socket-address"][0]["port"]
        .as_str()
        .context("where it listens")?;
    source
        .run("migrate", json!({"uri": format!("tcp:127.0.0.1:{port}")}))
        .await?;
    let completed = async {
        loop {
            let event = events.recv().await?;
            if event.name == "MIGRATION" && event.data["status"] == "completed" {
                return Ok::<_, anyhow::Error>(());
            }
            ensure!(event.data["status"] != "failed", "QEMU's migration has failed");
        }
    };
    tokio::time::timeout(LIMIT, completed).await??;
    to.machine.go_on().await?;
    let runs = milliseconds(begun.elapsed());
    Ok(Took {
        until_it_runs: runs,
        until_whole: runs,
        ..Took::default()
    })
}

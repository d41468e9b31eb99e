//! Both hosts lose power at the same moment, for each moment at which their disk has made a write durable:
//! dm-log-writes has recorded a move, and each prefix of the log is a disk from which the hosts start again.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::disks::{Ground, Mapped, Medium, Mounted, dmsetup, whole};
use crate::hosts::{Hosts, LIMIT, NAMES, VOLUME, read_all, succeed};
use crate::inside::Case;
use crate::replay::{Entry, Log};
use crate::rounds::{BLOCK, Rounds};

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("log::each_flush_of_a_device", device),
    ("log::each_power_failure_of_a_move", moving),
];

/// Limit of power failures of a move that are tried; 0: all.
const CUTS_VARIABLE: &str = "VERBATIM_FAULTY_CUTS";
const CUTS: usize = 30;

const ROUNDS: Rounds = Rounds { blocks: 256, seed: 1 };

/// Size of the disk with both hosts' folders, and of the log.
const DISK: u64 = 40 << 20;
const LOG: u64 = 160 << 20;

/// A disk with a record of all its writes.
struct Recorded {
    // Fields in the order of their drop.
    disk: Mapped,
    below: Medium,
    log: Medium,
}

impl Recorded {
    fn over(below: Medium, ground: &Ground) -> anyhow::Result<Self> {
        let log = Medium::new(ground.path("log"), LOG)?;
        let table = format!(
            "0 {} log-writes {} {}",
            below.sectors()?,
            below.device,
            log.device
        );
        Ok(Self {
            disk: Mapped::new("recorded", &table)?,
            below,
            log,
        })
    }

    fn mark(&self, text: &str) -> anyhow::Result<()> {
        dmsetup(&["message", "recorded", "0", "mark", text]).map(drop)
    }

    /// Ends the record; returns the log.
    fn log(self) -> anyhow::Result<Vec<u8>> {
        let Self { disk, below, log } = self;
        // The device writes the rest of the log when it is removed.
        drop(disk);
        drop(below);
        log.bytes()
    }
}

/// Number of the round in a mark.
fn round(mark: &str) -> Option<u64> {
    mark.strip_prefix("round-")?.parse().ok()
}

/// A volume on a device: after each flush of the disk, the disk has all that was acknowledged by then; at
/// each mark, all of the marked round.
fn device() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let bytes = ROUNDS.blocks * BLOCK as u64;
    let recorded = Recorded::over(Medium::new(ground.path("disk"), bytes)?, &ground)?;
    let hosts = Hosts::up()?;
    let size = bytes.to_string();
    hosts.order(
        0,
        &["create", VOLUME, "--size", &size, "--data", recorded.disk.word()],
    )?;
    hosts.order(0, &["attach", VOLUME])?;
    let mut client = hosts.client(0)?;
    let rounds = 30;
    for round in 1..=rounds {
        ROUNDS.carry_out(&mut client, round)?;
        recorded.mark(&format!("round-{round}"))?;
    }
    drop(hosts);
    let bytes_of_log = recorded.log()?;
    let log = Log::read(&bytes_of_log)?;
    let mut disk = vec![0; bytes as usize];
    let (mut acknowledged, mut cuts) = (0, 0);
    for (number, entry) in log.entries.iter().enumerate() {
        log.apply(entry, &mut disk)?;
        if let Some(round) = entry.mark.as_deref().and_then(round) {
            acknowledged = round;
        }
        if entry.is_cut() || entry.mark.is_some() {
            cuts += 1;
            // The next round may be durable before it is acknowledged; no round after it has begun.
            let checked = ROUNDS.check(&disk, acknowledged, acknowledged + 1);
            checked.with_context(|| format!("after entry {number}, {entry:?}"))?;
        }
    }
    ensure!(acknowledged == rounds, "the log ends after round {acknowledged}");
    eprintln!("{cuts} power failures, {} entries", log.entries.len());
    // Counter-check: a disk without its last write is detected.
    let last = log
        .entries
        .iter()
        .rposition(Entry::has_data)
        .context("nothing was written")?;
    let mut disk = vec![0; bytes as usize];
    for (number, entry) in log.entries.iter().enumerate() {
        if number != last {
            log.apply(entry, &mut disk)?;
        }
    }
    let checked = ROUNDS.check(&disk, acknowledged, acknowledged);
    ensure!(checked.is_err(), "a write was left out, and nobody has seen it");
    Ok(())
}

/// State folders of both hosts on one disk.
fn states(mounted: &Mounted) -> [PathBuf; 2] {
    NAMES.map(|name| mounted.0.join(name))
}

/// Works in rounds, on the host that serves the volume, until `is_over`; each round is marked in the log when
/// it is acknowledged.
fn tenant(hosts: &Hosts, recorded: &Recorded, done: &AtomicU64, is_over: &AtomicBool) -> anyhow::Result<()> {
    let mut client = None;
    let mut round = 1;
    while !is_over.load(Ordering::Relaxed) {
        let connected = match &mut client {
            Some(client) => client,
            none => none.insert(eventually("some host serves", LIMIT, || {
                Ok((0..2).find_map(|host| hosts.try_client(host)))
            })?),
        };
        if ROUNDS.carry_out(connected, round).is_err() {
            // The round is repeated on the host that serves now.
            client = None;
            continue;
        }
        recorded.mark(&format!("round-{round}"))?;
        done.store(round, Ordering::Relaxed);
        round += 1;
    }
    Ok(())
}

/// Records a move; returns the disk from before it, and the log.
fn record(ground: &Ground) -> anyhow::Result<(Vec<u8>, Vec<u8>)> {
    let below = Medium::new(ground.path("disk"), DISK)?;
    succeed(Command::new("mkfs.ext4").args(["-q", &below.device]))?;
    succeed(&mut Command::new("sync"))?;
    let before = below.bytes()?;
    let recorded = Recorded::over(below, ground)?;
    let mounted = Mounted::new(recorded.disk.word(), ground.path("mounted"))?;
    let mut hosts = Hosts::at(states(&mounted))?;
    hosts.start(0)?;
    hosts.start(1)?;
    let size = (ROUNDS.blocks * BLOCK as u64).to_string();
    hosts.order(0, &["create", VOLUME, "--size", &size])?;
    hosts.order(0, &["attach", VOLUME])?;
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let working = scope.spawn(|| tenant(&hosts, &recorded, &done, &is_over));
        let story = || -> anyhow::Result<()> {
            let reaches = |goal: u64| {
                eventually("the tenant works", LIMIT, || {
                    Ok((done.load(Ordering::Relaxed) >= goal).then_some(()))
                })
            };
            reaches(3)?;
            recorded.mark("begins")?;
            hosts.migrate(0, 1, &[])?;
            recorded.mark("moved")?;
            reaches(done.load(Ordering::Relaxed) + 3)
        };
        let told = story();
        is_over.store(true, Ordering::Relaxed);
        working.join().expect("it does not panic").and(told)
    })
    .with_context(|| hosts.logs())?;
    drop((hosts, mounted));
    Ok((before, recorded.log()?))
}

fn moving() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let (mut disk, bytes) = record(&ground)?;
    let log = Log::read(&bytes)?;
    let at = |text: &str| {
        let position = log
            .entries
            .iter()
            .position(|entry| entry.mark.as_deref() == Some(text));
        position.with_context(|| format!("no mark {text}"))
    };
    let (begins, moved) = (at("begins")?, at("moved")?);
    // All cuts within the move, and a few around it; fewer if there are too many.
    let cuts: Vec<usize> = (begins.saturating_sub(8)..log.entries.len().min(moved + 8))
        .filter(|&number| log.entries[number].is_cut())
        .collect();
    let wanted = std::env::var(CUTS_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(CUTS);
    let step = match wanted {
        0 => 1,
        wanted => cuts.len().div_ceil(wanted),
    };
    eprintln!(
        "{} entries, {} flushes in the move, each {step}. is a power failure",
        log.entries.len(),
        cuts.len()
    );
    let chosen: Vec<usize> = cuts.iter().copied().rev().step_by(step).collect();
    let mut known = Known::default();
    let mut outcomes = [0; 2];
    for (number, entry) in log.entries.iter().enumerate() {
        log.apply(entry, &mut disk)?;
        match entry.mark.as_deref() {
            Some("moved") => known.has_moved = true,
            Some(mark) => known.acknowledged = round(mark).unwrap_or(known.acknowledged),
            None => {}
        }
        if chosen.contains(&number) {
            let host = power_fails(&ground, &disk, &known)
                .with_context(|| format!("a power failure after entry {number} of {begins}..{moved}"))?;
            outcomes[host] += 1;
        }
    }
    eprintln!(
        "served at the source after {} power failures, at the destination after {}",
        outcomes[0], outcomes[1]
    );
    ensure!(
        outcomes[0] > 0 && outcomes[1] > 0,
        "all were on the same side of the commit"
    );
    Ok(())
}

/// Acknowledgements from before the power failure.
#[derive(Default)]
struct Known {
    acknowledged: u64,
    has_moved: bool,
}

/// Both hosts start again from the disk: one of them serves in the end, never both, and has all acknowledged
/// rounds.
fn power_fails(ground: &Ground, disk: &[u8], known: &Known) -> anyhow::Result<usize> {
    let file = ground.path("after");
    std::fs::write(&file, disk)?;
    let medium = Medium::of(file)?;
    // A table over the whole medium, so that the loop device itself is not mounted and is detached in any
    // case.
    let mapped = Mapped::new("after", &whole(&medium)?)?;
    let mounted = Mounted::new(mapped.word(), ground.path("mounted"))?;
    let mut hosts = Hosts::at(states(&mounted))?;
    hosts.start(0)?;
    hosts.start(1)?;
    let serving =
        eventually("one host serves", LIMIT, || hosts.one_serves()).with_context(|| hosts.logs())?;
    ensure!(
        !known.has_moved || serving == 1,
        "the commit is forgotten\n{}",
        hosts.logs()
    );
    let data = read_all(&mut hosts.client(serving)?)?;
    let checked = ROUNDS.check(&data, known.acknowledged, known.acknowledged + 1);
    checked.with_context(|| format!("at {}\n{}", NAMES[serving], hosts.logs()))?;
    Ok(serving)
}

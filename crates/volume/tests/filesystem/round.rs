//! One round: a file system on a volume that moves each 20 s, processes that work on it, and tools of other
//! projects.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::disk::Disk;
use crate::follower::Follower;
use crate::mounted::{Kind, Mounted};
use crate::moving;
use crate::operations::OPERATIONS;
use crate::process::{Counts, Process, Task};
use crate::support::{Lab, NAMES};
use crate::tools::{self, Ended, TOOLS};

pub const VOLUME: &str = "fs";
/// Processes that work on files at a time.
const PROCESSES: u64 = 2;

/// A volume with a mounted file system, and a client that follows it from host to host.
pub struct Site {
    pub mounted: Option<Mounted>,
    pub disk: Disk,
    pub follower: Arc<Follower>,
    pub lab: Lab,
    pub kind: Kind,
}

impl Drop for Site {
    fn drop(&mut self) {
        if self.mounted.is_some() {
            // It has failed: nobody waits for a volume that may not come back.
            self.follower.go();
        }
    }
}

impl Site {
    pub fn new(kind: Kind, options: &str) -> Self {
        let length = match kind {
            Kind::Ext4 => 256 << 20,
            Kind::Xfs => 400 << 20,
        };
        let lab = Lab::new();
        lab.volume(VOLUME, &length.to_string());
        let follower = Arc::new(Follower::new([0, 1].map(|host| lab.socket(host, VOLUME))));
        let disk = Disk::new(follower.clone(), length, lab.path(2, "volume"));
        kind.make(&disk.device);
        let mounted = Mounted::new(kind, &disk.device, lab.path(2, "mounted"), options);
        Self {
            mounted: Some(mounted),
            disk,
            follower,
            lab,
            kind,
        }
    }

    pub fn folder(&self) -> &Path {
        &self.mounted.as_ref().expect("it is mounted").path
    }

    /// Unmounts the file system, checks it for errors, and mounts it again.
    pub fn check(&mut self) {
        self.mounted.take().expect("it is mounted").unmount();
        self.kind.check(&self.disk.device);
        let path = self.lab.path(2, "mounted");
        self.mounted = Some(Mounted::new(self.kind, &self.disk.device, path, "noatime"));
    }

    /// Unmounts the file system, and moves the volume for the last time: both hosts have the same data.
    pub fn end(mut self, host: usize) {
        self.mounted.take().expect("it is mounted").unmount();
        self.kind.check(&self.disk.device);
        self.lab
            .order(host, &["migrate", VOLUME, "--to", NAMES[1 - host]]);
        let data = |host| self.lab.path(host, "state").join(VOLUME).join("data");
        if let Some(offset) = first_difference(&data(0), &data(1)) {
            panic!("the copies differ at {offset}\n{}", self.lab.logs());
        }
        let troubles = self.follower.troubles();
        assert!(
            troubles.is_empty(),
            "the device has failed: {troubles:#?}\n{}",
            self.lab.logs()
        );
    }
}

/// The first offset at which two files differ.
fn first_difference(one: &Path, other: &Path) -> Option<u64> {
    let open = |path| File::open(path).expect("it is there");
    let (mut files, mut at) = ([open(one), open(other)], 0);
    loop {
        let [first, second] = files.each_mut().map(|file| {
            let mut part = Vec::new();
            file.take(1 << 20).read_to_end(&mut part).expect("it can be read");
            part
        });
        if first != second {
            let same = first.iter().zip(&second).take_while(|(one, other)| one == other);
            return Some(at + same.count() as u64);
        }
        if first.is_empty() {
            return None;
        }
        at += first.len() as u64;
    }
}

/// Runs a file system of this kind, for this long.
pub fn run(kind: Kind, seed: u64, time: Duration) {
    let mut random = StdRng::seed_from_u64(seed);
    let options = if random.random() {
        "noatime"
    } else {
        "noatime,discard"
    };
    let mut site = Site::new(kind, options);
    let interval = Duration::from_secs(20).min(time / 5);
    let notes = |number: u64| site.lab.path(2, &format!("notes-{number}"));
    let mut processes: Vec<Process> = (0..PROCESSES)
        .map(|number| {
            Process::start(&Task::Operate {
                folder: site.folder().join(format!("process-{number}")),
                is_xfs: kind == Kind::Xfs,
                seed: seed.wrapping_mul(100).wrapping_add(number),
                notes: notes(number),
            })
        })
        .collect();
    let (end, is_over) = (Instant::now() + time, AtomicBool::new(false));
    let mut ran = BTreeMap::new();
    let (moves, host) = std::thread::scope(|scope| {
        let moving = scope.spawn(|| moving::to_and_fro(&site.lab, VOLUME, interval, &is_over));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let folder = site.folder().join("tools");
            let mut next = random.random_range(0..TOOLS.len());
            while Instant::now() < end {
                assert!(
                    !processes.iter_mut().any(Process::has_ended),
                    "a process has ended by itself (above)"
                );
                assert!(!moving.is_finished(), "the moves have ended by themselves");
                std::fs::create_dir_all(&folder).expect("a folder");
                let began = Instant::now();
                let ended = tools::run(next, &folder, seed.wrapping_add(ran.len() as u64));
                std::fs::remove_dir_all(&folder).expect("what a tool has left can be deleted");
                eprintln!("  {}: {ended:?}, {:.1?}", TOOLS[next].0, began.elapsed());
                let count: &mut u64 = ran.entry(TOOLS[next].0).or_default();
                *count += u64::from(ended == Ended::Well);
                next = (next + 1) % TOOLS.len();
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        let moved = moving.join().expect("no panic");
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        moved
    });
    let mut counts = Counts::new();
    for process in processes {
        let lines = process.stop();
        let line = lines.last().expect("counts");
        for (name, (done, other)) in serde_json::from_str::<Counts>(line).expect("counts") {
            let count = counts.entry(name).or_default();
            *count = (count.0 + done, count.1 + other);
        }
    }
    site.check();
    for number in 0..PROCESSES {
        let notes = site.lab.path(2, &format!("notes-{number}"));
        Process::start(&Task::Verify { notes }).stop();
    }
    let done: u64 = counts.values().map(|(done, _)| done).sum();
    let without: Vec<_> = OPERATIONS
        .iter()
        .filter(|(name, _)| !counts.contains_key(*name))
        .collect();
    let not_here: Vec<_> = counts
        .iter()
        .filter(|(_, (done, _))| *done == 0)
        .map(|(name, _)| name)
        .collect();
    eprintln!(
        "{}, seed {seed}: {done} operations of {} kinds, {moves} moves, {} requests, {} connections\n  \
         not on this file system: {not_here:?}\n  tools (0: not installed): {ran:?}",
        kind.name(),
        counts.len() - not_here.len(),
        site.follower.done.load(Ordering::Relaxed),
        site.follower.connections.load(Ordering::Relaxed),
    );
    assert!(moves > 0, "it has never moved");
    assert!(
        time < Duration::from_secs(60) || without.is_empty(),
        "never tried: {:?}",
        names(&without)
    );
    site.end(host);
}

fn names(operations: &[&(&'static str, crate::operations::Operation)]) -> Vec<&'static str> {
    operations.iter().map(|(name, _)| *name).collect()
}

//! Power fails at any moment of a move: the journal of the file system on the volume recovers, and all
//! durable data are whole.
//!
//! Each host has its state folder on a disk with a write cache (`volatile.rs`): when power fails there,
//! unflushed writes of the daemon are lost, including those of its sidecars. The machine with the file system
//! is a third one. It loses its device and its memory at the same moment.

use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use verbatim_volume::faults::{POINTS, Point};

use crate::disk::Disk;
use crate::follower::Follower;
use crate::mounted::{Kind, Mounted};
use crate::process::{Process, Task};
use crate::promises::{self, Promises};
use crate::support::{Lab, NAMES, PATIENCE, until};
use crate::volatile::Volatile;

const VOLUME: &str = "fs";
/// Bytes of the host's disk beside the volume.
const ROOM: u64 = 160 << 20;
const LENGTH_EXT4: u64 = 96 << 20;
/// The smallest file system that XFS makes.
const LENGTH_XFS: u64 = 320 << 20;

/// A host's disk, and the file system with its state folder.
struct Host {
    mounted: Option<Mounted>,
    disk: Option<Disk>,
    volatile: Arc<Volatile>,
    file: PathBuf,
    length: u64,
}

impl Host {
    fn new(lab: &Lab, host: usize, length: u64) -> Self {
        let file = lab.path(host, "disk");
        std::fs::File::create(&file)
            .and_then(|file| file.set_len(length))
            .expect("a disk");
        let mut host_disk = Self {
            mounted: None,
            disk: None,
            volatile: Arc::new(Volatile::new(&file, 0)),
            file,
            length,
        };
        host_disk.power_on(lab, host, 0, true);
        host_disk
    }

    /// Starts the host's disk with its stable content.
    fn power_on(&mut self, lab: &Lab, host: usize, seed: u64, is_new: bool) {
        self.volatile = Arc::new(Volatile::new(&self.file, seed));
        let disk = Disk::new(self.volatile.clone(), self.length, lab.path(host, "disk-of-fuse"));
        if is_new {
            Kind::Ext4.make(&disk.device);
        }
        self.mounted = Some(Mounted::new(
            Kind::Ext4,
            &disk.device,
            lab.path(host, "state"),
            "noatime",
        ));
        self.disk = Some(disk);
        // Folders in the state folder are taken for volumes.
        let _ = std::fs::remove_dir(lab.path(host, "state/lost+found"));
    }

    /// Takes the host's disk away.
    fn take_away(&mut self) {
        // A proper unmount writes everything; this one must not.
        self.volatile.fail();
        self.volatile.end();
        drop(self.mounted.take());
        drop(self.disk.take());
    }
}

/// The hosts, and the file system on the volume.
struct World {
    hosts: [Host; 2],
    lab: Lab,
    kind: Kind,
    length: u64,
    random: StdRng,
    promises: Promises,
}

impl Drop for World {
    fn drop(&mut self) {
        for (host, disk) in self.hosts.iter_mut().enumerate() {
            self.lab.kill(host);
            disk.take_away();
        }
    }
}

/// Power fails again and again until the time is over.
pub fn run(kind: Kind, seed: u64, time: Duration) {
    let length = match kind {
        Kind::Ext4 => LENGTH_EXT4,
        Kind::Xfs => LENGTH_XFS,
    };
    let mut lab = Lab::without_daemons();
    let hosts = [0, 1].map(|host| Host::new(&lab, host, length + ROOM));
    lab.start(0, None);
    lab.start(1, None);
    lab.volume(VOLUME, &length.to_string());
    let mut world = World {
        hosts,
        lab,
        kind,
        length,
        random: StdRng::seed_from_u64(seed),
        promises: Promises::new(),
    };
    let end = Instant::now() + time;
    let (mut generation, mut serving) = (0, 0);
    while generation < 1 || Instant::now() < end {
        generation += 1;
        serving = world.lose_power(serving, generation);
    }
    let count = world.promises.len();
    assert!(count > 0, "nothing was promised");
    eprintln!(
        "{}, seed {seed}: power failed {generation} times, {count} names were promised",
        kind.name()
    );
}

impl World {
    /// The file system works, the volume moves, and power fails. Returns the host that serves afterwards.
    fn lose_power(&mut self, serving: usize, generation: u64) -> usize {
        let began = Instant::now();
        let sockets = [0, 1].map(|host| self.lab.socket(host, VOLUME));
        let follower = Arc::new(Follower::new(sockets));
        let disk = Disk::new(follower.clone(), self.length, self.lab.path(2, "volume"));
        if generation == 1 {
            self.kind.make(&disk.device);
        }
        let place = self.lab.path(2, "mounted");
        let mounted = Mounted::new(self.kind, &disk.device, place, "noatime");
        if generation > 1 {
            self.check(&mounted);
        }
        let seed = self.random.random();
        let promising = Process::start(&Task::Promise {
            folder: mounted.path.clone(),
            generation,
            seed,
        });
        let done = follower.done.load(std::sync::atomic::Ordering::Relaxed);
        until("the file system works", || {
            follower.done.load(std::sync::atomic::Ordering::Relaxed) > done + 100
        });
        // At a point that a daemon passes, or at any other moment.
        let point = self
            .random
            .random_bool(0.6)
            .then(|| POINTS[self.random.random_range(0..POINTS.len())]);
        let mut moving = match point {
            Some(point) => self.move_until(serving, point),
            None => {
                let moving = self.migrate(serving);
                std::thread::sleep(Duration::from_millis(self.random.random_range(0..1500)));
                moving
            }
        };
        let victims = match (point, self.random.random_range(0..3)) {
            (None, 0) => vec![serving],
            (None, 1) => vec![1 - serving],
            (Some(point), 0 | 1) => vec![victim(point, serving)],
            _ => vec![0, 1],
        };
        // All at the same moment.
        follower.go();
        victims.iter().for_each(|&host| self.hosts[host].volatile.fail());
        for &host in &victims {
            if !self.lab.has_ended(host) {
                self.lab.signal(host, Signal::KILL);
            }
            // The daemon's threads that wait for the disk never get the answer.
            self.hosts[host].volatile.end();
            self.lab.kill(host);
        }
        let lines = promising.kill();
        promises::note(&mut self.promises, &lines);
        drop(mounted);
        drop(disk);
        for &host in &victims {
            self.hosts[host].take_away();
            let seed = self.random.random();
            self.hosts[host].power_on(&self.lab, host, seed, false);
        }
        // A daemon that ended at a point had no power failure if it was not chosen.
        for host in 0..2 {
            if victims.contains(&host) {
                self.lab.start(host, None);
            } else if self.lab.has_ended(host) {
                self.lab.kill(host);
                self.lab.start(host, None);
            }
        }
        // A destination that has come back may get everything once more.
        let end = Instant::now() + 4 * PATIENCE;
        while moving.try_wait().expect("ours").is_none() {
            assert!(Instant::now() < end, "the order never ends\n{}", self.lab.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        let how = format!("{point:?}, power failed at {victims:?} of a move from {serving}");
        let serving = self.settled(&how);
        eprintln!("  {how}: served at {serving}, {:.1?}", began.elapsed());
        serving
    }

    fn migrate(&self, serving: usize) -> Child {
        let mut order = self
            .lab
            .command(serving, &["migrate", VOLUME, "--to", NAMES[1 - serving]]);
        order
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null());
        order.spawn().expect("it runs")
    }

    /// Begins a move, and waits for the daemon to end at this point.
    fn move_until(&mut self, serving: usize, point: Point) -> Child {
        let victim = victim(point, serving);
        self.lab.kill(victim);
        self.lab.start(victim, Some(&format!("{point:?}")));
        until("it is served again", || {
            self.lab.role(serving, VOLUME) == "serving"
        });
        let moving = self.migrate(serving);
        // All of the volume is copied before most points.
        let end = Instant::now() + 4 * PATIENCE;
        while !self.lab.has_ended(victim) {
            assert!(
                Instant::now() < end,
                "the daemon never ends at {point:?}\n{}",
                self.lab.logs()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        moving
    }

    fn settled(&self, how: &str) -> usize {
        let end = Instant::now() + PATIENCE;
        loop {
            let roles = [self.lab.role(0, VOLUME), self.lab.role(1, VOLUME)];
            let serving: Vec<_> = (0..2).filter(|&host| roles[host] == "serving").collect();
            assert!(serving.len() < 2, "two copies serve: {how}\n{}", self.lab.logs());
            if serving.len() == 1 && !roles.contains(&"deciding".to_owned()) {
                return serving[0];
            }
            assert!(
                Instant::now() < end,
                "{how}: roles {roles:?}\n{}",
                self.lab.logs()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The journal has been recovered. The file system has no errors, and all durable data are whole.
    fn check(&mut self, mounted: &Mounted) {
        let notes = self.lab.path(2, "promises");
        std::fs::write(&notes, serde_json::to_vec(&self.promises).expect("JSON")).expect("written");
        let folder = mounted.path.clone();
        Process::start(&Task::Keep {
            folder,
            promises: notes,
        })
        .stop();
        let gone = |promise: &promises::Promise| !matches!(promise, promises::Promise::Has { .. });
        // A name that was about to go may be there again, and means nothing from now on.
        self.promises.retain(|_, promise| !gone(promise));
    }
}

/// The host that passes a point.
fn victim(point: Point, serving: usize) -> usize {
    match point {
        Point::Prepared | Point::Written | Point::Question | Point::Committing | Point::Committed => {
            1 - serving
        }
        _ => serving,
    }
}

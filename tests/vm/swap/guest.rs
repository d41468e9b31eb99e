//! A guest whose swap disk is another host's memory. Its own memory is enough for its kernel and a part of the programs; what happens to the servers
//! meanwhile, no page may notice.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::ensure;
use rustix::process::Signal;
use verbatim_testbed::{Network, VmConfig};

use crate::lab::{Lab, end, signal};
use crate::machine::{Load, Machine, Watch};

/// Of the guest; some 100 of it are its kernel's and the test bed's.
const MEMORY: u32 = 256;
const SERVED: &str = "768M";
const DISK: &str = "512M";
/// A disk is used when so many requests were answered.
const USED: u64 = 2000;

/// A name, and what is done under it.
pub type Test = (&'static str, fn() -> anyhow::Result<()>);

/// All of them.
pub const ALL: &[Test] = &[
    ("guest::uses_twice_its_memory", twice),
    ("guest::server_is_killed_file", killed_file),
    ("guest::server_is_killed_mirror", killed_mirror),
    ("guest::server_hangs", hangs),
    ("guest::rnic_of_the_server_hangs", rnic_hangs),
    ("guest::server_leaves", leaves),
];

/// Programs with 1.3 times the guest's memory.
const LOAD: Load = Load {
    programs: 2,
    mib: 330,
    seconds: 60,
};

/// Three hosts and a guest of the first.
struct Site {
    // In the order in which they go.
    machine: Machine,
    lab: Lab,
    _network: Network,
}

impl Site {
    fn up(cpus: u32, more: &[&str]) -> anyhow::Result<Self> {
        let mut lab = Lab::new();
        lab.start_server(1, SERVED);
        if more.iter().any(|option| option.starts_with("mirror")) {
            lab.start_server(2, SERVED);
        }
        let socket = lab.attach(DISK, more);
        let config = VmConfig {
            memory_mib: MEMORY,
            cpus,
            drives: vec![uri(&socket)],
            ..VmConfig::new(format!("swap-{}", std::process::id()))
        };
        let network = Network::new()?;
        let machine = Machine::boot(&config, &network)?;
        machine.shell("modprobe virtio_blk")?;
        machine.swap_on(&PathBuf::from("/dev/vda"))?;
        Ok(Self {
            machine,
            lab,
            _network: network,
        })
    }

    /// The load, with trouble once the disk is used; and no request has failed.
    fn run(
        mut self,
        load: Load,
        trouble: impl FnOnce(&mut Lab, &Watch<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let lab = &mut self.lab;
        let swapped = self.machine.load(load, |watch| {
            watch.until("the disk is used", || {
                Ok(answered(lab, "writes") > USED && answered(lab, "reads") > USED)
            })?;
            let began = Instant::now();
            trouble(lab, watch)?;
            eprintln!("the trouble took {:.1} s", began.elapsed().as_secs_f64());
            Ok(())
        })?;
        let pages = u64::from(load.mib - MEMORY) * 256;
        ensure!(
            swapped.out > pages && swapped.back > pages,
            "hardly anything was swapped: {swapped:?}"
        );
        let status = self.lab.status();
        ensure!(
            status["requests"]["failed"] == 0 && status["lost_bytes"] == 0,
            "{status}"
        );
        eprintln!("{}", status["requests"]);
        Ok(())
    }
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///disk?socket={}", socket.display())
}

fn answered(lab: &Lab, what: &str) -> u64 {
    lab.status()["requests"][what].as_u64().unwrap_or(0)
}

fn twice() -> anyhow::Result<()> {
    let load = Load {
        programs: 3,
        mib: 2 * MEMORY - 32,
        seconds: 60,
    };
    Site::up(1, &[])?.run(load, |_, _| Ok(()))
}

/// For as long as one likes, with nothing but the load.
pub fn storm(cpus: u32, seconds: u32) -> anyhow::Result<()> {
    let load = Load {
        programs: 4,
        mib: 2 * MEMORY - 32,
        seconds,
    };
    Site::up(cpus, &[])?.run(load, |_, _| Ok(()))
}

/// Killed and started again, twice; then filled again beside the requests.
fn killed(more: &[&str]) -> anyhow::Result<()> {
    Site::up(1, more)?.run(LOAD, |lab, watch| {
        for _ in 0..2 {
            end(&mut lab.servers[1]);
            watch.until("it is noticed", || Ok(lab.state(0) == "down"))?;
            watch.go_on(2000)?;
            lab.start_server(1, SERVED);
            watch.until("it is back", || Ok(lab.state(0) == "up"))?;
            watch.go_on(2000)?;
        }
        Ok(())
    })
}

fn killed_file() -> anyhow::Result<()> {
    killed(&[])
}

fn killed_mirror() -> anyhow::Result<()> {
    killed(&["--backup", "mirror=c"])
}

/// Its process is not on the way of a page.
fn hangs() -> anyhow::Result<()> {
    Site::up(1, &["--backup", "none"])?.run(LOAD, |lab, watch| {
        signal(lab.servers[1].as_ref().expect("it runs"), Signal::STOP);
        watch.go_on(4000)?;
        let state = lab.state(0);
        signal(lab.servers[1].as_ref().expect("it runs"), Signal::CONT);
        ensure!(state == "up", "the server is {state}");
        Ok(())
    })
}

/// Given up after the deadline, and back.
fn rnic_hangs() -> anyhow::Result<()> {
    Site::up(1, &["--deadline", "500"])?.run(LOAD, |lab, watch| {
        for _ in 0..2 {
            signal(lab.nics[1].as_ref().expect("it runs"), Signal::STOP);
            watch.until("it is given up", || Ok(lab.state(0) == "down"))?;
            watch.go_on(2000)?;
            signal(lab.nics[1].as_ref().expect("it runs"), Signal::CONT);
            watch.until("it is back", || Ok(lab.state(0) == "up"))?;
            watch.go_on(2000)?;
        }
        Ok(())
    })
}

/// What it alone has is in the file before it ends.
fn leaves() -> anyhow::Result<()> {
    Site::up(1, &[])?.run(LOAD, |lab, watch| {
        signal(lab.servers[1].as_ref().expect("it runs"), Signal::TERM);
        let mut server = lab.servers[1].take().expect("it runs");
        let mut status = None;
        watch.until("it has left", || {
            status = server.try_wait()?;
            Ok(status.is_some())
        })?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "it has left with {status:?}"
        );
        ensure!(lab.state(0) == "down", "it is still there");
        watch.go_on(4000)
    })
}

//! The machine in which programs swap, and what it swaps to.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use tempfile::TempDir;
use verbatim_testbed::{Command, Ended, Network, VmConfig};

use crate::built::Built;
use crate::lab::Lab;
use crate::machine::Machine;

/// What the machine has beside what the larger program needs: its kernel's and the test bed's, in MiB.
const BESIDE: u32 = 256;
/// How far from what is wanted may be what is left, in MiB.
const NEAR: u64 = 2;
/// How often memory is taken away, or given back, until that is so.
const TRIES: u32 = 20;
/// Of a page in KiB, and of a huge one in MiB.
const PAGE_KIB: u64 = 4;
const HUGE: u64 = 2;

/// The kernel swaps so much out if it finds it (`memory.reclaim` of cgroup v2).
const IDLE: &str = "64M";
const RECLAIM: &str = "/sys/fs/cgroup/memory.reclaim";

const FILES: &str = "/mnt";

/// Where what has no room goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// There is room.
    Memory,
    /// A swap disk on another host's memory, by the software RNIC.
    Remote,
    /// A file on the host's disk, past its page cache.
    Disk,
    /// The same memory, compressed.
    Zram,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Remote, Self::Disk, Self::Zram];
    /// Those that files can be on.
    pub const DISKS: [Self; 3] = [Self::Remote, Self::Disk, Self::Zram];

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "enough memory",
            Self::Remote => "swap on another host's memory",
            Self::Disk => "swap on a local disk",
            Self::Zram => "zram",
        }
    }

    fn device(self) -> &'static str {
        match self {
            Self::Memory => "",
            Self::Remote => "/dev/vda",
            Self::Disk => "/dev/vdb",
            Self::Zram => "/dev/zram0",
        }
    }
}

/// Two hosts, and a machine on the first.
pub struct Site {
    // In the order in which they go.
    machine: Machine,
    built: Built,
    disk_mib: u32,
    _lab: Lab,
    _network: Network,
    _folder: TempDir,
}

/// What swaps until it is switched off.
pub struct Swap<'a> {
    site: &'a Site,
    way: Way,
}

impl Site {
    /// For programs of so many MiB.
    pub fn up(largest: u32) -> anyhow::Result<Self> {
        let built = Built::of(&["sort", "fft"])?;
        // A file system has room for twice what is left of the memory.
        let disk_mib = largest * 5 / 2;
        let mut lab = Lab::new();
        lab.start_server(1, &format!("{}M", disk_mib + 64));
        let socket = lab.attach(&format!("{disk_mib}M"), &["--backup", "none"]);
        let folder = TempDir::new_in("/var/tmp")?;
        let file = folder.path().join("disk");
        File::create(&file)?.set_len(u64::from(disk_mib) << 20)?;
        // Its blocks are there, as on a disk.
        write_all(&file, disk_mib)?;
        let config = VmConfig {
            memory_mib: largest + BESIDE,
            cpus: 1,
            drives: vec![
                format!("nbd+unix:///disk?socket={}", socket.display()),
                file.display().to_string(),
            ],
            ..VmConfig::new(format!("programs-{}", std::process::id()))
        };
        let network = Network::new()?;
        let machine = Machine::boot(&config, &network)?;
        machine.shell("modprobe virtio_blk; modprobe zram num_devices=1")?;
        Ok(Self {
            machine,
            built,
            disk_mib,
            _lab: lab,
            _network: network,
            _folder: folder,
        })
    }

    /// The path of a program, in the machine.
    pub fn program(&self, name: &str) -> String {
        self.built.path(name).display().to_string()
    }

    /// It swaps so, and so much is left for programs; with [`Way::Memory`] all.
    pub fn swap(&self, way: Way, memory_mib: u32) -> anyhow::Result<Swap<'_>> {
        self.machine.shell("dmesg --clear")?;
        if way != Way::Memory {
            self.make(way)?;
            self.machine.swap_on(Path::new(way.device()))?;
            self.press()?;
            self.take_away(memory_mib.into())?;
        }
        Ok(Swap { site: self, way })
    }

    /// What lies idle is swapped out: else it would be while a program runs, and leave its room to that one. The kernel says that it cannot when it
    /// has found as much as there is.
    fn press(&self) -> anyhow::Result<()> {
        self.machine
            .shell(&format!(
                "for time in 1 2 3; do echo {IDLE} >{RECLAIM} 2>/dev/null || true; done"
            ))
            .map(drop)
    }

    fn make(&self, way: Way) -> anyhow::Result<()> {
        let size = self.disk_mib;
        match way {
            Way::Zram => self
                .machine
                .shell(&format!("echo {size}M >/sys/block/zram0/disksize"))
                .map(drop),
            Way::Memory | Way::Remote | Way::Disk => Ok(()),
        }
    }

    /// Huge pages, which nobody uses and nothing swaps, until so much is left.
    fn take_away(&self, memory_mib: u64) -> anyhow::Result<()> {
        self.machine.shell("echo 1 >/proc/sys/vm/compact_memory")?;
        for _ in 0..TRIES {
            let free = self.free_mib()?;
            if free.abs_diff(memory_mib) <= NEAR {
                return Ok(());
            }
            let taken: u64 = self
                .machine
                .shell("cat /proc/sys/vm/nr_hugepages")?
                .trim()
                .parse()?;
            let wanted = (taken + free / HUGE).saturating_sub(memory_mib / HUGE);
            self.machine
                .shell(&format!("echo {wanted} >/proc/sys/vm/nr_hugepages"))?;
        }
        let free = self.free_mib()?;
        ensure!(
            free.abs_diff(memory_mib) <= NEAR,
            "the machine has {free} MiB for programs, and not {memory_mib}"
        );
        Ok(())
    }

    /// What there is for programs: all that is free when the page cache is empty. It has the kernel's reserve in it, of which programs get a part; what
    /// `MemAvailable` leaves out they could have as well. `MemFree` leaves out what the kernel has at hand for each processor, some 20 MiB here.
    pub fn free_mib(&self) -> anyhow::Result<u64> {
        let text = self
            .machine
            .shell("sync; echo 3 >/proc/sys/vm/drop_caches; cat /proc/meminfo /proc/zoneinfo")?;
        let number = |line: &str| line.split_whitespace().next()?.parse::<u64>().ok();
        let free = text.lines().find_map(|line| line.strip_prefix("MemFree:"));
        let free = free.and_then(number).context("no MemFree")?;
        let at_hand = text.lines().filter_map(|line| line.trim().strip_prefix("count:"));
        let at_hand: u64 = at_hand.filter_map(number).sum();
        Ok((free + at_hand * PAGE_KIB) >> 10)
    }

    pub fn run(&self, argv: &[String], limit: Duration) -> anyhow::Result<Ended> {
        self.machine.run(&Command::new(argv), limit)
    }

    /// Whether the kernel has killed somebody since [`Self::swap`].
    pub fn has_run_out(&self) -> anyhow::Result<bool> {
        Ok(self.machine.shell("dmesg")?.contains("Out of memory"))
    }

    pub fn console(&self) -> String {
        self.machine.console()
    }

    /// What bonnie++ says of a file system on that disk, with a file of twice the memory.
    pub fn bonnie(&self, way: Way, memory_mib: u32) -> anyhow::Result<String> {
        self.make(way)?;
        self.take_away(memory_mib.into())?;
        let device = way.device();
        self.machine
            .shell(&format!("mkfs.ext4 -q {device} && mount {device} {FILES}"))?;
        let size = memory_mib * 2;
        let script = format!("bonnie++ -d {FILES} -s {size} -r {memory_mib} -n 0 -f -q -u root -m verbatim");
        let argv = ["sh", "-c", &script].map(str::to_owned);
        let ended = self.run(&argv, super::LIMIT)?;
        ensure!(
            ended.code == 0,
            "bonnie++ ends with {}: {}",
            ended.code,
            String::from_utf8_lossy(&ended.stderr)
        );
        self.machine.shell(&format!("umount {FILES}"))?;
        self.clear(way)?;
        Ok(String::from_utf8(ended.stdout)?)
    }

    fn clear(&self, way: Way) -> anyhow::Result<()> {
        self.machine.shell("echo 0 >/proc/sys/vm/nr_hugepages")?;
        if way == Way::Zram {
            self.machine.shell("echo 1 >/sys/block/zram0/reset")?;
        }
        Ok(())
    }

    pub fn processor(&self) -> anyhow::Result<String> {
        let text = self.machine.shell("cat /proc/cpuinfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("model name"));
        Ok(line
            .context("no processor")?
            .trim_start_matches([':', '\t', ' '])
            .to_owned())
    }

    pub fn kernel(&self) -> anyhow::Result<String> {
        Ok(self.machine.shell("uname -r")?.trim().to_owned())
    }
}

impl Swap<'_> {
    /// All is back in memory.
    pub fn off(self) -> anyhow::Result<()> {
        let machine = &self.site.machine;
        // What was taken away first: what comes back needs room.
        machine.shell("echo 0 >/proc/sys/vm/nr_hugepages")?;
        if self.way != Way::Memory {
            machine.shell(&format!("swapoff {}", self.way.device()))?;
        }
        self.site.clear(self.way)
    }
}

fn write_all(file: &Path, mib: u32) -> anyhow::Result<()> {
    use std::io::Write;
    let mut file = File::options().write(true).open(file)?;
    for _ in 0..mib {
        file.write_all(&[1; 1 << 20])?;
    }
    Ok(file.sync_all()?)
}

//! A guest that works on its memory and on the file system of a disk, and compares what it reads with what it wrote, moved while moves fail now and then.
//!
//! The disk is a file that both hosts reach, read and written directly (`cache=none`), so that data go to the guest's memory past its page tables; or it
//! is a volume, and moves along.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Finished, Instance, ROLLED_BACK, TestLab, Tools, eventually};
use verbatim_testbed::{Contents, Image, Kernel};

use crate::{LIMIT, NAME, boot, moves, program};

const HOSTS: &[&str] = &["src", "dst"];
const ADDRESS: &str = "10.77.1.51/16";
/// Between two moves: the guest is to have work done.
const BETWEEN: Duration = Duration::from_secs(1);
/// What a move takes of the time for which the guest works, at most; a failed one before it included.
const EACH: u32 = 12;
const DISK: u64 = 96 << 20;
const VOLUME: &str = "data";

/// What the guest runs, beside its first process.
const PROGRAMS: &[&str] = &[
    "mount",
    "umount",
    "insmod",
    "stress-ng",
    "e2fsck",
    "sleep",
    "mkdir",
];
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];

/// One of them strikes before every third move: the host whose agent takes the order, as seen from the move, and what.
const FAULTS: &[(End, &str)] = &[
    (End::Source, "source-pre-copy fail"),
    (End::Source, "source-transfer fail"),
    (End::Destination, "destination-restore fail"),
    (End::Source, "source-freeze fail"),
    (End::Destination, "destination-prepare-restore fail"),
];

#[derive(Debug, Clone, Copy)]
enum End {
    Source,
    Destination,
}

/// Not one word is another than was written, and the file system is whole.
pub fn run(is_volume: bool) -> anyhow::Result<()> {
    let moves = moves()?;
    let tools = Tools::find()?.that_fail_on_order();
    let image = image()?;
    let lab = TestLab::up_with(&tools, HOSTS, &[], is_volume.then_some("tls"), None)?;
    let disk = match is_volume {
        true => Disk::volume(&lab)?,
        false => Disk::file()?,
    };
    let moved = work_and_move(&lab, &image, &disk, moves).with_context(|| lab.logs());
    lab.down()?;
    moved
}

fn image() -> anyhow::Result<Image> {
    let mut programs = vec![("sh", program("dash")?)];
    for name in PROGRAMS {
        programs.push((*name, program(name)?));
    }
    let contents = Contents {
        init: include_bytes!("load.sh"),
        programs: &programs,
        files: &[],
        modules: MODULES,
    };
    Ok(Image::holding(&Kernel::find()?, &contents)?)
}

/// The guest's disk, with a new file system.
enum Disk {
    File {
        path: PathBuf,
        /// The file is in it.
        _folder: tempfile::TempDir,
    },
    Volume,
}

impl Disk {
    fn file() -> anyhow::Result<Self> {
        let folder = tempfile::TempDir::new_in("/var/tmp")?;
        let path = folder.path().join("disk");
        std::fs::File::create(&path)?.set_len(DISK)?;
        let made = std::process::Command::new(program("mkfs.ext4")?)
            .args(["-q", "-F"])
            .arg(&path)
            .status();
        ensure!(made?.success(), "mkfs.ext4 has failed");
        Ok(Self::File {
            path,
            _folder: folder,
        })
    }

    fn volume(lab: &TestLab) -> anyhow::Result<Self> {
        volume(lab, "src", &["create", VOLUME, "--size", &DISK.to_string()])?;
        let device = volume(lab, "src", &["attach", VOLUME, "--device"])?.stdout;
        lab.start_plain("src", &["mkfs.ext4", "-q", device.trim()])?
            .succeed(LIMIT)?;
        volume(lab, "src", &["detach", VOLUME])?;
        Ok(Self::Volume)
    }

    /// Makes it larger under the guest's work, where that can be; returns when the guest's kernel knows.
    fn grow(&self, lab: &TestLab, host: &str, guest: &Instance, times: u64) -> anyhow::Result<()> {
        if let Self::File { .. } = self {
            return Ok(());
        }
        let bytes = DISK * times;
        let verbatim = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
        let size = bytes.to_string();
        let words = [verbatim, "volume", "resize", VOLUME, "--size", &size];
        eventually("a volume that is idle for a moment, and grows", LIMIT, || {
            Ok((lab.start_plain(host, &words)?.wait(LIMIT)?.code == 0).then_some(()))
        })?;
        let told = format!("the disk has {} sectors", bytes / 512);
        eventually(&told, LIMIT, || Ok(guest.output()?.contains(&told).then_some(())))
            .with_context(|| guest.output().unwrap_or_default())
    }

    /// Whether the file system is whole, as the host sees it that the guest was on.
    fn check(&self, lab: &TestLab, host: &str) -> anyhow::Result<()> {
        match self {
            Self::File { path, .. } => {
                let checked = std::process::Command::new(program("e2fsck")?)
                    .args(["-f", "-n"])
                    .arg(path)
                    .output()?;
                let said = String::from_utf8_lossy(&checked.stdout);
                ensure!(checked.status.success(), "{said}");
            }
            Self::Volume => {
                let device = volume(lab, host, &["attach", VOLUME, "--device"])?.stdout;
                let check = lab.start_plain(host, &["e2fsck", "-f", "-n", device.trim()])?;
                check.succeed(LIMIT)?;
                volume(lab, host, &["detach", VOLUME])?;
            }
        }
        Ok(())
    }
}

/// `verbatim volume …` on a host.
fn volume(lab: &TestLab, host: &str, arguments: &[&str]) -> anyhow::Result<Finished> {
    let verbatim = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
    lab.start_plain(host, &[&[verbatim, "volume"], arguments].concat())?
        .succeed(LIMIT)
}

fn work_and_move(lab: &TestLab, image: &Image, disk: &Disk, moves: u32) -> anyhow::Result<()> {
    let append = format!("seconds={} loglevel=7", moves * EACH);
    let guest = match disk {
        Disk::File { path, .. } => {
            let drive = format!(
                "file={},format=raw,if=virtio,cache=none,aio=threads",
                path.display()
            );
            boot(lab, image, &["--address", ADDRESS], &append, &["-drive", &drive])?
        }
        Disk::Volume => {
            let options = ["--address", ADDRESS, "--volume", VOLUME];
            boot(lab, image, &options, &append, &[])?
        }
    };
    let (mut here, mut there, mut failed) = ("src", "dst", 0);
    disk.grow(lab, here, &guest, 2)?;
    for number in 0..moves {
        std::thread::sleep(BETWEEN);
        if number % 3 == 2 {
            let (end, fault) = FAULTS[(number / 3) as usize % FAULTS.len()];
            let host = match end {
                End::Source => here,
                End::Destination => there,
            };
            lab.order_faults(host, &format!("{fault}\n"))?;
            let migration = guest.migrate(there)?;
            lab.order_faults(host, "")?;
            ensure!(migration.outcome == ROLLED_BACK, "{fault}: {migration:?}");
            failed += 1;
        }
        let migration = guest.moves(there)?;
        eprintln!(
            "{number}: {NAME} to {there}, {:.1} ms of {:.0}",
            migration.service_blackout_ms, migration.total_ms
        );
        (here, there) = (there, here);
        let said = guest.output()?;
        ensure!(
            !said.contains("the load has ended"),
            "the guest worked for too short a time for this machine:\n{said}"
        );
    }
    eprintln!("{moves} moves, and {failed} that failed");
    disk.grow(lab, here, &guest, 3)?;
    let limit = LIMIT + Duration::from_secs((moves * EACH).into());
    eventually("the guest's own check", limit, || {
        Ok(guest
            .output()?
            .contains("the file system is checked")
            .then_some(()))
    })
    .with_context(|| guest.output().unwrap_or_default())?;
    let said = guest.output()?;
    for wanted in ["the load has ended with 0", "the file system is checked with 0"] {
        ensure!(said.contains(wanted), "{said}");
    }
    ensure!(!said.contains("target is busy"), "{said}");
    eprintln!("{said}");
    lab.ask(&["stop", NAME])?;
    disk.check(lab, here)
}

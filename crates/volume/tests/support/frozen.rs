//! A disk that can be made to hang: a file system on a loop device, which is frozen (fsfreeze(8)). Its
//! writers then wait, and cannot be killed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::find;

/// The disk. It is thawed and unmounted on drop.
pub struct Disk {
    folder: tempfile::TempDir,
    is_frozen: bool,
}

/// Runs a program; an error is in its words.
fn run(program: &str, args: &[&Path]) -> Result<(), String> {
    let output = Command::new(program).args(args).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

impl Disk {
    /// A disk with this many MiB; `None`, with a message, if that is impossible.
    pub fn new(mib: u64) -> Option<Self> {
        let needed = ["mkfs.ext4", "fsfreeze", "mount"];
        let lack = needed.into_iter().find(|program| find(program).is_none());
        let is_root = rustix::process::geteuid().is_root();
        if !is_root || lack.is_some() || !Path::new("/dev/loop-control").exists() {
            eprintln!(
                "skipped: not root, no loop devices, or no {}",
                lack.unwrap_or("rights")
            );
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let (image, mounted) = (folder.path().join("image"), folder.path().join("mounted"));
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(mib << 20).expect("it has room");
        std::fs::create_dir(&mounted).expect("a folder");
        run("mkfs.ext4", &[Path::new("-q"), &image]).expect("a file system");
        let mount = [Path::new("-o"), Path::new("loop"), &image, &mounted];
        run("mount", &mount).expect("it can be mounted");
        Some(Self {
            folder,
            is_frozen: false,
        })
    }

    fn mounted(&self) -> PathBuf {
        self.folder.path().join("mounted")
    }

    /// A file on the disk.
    pub fn file(&self, name: &str) -> String {
        self.mounted().join(name).to_str().expect("text").to_owned()
    }

    /// Makes writers wait from now on.
    pub fn hang(&mut self) {
        run("fsfreeze", &[Path::new("-f"), &self.mounted()]).expect("it is frozen");
        self.is_frozen = true;
    }

    /// Lets writers go on.
    pub fn go_on(&mut self) {
        if std::mem::take(&mut self.is_frozen) {
            run("fsfreeze", &[Path::new("-u"), &self.mounted()]).expect("it is thawed");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_frozen {
            let (Ok(()) | Err(_)) = run("fsfreeze", &[Path::new("-u"), &self.mounted()]);
        }
        // A daemon with a file on the disk may end later.
        let (Ok(()) | Err(_)) = run("umount", &[Path::new("-l"), &self.mounted()]);
    }
}

//! Whether two hosts reach the same storage: a file that one makes there the other one sees.
//!
//! Disks that a virtual machine's command line names do not move, as its volumes do. Where the destination has a file of its own at the same path, the guest would go on with
//! other data, and nobody would notice before it is too late. Of block devices [`devices`] tells it, of disks that others serve [`servers`].

pub mod devices;
pub mod images;
pub mod servers;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use verbatim_container::Workload;
use verbatim_vm::File as MachineFile;

use super::record::Record;

/// How the name of each begins: nobody learns what other files there are.
const PREFIX: &str = ".verbatim-";

/// Files that were made beside the disks, as long as this lives.
#[derive(Debug, Default)]
pub struct Witnesses {
    /// Beside files that it writes to; the destination must see them.
    made: Vec<PathBuf>,
    /// Beside files that it only reads, of which the destination may have an identical copy on other storage.
    beside_images: Vec<PathBuf>,
    /// Reasons why none could be made beside a disk.
    untried: Vec<String>,
}

impl Witnesses {
    /// Makes one in each folder that has a file that a virtual machine may write to, or one of its `files`
    /// that it only reads. If none can be made beside a disk that it writes to, the move is refused
    /// ([`Self::untried`]).
    pub fn make(record: &Record, files: &[MachineFile]) -> Self {
        let (Some(_), Workload::Command { binds, .. }) = (&record.machine, &record.workload) else {
            return Self::default();
        };
        let is_read = |path: &Path| files.iter().any(|file| file.read_only && file.path == path);
        let written = binds
            .iter()
            .filter(|bind| bind.writable && bind.path.is_file() && !is_read(&bind.path));
        let folders = |paths: Vec<&Path>| {
            let mut folders: Vec<_> = paths
                .into_iter()
                .filter_map(Path::parent)
                .map(Path::to_owned)
                .collect();
            folders.sort_unstable();
            folders.dedup();
            folders
        };
        let mut witnesses = Self::default();
        for folder in folders(written.map(|bind| bind.path.as_path()).collect()) {
            let has_disk = files
                .iter()
                .any(|file| !file.read_only && file.path.parent() == Some(&folder));
            match Self::beside(&folder) {
                Ok(path) => witnesses.made.push(path),
                Err(error) if has_disk => witnesses.untried.push(format!(
                    "the destination's access to the disks in {} cannot be tested: no file can be made beside them ({error})",
                    folder.display()
                )),
                Err(_) => {}
            }
        }
        let read = files.iter().filter(|file| file.read_only && file.path.is_file());
        for folder in folders(read.map(|file| file.path.as_path()).collect()) {
            if witnesses.of_image(&folder.join("image")).is_empty()
                && let Ok(path) = Self::beside(&folder)
            {
                witnesses.beside_images.push(path);
            }
        }
        witnesses
    }

    fn beside(folder: &Path) -> io::Result<PathBuf> {
        let path = folder.join(format!("{PREFIX}{:016x}", rand::random::<u64>()));
        File::create_new(&path).map(|_| path)
    }

    /// Paths of those that the destination must see.
    pub fn paths(&self) -> Vec<String> {
        let paths = self.made.iter().filter_map(|path| path.to_str());
        paths.map(str::to_owned).collect()
    }

    /// Reasons why the instance cannot leave.
    pub fn untried(&self) -> &[String] {
        &self.untried
    }

    /// Path of the one beside a file, or an empty string.
    pub fn of_image(&self, image: &Path) -> String {
        let mut all = self.made.iter().chain(&self.beside_images);
        let beside = all.find(|path| path.parent() == image.parent());
        beside
            .and_then(|path| path.to_str())
            .unwrap_or_default()
            .to_owned()
    }
}

impl Drop for Witnesses {
    fn drop(&mut self) {
        for path in self.made.iter().chain(&self.beside_images) {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "a file that was made for a moment is left behind");
            }
        }
    }
}

/// Why this host cannot take an instance whose source has made these. Nothing is opened that could wait, or do something when it is opened.
pub fn unseen(witnesses: &[String]) -> Vec<String> {
    let unseen = witnesses.iter().filter(|path| !is_seen(path));
    let words = unseen.map(|path| {
        let folder = Path::new(path).parent().unwrap_or(Path::new("/"));
        format!(
            "{} there is not the same storage as on the source: a file that was made in it a moment ago is not seen; \
             disks must be where both hosts reach them",
            folder.display()
        )
    });
    words.collect()
}

/// Whether a witness is there.
fn is_seen(path: &str) -> bool {
    let name = Path::new(path).file_name().and_then(OsStr::to_str);
    let is_witness = name.is_some_and(|name| name.starts_with(PREFIX));
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    is_witness && rustix::fs::open(path, flags, Mode::empty()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_is_seen_where_it_was_made_and_gone_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, "").unwrap();
        let record = serde_json::json!({
            "name": "vm",
            "workload": {"Command": {"args": [], "env": [], "cwd": "/", "binds": [
                {"path": disk, "writable": true}, {"path": "/usr/share", "writable": false}]}},
            "address": "10.77.1.5",
            "prefix": 16,
            "machine": verbatim_vm::Arguments::parse(&["qemu"]).unwrap(),
        });
        let mut record: Record = serde_json::from_value(record).unwrap();
        let witnesses = Witnesses::make(&record, &[]);
        let paths = witnesses.paths();
        assert_eq!(paths.len(), 1, "{paths:?}");
        assert!(unseen(&paths).is_empty());
        assert_eq!(
            unseen(&["/etc/passwd".to_owned()]).len(),
            1,
            "what is there is told to nobody"
        );
        drop(witnesses);
        assert!(unseen(&paths)[0].contains("not the same storage"), "{paths:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        record.machine = None;
        assert!(Witnesses::make(&record, &[]).paths().is_empty());
    }
}

//! Whether two hosts reach the same storage: a file that one makes there the other one sees.
//!
//! Disks that a virtual machine's command line names do not move, as its volumes do. Where the destination has a file of its own at the same path, the guest would go on with
//! other data, and nobody would notice before it is too late. Of block devices [`devices`] tells it.

pub mod devices;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use verbatim_container::Workload;

use super::record::Record;

/// How the name of each begins: nobody learns what other files there are.
const PREFIX: &str = ".verbatim-";

/// Files that were made beside the disks, as long as this lives.
#[derive(Debug, Default)]
pub struct Witnesses(Vec<PathBuf>);

impl Witnesses {
    /// Makes one beside each file that a virtual machine may write to, once in each folder. Where none can be made (a file system that is
    /// read-only) nothing is known, and none is made.
    pub fn make(record: &Record) -> Self {
        let (Some(_), Workload::Command { binds, .. }) = (&record.machine, &record.workload) else {
            return Self::default();
        };
        let written = binds.iter().filter(|bind| bind.writable && bind.path.is_file());
        let mut folders: Vec<&Path> = written.filter_map(|bind| bind.path.parent()).collect();
        folders.sort_unstable();
        folders.dedup();
        let mut made = Self::default();
        for folder in folders {
            let path = folder.join(format!("{PREFIX}{:016x}", rand::random::<u64>()));
            match File::create_new(&path) {
                Ok(_) => made.0.push(path),
                Err(error) => tracing::debug!(
                    path = %path.display(),
                    %error,
                    "whether the destination reaches this storage is not tried"
                ),
            }
        }
        made
    }

    /// Where they are.
    pub fn paths(&self) -> Vec<String> {
        let paths = self.0.iter().filter_map(|path| path.to_str());
        paths.map(str::to_owned).collect()
    }
}

impl Drop for Witnesses {
    fn drop(&mut self) {
        for path in &self.0 {
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
    let is_seen = |path: &&String| {
        let name = Path::new(path).file_name().and_then(OsStr::to_str);
        let is_witness = name.is_some_and(|name| name.starts_with(PREFIX));
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        is_witness && rustix::fs::open(path.as_str(), flags, Mode::empty()).is_ok()
    };
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
        let witnesses = Witnesses::make(&record);
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
        assert!(Witnesses::make(&record).paths().is_empty());
    }
}

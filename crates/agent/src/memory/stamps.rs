//! When files were read and written: given to them once nobody touches them any more.
//!
//! Whatever is placed changes the times of a folder, and CRIU binds sockets again and maps files. So times are kept until the tasks
//! are restored, and do not run yet.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::tree::Times;
use crate::beneath;
use crate::proto::Stamp;
use crate::quotas;

/// Of files below one folder.
#[derive(Debug, Default)]
pub struct Stamps {
    all: Vec<(PathBuf, Times)>,
    bytes: usize,
}

impl Stamps {
    /// Keeps the times of the file at `path`, which is plain.
    pub fn keep(&mut self, path: &Path, stamp: &Stamp) -> io::Result<()> {
        let times = Times::told(stamp);
        let times = times.ok_or_else(|| invalid("a time has more nanoseconds than a second has"))?;
        self.bytes += path.as_os_str().len();
        if self.all.len() >= quotas::STAMPS || self.bytes > quotas::STAMP_BYTES {
            return Err(invalid("there are more files than times are kept of"));
        }
        self.all.push((path.to_owned(), times));
        Ok(())
    }

    /// Gives all of them to the files below `root`, and forgets them. What is no more there needs none.
    pub fn give(&mut self, root: &Path) -> io::Result<()> {
        self.bytes = 0;
        let all = std::mem::take(&mut self.all);
        if all.is_empty() {
            return Ok(());
        }
        let root = beneath::folder(root)?;
        // Neighbours are in one folder.
        let mut last: Option<(&Path, Option<OwnedFd>)> = None;
        for (path, times) in &all {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                continue;
            };
            if last.as_ref().is_none_or(|(folder, _)| *folder != parent) {
                last = Some((parent, open(&root, parent)?));
            }
            let Some((_, Some(folder))) = &last else { continue };
            match rustix::fs::utimensat(folder, name, &times.stamps(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn open(root: &OwnedFd, folder: &Path) -> io::Result<Option<OwnedFd>> {
    let within = match folder == Path::new("") {
        true => Path::new("."),
        false => folder,
    };
    match beneath::open_any(root, within, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()) {
        Ok(folder) => Ok(Some(folder)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

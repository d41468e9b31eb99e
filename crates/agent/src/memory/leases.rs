//! Leases that programs have on files (`F_SETLEASE`, `man 2 fcntl`).
//!
//! Whoever opens a file that another process has leased for writing breaks the lease, also with `O_NONBLOCK`: its holder is told, and
//! loses it. So such a file is read by the holder's own descriptor, once nobody runs, and not opened at all.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::makedev;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::tree::Inode;

/// Leases that an opening for reading breaks, or that are broken already.
#[derive(Debug, Default)]
pub struct Leases(HashMap<Inode, Holder>);

/// Who has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Its process.
    pub pid: i32,
}

impl Leases {
    /// All of this machine, as far as their processes can be seen.
    pub fn look() -> io::Result<Self> {
        Ok(Self::parse(&fs::read_to_string("/proc/locks")?))
    }

    fn parse(locks: &str) -> Self {
        Self(locks.lines().filter_map(lease).collect())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who has one on that file.
    pub fn holder(&self, inode: Inode) -> Option<Holder> {
        self.0.get(&inode).copied()
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (Inode, Holder)> {
        self.0.iter().map(|(inode, holder)| (*inode, *holder))
    }
}

/// `NUMBER: LEASE ACTIVE|BREAKING READ|WRITE|UNLCK PID MAJOR:MINOR:INODE 0 EOF` of proc_locks(5).
fn lease(line: &str) -> Option<(Inode, Holder)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "LEASE" {
        return None;
    }
    let (state, kind) = (words.next()?, words.next()?);
    if state != "BREAKING" && kind != "WRITE" {
        return None;
    }
    let pid = words.next()?.parse().ok()?;
    let mut file = words.next()?.split(':');
    let (major, minor) = (hexadecimal(file.next()?)?, hexadecimal(file.next()?)?);
    let inode = Inode {
        device: makedev(major, minor),
        number: file.next()?.parse().ok()?,
    };
    Some((inode, Holder { pid }))
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

impl Holder {
    /// The file, by a descriptor of the holder's: nothing is opened. Whoever reads by it is noted as the file's reader.
    pub fn open(&self, inode: Inode) -> io::Result<File> {
        match self.descriptor(inode)? {
            Some(number) => {
                let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
                let process = pidfd_open(pid, PidfdFlags::empty())?;
                let file = pidfd_getfd(process, number, PidfdGetfdFlags::empty())?;
                let metadata = rustix::fs::fstat(&file)?;
                if Inode::of(&metadata) != inode {
                    return Err(io::Error::other("has a lease, and is another file by now"));
                }
                Ok(File::from(file))
            }
            None => Err(io::Error::other(format!(
                "has a lease for writing (F_SETLEASE) of process {}, which cannot read it",
                self.pid
            ))),
        }
    }

    /// The number of a descriptor by which the holder can read that file.
    fn descriptor(&self, inode: Inode) -> io::Result<Option<i32>> {
        let folder = self.folder();
        let can_read = |number: &i32| {
            let info = fs::read_to_string(folder.join("fdinfo").join(number.to_string()));
            can_be_read(&info.unwrap_or_default())
        };
        Ok(self.descriptors(inode)?.into_iter().find(can_read))
    }

    /// The numbers of the holder's descriptors of that file.
    fn descriptors(&self, inode: Inode) -> io::Result<Vec<i32>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.folder().join("fd"))? {
            let entry = entry?;
            // By the link: nothing is opened.
            let is_it = fs::metadata(entry.path())
                .is_ok_and(|found| found.dev() == inode.device && found.ino() == inode.number);
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.parse::<i32>().ok());
            found.extend(number.filter(|_| is_it));
        }
        Ok(found)
    }

    fn folder(&self) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string())
    }
}

/// Whether a proc_pid_fdinfo(5) is of a descriptor by which a file can be read.
fn can_be_read(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_WRONLY)
}

/// From this length on CRIU opens a file that a task has open, to see whether it is a library (`criu/files-reg.c`,
/// `store_validation_data_build_id`). It would break the lease, and wait until the kernel takes it away, 45 s with the tasks
/// frozen.
const LOOKED_INTO_BYTES: u64 = 5;

/// Leases of a process, and of all that descend from it, that would be broken, or on files of that file system that cannot be read; in
/// words for an operator.
pub fn problems(root: i32, carried: Option<u64>) -> io::Result<Vec<String>> {
    let leases = Leases::look()?;
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let processes = super::private::processes(root);
    let mut found = Vec::new();
    for (inode, holder) in leases.all() {
        if !processes.contains(&holder.pid.cast_unsigned()) {
            continue;
        }
        // One that ends meanwhile has no lease.
        let Some(number) = holder.descriptors(inode).unwrap_or_default().first().copied() else {
            continue;
        };
        let link = holder.folder().join("fd").join(number.to_string());
        let (Ok(path), Ok(metadata)) = (fs::read_link(&link), fs::metadata(&link)) else {
            continue;
        };
        let is_unread = carried == Some(inode.device) && matches!(holder.descriptor(inode), Ok(None));
        if metadata.len() >= LOOKED_INTO_BYTES || is_unread {
            found.push(format!(
                "process {} has a lease for writing (F_SETLEASE) on {}, which whoever writes it down would break: end the lease first",
                holder.pid,
                path.display()
            ));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn leases_that_an_opening_breaks_are_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 812 08:01:131098 0 EOF\n\
            2: LEASE  ACTIVE    WRITE 4711 00:2f:9 0 EOF\n\
            3: LEASE  ACTIVE    READ 4712 00:2f:10 0 EOF\n\
            4: LEASE  BREAKING  READ 4713 00:2f:11 0 EOF\n\
            4: -> LEASE  BREAKER   READ 99 00:2f:11 0 EOF\n\
            5: LEASE\n6: LEASE ACTIVE WRITE x 00:2f:9 0 EOF\n";
        let leases = Leases::parse(locks);
        let on = |number| {
            let inode = Inode {
                device: makedev(0, 0x2f),
                number,
            };
            leases.holder(inode).map(|holder| holder.pid)
        };
        assert_eq!([9, 10, 11, 12].map(on), [Some(4711), None, Some(4713), None]);
        assert_eq!(leases.all().count(), 2);
        assert!(!leases.is_empty() && Leases::parse("").is_empty());
    }

    #[test]
    fn a_leased_file_is_read_and_the_lease_stays() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("f");
        fs::write(&path, "content").unwrap();
        let own = File::open(&path).unwrap();
        let lease = |kind: libc::c_int| {
            // SAFETY: the descriptor is open, and the call takes a number.
            unsafe { libc::fcntl(own.as_raw_fd(), libc::F_SETLEASE, kind) }
        };
        assert_eq!(lease(libc::F_WRLCK), 0);
        let inode = Inode::of(&rustix::fs::fstat(&own).unwrap());
        let holder = Leases::look().unwrap().holder(inode).unwrap();
        let mut text = String::new();
        holder.open(inode).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        let own_pid = std::process::id().cast_signed();
        let found = problems(own_pid, None).unwrap();
        let named = |problem: &&String| problem.contains(path.to_str().unwrap());
        assert_eq!(found.iter().filter(named).count(), 1, "{found:?}");
        // SAFETY: as above.
        let held = unsafe { libc::fcntl(own.as_raw_fd(), libc::F_GETLEASE) };
        assert_eq!(held, libc::F_WRLCK);
        assert_eq!(lease(libc::F_UNLCK), 0);
        assert!(Leases::look().unwrap().holder(inode).is_none());
        assert!(can_be_read("pos:\t0\nflags:\t0100002\n"));
        assert!(!can_be_read("flags:\t0100001\n") && !can_be_read("flags:\t010000000\n") && !can_be_read(""));
    }
}

//! Which paths a process keeps (landlock(7)).
//!
//! What is open stays open. Whoever is in such a domain changes no mounts, and traces no process outside of it.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::thread::set_no_new_privs;

/// System calls of `linux/landlock.h`; they have the same numbers on all machines.
const CREATE_RULESET: libc::c_long = 444;
const ADD_RULE: libc::c_long = 445;
const RESTRICT_SELF: libc::c_long = 446;

const CREATE_RULESET_VERSION: libc::c_ulong = 1;
const RULE_PATH_BENEATH: libc::c_ulong = 1;

// LANDLOCK_ACCESS_FS_*
const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// Removing and making what lies in folders, of every kind.
const CHANGE_FOLDER: u64 = 0x1ff0;
/// Linking and renaming from one folder into another: version 2.
const REFER: u64 = 1 << 13;
/// Version 3.
const TRUNCATE: u64 = 1 << 14;
/// Orders to devices: version 5.
const IOCTL_DEVICE: u64 = 1 << 15;

/// Rights that a file can have; others are folders'.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE;

/// What may be done with a file, or with all that lies below a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading files and folders.
    Read,
    /// The same, and executing files.
    Execute,
    /// The same as reading, and changing everything there.
    Write,
    /// Linking and renaming from one folder into another.
    Refer,
}

impl Access {
    fn rights(self) -> u64 {
        let read = READ_FILE | READ_DIR;
        match self {
            Self::Read => read,
            Self::Execute => read | EXECUTE,
            Self::Refer => REFER,
            Self::Write => read | WRITE_FILE | CHANGE_FOLDER | REFER | TRUNCATE | IOCTL_DEVICE,
        }
    }
}

/// A list of paths that stay.
#[derive(Debug, Clone)]
pub struct Paths {
    /// Rights that are taken away elsewhere.
    taken: u64,
    kept: Vec<(PathBuf, Access)>,
}

impl Paths {
    /// None.
    pub fn none() -> Self {
        Self {
            taken: u64::MAX,
            kept: Vec::new(),
        }
    }

    /// All, but none to be executed.
    ///
    /// Whoever is in a domain may not rename from one folder into another unless a rule says so.
    pub fn none_executed() -> Self {
        let all = Self {
            taken: EXECUTE | REFER,
            kept: Vec::new(),
        };
        all.and("/", Access::Refer)
    }

    /// And this program, with the loader of its libraries.
    pub fn and_own_program(self) -> Self {
        let own = std::fs::read_link("/proc/self/exe").into_iter();
        // The kernel executes the loader, too, which is mapped.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let loader = maps
            .lines()
            .filter_map(|line| {
                line.split_once('/')
                    .map(|(_, path)| PathBuf::from(format!("/{path}")))
            })
            .find(|path| {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| name.starts_with("ld-") || name.starts_with("ld."))
            });
        own.chain(loader)
            .fold(self, |paths, path| paths.and(path, Access::Execute))
    }

    /// And this one, with all below it. One that is not there is passed over.
    pub fn and(mut self, path: impl Into<PathBuf>, access: Access) -> Self {
        self.kept.push((path.into(), access));
        self
    }

    /// From here on this thread, and those that it starts, and all programs that they execute, open no other paths. Returns the version of landlock
    /// that the kernel has.
    pub fn keep(&self) -> io::Result<u32> {
        // SAFETY: with this flag the call takes no attributes, and returns a number.
        let version = unsafe {
            libc::syscall(
                CREATE_RULESET,
                std::ptr::null::<u64>(),
                0usize,
                CREATE_RULESET_VERSION,
            )
        };
        let version = u32::try_from(version).map_err(|_| io::Error::last_os_error())?;
        if version < 2 && self.kept.iter().any(|(_, access)| *access == Access::Refer) {
            return Err(io::Error::other(
                "landlock of this kernel (before Linux 5.19) lets nobody rename from one folder into another",
            ));
        }
        let handled = handled(version) & self.taken;
        // SAFETY: `struct landlock_ruleset_attr` of version 1 is one number, whose size is given.
        let rules = unsafe {
            libc::syscall(
                CREATE_RULESET,
                &raw const handled,
                size_of::<u64>(),
                0 as libc::c_ulong,
            )
        };
        if rules < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let rules = unsafe { OwnedFd::from_raw_fd(rules as i32) };
        for (path, access) in &self.kept {
            add(&rules, path, access.rights() & handled)?;
        }
        set_no_new_privs(true)?;
        // SAFETY: a descriptor and a number.
        match unsafe { libc::syscall(RESTRICT_SELF, rules.as_raw_fd(), 0 as libc::c_ulong) } {
            0 => Ok(version),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The rights that a kernel of this version can take away.
fn handled(version: u32) -> u64 {
    let mut rights = EXECUTE | WRITE_FILE | READ_FILE | READ_DIR | CHANGE_FOLDER;
    for (since, right) in [(2, REFER), (3, TRUNCATE), (5, IOCTL_DEVICE)] {
        if version >= since {
            rights |= right;
        }
    }
    rights
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: i32,
}

fn add(rules: &OwnedFd, path: &Path, rights: u64) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let opened = match rustix::fs::open(&name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(()),
        opened => opened?,
    };
    let is_folder = path.metadata()?.is_dir();
    let rule = PathBeneath {
        allowed_access: match is_folder {
            true => rights,
            false => rights & OF_FILES,
        },
        parent_fd: opened.as_raw_fd(),
    };
    // SAFETY: `rule` is of the type that its kind says, and lives through the call.
    let result = unsafe {
        libc::syscall(
            ADD_RULE,
            rules.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const rule,
            0 as libc::c_ulong,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_program_is_executed() {
        let done = std::thread::spawn(|| {
            Paths::none_executed().and_own_program().keep().ok()?;
            let own = std::process::Command::new("/proc/self/exe")
                .arg("--list")
                .output();
            let other = std::process::Command::new("true").status();
            let read = std::fs::read("/etc/passwd");
            let folder = tempfile::tempdir().unwrap();
            let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
            for folder in [&from, &to] {
                std::fs::create_dir(folder).unwrap();
            }
            std::fs::write(from.join("file"), "content").unwrap();
            let renamed = std::fs::rename(from.join("file"), to.join("file"));
            Some((
                own.is_ok_and(|ended| ended.status.success()),
                other.is_ok(),
                read.is_ok(),
                renamed.is_ok(),
            ))
        });
        if let Some(done) = done.join().unwrap() {
            assert_eq!(done, (true, false, true, true));
        }
    }

    #[test]
    fn what_is_not_in_the_list_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [read, write, other] = ["read", "write", "other"].map(|name| folder.path().join(name));
        for folder in [&read, &write, &other] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("file"), "content").unwrap();
        }
        let paths = Paths::none()
            .and(&read, Access::Read)
            .and(&write, Access::Write)
            .and(folder.path().join("missing"), Access::Write);
        let done = std::thread::spawn(move || {
            if let Err(error) = paths.keep() {
                // A kernel without landlock.
                let missing = [Some(libc::ENOSYS), Some(libc::EOPNOTSUPP)];
                assert!(missing.contains(&error.raw_os_error()), "{error}");
                return None;
            }
            let is_read = |folder: &Path| std::fs::read(folder.join("file")).is_ok();
            let is_written = |folder: &Path| std::fs::write(folder.join("file"), "other").is_ok();
            let is_made = |folder: &Path| std::fs::write(folder.join("new"), "other").is_ok();
            let folders = [&read, &write, &other];
            Some((
                folders.map(|folder| is_read(folder)),
                folders.map(|folder| is_written(folder)),
                folders.map(|folder| is_made(folder)),
            ))
        });
        let Some((read, written, made)) = done.join().unwrap() else {
            return;
        };
        assert_eq!(read, [true, true, false]);
        assert_eq!(written, [false, true, false]);
        assert_eq!(made, [false, true, false]);
    }
}

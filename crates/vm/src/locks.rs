//! Locks on images: when the guest moves only the source's QEMU may have one, and must release it.
//!
//! QEMU keeps others away from an image by locks on single bytes of its file, of the open file description:
//! byte 100 + N while it uses permission N, byte 200 + N while it denies that to others. So
//! `/proc/PID/fdinfo` shows the locks of each image. Whether another QEMU would get the same locks is asked
//! as QEMU itself asks, by `F_OFD_GETLK`, which a network file system answers for all its hosts.
//!
//! QEMU releases them when its guest has left (its nodes are inactive), except for nodes whose drivers do not
//! pass that on to the nodes below.
//!
//! The QEMU of an arriving guest takes them in two steps (7.2): it uses its images when the guest is loaded,
//! and denies them to others when the guest begins to run. A lock that conflicts with the first step keeps
//! the guest from running. A lock that conflicts with the second only causes a message on QEMU's standard
//! error, and the guest runs on an image that others may write to. Both are therefore looked for while the
//! move can still be taken back ([`Machine::taken`]); later ones show by the locks that are missing
//! ([`Machine::unprotected`]).

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::ofd;

/// First byte of the permissions that are used.
const USED: u64 = 100;

/// First byte of the permissions that are denied to others.
const DENIED: u64 = 200;

/// Limit of the number of permissions.
const PERMISSIONS: u64 = 64;

/// All locks that this process may see.
const ALL: &str = "/proc/locks";

/// Number of looks, since a lock may be taken or released between two of them.
const LOOKS: usize = 3;

/// Drivers of block nodes that keep the locks of the files below them when the guest has left.
const KEEPERS: [&str; 1] = ["quorum"];

/// A lock, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lock {
    /// `fe:00:9978051`: the kernel's numbers of the file.
    file: String,
    /// The first byte and the last.
    bytes: (u64, u64),
    /// Permissions used and denied; permission N is bit N.
    used: u64,
    denied: u64,
}

impl Lock {
    /// Parses a line of `/proc/locks`, or of an `fdinfo`, if the lock is of QEMU's kind: `1: OFDLCK ADVISORY
    /// READ -1 fe:00:9978051 100 101`.
    fn of(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let [_, "OFDLCK" | "POSIX", _, _, _, file, first, last] = words[..] else {
            return None;
        };
        // The end of the file, at any length.
        let last = match last {
            "EOF" => u64::MAX,
            last => last.parse().ok()?,
        };
        let bytes: (u64, u64) = (first.parse().ok()?, last);
        let bits = |base: u64| {
            let range = bytes.0.max(base)..=bytes.1.min(base + PERMISSIONS - 1);
            range.fold(0, |bits, byte| bits | 1 << (byte - base))
        };
        let (used, denied) = (bits(USED), bits(DENIED));
        (used | denied != 0).then(|| Self {
            file: file.to_owned(),
            bytes,
            used,
            denied,
        })
    }
}

/// A QEMU's locks on an image, for the QEMU that takes its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The image, as QEMU sees it.
    pub path: PathBuf,
    /// Permissions that it uses: permission N is bit N.
    pub used: u64,
    /// Permissions that it denies to others.
    pub denied: u64,
}

/// An image that a QEMU has locked.
#[derive(Debug)]
struct Image {
    path: PathBuf,
    /// A new open file description: locks of the same description would not conflict.
    file: File,
    locks: Vec<Lock>,
}

/// The locked images of a QEMU whose guest may run, with the locks that a QEMU in its place needs.
#[derive(Debug, Default)]
pub(crate) struct Images(Vec<Image>);

impl Images {
    /// The present images of a process.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut images: Vec<Image> = Vec::new();
        for (path, lock) in locks_of(pid)? {
            match images.iter_mut().find(|image| image.locks[0].file == lock.file) {
                Some(image) => image.locks.push(lock),
                None => {
                    let name = std::fs::read_link(&path).unwrap_or_default();
                    let Some(file) = open_descriptor(&path, &name)? else {
                        continue;
                    };
                    images.push(Image {
                        path: name,
                        file,
                        locks: vec![lock],
                    });
                }
            }
        }
        Ok(Self(images))
    }

    /// The locks in a form to send.
    pub(crate) fn held(&self) -> Vec<Held> {
        let bits =
            |image: &Image, of: fn(&Lock) -> u64| image.locks.iter().fold(0, |bits, lock| bits | of(lock));
        let held = self.0.iter().map(|image| Held {
            path: image.path.clone(),
            used: bits(image, |lock| lock.used),
            denied: bits(image, |lock| lock.denied),
        });
        held.collect()
    }

    /// Reasons why another QEMU would not get this one's locks: locks of other processes on this host.
    pub(crate) fn strangers(pid: u32) -> Result<Vec<String>> {
        Self::in_the_way(pid, &[])
    }

    /// Reasons why a QEMU does not get the locks that it has and is to have: locks of other processes on this
    /// host.
    fn in_the_way(pid: u32, wanted: &[Held]) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for _ in 0..LOOKS {
            let mut images = Self::of(pid)?;
            let own: Vec<Lock> = images.0.iter().flat_map(|image| image.locks.clone()).collect();
            images.are_to_have(pid, wanted)?;
            let all = std::fs::read_to_string(ALL).map_err(Error::io(format!("read {ALL}")))?;
            let mut others: Vec<_> = all.lines().filter_map(Lock::of).collect();
            for own in &own {
                if let Some(at) = others.iter().position(|lock| lock == own) {
                    others.swap_remove(at);
                }
            }
            let is_others = |image: &&Image| {
                let mut others = others.iter().filter(|lock| lock.file == image.locks[0].file);
                others.any(|lock| image.conflicts(lock))
            };
            found = images
                .0
                .iter()
                .filter(is_others)
                .map(Image::taken_by_another)
                .collect();
            if found.is_empty() {
                break;
            }
        }
        Ok(found)
    }

    /// Adds the locks that QEMU is to have on images that it has open, whether it has some of them already or
    /// not.
    fn are_to_have(&mut self, pid: u32, wanted: &[Held]) -> Result<()> {
        for held in wanted {
            let known = self.0.iter_mut().find(|image| image.path == held.path);
            let image = match known {
                Some(image) => image,
                None => {
                    let Some(file) = open_by(pid, &held.path)? else {
                        continue;
                    };
                    self.0.push(Image {
                        path: held.path.clone(),
                        file,
                        locks: Vec::new(),
                    });
                    self.0.last_mut().expect("one was added")
                }
            };
            let file = match image.locks.first() {
                Some(lock) => lock.file.clone(),
                None => by_kernel(&image.file)?,
            };
            image.locks.push(Lock {
                file,
                bytes: (0, 0),
                used: held.used,
                denied: held.denied,
            });
        }
        Ok(())
    }

    /// An error unless another QEMU would get all of these locks. `pid`: the QEMU that had them.
    pub(crate) fn are_free(&self, pid: u32) -> Result<()> {
        let mut taken = Vec::new();
        for image in &self.0 {
            if image.is_free()? {
                continue;
            }
            let mut own = locks_of(pid)?.into_iter().map(|(_, lock)| lock);
            let keeps = own.any(|lock| lock.file == image.locks[0].file && image.conflicts(&lock));
            taken.push(match keeps {
                true => format!(
                    "QEMU keeps its lock on {} although its guest has left, and the destination's could not use it: that \
                     is so below a node of driver quorum, or one that works like it; give the guest that disk in another way",
                    image.path.display()
                ),
                false => image.taken_by_another(),
            });
        }
        match taken.is_empty() {
            true => Ok(()),
            false => Err(Error::Unmovable(taken)),
        }
    }
}

impl Machine {
    /// Reasons why this QEMU, whose guest is loaded and does not run yet, would not get the image locks of
    /// the guest's last QEMU (`held`): locks of other processes on this host.
    pub fn taken(&self, held: &[Held]) -> Result<Vec<String>> {
        Images::in_the_way(self.pid(), held)
    }

    /// Images of a running guest that are less protected from others than by its last QEMU (`held`).
    pub fn unprotected(&self, held: &[Held]) -> Result<Vec<PathBuf>> {
        let now = Images::of(self.pid())?.held();
        let less = held.iter().filter(|held| {
            let mut now = now.iter().filter(|now| now.path == held.path);
            // The image may be used in another way now.
            now.any(|now| now.used & held.used == held.used && now.denied & held.denied != held.denied)
        });
        Ok(less.map(|held| held.path.clone()).collect())
    }
}

impl Image {
    /// Whether this lock conflicts with the image's.
    fn conflicts(&self, other: &Lock) -> bool {
        let mut own = self.locks.iter();
        own.any(|own| own.used & other.denied != 0 || own.denied & other.used != 0)
    }

    fn taken_by_another(&self) -> String {
        format!(
            "another process, on this host or on one that has the same storage, has a lock on {}, and the destination's \
             QEMU could not use it: end that process (a second QEMU, qemu-img, qemu-nbd, a backup), and try again",
            self.path.display()
        )
    }

    /// Checks as QEMU does before it takes its locks.
    fn is_free(&self) -> Result<bool> {
        let asked = |bits: u64, base: u64| {
            let bits = (0..PERMISSIONS).filter(move |bit| bits & (1 << bit) != 0);
            bits.map(move |bit| base + bit)
        };
        for lock in &self.locks {
            for byte in asked(lock.used, DENIED).chain(asked(lock.denied, USED)) {
                let held = ofd::is_locked(&self.file, byte)
                    .map_err(Error::io(format!("ask for the locks of {}", self.path.display())))?;
                if held {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// The locks that a process has, each with the path of its descriptor.
fn locks_of(pid: u32) -> Result<Vec<(PathBuf, Lock)>> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let folder = process.join("fd");
    let entries = std::fs::read_dir(&folder).map_err(Error::io(format!("read {}", folder.display())))?;
    let mut locks = Vec::new();
    for entry in entries.flatten() {
        // A descriptor that is closed by now has none.
        let info =
            std::fs::read_to_string(process.join("fdinfo").join(entry.file_name())).unwrap_or_default();
        let lines = info.lines().filter_map(|line| line.strip_prefix("lock:"));
        locks.extend(lines.filter_map(Lock::of).map(|lock| (entry.path(), lock)));
    }
    Ok(locks)
}

/// A file that a process has open by this path.
fn open_by(pid: u32, path: &std::path::Path) -> Result<Option<File>> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = std::fs::read_dir(&folder).map_err(Error::io(format!("read {}", folder.display())))?;
    let mut names = entries.flatten().map(|entry| entry.path());
    let found = names.find(|name| std::fs::read_link(name).is_ok_and(|target| target == path));
    found.map_or(Ok(None), |found| open_descriptor(&found, path))
}

/// The file of another process's descriptor; `None` if it is closed by now, and its locks are gone with it.
fn open_descriptor(descriptor: &std::path::Path, name: &std::path::Path) -> Result<Option<File>> {
    match File::open(descriptor) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(format!("open the image {}", name.display()))(error)),
    }
}

/// The kernel's numbers of a file without locks.
fn by_kernel(file: &File) -> Result<String> {
    let known = file.metadata().map_err(Error::io("look at an image"))?;
    let (major, minor) = (rustix::fs::major(known.dev()), rustix::fs::minor(known.dev()));
    Ok(format!("{major:02x}:{minor:02x}:{}", known.ino()))
}

/// The reason why a block node cannot move: it would keep its locks.
pub(crate) fn keeper(node: &str, driver: &str) -> Option<String> {
    KEEPERS.contains(&driver).then(|| {
        format!(
            "the block node {node} is of driver {driver}: QEMU keeps its locks on the files below that when the guest \
             leaves, and the destination's could not use them"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_read_from_the_locks_that_the_kernel_lists() {
        let of = |line: &str| Lock::of(line).map(|lock| (lock.used, lock.denied));
        assert_eq!(
            of("\t1: OFDLCK ADVISORY  READ -1 fe:00:9978098 100 101"),
            Some((0b11, 0))
        );
        assert_eq!(
            of("7: OFDLCK ADVISORY  READ -1 fe:00:9978098 203 203"),
            Some((0, 0b1000))
        );
        let all = of("1: POSIX  ADVISORY  WRITE 7 fe:00:1 0 EOF").unwrap();
        assert_eq!(all, (u64::MAX, u64::MAX));
        for other in [
            "1: FLOCK  ADVISORY  WRITE 7 fe:00:1 0 EOF",
            "1: -> OFDLCK ADVISORY  READ -1 fe:00:9978098 100 101",
            "1: OFDLCK ADVISORY  READ -1 fe:00:9978098 0 99",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn a_lock_that_is_kept_or_anothers_is_found_and_one_that_is_shared_is_not() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, &[0; 512]).unwrap();
        let image = |used, denied| Image {
            path: file.path().to_owned(),
            file: File::open(file.path()).unwrap(),
            locks: vec![Lock {
                file: String::new(),
                bytes: (0, 0),
                used,
                denied,
            }],
        };
        let (writer, reader) = (image(0b11, 0b10), image(0b1, 0b10));
        assert!(writer.is_free().unwrap() && reader.is_free().unwrap());
        // The locks of a node that has released its permissions, and still denies writes to others.
        let held = File::open(file.path()).unwrap();
        ofd::lock(&held, DENIED + 1).unwrap();
        assert!(!writer.is_free().unwrap());
        assert!(reader.is_free().unwrap());
        // This process, too, is found by its descriptors.
        let own = Images::of(std::process::id()).unwrap();
        let own = own.0.iter().find(|image| image.path == file.path()).unwrap();
        let [lock] = &own.locks[..] else { panic!("{own:?}") };
        assert_eq!((lock.used, lock.denied), (0, 0b10));
        assert!(writer.conflicts(lock) && !reader.conflicts(lock));
        drop(held);
        assert!(writer.is_free().unwrap());
    }

    /// Another process that has read locks on some bytes of a file, until its standard input ends.
    fn locker(path: &std::path::Path, bytes: &[u64]) -> std::process::Child {
        const LOCKS: &str = "import fcntl, struct, sys
file = open(sys.argv[1], 'rb')
for byte in sys.argv[2:]:
    fcntl.fcntl(file, 37, struct.pack('hhqqixxxx', fcntl.F_RDLCK, 0, int(byte), 1, 0))
print('locked', flush=True)
sys.stdin.read()";
        let mut command = std::process::Command::new("python3");
        command
            .args(["-c", LOCKS])
            .arg(path)
            .args(bytes.iter().map(u64::to_string));
        let pipe = std::process::Stdio::piped;
        let mut child = command.stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut said = String::new();
        let output = child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said).unwrap();
        assert_eq!(said, "locked\n");
        child
    }

    #[test]
    fn what_is_in_the_way_of_locks_that_are_still_to_be_taken_is_found() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, &[0; 512]).unwrap();
        // The locks of a QEMU whose guest is loaded: it uses the image, and denies nothing yet.
        let own = File::open(file.path()).unwrap();
        let (pid, path) = (std::process::id(), file.path().to_owned());
        let held = [Held {
            path: path.clone(),
            used: 0b11,
            denied: 0b10,
        }];
        let found = || Images::in_the_way(pid, &held).unwrap();
        for has_its_own in [false, true] {
            if has_its_own {
                ofd::lock(&own, USED).unwrap();
                ofd::lock(&own, USED + 1).unwrap();
            }
            assert!(found().is_empty(), "{:?}", found());
            // A process that writes and denies nothing, one that denies this use, and one that reads.
            for (bytes, is_in_the_way) in [
                (&[USED, USED + 1][..], true),
                (&[USED, DENIED + 1], true),
                (&[USED], false),
            ] {
                let mut other = locker(&path, bytes);
                let found = found();
                assert_eq!(found.len(), usize::from(is_in_the_way), "{bytes:?}: {found:?}");
                assert!(
                    found.iter().all(|said| said.contains(path.to_str().unwrap())),
                    "{found:?}"
                );
                drop(other.stdin.take());
                other.wait().unwrap();
            }
        }
        assert!(Images::in_the_way(pid, &[]).unwrap().is_empty());
        // The locks are reported as they are.
        ofd::lock(&own, DENIED + 1).unwrap();
        let now = Images::of(pid).unwrap().held();
        assert!(now.contains(&held[0]), "{now:?}");
    }
}

//! Threads of another process that wait for pages of a file that it maps and shares.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::PAGE;
use crate::error::Error;
use crate::maps::{self, MappedFile, Mapping};
use crate::ranges::Ranges;
use crate::still::alone;
use crate::sys::missing::{self, Put};
use crate::sys::ptrace;

/// Where the kernel offers userfaultfds whose faults may be the kernel's own, to whoever can open it (Linux 6.1).
pub const DEVICE: &str = "/dev/userfaultfd";

/// Who touches a page that a file of tmpfs lacks, in a process that maps and shares all of it, waits: its threads, and the kernel for them
/// (reads from a disk, KVM). All is said in bytes from the file's beginning.
///
/// The userfaultfd is made in that process and **stays open there**: whoever answers may end, and nothing is lost. Who waits waits on,
/// and the next one takes it again ([`FileFaults::take`]). Dropping this is such an end.
#[derive(Debug)]
pub struct FileFaults {
    pid: u32,
    process: OwnedFd,
    uffd: OwnedFd,
    /// Its number in the process.
    number: i32,
    parts: Vec<Part>,
}

/// A mapping of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    file: Range<u64>,
    address: u64,
}

impl FileFaults {
    /// Has a process make the userfaultfd. It must have [`DEVICE`] open: by this its rights do not count. Nobody waits before
    /// [`FileFaults::begin`].
    pub fn put_in(pid: u32, device: &File, file: &File) -> Result<Self, Error> {
        let process = ptrace::open(pid).map_err(Error::io("open a process"))?;
        let device = descriptor_of(pid, device)?;
        let (number, uffd) = alone(|| make(pid, &process, device))?;
        missing::set_up(uffd.as_fd()).map_err(Error::Refused)?;
        Self::of(pid, process, uffd, number, file)
    }

    /// Takes what was put in under this number ([`FileFaults::number`]); `None` if there is no userfaultfd. Who waits is told of again.
    pub fn take(pid: u32, number: i32, file: &File) -> Result<Option<Self>, Error> {
        let process = ptrace::open(pid).map_err(Error::io("open a process"))?;
        let path = format!("/proc/{pid}/fd/{number}");
        match std::fs::read_link(path) {
            Ok(target) if target.as_os_str() == "anon_inode:[userfaultfd]" => {}
            Ok(_) => return Ok(None),
            // The descriptor, or the process.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                maps::read(pid)?;
                return Ok(None);
            }
            Err(error) => return Err(Error::io("look at the descriptors of a process")(error)),
        }
        let uffd = ptrace::take(&process, number);
        let uffd = uffd.map_err(Error::io("take the userfaultfd of a process"))?;
        let taken = Self::of(pid, process, uffd, number, file)?;
        taken.tell_again()?;
        Ok(Some(taken))
    }

    fn of(pid: u32, process: OwnedFd, uffd: OwnedFd, number: i32, file: &File) -> Result<Self, Error> {
        let length = file.metadata().map_err(Error::io("look at a file"))?.len();
        let file = MappedFile::of(file).map_err(Error::io("look at a file"))?;
        let parts = parts(&maps::read(pid)?, file);
        let mut mapped = 0;
        for part in &parts {
            if part.file.start != mapped {
                break;
            }
            mapped = part.file.end;
        }
        let once = mapped == parts.iter().map(|part| part.file.end - part.file.start).sum();
        if mapped < length || !once {
            return Err(Error::Io {
                what: "serve a process's faults",
                source: io::Error::other("it does not map and share all of the file once"),
            });
        }
        Ok(Self {
            pid,
            process,
            uffd,
            number,
            parts,
        })
    }

    /// The number of the userfaultfd in its process.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// The process: readable when it has ended.
    pub fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// From now on who touches a page that the file lacks waits.
    pub fn begin(&self) -> Result<(), Error> {
        self.for_each("have a process wait for pages", missing::register)
    }

    /// Who waits tries again, and is told of again if the page is still missing.
    pub fn tell_again(&self) -> Result<(), Error> {
        self.for_each("wake who waits for a page", missing::wake)
    }

    /// Nobody waits any more: what the file lacks is zero.
    pub fn end(&self) -> Result<(), Error> {
        self.for_each(
            "let a process take what is missing for zeros",
            missing::unregister,
        )
    }

    fn for_each(
        &self,
        what: &'static str,
        change: fn(BorrowedFd<'_>, u64, u64) -> io::Result<()>,
    ) -> Result<(), Error> {
        for part in &self.parts {
            let changed = change(self.uffd.as_fd(), part.address, part.file.end - part.file.start);
            changed.map_err(Error::io(what))?;
        }
        Ok(())
    }

    /// Has the process close the userfaultfd. After [`FileFaults::end`].
    pub fn close(self) -> Result<(), Error> {
        alone(|| close(self.pid, self.number))
    }

    /// The page that somebody waits for next, if there is one. The descriptor is readable then.
    pub fn next(&self) -> Result<Option<u64>, Error> {
        let address = missing::next(self.uffd.as_fd());
        let Some(address) = address.map_err(Error::io("read who waits for a page"))? else {
            return Ok(None);
        };
        let of = |part: &&Part| (part.address..part.end()).contains(&address);
        let part = self.parts.iter().find(of).ok_or(Error::Changed)?;
        Ok(Some((part.file.start + address - part.address) / PAGE * PAGE))
    }

    /// Puts whole pages in their place. Who waits for them goes on. Pages that are there stay as they are.
    pub fn copy(&self, start: u64, bytes: &[u8]) -> Result<(), Error> {
        self.put(start..start + bytes.len() as u64, |address, within| {
            missing::copy(self.uffd.as_fd(), address, &bytes[within])
        })
    }

    /// Puts pages of zeros in their place, in the same way.
    pub fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        self.put(range, |address, within| {
            missing::zero(self.uffd.as_fd(), address, within.len() as u64)
        })
    }

    /// Who waits for a page of this range tries again.
    pub fn wake(&self, range: Range<u64>) -> Result<(), Error> {
        for (address, within) in self.addresses(range) {
            let woken = missing::wake(self.uffd.as_fd(), address, within.len() as u64);
            woken.map_err(Error::io("wake who waits for a page"))?;
        }
        Ok(())
    }

    /// `put` gets an address, and which bytes of the range belong there.
    fn put(
        &self,
        range: Range<u64>,
        put: impl Fn(u64, Range<usize>) -> io::Result<Put>,
    ) -> Result<(), Error> {
        for (mut address, mut within) in self.addresses(range) {
            while !within.is_empty() {
                let done = match put(address, within.clone()) {
                    Ok(Put::Bytes(bytes)) => bytes,
                    Ok(Put::Exists) => {
                        // Who waits for it was told of before it came.
                        let woken = missing::wake(self.uffd.as_fd(), address, PAGE);
                        woken.map_err(Error::io("wake who waits for a page"))?;
                        PAGE
                    }
                    // Its mappings are changing just now.
                    Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => continue,
                    Err(error) => return Err(Error::io("give a process a page")(error)),
                };
                address += done;
                within.start += done as usize;
            }
        }
        Ok(())
    }

    /// Where the parts of a range are in the process, and which bytes of the range each is.
    fn addresses(&self, range: Range<u64>) -> Vec<(u64, Range<usize>)> {
        let part = |part: &Part| {
            let start = part.file.start.max(range.start);
            let end = part.file.end.min(range.end);
            (start < end).then(|| {
                let within = (start - range.start) as usize..(end - range.start) as usize;
                (part.address + start - part.file.start, within)
            })
        };
        self.parts.iter().filter_map(part).collect()
    }
}

impl AsFd for FileFaults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

impl AsRawFd for FileFaults {
    fn as_raw_fd(&self) -> RawFd {
        self.uffd.as_raw_fd()
    }
}

impl Part {
    fn end(&self) -> u64 {
        self.address + self.file.end - self.file.start
    }
}

/// The mappings of a file that are shared, in its order.
fn parts(text: &str, file: MappedFile) -> Vec<Part> {
    let ours = |mapping: &Mapping<'_>| !mapping.is_private && mapping.file == file;
    let mut parts: Vec<_> = maps::parse(text)
        .filter(ours)
        .map(|mapping| Part {
            file: mapping.offset..mapping.offset + mapping.range.end - mapping.range.start,
            address: mapping.range.start,
        })
        .collect();
    parts.sort_by_key(|part| part.file.start);
    parts
}

/// Under which number a process has a device open that we have open, too.
fn descriptor_of(pid: u32, device: &File) -> Result<i32, Error> {
    let failed = Error::io("look at the descriptors of a process");
    let ours = rustix::fs::fstat(device)
        .map_err(|error| failed(error.into()))?
        .st_rdev;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))
        .map_err(&failed)?
        .flatten()
    {
        // It may have been closed since, and then it is not what is looked for.
        let is_device = rustix::fs::stat(entry.path()).is_ok_and(|stat| {
            stat.st_rdev == ours && rustix::fs::FileType::from_raw_mode(stat.st_mode).is_char_device()
        });
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|_| is_device) {
            return Ok(number);
        }
    }
    Err(Error::Io {
        what: "find /dev/userfaultfd among the descriptors of a process",
        source: io::ErrorKind::NotFound.into(),
    })
}

/// Has the first thread of a process make a userfaultfd by the device that it has open; returns its number there, and our copy.
#[cfg(target_arch = "x86_64")]
fn make(pid: u32, process: &OwnedFd, device: i32) -> Result<(i32, OwnedFd), Error> {
    const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let mut thread = crate::inject::Stopped::stop(pid)?;
    let made = thread.make_descriptor(libc::SYS_ioctl, [device as u64, missing::NEW, FLAGS]);
    let taken = made.map(|number| (number, ptrace::take(process, number)));
    if let Ok((number, Err(_))) = &taken {
        thread.call(libc::SYS_close, [*number as u64, 0, 0])?;
    }
    thread.go_on()?;
    let (number, uffd) = taken?;
    Ok((
        number,
        uffd.map_err(Error::io("take the userfaultfd of a process"))?,
    ))
}

#[cfg(target_arch = "x86_64")]
fn close(pid: u32, number: i32) -> Result<(), Error> {
    let mut thread = crate::inject::Stopped::stop(pid)?;
    let closed = thread.call(libc::SYS_close, [number as u64, 0, 0]);
    thread.go_on()?;
    match closed? {
        0 => Ok(()),
        error => Err(Error::Io {
            what: "have a process close its userfaultfd",
            source: io::Error::from_raw_os_error(i32::try_from(-error).unwrap_or(libc::EIO)),
        }),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn make(_: u32, _: &OwnedFd, _: i32) -> Result<(i32, OwnedFd), Error> {
    Err(Error::Refused(io::ErrorKind::Unsupported.into()))
}

#[cfg(not(target_arch = "x86_64"))]
fn close(_: u32, _: i32) -> Result<(), Error> {
    Err(Error::Refused(io::ErrorKind::Unsupported.into()))
}

/// Which of these ranges of a file of tmpfs have pages.
pub fn not_missing(file: &File, ranges: &Ranges) -> Result<Ranges, Error> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let failed = |error: Errno| Error::io("look for holes in a file")(error.into());
    let mut there = Ranges::default();
    for range in ranges.iter() {
        let mut at = range.start;
        while at < range.end {
            let start = match seek(file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                Err(error) => return Err(failed(error)),
            };
            if start >= range.end {
                break;
            }
            at = seek(file, SeekFrom::Hole(start)).map_err(failed)?;
            there.insert(start..at.min(range.end));
        }
    }
    Ok(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_shared_mappings_of_the_file_in_its_order() {
        let text = "\
7f0000200000-7f0000300000 rw-s 00100000 00:1a 77                         /ram
7f0000000000-7f0000100000 rw-s 00000000 00:1a 77                         /ram
7f0000400000-7f0000500000 rw-p 00000000 00:1a 77                         /ram
7f0000600000-7f0000700000 rw-s 00000000 00:1a 78                         /other
";
        let file = MappedFile {
            major: 0,
            minor: 0x1a,
            inode: 77,
        };
        let expected = [
            (0..1 << 20, 0x7f00_0000_0000),
            (1 << 20..2 << 20, 0x7f00_0020_0000),
        ];
        let expected = expected.map(|(file, address)| Part { file, address });
        assert_eq!(parts(text, file), expected);
    }
}

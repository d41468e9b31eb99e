//! A block device of this process: a file that FUSE serves, and a loop device with direct I/O on it.
//!
//! No thread of this process may map a file on such a device: a page fault that waits for the device can
//! block the threads that serve it.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};
use verbatim_volume::fuse_protocol::{self as protocol, Op};

use crate::support::devices::run;

/// The largest request.
const MAX_BYTES: u32 = 1 << 20;
/// The header of a request, rounded up.
const MAX_HEADER: usize = 4096;
/// Requests under way at a time.
const THREADS: usize = 4;

/// The content of a disk.
pub trait Backend: Send + Sync + 'static {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Writes zeros; the room may be given back.
    fn zero(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()>;
    fn flush(&self) -> io::Result<()>;
}

/// A file system of one file.
struct OneFile<B> {
    backend: Arc<B>,
    length: u64,
    fuse: OwnedFd,
    /// Readable once the threads are to end.
    end: Arc<OwnedFd>,
}

/// The device. It ends with its owner: requests of users that it still has then fail.
pub struct Disk {
    pub device: String,
    open: Option<File>,
    file: PathBuf,
    end: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Disk {
    /// A device of this many bytes. The file is made at `file`.
    pub fn new<B: Backend>(backend: Arc<B>, length: u64, file: PathBuf) -> Self {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
        let fuse = OwnedFd::from(options.open("/dev/fuse").expect("FUSE"));
        let mount = mount(&fuse).expect("a file system of one file");
        File::create(&file).expect("a place for it");
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(mount.as_fd(), "", CWD, &file, flags).expect("it is mounted");
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"));
        let one = Arc::new(OneFile {
            backend,
            length,
            fuse,
            end: end.clone(),
        });
        let threads = (0..THREADS).map(|_| {
            let one = one.clone();
            std::thread::spawn(move || one.serve())
        });
        let threads = threads.collect();
        // The kernel aborts the connection when the threads have closed its only descriptor.
        drop(one);
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        let device = run(&mut losetup);
        // A loop device that is detached while open goes with its last user, also when this process is
        // killed.
        let open = File::open(&device).expect("it is there");
        run(Command::new("losetup").args(["--detach", &device]));
        Self {
            device,
            open: Some(open),
            file,
            end,
            threads,
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The last user's close may flush, which is served still.
        drop(self.open.take());
        let _ = rustix::mount::unmount(&self.file, UnmountFlags::DETACH);
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn mount(fuse: &OwnedFd) -> io::Result<OwnedFd> {
    let system = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let fuse = fuse.as_raw_fd().to_string();
    for (key, value) in [
        ("source", "verbatim-test"),
        ("fd", fuse.as_str()),
        ("rootmode", "100600"),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        rustix::mount::fsconfig_set_string(system.as_fd(), key, value)?;
    }
    rustix::mount::fsconfig_create(system.as_fd())?;
    let attributes = MountAttrFlags::empty();
    Ok(rustix::mount::fsmount(
        system.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl<B: Backend> OneFile<B> {
    /// Takes requests until the device ends.
    fn serve(&self) {
        let mut bytes = vec![0; MAX_BYTES as usize + MAX_HEADER];
        loop {
            let mut ready = [
                PollFd::new(&self.fuse, PollFlags::IN),
                PollFd::new(&*self.end, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => panic!("requests cannot be awaited: {error}"),
            }
            if !ready[1].revents().is_empty() {
                return;
            }
            match rustix::io::read(&self.fuse, &mut bytes) {
                Ok(0) | Err(Errno::NODEV) => return,
                Ok(length) => self.answer(&bytes[..length]),
                // Another thread has it, or its asker has given up.
                Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => {}
                Err(error) => panic!("a request cannot be taken: {error}"),
            }
        }
    }

    fn answer(&self, bytes: &[u8]) {
        let request = protocol::parse(bytes).expect("a request");
        let answer = match request.op {
            Op::Silent => return,
            Op::Init(offer) => Ok(offer.answer(MAX_BYTES)),
            Op::Attributes => Ok(protocol::attributes(self.length)),
            Op::Open => Ok(protocol::opened()),
            Op::FileSystem => Ok(protocol::file_system()),
            Op::Nothing => Ok(Vec::new()),
            Op::Unknown => Err(libc::ENOSYS),
            Op::Refused => Err(libc::EOPNOTSUPP),
            Op::Damaged => Err(libc::EIO),
            Op::Read { offset, length } => {
                let there = self.length.saturating_sub(offset).min(length);
                let mut data = vec![0; there as usize];
                let read = self.backend.read(offset, &mut data);
                read.map(|()| data).map_err(|error| errno(&error))
            }
            Op::Write { offset, data } => {
                let written = self.backend.write(offset, data);
                written
                    .map(|()| protocol::written(data.len() as u32))
                    .map_err(|error| errno(&error))
            }
            Op::Zero {
                offset,
                length,
                may_free,
            } => {
                let zeroed = self.backend.zero(offset, length, may_free);
                zeroed.map(|()| Vec::new()).map_err(|error| errno(&error))
            }
            Op::Sync => {
                let flushed = self.backend.flush();
                flushed.map(|()| Vec::new()).map_err(|error| errno(&error))
            }
        };
        let (body, errno) = match &answer {
            Ok(body) => (body.as_slice(), 0),
            Err(errno) => ([].as_slice(), *errno),
        };
        let header = protocol::header(request.unique, errno, body.len());
        match rustix::io::writev(&self.fuse, &[IoSlice::new(&header), IoSlice::new(body)]) {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
            Err(error) => panic!("an answer of {} bytes is not taken: {error}", body.len()),
        }
    }
}

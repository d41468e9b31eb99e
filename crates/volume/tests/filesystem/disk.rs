//! A block device of this process: a file that FUSE serves, and a loop device with direct I/O on it.
//!
//! No thread of this process may map a file on such a device: a page fault that waits for the device can
//! block the threads that serve it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, Session,
    SessionACL, WriteFlags,
};
use rustix::fs::CWD;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};

use crate::support::devices::run;

/// The largest request.
const MAX_BYTES: u32 = 1 << 20;
/// Requests in flight at a time.
const THREADS: usize = 4;
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The storage of a disk's bytes.
pub trait Backend: Send + Sync + 'static {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Writes zeros; the room may be given back.
    fn zero(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()>;
    fn flush(&self) -> io::Result<()>;
}

struct OneFile<B> {
    backend: Arc<B>,
    length: u64,
}

/// The device. It is removed on drop, or with its last user.
pub struct Disk {
    pub device: String,
    _open: File,
    file: PathBuf,
    serving: Option<JoinHandle<()>>,
}

impl Disk {
    /// A device of this many bytes. The file is made at `file`.
    pub fn new<B: Backend>(backend: Arc<B>, length: u64, file: PathBuf) -> Self {
        let connection = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let connection = OwnedFd::from(connection.expect("FUSE"));
        let mount = mount(&connection).expect("a file system of one file");
        File::create(&file).expect("a place for it");
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(mount.as_fd(), "", CWD, &file, flags).expect("it is mounted");
        let one = OneFile { backend, length };
        let mut config = Config::default();
        (config.n_threads, config.clone_fd) = (Some(THREADS), true);
        let session = Session::from_fd(one, connection, SessionACL::All, config).expect("a session");
        let serving = std::thread::spawn(move || {
            // The session ends with the last user of the file.
            let _ = session.run();
        });
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        let device = run(&mut losetup);
        // A loop device that is detached while open goes with its last user, also when this process is
        // killed.
        let open = File::open(&device).expect("it is there");
        run(Command::new("losetup").args(["--detach", &device]));
        Self {
            device,
            _open: open,
            file,
            serving: Some(serving),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.device]).output();
        let _ = rustix::mount::unmount(&self.file, UnmountFlags::DETACH);
        // A device that is still in use keeps its server.
        let serving = self.serving.take().expect("it serves");
        if !Path::new("/sys/block")
            .join(self.device.trim_start_matches("/dev/"))
            .join("loop")
            .exists()
        {
            let _ = serving.join();
        }
    }
}

fn mount(connection: &OwnedFd) -> io::Result<OwnedFd> {
    let system = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let connection = connection.as_raw_fd().to_string();
    for (key, value) in [
        ("source", "verbatim-test"),
        ("fd", connection.as_str()),
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

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

fn answer(result: io::Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

impl<B: Backend> Filesystem for OneFile<B> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(MAX_BYTES);
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_MAX_PAGES);
        Ok(())
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let attributes = FileAttr {
            ino,
            size: self.length,
            blocks: self.length / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: FileType::RegularFile,
            perm: 0o600,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&FOREVER, &attributes);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let there = self.length.saturating_sub(offset).min(size.into());
        let mut data = vec![0; there as usize];
        match self.backend.read(offset, &mut data) {
            Ok(()) => reply.data(&data),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.backend.write(offset, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer(self.backend.flush(), reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let may_free = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => true,
            libc::FALLOC_FL_ZERO_RANGE => false,
            _ => return reply.error(Errno::from_i32(libc::EOPNOTSUPP)),
        };
        answer(self.backend.zero(offset, length, may_free), reply);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

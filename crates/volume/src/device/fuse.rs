//! A FUSE server of one file: its root is the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, Session,
    SessionACL, WriteFlags,
};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use verbatim_mirror::{Extent, Failure};

use crate::volume::{Volume, Wanted};

/// The largest request. What the kernel has is cut into such.
const MAX_BYTES: u32 = 1 << 20;

/// Threads that take requests of one volume.
const THREADS: usize = 2;

/// What the kernel knows of the file is right for ever: a volume that grows is made a new file.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

struct OneFile {
    volume: Arc<Volume>,
    length: u64,
    is_read_only: bool,
}

/// The volume as a file that is open for direct I/O, served until it is closed.
pub fn file(volume: &Arc<Volume>, is_read_only: bool) -> io::Result<File> {
    let connection = OwnedFd::from(OpenOptions::new().read(true).write(true).open("/dev/fuse")?);
    let mount = mount(&connection)?;
    let length = volume.length();
    let one = OneFile {
        volume: volume.clone(),
        length,
        is_read_only,
    };
    let mut config = Config::default();
    (config.n_threads, config.clone_fd) = (Some(THREADS), true);
    let session = Session::from_fd(one, connection, SessionACL::All, config)?;
    std::thread::Builder::new().name("fuse".into()).spawn(move || {
        if let Err(error) = session.run() {
            tracing::info!("a volume's file has ended: {error}");
        }
    })?;
    let file = OpenOptions::new()
        .read(true)
        .write(!is_read_only)
        .custom_flags(libc::O_DIRECT)
        .open(Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string()))?;
    // The kernel has asked nobody yet how long it is.
    match file.metadata()?.len() == length {
        true => Ok(file),
        false => Err(io::Error::other("the file does not have the volume's length")),
    }
}

/// The file system with that one file, in no namespace. It is there as long as it or the file is open.
fn mount(connection: &OwnedFd) -> io::Result<OwnedFd> {
    let system = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let connection = connection.as_raw_fd().to_string();
    for (key, value) in [
        ("source", "verbatim-volume"),
        ("fd", connection.as_str()),
        ("rootmode", "100600"),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        rustix::mount::fsconfig_set_string(system.as_fd(), key, value)?;
    }
    rustix::mount::fsconfig_create(system.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    Ok(rustix::mount::fsmount(
        system.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

fn errno(failure: Failure) -> Errno {
    match failure {
        Failure::Disk(errno) => Errno::from_i32(errno),
        Failure::Moved => Errno::from_i32(libc::ESHUTDOWN),
    }
}

impl OneFile {
    fn extent(&self, offset: u64, length: u64) -> Option<Extent> {
        Extent::within(self.length, offset, length)
    }

    fn change(&self, wanted: Wanted, extent: Extent, reply: impl FnOnce(Result<(), Errno>) + Send + 'static) {
        if self.is_read_only && wanted != Wanted::Flush {
            return reply(Err(Errno::from_i32(libc::EROFS)));
        }
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| {
            reply(result.map(drop).map_err(errno));
        });
        self.volume.request_here(wanted, extent, false, reply);
    }
}

fn empty(reply: ReplyEmpty) -> impl FnOnce(Result<(), Errno>) + Send + 'static {
    move |result| match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A kernel that knows less has smaller requests, one after the other.
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
        let Some(extent) = self.extent(offset, there) else {
            return reply.data(&[]);
        };
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| match result {
            Ok(data) => reply.data(&data),
            Err(failure) => reply.error(errno(failure)),
        });
        self.volume.request_here(Wanted::Read, extent, false, reply);
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
        let Some(extent) = self.extent(offset, data.len() as u64) else {
            return reply.error(Errno::from_i32(libc::ENOSPC));
        };
        let length = data.len() as u32;
        self.change(
            Wanted::Write(Arc::new(data.to_vec())),
            extent,
            move |result| match result {
                Ok(()) => reply.written(length),
                Err(errno) => reply.error(errno),
            },
        );
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let any = Extent { offset: 0, length: 1 };
        self.change(Wanted::Flush, any, empty(reply));
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
        match self.extent(offset, length) {
            Some(extent) => self.change(Wanted::Zero { may_free }, extent, empty(reply)),
            None => reply.error(Errno::from_i32(libc::EINVAL)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}

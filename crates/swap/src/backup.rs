//! The file that stands in for a server: threads read and write it, past the page cache if its file system
//! can do that. Otherwise each write is on the disk before it counts: Linux reports the failure of an earlier
//! write to no later write, and drops the page, which would then be read with its earlier content.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};
use rustix::fs::FallocateFlags;
use verbatim_lease::{Extent, SlotId};

use crate::block::{Block, PAGE_BYTES, place};

/// Number of requests of the file in flight.
const THREADS: usize = 4;

/// A small stack is enough for two system calls, and all of it is locked.
const STACK_BYTES: usize = 128 << 10;

/// Something to do.
pub enum Job {
    /// Write this extent of the slot.
    Write(SlotId, Extent, Arc<Block>),
    /// Read into this block, from its beginning on.
    Read(SlotId, Extent, Box<Block>),
}

/// The result of a job.
pub struct Done {
    /// The slot.
    pub slot: SlotId,
    /// The pages.
    pub extent: Extent,
    /// The block of a read.
    pub read: Option<Box<Block>>,
    /// The errno of a failure.
    pub result: Result<(), i32>,
}

struct Shared {
    file: File,
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
    done: Mutex<VecDeque<Done>>,
    wake: Arc<OwnedFd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open file. Its threads end with the process.
pub struct Backup {
    shared: Arc<Shared>,
    /// The file goes through the page cache.
    pub is_cached: bool,
}

impl Backup {
    /// Opens the file, with room for `bytes`. A file that is made for this purpose has no name from here on,
    /// so that nothing is left of it after any end of this process. `wake` is written when a job is done;
    /// `most` is the limit of jobs in flight.
    pub fn open(path: &Path, bytes: u64, most: usize, wake: Arc<OwnedFd>) -> anyhow::Result<Self> {
        let is_new = !path.exists();
        let open = |flags| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .custom_flags(flags)
                .open(path)
        };
        let (file, is_cached) = match open(libc::O_DIRECT) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (open(libc::O_DSYNC), true),
            opened => (opened, false),
        };
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let unlink = || match is_new {
            true => std::fs::remove_file(path),
            false => Ok(()),
        };
        let room =
            room(&file, bytes).with_context(|| format!("{} cannot take {bytes} bytes", path.display()));
        unlink().with_context(|| format!("cannot unlink {}", path.display()))?;
        room?;
        let shared = Arc::new(Shared {
            file,
            jobs: Mutex::new(VecDeque::with_capacity(most)),
            more: Condvar::new(),
            done: Mutex::new(VecDeque::with_capacity(most)),
            wake,
        });
        for number in 0..THREADS {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("backup {number}"))
                .stack_size(STACK_BYTES)
                .spawn(move || work(&shared))?;
        }
        Ok(Self { shared, is_cached })
    }

    /// Gives a job to the threads.
    pub fn submit(&self, job: Job) {
        lock(&self.shared.jobs).push_back(job);
        self.shared.more.notify_one();
    }

    /// The next result.
    pub fn take(&self) -> Option<Done> {
        lock(&self.shared.done).pop_front()
    }
}

fn room(file: &File, bytes: u64) -> anyhow::Result<()> {
    if file.metadata()?.file_type().is_block_device() {
        let size = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
        if size < bytes {
            bail!("the device has {size} bytes");
        }
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        // Not every file system can reserve room.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(file.set_len(bytes)?),
        done => Ok(done?),
    }
}

fn work(shared: &Shared) {
    loop {
        let mut jobs = lock(&shared.jobs);
        let job = loop {
            match jobs.pop_front() {
                Some(job) => break job,
                None => jobs = shared.more.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(jobs);
        let errno =
            |result: io::Result<()>| result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
        let done = match job {
            Job::Write(slot, extent, block) => {
                let bytes = &block.bytes()[place(extent.page, extent)];
                let result = errno(shared.file.write_all_at(bytes, extent.page * PAGE_BYTES));
                // Before the result is visible: the slot may be used again then.
                drop(block);
                Done {
                    slot,
                    extent,
                    read: None,
                    result,
                }
            }
            Job::Read(slot, extent, mut block) => {
                let bytes = &mut block.bytes_mut()[place(extent.page, extent)];
                let result = errno(shared.file.read_exact_at(bytes, extent.page * PAGE_BYTES));
                Done {
                    slot,
                    extent,
                    read: Some(block),
                    result,
                }
            }
        };
        lock(&shared.done).push_back(done);
        let _ = rustix::io::write(&*shared.wake, &1u64.to_ne_bytes());
    }
}

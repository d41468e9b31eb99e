//! A volume as a block device of this machine: a file of a FUSE server in this process, and a loop device with direct I/O on it.
//!
//! The file system with that one file is mounted nowhere: the kernel has it as long as the loop device has the file open. The loop device goes
//! when nobody has it open any more; this process has, until it lets go of it. So whoever dies, nothing is left behind, and a file system
//! that is mounted on the device stays mounted as long as this process serves it.

mod fuse;
mod sys;
mod users;

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};

use crate::volume::Volume;

pub use sys::be_io_flusher;

/// Loop devices that others take while we look for a free one.
const TRIES: u32 = 64;

/// A loop device. Dropped, it goes, unless something else has it open: then it goes with that.
pub struct Device {
    path: PathBuf,
    is_read_only: bool,
    /// While it is open here, it does not go.
    _open: File,
}

impl Device {
    /// Makes one of the volume.
    pub fn new(volume: &Arc<Volume>, is_read_only: bool) -> anyhow::Result<Self> {
        let length = volume.length();
        ensure!(
            length.is_multiple_of(512),
            "a block device has whole sectors of 512 bytes, and the volume has {length} bytes: resize it"
        );
        let file = fuse::file(volume, is_read_only).context("cannot serve a file by FUSE")?;
        let device = Self::on(&file, is_read_only).context("cannot make a loop device")?;
        tracing::debug!("a volume is {}", device.path.display());
        Ok(device)
    }

    fn on(file: &File, is_read_only: bool) -> io::Result<Self> {
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/loop-control")?;
        for _ in 0..TRIES {
            let number = sys::free_loop_device(&control)?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            // Where no devtmpfs is mounted, nobody makes nodes of new devices.
            if !path.exists() {
                sys::make_node(&path, number)?;
            }
            let open = OpenOptions::new().read(true).write(!is_read_only).open(&path)?;
            match sys::configure_loop_device(&open, file, is_read_only) {
                Ok(()) => {
                    return Ok(Self {
                        path,
                        is_read_only,
                        _open: open,
                    });
                }
                // Somebody else was quicker.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nothing can be written to it.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Something that is on it: a file system that is mounted, swap, or a device made of it. For the operator.
    pub fn user(&self) -> Option<String> {
        users::of(&self.path)
    }
}

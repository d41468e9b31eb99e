//! Operations that make bytes durable. Power failures (`crash.rs`) show that the bytes are; here the
//! operations have to succeed at any moment.

use std::io;
use std::os::unix::fs::FileExt;

use rand::Rng;

use crate::sys::sync_range;
use crate::work::{LONGEST, Outcome, Work};

pub fn fsync(work: &mut Work) -> io::Result<Outcome> {
    work.any().file.sync_all()?;
    Ok(Outcome::Done)
}

pub fn fdatasync(work: &mut Work) -> io::Result<Outcome> {
    work.any().file.sync_data()?;
    Ok(Outcome::Done)
}

pub fn sync_file_range(work: &mut Work) -> io::Result<Outcome> {
    let offset = work.random.random_range(0..LONGEST as u64);
    sync_range(&work.any().file, offset, 256 << 10)?;
    Ok(Outcome::Done)
}

pub fn syncfs(work: &mut Work) -> io::Result<Outcome> {
    rustix::fs::syncfs(&work.any().file)?;
    Ok(Outcome::Done)
}

pub fn write_dsync(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(64 << 10);
    let offset = work.random.random_range(0..LONGEST - data.len());
    let subject = work.any();
    let file = subject.open_with(libc::O_DSYNC)?;
    file.write_all_at(&data, offset as u64)?;
    subject.has(offset, &data);
    Ok(Outcome::Done)
}

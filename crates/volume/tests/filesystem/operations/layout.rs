//! Files get shorter and longer, and get holes; their blocks are shared.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rand::Rng;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate};

use super::unless_unknown;
use crate::sys::clone_range;
use crate::work::{BLOCK, LONGEST, Outcome, Work, compare};

/// `FALLOC_FL_INSERT_RANGE` and `FALLOC_FL_UNSHARE_RANGE` (`linux/falloc.h`), which not all libraries have.
const INSERT_RANGE: FallocateFlags = FallocateFlags::from_bits_retain(0x20);
const UNSHARE_RANGE: FallocateFlags = FallocateFlags::from_bits_retain(0x40);

fn place(work: &mut Work, longest: usize) -> (usize, usize) {
    let offset = work.random.random_range(0..LONGEST - longest);
    (offset, work.random.random_range(1..longest))
}

pub fn truncate_shorter(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(1)?;
    let length = work.random.random_range(0..=blocks * BLOCK);
    let subject = &mut work.subjects[index];
    subject.file.set_len(length as u64)?;
    subject.content.truncate(length);
    Ok(Outcome::Done)
}

pub fn truncate_longer(work: &mut Work) -> io::Result<Outcome> {
    let length = work.random.random_range(0..LONGEST);
    let subject = work.any();
    if subject.content.len() < length {
        subject.file.set_len(length as u64)?;
        subject.content.resize(length, 0);
    }
    Ok(Outcome::Done)
}

/// A truncation beside a write; either may come first.
pub fn truncate_beside_write(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(64 << 10);
    let offset = work.random.random_range(0..LONGEST - data.len());
    let length = work.random.random_range(0..LONGEST);
    let subject = work.any();
    let file = &subject.file;
    std::thread::scope(|scope| {
        let cutting = scope.spawn(|| file.set_len(length as u64));
        // In one call, so that the truncation comes before or after it.
        let count = file.write_at(&data, offset as u64)?;
        assert_eq!(count, data.len(), "part of a write");
        cutting.join().expect("no panic")
    })?;
    let mut found = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut found, 0)?;
    let before = subject.content.clone();
    subject.has(offset, &data);
    subject.content.resize(length, 0);
    if found != subject.content {
        subject.content = before;
        subject.content.resize(length, 0);
        subject.has(offset, &data);
        compare("cut beside a write", &subject.path, 0, &found, &subject.content);
    }
    Ok(Outcome::Done)
}

pub fn punch_hole(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = place(work, 256 << 10);
    let subject = work.any();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&subject.file, flags, offset as u64, length as u64)?;
    let there = subject.content.len();
    let (from, to) = (offset.min(there), (offset + length).min(there));
    subject.content[from..to].fill(0);
    Ok(Outcome::Done)
}

pub fn zero_range(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = place(work, 256 << 10);
    let subject = work.any();
    fallocate(
        &subject.file,
        FallocateFlags::ZERO_RANGE,
        offset as u64,
        length as u64,
    )?;
    subject.has(offset, &vec![0; length]);
    Ok(Outcome::Done)
}

pub fn zero_range_keep_size(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = place(work, 256 << 10);
    let subject = work.any();
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    fallocate(&subject.file, flags, offset as u64, length as u64)?;
    let there = subject.content.len();
    let (from, to) = (offset.min(there), (offset + length).min(there));
    subject.content[from..to].fill(0);
    Ok(Outcome::Done)
}

pub fn collapse_range(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(4)?;
    // Some blocks have to remain behind the range.
    let first = work.random.random_range(0..blocks - 2);
    let count = work.random.random_range(1..blocks - 1 - first);
    let subject = &mut work.subjects[index];
    let (offset, length) = (first * BLOCK, count * BLOCK);
    fallocate(
        &subject.file,
        FallocateFlags::COLLAPSE_RANGE,
        offset as u64,
        length as u64,
    )?;
    subject.content.drain(offset..offset + length);
    Ok(Outcome::Done)
}

pub fn insert_range(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(2)?;
    if work.subjects[index].content.len() > LONGEST / 2 {
        return truncate_shorter(work);
    }
    let first = work.random.random_range(0..blocks - 1);
    let count = work.random.random_range(1..32);
    let subject = &mut work.subjects[index];
    let (offset, length) = (first * BLOCK, count * BLOCK);
    fallocate(&subject.file, INSERT_RANGE, offset as u64, length as u64)?;
    subject.content.splice(offset..offset, vec![0; length]);
    Ok(Outcome::Done)
}

pub fn preallocate(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = place(work, 256 << 10);
    let subject = work.any();
    fallocate(
        &subject.file,
        FallocateFlags::empty(),
        offset as u64,
        length as u64,
    )?;
    if subject.content.len() < offset + length {
        subject.content.resize(offset + length, 0);
    }
    Ok(Outcome::Done)
}

pub fn preallocate_keep_size(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = place(work, 256 << 10);
    let subject = work.any();
    fallocate(
        &subject.file,
        FallocateFlags::KEEP_SIZE,
        offset as u64,
        length as u64,
    )?;
    Ok(Outcome::Done)
}

pub fn unshare_range(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(1)?;
    let subject = &work.subjects[index];
    unless_unknown(
        fallocate(&subject.file, UNSHARE_RANGE, 0, (blocks * BLOCK) as u64).map_err(io::Error::from),
    )
}

pub fn reflink(work: &mut Work) -> io::Result<Outcome> {
    let (from, to) = work.two();
    let content = work.subjects[from].content.clone();
    // The clone takes the length of the source only if that is longer.
    work.subjects[to].file.set_len(0)?;
    work.subjects[to].content.clear();
    let done = rustix::fs::ioctl_ficlone(&work.subjects[to].file, &work.subjects[from].file);
    if done.is_ok() {
        work.subjects[to].content = content;
    }
    unless_unknown(done.map_err(io::Error::from))
}

pub fn reflink_range(work: &mut Work) -> io::Result<Outcome> {
    let (from, blocks) = work.with_blocks(2)?;
    let to = (from + 1) % work.subjects.len();
    let first = work.random.random_range(0..blocks - 1);
    let count = work.random.random_range(1..blocks - first);
    let (start, length) = (first * BLOCK, count * BLOCK);
    let offset = work.random.random_range(0..=(LONGEST - length) / BLOCK) * BLOCK;
    let data = work.subjects[from].content[start..start + length].to_vec();
    let (one, other) = (&work.subjects[to].file, &work.subjects[from].file);
    let done = clone_range(one, offset as u64, other, start as u64, length as u64);
    if done.is_ok() {
        work.subjects[to].has(offset, &data);
    }
    unless_unknown(done)
}

/// Holes contain only zeros.
pub fn holes_and_data(work: &mut Work) -> io::Result<Outcome> {
    let subject = work.any();
    let length = subject.content.len();
    let mut at = 0;
    while at < length {
        let data = match rustix::fs::seek(&subject.file, SeekFrom::Data(at as u64)) {
            Ok(data) => data as usize,
            // No data behind it.
            Err(error) if error == rustix::io::Errno::NXIO => length,
            Err(error) => return Err(error.into()),
        };
        let hole = &subject.content[at..data];
        compare("a hole", &subject.path, at, &vec![0; hole.len()], hole);
        at = match data < length {
            true => rustix::fs::seek(&subject.file, SeekFrom::Hole(data as u64))? as usize,
            false => length,
        };
    }
    Ok(Outcome::Done)
}

/// A file with little data far behind its beginning.
pub fn far_offset(work: &mut Work) -> io::Result<Outcome> {
    let path = work.folder.join("far");
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)?;
    let mut places = Vec::new();
    for gigabytes in [1u64, 5, 900] {
        let (data, extra) = (work.noise(BLOCK * 3), work.random.random_range(0..1 << 20));
        let offset = (gigabytes << 30) + extra;
        file.write_all_at(&data, offset)?;
        places.push((offset, data));
    }
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    for (offset, data) in places {
        let mut found = vec![0; data.len() + BLOCK];
        file.read_exact_at(&mut found, offset - BLOCK as u64)?;
        compare(
            "far",
            &path,
            offset as usize,
            &found,
            &[vec![0; BLOCK], data].concat(),
        );
    }
    std::fs::remove_file(&path)?;
    Ok(Outcome::Done)
}

//! Reads and writes of bytes, in all ways.

use std::fs::File;
use std::io::{self, IoSlice, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use rand::Rng;
use rustix::fs::Advice;

use crate::sys::Map;
use crate::work::{Aligned, BLOCK, LONGEST, Outcome, Work, compare};

/// The longest write, with few exceptions.
const LONG: usize = 96 << 10;

pub fn write(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(LONG);
    let offset = work.random.random_range(0..LONGEST - LONG);
    work.any().write(offset, &data)?;
    Ok(Outcome::Done)
}

pub fn write_vectored(work: &mut Work) -> io::Result<Outcome> {
    let (data, other) = (work.noise(LONG / 4), work.noise(LONG / 4));
    let offset = work.random.random_range(0..LONGEST - LONG);
    let subject = work.any();
    subject.file.seek(SeekFrom::Start(offset as u64))?;
    let count = subject
        .file
        .write_vectored(&[IoSlice::new(&data), IoSlice::new(&other)])?;
    subject.has(offset, &[data, other].concat()[..count]);
    Ok(Outcome::Done)
}

pub fn write_direct(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise_of_blocks(32);
    let offset = work.random.random_range(0..(LONGEST - data.len()) / BLOCK) * BLOCK;
    let subject = work.any();
    let file = subject.open_with(libc::O_DIRECT)?;
    file.write_all_at(Aligned::of(&data).bytes(), offset as u64)?;
    subject.has(offset, &data);
    Ok(Outcome::Done)
}

pub fn append(work: &mut Work) -> io::Result<Outcome> {
    let data = work.noise(LONG / 4);
    let subject = work.any();
    let length = subject.content.len();
    if length + data.len() > LONGEST {
        subject.file.set_len(0)?;
        subject.content.clear();
    }
    let length = subject.content.len();
    File::options()
        .append(true)
        .open(&subject.path)?
        .write_all(&data)?;
    subject.has(length, &data);
    Ok(Outcome::Done)
}

pub fn read(work: &mut Work) -> io::Result<Outcome> {
    let (offset, length) = (
        work.random.random_range(0..LONGEST),
        work.random.random_range(1..LONG),
    );
    let subject = work.any();
    let mut found = vec![0; length];
    let count = subject.file.read_at(&mut found, offset as u64)?;
    let there = subject.content.len().saturating_sub(offset).min(length);
    let offset = offset.min(subject.content.len());
    compare(
        "read",
        &subject.path,
        offset,
        &found[..count],
        &subject.content[offset..offset + there],
    );
    Ok(Outcome::Done)
}

pub fn read_direct(work: &mut Work) -> io::Result<Outcome> {
    work.any().check_direct("read directly")?;
    Ok(Outcome::Done)
}

pub fn read_from_disk(work: &mut Work) -> io::Result<Outcome> {
    let subject = work.any();
    subject.file.sync_data()?;
    rustix::fs::fadvise(&subject.file, 0, None, Advice::DontNeed)?;
    subject.check("read from the disk")?;
    Ok(Outcome::Done)
}

pub fn mmap_read(work: &mut Work) -> io::Result<Outcome> {
    let (index, _) = work.with_blocks(1)?;
    let subject = &work.subjects[index];
    let map = Map::of(&subject.file, subject.content.len())?;
    let mut found = vec![0; subject.content.len()];
    map.read(0, &mut found);
    compare("read in memory", &subject.path, 0, &found, &subject.content);
    Ok(Outcome::Done)
}

pub fn mmap_write(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(2)?;
    let data = work.noise(BLOCK);
    let offset = work.random.random_range(0..(blocks - 1) * BLOCK);
    let is_synced = work.random.random_bool(0.5);
    let subject = &mut work.subjects[index];
    let map = Map::of(&subject.file, subject.content.len())?;
    map.write(offset, &data);
    if is_synced {
        map.sync()?;
    }
    subject.has(offset, &data);
    Ok(Outcome::Done)
}

/// A page that was written through a mapping is read directly, and a page that was written directly is read
/// through a mapping.
pub fn mmap_beside_direct(work: &mut Work) -> io::Result<Outcome> {
    let (index, blocks) = work.with_blocks(3)?;
    let (one, other) = (work.noise_of_blocks(1), work.noise_of_blocks(1));
    let place = work.random.random_range(0..blocks - 1) * BLOCK;
    let subject = &mut work.subjects[index];
    let map = Map::of(&subject.file, blocks * BLOCK)?;
    let direct = subject.open_with(libc::O_DIRECT)?;
    map.write(place, &one);
    map.sync()?;
    subject.has(place, &one);
    let mut found = Aligned::new(BLOCK);
    direct.read_exact_at(found.bytes_mut(), place as u64)?;
    compare(
        "written in memory, read directly",
        &subject.path,
        place,
        found.bytes(),
        &one,
    );
    let place = place + BLOCK;
    direct.write_all_at(Aligned::of(&other).bytes(), place as u64)?;
    subject.has(place, &other);
    let mut found = vec![0; BLOCK];
    map.read(place, &mut found);
    compare(
        "written directly, read in memory",
        &subject.path,
        place,
        &found,
        &other,
    );
    Ok(Outcome::Done)
}

pub fn sendfile(work: &mut Work) -> io::Result<Outcome> {
    let (from, to) = work.two();
    let length = work.subjects[from].content.len().min(LONG);
    let data = work.subjects[from].content[..length].to_vec();
    let offset = work.random.random_range(0..LONGEST - LONG);
    let subject = &work.subjects[to];
    let mut out = &subject.file;
    out.seek(SeekFrom::Start(offset as u64))?;
    let mut at = 0;
    while (at as usize) < length {
        let left = length - at as usize;
        rustix::fs::sendfile(out, &work.subjects[from].file, Some(&mut at), left)?;
    }
    work.subjects[to].has(offset, &data);
    Ok(Outcome::Done)
}

pub fn copy_file_range(work: &mut Work) -> io::Result<Outcome> {
    let (from, to) = work.two();
    let length = work.subjects[from].content.len();
    let start = work.random.random_range(0..=length / 2);
    let length = (length - start).min(LONG * 4);
    let data = work.subjects[from].content[start..start + length].to_vec();
    let offset = work.random.random_range(0..LONGEST - LONG * 4);
    let (mut source, mut place) = (start as u64, offset as u64);
    while (source as usize) < start + length {
        let left = start + length - source as usize;
        let (one, other) = (&work.subjects[from].file, &work.subjects[to].file);
        let count = rustix::fs::copy_file_range(one, Some(&mut source), other, Some(&mut place), left)?;
        assert!(count > 0, "copy_file_range stands still");
    }
    work.subjects[to].has(offset, &data);
    Ok(Outcome::Done)
}

/// Two threads write beside each other, to the same blocks.
pub fn two_writers(work: &mut Work) -> io::Result<Outcome> {
    let (one, other) = (work.noise(LONG), work.noise(LONG));
    let offset = work.random.random_range(0..LONGEST - 2 * LONG);
    let subject = work.any();
    let file = &subject.file;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| file.write_all_at(&one, offset as u64));
        file.write_all_at(&other, (offset + one.len()) as u64)?;
        writer.join().expect("no panic")
    })?;
    subject.has(offset, &one);
    subject.has(offset + one.len(), &other);
    Ok(Outcome::Done)
}

//! Files, and the expected content of each.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The block size of the file systems.
pub const BLOCK: usize = 4096;
/// The longest file.
pub const LONGEST: usize = 2 << 20;
const FILES: usize = 5;

/// A file, and its expected content.
pub struct Subject {
    pub path: PathBuf,
    pub file: File,
    pub content: Vec<u8>,
    pub attributes: BTreeMap<String, Vec<u8>>,
}

/// The files of one process, in a folder of its own.
pub struct Work {
    pub folder: PathBuf,
    pub subjects: Vec<Subject>,
    pub random: StdRng,
    pub is_xfs: bool,
}

/// Result of an operation.
pub enum Outcome {
    Done,
    /// This file system, or this file, does not support the operation.
    NotHere,
}

/// Memory for direct I/O.
pub struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        Self {
            memory,
            start,
            length,
        }
    }

    pub fn of(data: &[u8]) -> Self {
        let mut aligned = Self::new(data.len());
        aligned.bytes_mut().copy_from_slice(data);
        aligned
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

/// Fails the test at the first difference.
pub fn compare(what: &str, path: &Path, offset: usize, found: &[u8], wanted: &[u8]) {
    if found == wanted {
        return;
    }
    let lengths = (found.len(), wanted.len());
    let first = found.iter().zip(wanted).position(|(one, other)| one != other);
    let first = first.unwrap_or(lengths.0.min(lengths.1));
    let wrong = found
        .iter()
        .zip(wanted)
        .filter(|(one, other)| one != other)
        .count();
    let part = |bytes: &[u8]| bytes[first..bytes.len().min(first + 16)].to_vec();
    panic!(
        "{what}: {} differs at {}: {:02x?} and not {:02x?}; {wrong} bytes differ, lengths {lengths:?}",
        path.display(),
        offset + first,
        part(found),
        part(wanted)
    );
}

impl Subject {
    pub fn create(path: PathBuf) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)?;
        Ok(Self {
            path,
            file,
            content: Vec::new(),
            attributes: BTreeMap::new(),
        })
    }

    /// Opens the file once more.
    pub fn open_with(&self, flags: i32) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(&self.path)
    }

    /// Sets the expected bytes at this offset.
    pub fn has(&mut self, offset: usize, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let end = offset + data.len();
        if self.content.len() < end {
            self.content.resize(end, 0);
        }
        self.content[offset..end].copy_from_slice(data);
    }

    pub fn write(&mut self, offset: usize, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset as u64)?;
        self.has(offset, data);
        Ok(())
    }

    /// Compares the whole file with its expected content.
    pub fn check(&self, what: &str) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        let mut found = vec![0; length as usize];
        self.file.read_exact_at(&mut found, 0)?;
        compare(what, &self.path, 0, &found, &self.content);
        for (name, value) in &self.attributes {
            let mut found = vec![0; value.len() + 1];
            let length = rustix::fs::fgetxattr(&self.file, name.as_str(), &mut found)?;
            compare(name, &self.path, 0, &found[..length], value);
        }
        Ok(())
    }

    /// Compares the content on the device.
    pub fn check_direct(&self, what: &str) -> io::Result<()> {
        let file = self.open_with(libc::O_DIRECT)?;
        let whole = self.content.len().next_multiple_of(BLOCK);
        let mut found = Aligned::new(whole);
        let mut at = 0;
        while at < whole {
            match file.read_at(&mut found.bytes_mut()[at..], at as u64)? {
                0 => break,
                count => at += count,
            }
            if at % BLOCK != 0 {
                break;
            }
        }
        compare(what, &self.path, 0, &found.bytes()[..at], &self.content);
        Ok(())
    }
}

impl Work {
    pub fn new(folder: PathBuf, is_xfs: bool, seed: u64) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let subjects = (0..FILES).map(|number| Subject::create(folder.join(format!("file-{number}"))));
        Ok(Self {
            subjects: subjects.collect::<io::Result<_>>()?,
            folder,
            random: StdRng::seed_from_u64(seed),
            is_xfs,
        })
    }

    /// One of the files.
    pub fn any(&mut self) -> &mut Subject {
        let index = self.random.random_range(0..self.subjects.len());
        &mut self.subjects[index]
    }

    /// Two of the files.
    pub fn two(&mut self) -> (usize, usize) {
        let one = self.random.random_range(0..self.subjects.len());
        let other = (one + self.random.random_range(1..self.subjects.len())) % self.subjects.len();
        (one, other)
    }

    /// Bytes that were not written before.
    pub fn noise(&mut self, longest: usize) -> Vec<u8> {
        let mut data = vec![0; self.random.random_range(1..=longest)];
        self.random.fill(data.as_mut_slice());
        data
    }

    /// Noise of whole blocks.
    pub fn noise_of_blocks(&mut self, most: usize) -> Vec<u8> {
        let mut data = vec![0; self.random.random_range(1..=most) * BLOCK];
        self.random.fill(data.as_mut_slice());
        data
    }

    /// A file with `blocks` whole blocks at least, and the number of its blocks.
    pub fn with_blocks(&mut self, blocks: usize) -> io::Result<(usize, usize)> {
        let index = self.random.random_range(0..self.subjects.len());
        let length = self.subjects[index].content.len();
        if length < blocks * BLOCK {
            let data = self.noise_of_blocks(4);
            let data = data.repeat(blocks);
            self.subjects[index].write(length, &data)?;
        }
        Ok((index, self.subjects[index].content.len() / BLOCK))
    }

    pub fn check(&self, what: &str) -> io::Result<()> {
        self.subjects.iter().try_for_each(|subject| subject.check(what))
    }
}

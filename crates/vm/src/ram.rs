//! The RAM of a virtual machine: a file of tmpfs that QEMU maps and shares.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use verbatim_tracking::{FileTracker, MappedFile, PAGE, Ranges, maps_file, stand_still_once};

use crate::error::{Error, Result};

/// Most bytes of a run.
pub const RUN: u64 = 1 << 20;

/// `TMPFS_MAGIC`.
const TMPFS: i64 = 0x0102_1994;

/// The file.
#[derive(Debug)]
pub struct Ram {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Ram {
    /// Makes the file of a new virtual machine: as long as its RAM, and without any memory yet.
    pub fn create(path: &Path, bytes: u64) -> Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path);
        let file = file.map_err(Error::io(format!("make {}", path.display())))?;
        let sized = file.set_len(bytes);
        sized.map_err(Error::io(format!("make {} as long as the RAM", path.display())))?;
        Self::of(file, path)
    }

    /// Opens the RAM of an existing virtual machine.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        Self::of(file.map_err(Error::io(format!("open {}", path.display())))?, path)
    }

    /// A file that is open for reading and writing; `path` is for display.
    pub fn of(file: File, path: &Path) -> Result<Self> {
        let what = || format!("look at {}", path.display());
        let system = rustix::fs::fstatfs(&file).map_err(|error| Error::io(what())(error.into()))?;
        if system.f_type != TMPFS {
            return Err(Error::Unmovable(vec![format!(
                "the RAM lies in {}, which is no tmpfs: what is written there cannot be tracked",
                path.display()
            )]));
        }
        let bytes = file.metadata().map_err(Error::io(what()))?.len();
        Ok(Self {
            file,
            path: path.to_owned(),
            bytes,
        })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Ranges with memory; the rest is zero.
    pub fn data(&self) -> Result<Ranges> {
        let mut data = Ranges::default();
        let mut from = 0;
        let failed = |error: Errno| Error::io("look for holes in the RAM")(error.into());
        while from < self.bytes {
            let start = match seek(&self.file, SeekFrom::Data(from)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                Err(error) => return Err(failed(error)),
            };
            let end = seek(&self.file, SeekFrom::Hole(start)).map_err(failed)?;
            data.insert(start..end.min(self.bytes));
            from = end;
        }
        Ok(data)
    }

    /// Reads a run.
    pub fn read(&self, run: Range<u64>, into: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(into, run.start);
        read.map_err(Error::io("read the RAM"))
    }

    /// Writes a run to its place.
    pub fn write(&self, start: u64, bytes: &[u8]) -> Result<()> {
        self.holds(start..start + bytes.len() as u64)?;
        let written = self.file.write_all_at(bytes, start);
        written.map_err(Error::io("write to the RAM"))
    }

    /// Makes a run zero, and gives its memory back.
    pub fn clear(&self, run: Range<u64>) -> Result<()> {
        self.holds(run.clone())?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, run.start, run.end - run.start)
            .map_err(|error| Error::io("make a hole in the RAM")(error.into()))
    }

    pub(crate) fn holds(&self, run: Range<u64>) -> Result<()> {
        match run.start <= run.end && run.end <= self.bytes {
            true => Ok(()),
            false => Err(Error::Malformed(format!(
                "a run at {run:?} of a RAM of {} bytes",
                self.bytes
            ))),
        }
    }
}

/// A part of the RAM to bring to the other copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Run {
    /// This part as it is now.
    Data(Range<u64>),
    /// This part is zero.
    Zero(Range<u64>),
}

/// The rounds by which a RAM is brought to its other copy while the virtual machine runs.
///
/// All runs of a round are read and brought there before the next round begins.
#[derive(Debug)]
pub struct Rounds {
    ram: Arc<Ram>,
    pid: u32,
    tracker: FileTracker,
    /// Ranges with memory in this copy at the look before.
    data: Ranges,
    /// Ranges with memory in the other copy.
    brought: Ranges,
}

impl Rounds {
    /// Begins to track QEMU's writes.
    pub fn begin(ram: &Arc<Ram>, pid: u32) -> Result<Self> {
        Ok(Self {
            ram: Arc::clone(ram),
            pid,
            tracker: FileTracker::arm(pid, ram.file())?,
            data: ram.data()?,
            brought: Ranges::default(),
        })
    }

    /// The RAM.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Runs that were written since the round before; in the first round, all.
    pub fn round(&mut self) -> Result<Vec<Run>> {
        let written = self.tracker.look(&self.data)?;
        // Direct disk reads into the RAM (O_DIRECT) that have looked its pages up before this call end before
        // it returns.
        stand_still_once(&[self.pid])?;
        self.data = self.ram.data()?;
        Ok(self.runs(&written))
    }

    /// The same for a virtual machine that stands still, and whose disks are quiet.
    pub fn last(&mut self) -> Result<Vec<Run>> {
        self.data = self.ram.data()?;
        let written = self.tracker.last_look(&self.data)?;
        Ok(self.runs(&written))
    }

    /// Ranges that were written since the round before and are left behind: they are not brought, and the
    /// other copy lacks them ([`crate::PostCopy::lack`]). From then on only post-copy brings them.
    ///
    /// Data that a disk still has to write there are in the RAM when the guest stands still, and not before:
    /// only then may the RAM be read.
    pub fn leave_behind(&mut self) -> Result<Ranges> {
        let written = self.tracker.look(&self.data)?;
        self.data = self.ram.data()?;
        Ok(self.left_behind(&written))
    }

    /// The same for a virtual machine that stands still, and whose disks are quiet; and its RAM, from which
    /// the ranges come later. The rounds are over.
    pub fn leave_last_behind(&mut self) -> Result<(Ranges, Behind)> {
        self.data = self.ram.data()?;
        let written = self.tracker.last_look(&self.data)?;
        let behind = self.left_behind(&written);
        let (ram, data) = (Arc::clone(&self.ram), self.data.clone());
        Ok((behind, Behind { ram, data }))
    }

    fn left_behind(&mut self, written: &Ranges) -> Ranges {
        let mut behind = written.intersection(&self.data);
        behind.union(&self.gone());
        self.brought.subtract(&behind);
        behind
    }

    /// Ranges with memory in the other copy, and no longer in this one.
    fn gone(&self) -> Ranges {
        let mut gone = self.brought.clone();
        gone.subtract(&self.data);
        gone
    }

    fn runs(&mut self, written: &Ranges) -> Vec<Run> {
        let mut runs = Vec::new();
        // Memory that was given back reads as zero, even if the tracker did not notice.
        let gone = self.gone();
        for range in gone.iter() {
            runs.push(Run::Zero(range));
        }
        self.brought.subtract(&gone);
        let written = written.intersection(&self.data);
        self.brought.union(&written);
        runs.extend(bridged(&written, &self.data).into_iter().map(Run::Data));
        runs
    }
}

/// The RAM of a guest that runs elsewhere, or is about to, and part of whose memory is only here. It is no
/// longer written to.
#[derive(Debug, Clone)]
pub struct Behind {
    ram: Arc<Ram>,
    /// Ranges with memory; they do not change.
    data: Ranges,
}

impl Behind {
    /// The RAM of a guest that has left, for a process that takes over from an earlier one.
    pub fn of(ram: &Arc<Ram>) -> Result<Self> {
        Ok(Self {
            ram: Arc::clone(ram),
            data: ram.data()?,
        })
    }

    /// The RAM.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// The content of a range: the runs that answer a request for it.
    pub fn runs(&self, range: Range<u64>) -> Result<Vec<Run>> {
        self.ram.holds(range.clone())?;
        let mut zero = Ranges::from_iter([range]);
        let data = self.data.intersection(&zero);
        zero.subtract(&data);
        let data = bridged(&data, &data).into_iter().map(Run::Data);
        Ok(data.chain(zero.iter().map(Run::Zero)).collect())
    }
}

/// Ranges as runs: single unwritten pages between them are taken along if they are memory, and no run is
/// longer than [`RUN`].
fn bridged(written: &Ranges, data: &Ranges) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in written.iter() {
        match runs.last_mut() {
            Some(last) if range.start - last.end <= PAGE && data.contains(last.end) => last.end = range.end,
            _ => runs.push(range),
        }
    }
    let parts = |run: Range<u64>| {
        let end = run.end;
        let starts = (run.start..end).step_by(RUN as usize);
        starts.map(move |start| start..end.min(start + RUN))
    };
    runs.into_iter().flat_map(parts).collect()
}

/// Other processes that map the file, in words.
pub(crate) fn other_users(ram: &Ram, pid: u32) -> Result<Vec<String>> {
    let file = MappedFile::of(ram.file()).map_err(Error::io("look at the RAM"))?;
    let own = std::process::id();
    let mut others = Vec::new();
    let processes = std::fs::read_dir("/proc").map_err(Error::io("look at the processes"))?;
    let numbers = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for other in numbers.filter(|other: &u32| *other != pid && *other != own) {
        // A process that has ended has no mappings.
        if maps_file(other, file).unwrap_or(false) {
            let name = std::fs::read_to_string(format!("/proc/{other}/comm")).unwrap_or_default();
            others.push(format!("process {other} ({}) maps the RAM, too", name.trim()));
        }
    }
    Ok(others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ram(bytes: u64) -> (tempfile::TempDir, Ram) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = Ram::create(&folder.path().join("ram"), bytes).unwrap();
        (folder, ram)
    }

    #[test]
    fn holes_are_known_and_made() {
        let (_folder, ram) = ram(8 * PAGE);
        assert!(ram.data().unwrap().is_empty());
        ram.write(2 * PAGE, &[7; 3 * PAGE as usize]).unwrap();
        ram.clear(3 * PAGE..4 * PAGE).unwrap();
        let data: Vec<_> = ram.data().unwrap().iter().collect();
        assert_eq!(data, [2 * PAGE..3 * PAGE, 4 * PAGE..5 * PAGE]);
        assert!(ram.write(7 * PAGE, &[0; 2 * PAGE as usize]).is_err());
        assert!(ram.clear(0..9 * PAGE).is_err());
    }

    #[test]
    fn what_was_left_behind_is_data_or_zero() {
        let (_folder, ram) = ram(1024 * PAGE);
        ram.write(2 * PAGE, &vec![7; 600 * PAGE as usize]).unwrap();
        ram.write(700 * PAGE, &[7; PAGE as usize]).unwrap();
        let behind = Behind::of(&Arc::new(ram)).unwrap();
        let pages = |range: Range<u64>| range.start * PAGE..range.end * PAGE;
        let expected = [
            Run::Data(pages(2..258)),
            Run::Data(pages(258..514)),
            Run::Data(pages(514..602)),
            Run::Data(pages(700..701)),
            Run::Zero(pages(1..2)),
            Run::Zero(pages(602..700)),
            Run::Zero(pages(701..702)),
        ];
        assert_eq!(behind.runs(pages(1..702)).unwrap(), expected);
        assert!(behind.runs(pages(1000..1025)).is_err());
    }

    #[test]
    fn a_file_of_a_disk_is_refused() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        match Ram::create(&folder.path().join("ram"), PAGE) {
            Err(Error::Unmovable(reasons)) => assert!(reasons[0].contains("tmpfs"), "{reasons:?}"),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        /// Runs hold all written pages, no unwritten hole, and at most one further page for each.
        #[test]
        fn runs_hold_what_was_written(pages in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..64)) {
            let set = |is_in: &dyn Fn(&(bool, bool)) -> bool| {
                let numbers = (0..).zip(&pages).filter(|(_, page)| is_in(page));
                Ranges::from_iter(numbers.map(|(number, _): (u64, _)| number * PAGE..(number + 1) * PAGE))
            };
            let data = set(&|page| page.0);
            let written = set(&|page| page.0 && page.1);
            let runs = bridged(&written, &data);
            let carried = Ranges::from_iter(runs.iter().cloned());
            let mut missing = written.clone();
            missing.subtract(&carried);
            prop_assert!(missing.is_empty());
            let mut holes = carried.clone();
            holes.subtract(&data);
            prop_assert!(holes.is_empty());
            prop_assert!(carried.bytes() <= 2 * written.bytes());
            prop_assert!(runs.iter().all(|run| run.end - run.start <= RUN));
            prop_assert_eq!(carried.bytes(), runs.iter().map(|run| run.end - run.start).sum::<u64>());
        }
    }
}

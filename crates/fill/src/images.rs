//! What is read of CRIU's images: which tasks there are, which of their pages are lazy, and where their mappings end.
//!
//! An image is two magic numbers (u32, little-endian) and then records, each behind its length (u32). Formats: CRIU's
//! `images/*.proto` and `criu/include/magic.h`, version 4.2.1. A file that a full disk cut off is an error, which names the
//! file and the offset.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use prost::Message;

/// First in every image.
const COMMON_MAGIC: u32 = 0x5456_4319;
const PSTREE_MAGIC: u32 = 0x5027_3030;
const CORE_MAGIC: u32 = 0x5505_3847;
const MM_MAGIC: u32 = 0x5749_2820;
const PAGEMAP_MAGIC: u32 = 0x5608_4025;

/// `enum pagemap flags` of CRIU: the page is left for later.
const PE_LAZY: u32 = 1 << 1;
/// The page is in the images.
const PE_PRESENT: u32 = 1 << 2;

/// `status` of a VMA entry: no mapping, but a range of one in which every access is a fault (`MADV_GUARD_INSTALL`).
const VMA_AREA_GUARD: u32 = 1 << 16;

/// `task_state` of a zombie.
const TASK_DEAD: u32 = 2;

/// No image that is read here is longer, in bytes. The longest is a page map: 20 bytes for each run of pages.
const LONGEST: u64 = 256 << 20;

/// No address of a program lies higher.
const HIGHEST: u64 = 1 << 56;

/// An image that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}, offset {offset}: {what}", path.display())]
pub struct ImageError {
    /// Which file.
    pub path: PathBuf,
    /// Where in it, in bytes.
    pub offset: u64,
    /// What is wrong.
    pub what: String,
}

#[derive(Message)]
struct PstreeEntry {
    #[prost(uint32, required, tag = "1")]
    pid: u32,
}

#[derive(Message)]
struct CoreEntry {
    #[prost(message, optional, tag = "3")]
    tc: Option<TaskCoreEntry>,
}

#[derive(Message)]
struct TaskCoreEntry {
    #[prost(uint32, required, tag = "1")]
    task_state: u32,
}

#[derive(Message)]
struct MmEntry {
    #[prost(message, repeated, tag = "14")]
    vmas: Vec<VmaEntry>,
}

#[derive(Message)]
struct VmaEntry {
    #[prost(uint64, required, tag = "1")]
    start: u64,
    #[prost(uint64, required, tag = "2")]
    end: u64,
    /// CRIU writes it into every entry.
    #[prost(uint32, optional, tag = "7")]
    status: Option<u32>,
    #[prost(uint64, optional, tag = "9")]
    madv: Option<u64>,
}

#[derive(Message)]
struct PagemapEntry {
    #[prost(uint64, required, tag = "1")]
    vaddr: u64,
    #[prost(uint32, optional, tag = "2")]
    compat_nr_pages: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    nr_pages: Option<u64>,
}

/// A mapping of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub range: Range<u64>,
    /// A child that the task forks has what is in it (neither `MADV_WIPEONFORK` nor `MADV_DONTFORK`).
    pub inherited: bool,
}

/// An image that was read, and how far.
struct Image<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Image<'a> {
    fn new(path: &'a Path, bytes: &'a [u8], magic: u32) -> Result<Self, ImageError> {
        let mut image = Self {
            path,
            bytes,
            offset: 0,
        };
        for expected in [COMMON_MAGIC, magic] {
            let found = image.word()?;
            if found != expected {
                image.offset -= 4;
                return Err(image.error(format!(
                    "the magic number is {found:#010x}, not {expected:#010x}: no image of this kind"
                )));
            }
        }
        Ok(image)
    }

    fn error(&self, what: impl Into<String>) -> ImageError {
        ImageError {
            path: self.path.to_owned(),
            offset: self.offset as u64,
            what: what.into(),
        }
    }

    fn word(&mut self) -> Result<u32, ImageError> {
        let Some(bytes) = self.bytes[self.offset..].first_chunk::<4>() else {
            return Err(self.error("the file ends in the middle of a number: it is cut off"));
        };
        self.offset += 4;
        Ok(u32::from_le_bytes(*bytes))
    }

    /// The bytes of the next record; `None` at the end.
    fn record(&mut self) -> Result<Option<&'a [u8]>, ImageError> {
        if self.offset == self.bytes.len() {
            return Ok(None);
        }
        let length = self.word()? as usize;
        let Some(record) = self.bytes[self.offset..].get(..length) else {
            let there = self.bytes.len() - self.offset;
            return Err(self.error(format!(
                "a record of {length} bytes begins, and {there} are there: it is cut off"
            )));
        };
        self.offset += length;
        Ok(Some(record))
    }

    /// The next record, decoded.
    fn next<T: Message + Default>(&mut self) -> Result<Option<T>, ImageError> {
        let Some(record) = self.record()? else {
            return Ok(None);
        };
        let decoded = T::decode(record).map_err(|error| {
            self.offset -= record.len();
            self.error(format!("a malformed record: {error}"))
        })?;
        Ok(Some(decoded))
    }

    /// The one record of an image that has one.
    fn only<T: Message + Default>(&mut self) -> Result<T, ImageError> {
        let only = self
            .next()?
            .ok_or_else(|| self.error("the file ends before its record: it is cut off"))?;
        match self.offset == self.bytes.len() {
            true => Ok(only),
            false => Err(self.error("something follows the only record")),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    let error = |what: String| ImageError {
        path: path.to_owned(),
        offset: 0,
        what,
    };
    let file = File::open(path).map_err(|source| error(format!("cannot be opened: {source}")))?;
    let mut bytes = Vec::new();
    file.take(LONGEST + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| error(format!("cannot be read: {source}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(error(format!("the file is longer than {LONGEST} bytes")));
    }
    Ok(bytes)
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// A range that is whole pages, and not empty.
fn checked(image: &Image<'_>, start: u64, end: Option<u64>) -> Result<Range<u64>, ImageError> {
    let page = page_bytes();
    match end {
        Some(end)
            if start < end && end <= HIGHEST && start.is_multiple_of(page) && end.is_multiple_of(page) =>
        {
            Ok(start..end)
        }
        _ => Err(image.error(format!(
            "the record before has a range from {start:#x} that is no range of pages"
        ))),
    }
}

/// What [`left_to_fill`] makes of the bytes of a page map; `path` is for errors.
pub fn lazy_pages(path: &Path, bytes: &[u8]) -> Result<Vec<Range<u64>>, ImageError> {
    let mut image = Image::new(path, bytes, PAGEMAP_MAGIC)?;
    // The head says where the pages are.
    if image.record()?.is_none() {
        return Err(image.error("the file ends before its head: it is cut off"));
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut before = 0;
    while let Some(entry) = image.next::<PagemapEntry>()? {
        let pages = match (entry.nr_pages, entry.compat_nr_pages) {
            (Some(pages), _) if pages != 0 => pages,
            (_, compat) => compat.unwrap_or(0).into(),
        };
        let end = pages
            .checked_mul(page_bytes())
            .and_then(|bytes| bytes.checked_add(entry.vaddr));
        let range = checked(&image, entry.vaddr, end)?;
        if range.start < before {
            return Err(image.error(format!(
                "the record before begins at {:#x}, below the end of the one before it",
                range.start
            )));
        }
        before = range.end;
        let flags = entry.flags.unwrap_or(0);
        if flags & PE_LAZY == 0 || flags & PE_PRESENT != 0 {
            continue;
        }
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    Ok(ranges)
}

/// What [`mappings`] makes of the bytes of an image; `path` is for errors.
///
/// Guard regions follow all mappings, each within one (CRIU 4.2 and later). CRIU itself puts them back, and no page of them is in a
/// page map; so they are left out.
pub fn mappings_of(path: &Path, bytes: &[u8]) -> Result<Vec<Mapping>, ImageError> {
    let mut image = Image::new(path, bytes, MM_MAGIC)?;
    let mm: MmEntry = image.only()?;
    let is_guard = |vma: &VmaEntry| vma.status.unwrap_or(0) & VMA_AREA_GUARD != 0;
    let mut mappings: Vec<Mapping> = Vec::with_capacity(mm.vmas.len());
    let mut guards = Vec::new();
    for vma in mm.vmas {
        if is_guard(&vma) {
            guards.push(checked(&image, vma.start, Some(vma.end))?);
            continue;
        }
        // The vsyscall page lies above all.
        if vma.start >= HIGHEST {
            continue;
        }
        let range = checked(&image, vma.start, Some(vma.end))?;
        if mappings.last().is_some_and(|last| last.range.end > range.start) {
            return Err(image.error(format!(
                "the mapping at {:#x} begins below the end of the one before it",
                range.start
            )));
        }
        let not_inherited = 1 << libc::MADV_DONTFORK | 1 << libc::MADV_WIPEONFORK;
        mappings.push(Mapping {
            range,
            inherited: vma.madv.unwrap_or(0) & not_inherited == 0,
        });
    }
    for guard in guards {
        if !is_within(&mappings, &guard) {
            return Err(image.error(format!(
                "the guard region at {:#x} lies in no mapping",
                guard.start
            )));
        }
    }
    Ok(mappings)
}

/// Whether ascending mappings that follow each other without a gap have all of a range.
fn is_within(mappings: &[Mapping], range: &Range<u64>) -> bool {
    let first = mappings.partition_point(|mapping| mapping.range.end <= range.start);
    let mut at = range.start;
    for mapping in &mappings[first..] {
        if mapping.range.start > at {
            return false;
        }
        at = mapping.range.end;
        if at >= range.end {
            return true;
        }
    }
    false
}

/// The tasks of a process tree's bytes, zombies among them; `path` is for errors.
pub fn tree_of(path: &Path, bytes: &[u8]) -> Result<Vec<u32>, ImageError> {
    let mut image = Image::new(path, bytes, PSTREE_MAGIC)?;
    let mut pids = Vec::new();
    while let Some(entry) = image.next::<PstreeEntry>()? {
        pids.push(entry.pid);
    }
    if pids.is_empty() {
        return Err(image.error("there is no task in it: it is cut off"));
    }
    Ok(pids)
}

/// Whether the bytes of a task's core image are a zombie's; `path` is for errors.
pub fn is_zombie(path: &Path, bytes: &[u8]) -> Result<bool, ImageError> {
    let mut image = Image::new(path, bytes, CORE_MAGIC)?;
    let core: CoreEntry = image.only()?;
    let state = core.tc.map(|tc| tc.task_state);
    state
        .map(|state| state == TASK_DEAD)
        .ok_or_else(|| image.error("the record before has no state of the task"))
}

/// The ranges of addresses, ascending and in whole pages, that CRIU's page map of task `vpid` has left for later and that
/// are not in the images: what the cache must hold.
pub fn left_to_fill(images: &Path, vpid: u32) -> Result<Vec<Range<u64>>, ImageError> {
    let path = images.join(format!("pagemap-{vpid}.img"));
    lazy_pages(&path, &read(&path)?)
}

/// The mappings of task `vpid`, ascending.
pub fn mappings(images: &Path, vpid: u32) -> Result<Vec<Mapping>, ImageError> {
    let path = images.join(format!("mm-{vpid}.img"));
    mappings_of(&path, &read(&path)?)
}

/// The tasks in the images, by the numbers that they have in their own PID namespace. Zombies have no memory and are left out.
pub fn tasks(images: &Path) -> Result<Vec<u32>, ImageError> {
    let path = images.join("pstree.img");
    let mut with_memory = Vec::new();
    for vpid in tree_of(&path, &read(&path)?)? {
        let core = images.join(format!("core-{vpid}.img"));
        if !is_zombie(&core, &read(&core)?)? {
            with_memory.push(vpid);
        }
    }
    Ok(with_memory)
}

#[cfg(test)]
mod tests;

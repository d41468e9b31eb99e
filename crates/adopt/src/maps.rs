//! The process's own mappings, from `/proc/self/maps` and `/proc/self/smaps` (proc_pid_smaps(5)).

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::error::AdoptError;
use crate::sys::procmap::{Answer, Which, query};
use crate::sys::swap::Attributes;

const MAPS: &str = "/proc/self/maps";
const SMAPS: &str = "/proc/self/smaps";
const BUFFER_BYTES: usize = 64 << 10;

/// Kinds of memory, from `VmFlags`, whose pages do not move: huge TLB, growing down, I/O, raw page frames, not
/// expandable, mixed, watched by the program's own userfaultfd (missing, write-protect, minor), wiped on fork, sealed,
/// shadow stack, droppable, guarded.
const UNMOVABLE: &[&str] = &[
    "ht", "gd", "io", "pf", "de", "mm", "um", "uw", "ui", "wf", "sl", "ss", "dp", "gu",
];

/// The `VmFlags` of memory that children do not have.
const DONT_FORK: &str = "dc";

/// `VmFlags` of private anonymous memory that was told nothing.
const PLAIN_FLAGS: &str = "rd wr mr mw me ac";

/// Identity of the file behind a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// Major and minor number.
    pub device: (u32, u32),
    /// Inode number, 0 for no file.
    pub inode: u64,
}

/// One mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub range: Range<usize>,
    /// Like `rw-p`.
    permissions: String,
    /// Where in the file it starts.
    pub offset: u64,
    /// The file.
    pub file: FileId,
    /// Path or name, empty for none.
    name: String,
    /// `VmFlags` of smaps; empty from maps.
    flags: String,
    /// `ProtectionKey` of smaps.
    protection_key: u32,
}

impl Mapping {
    /// Whether it can be read.
    pub fn readable(&self) -> bool {
        self.permissions.starts_with('r')
    }

    /// Whether it is a shared mapping of that file.
    pub fn is_shared(&self, file: FileId) -> bool {
        self.permissions.ends_with('s') && self.file == file
    }

    /// Whether its pages can be moved: private anonymous memory without peculiarities.
    pub fn movable(&self) -> bool {
        self.permissions == "rw-p"
            && self.file.inode == 0
            && (self.name.is_empty() || self.name == "[heap]" || self.name.starts_with("[anon:"))
            && !self.flags.is_empty()
            && !UNMOVABLE.iter().any(|flag| self.has(flag))
            && self.protection_key == 0
    }

    /// Whether its pages can be moved, and nothing has to be said again to what takes its place.
    pub fn is_plain(&self) -> bool {
        self.movable() && self.attributes() == Attributes::PLAIN
    }

    /// For a mapping that the kernel told without flags, and that is known from elsewhere to have none that matter.
    pub fn assume_plain(&mut self) {
        PLAIN_FLAGS.clone_into(&mut self.flags);
    }

    /// For a mapping of our file, which the kernel gives to no child because we said so.
    pub fn forget_dont_fork(&mut self) {
        let kept: Vec<&str> = self
            .flags
            .split_ascii_whitespace()
            .filter(|flag| *flag != DONT_FORK)
            .collect();
        self.flags = kept.join(" ");
    }

    /// What has to be said again to a mapping that takes its place.
    pub fn attributes(&self) -> Attributes {
        let permission = |index: usize, letter: u8| self.permissions.as_bytes().get(index) == Some(&letter);
        Attributes {
            access: (permission(0, b'r'), permission(1, b'w')),
            locked: (self.has("lo"), self.has("lf")),
            dont_fork: self.has(DONT_FORK),
            dont_dump: self.has("dd"),
            huge: self.has("hg"),
            no_huge: self.has("nh"),
            no_reserve: self.has("nr"),
        }
    }

    /// A line of smaps about it.
    fn note(&mut self, line: &[u8]) {
        let value = |name: &str| {
            let value = line.strip_prefix(name.as_bytes())?;
            Some(String::from_utf8_lossy(value).trim().to_owned())
        };
        if let Some(flags) = value("VmFlags:") {
            self.flags = flags;
        } else if let Some(key) = value("ProtectionKey:") {
            self.protection_key = key.parse().unwrap_or(u32::MAX);
        }
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|have| have == flag)
    }

    /// A header line, like `7f0c-7f0d rw-p 00000000 00:00 0    [heap]`; `None` for any other line.
    fn parse(line: &str) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let (field, after) = rest
                .trim_start()
                .split_once(' ')
                .unwrap_or((rest.trim_start(), ""));
            rest = after;
            (!field.is_empty()).then_some(field)
        };
        let (start, end) = field()?.split_once('-')?;
        let permissions = field()?.to_owned();
        let offset = u64::from_str_radix(field()?, 16).ok()?;
        let (major, minor) = field()?.split_once(':')?;
        let inode = field()?.parse().ok()?;
        Some(Self {
            range: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
            permissions,
            offset,
            file: FileId {
                device: (
                    u32::from_str_radix(major, 16).ok()?,
                    u32::from_str_radix(minor, 16).ok()?,
                ),
                inode,
            },
            name: rest.trim().to_owned(),
            flags: String::new(),
            protection_key: 0,
        })
    }
}

/// The mappings that overlap `range`, with their flags. The kernel walks the page tables of all mappings below.
pub fn overlapping(range: &Range<usize>) -> Result<Vec<Mapping>, AdoptError> {
    read_file(SMAPS, |_, mapping| Wanted::within(range, mapping))
}

/// All mappings below and in `range`, with their flags, and as many again above it: regions that are registered in
/// the order of their addresses do not need a look each.
pub fn as_far_as(range: &Range<usize>) -> Result<Vec<Mapping>, AdoptError> {
    let mut within = 0;
    read_file(SMAPS, |found, mapping| {
        if mapping.range.start < range.end {
            within = found.len() + 1;
        }
        match found.len() < 2 * within {
            true => Wanted::Yes,
            false => Wanted::NoMore,
        }
    })
}

/// All mappings, without flags.
fn all() -> Result<Vec<Mapping>, AdoptError> {
    read_file(MAPS, |_, _| Wanted::Yes)
}

/// All shared mappings of a file, in the order of addresses, without flags.
pub fn shared_of(id: FileId) -> Result<Vec<Mapping>, AdoptError> {
    let failed = |source| AdoptError::Maps { path: MAPS, source };
    let maps = File::open(MAPS).map_err(failed)?;
    let mut found = Vec::new();
    let mut at = 0;
    loop {
        count_one();
        match query(maps.as_fd(), at, Which::NextSharedFile) {
            Ok(Some(answer)) => {
                at = answer.end;
                found.push(Mapping::from(answer));
            }
            Ok(None) => break,
            // The kernel is older than the question.
            Err(Errno::NOTTY | Errno::INVAL) => {
                found = all()?;
                break;
            }
            Err(error) => return Err(failed(error.into())),
        }
    }
    found.retain(|mapping| mapping.is_shared(id));
    Ok(found)
}

/// The mappings that cover `range` without a gap, without flags and names. `None` if there is a gap, or if the kernel
/// cannot be asked for single mappings.
pub fn covering(range: &Range<usize>) -> Option<Vec<Mapping>> {
    let maps = File::open(MAPS).ok()?;
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        count_one();
        let answer = query(maps.as_fd(), at, Which::Covering).ok().flatten()?;
        at = answer.end;
        found.push(Mapping::from(answer));
    }
    Some(found)
}

impl From<Answer> for Mapping {
    fn from(answer: Answer) -> Self {
        let letter = |is: bool, letter: char| if is { letter } else { '-' };
        let (read, write, execute) = answer.access;
        Self {
            range: answer.start..answer.end,
            permissions: [
                letter(read, 'r'),
                letter(write, 'w'),
                letter(execute, 'x'),
                if answer.shared { 's' } else { 'p' },
            ]
            .into_iter()
            .collect(),
            offset: answer.offset,
            file: FileId {
                device: answer.device,
                inode: answer.inode,
            },
            name: String::new(),
            flags: String::new(),
            protection_key: 0,
        }
    }
}

/// Whether a mapping is wanted.
enum Wanted {
    Yes,
    No,
    /// Nor those that follow.
    NoMore,
}

impl Wanted {
    fn within(range: &Range<usize>, mapping: &Mapping) -> Self {
        if mapping.range.start >= range.end {
            Self::NoMore
        } else if mapping.range.end > range.start {
            Self::Yes
        } else {
            Self::No
        }
    }
}

fn read_file(
    path: &'static str,
    wanted: impl FnMut(&[Mapping], &Mapping) -> Wanted,
) -> Result<Vec<Mapping>, AdoptError> {
    File::open(path)
        .and_then(|file| read(BufReader::with_capacity(BUFFER_BYTES, file), wanted))
        .map_err(|source| AdoptError::Maps { path, source })
}

fn read(
    mut lines: impl BufRead,
    mut wanted: impl FnMut(&[Mapping], &Mapping) -> Wanted,
) -> std::io::Result<Vec<Mapping>> {
    let mut found: Vec<Mapping> = Vec::new();
    let mut within = false;
    let mut line = Vec::new();
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok(found);
        }
        let line = line.trim_ascii_end();
        if line.first().is_some_and(u8::is_ascii_uppercase) {
            if let Some(mapping) = found.last_mut().filter(|_| within) {
                mapping.note(line);
            }
            continue;
        }
        count_one();
        // A path may hold any bytes; the rest is ASCII.
        let Some(mapping) = Mapping::parse(&String::from_utf8_lossy(line)) else {
            within = false;
            continue;
        };
        let wanted = wanted(&found, &mapping);
        within = matches!(wanted, Wanted::Yes);
        match wanted {
            Wanted::Yes => found.push(mapping),
            Wanted::No => {}
            Wanted::NoMore => return Ok(found),
        }
    }
}

/// Tests count how many mappings are looked at: it must not grow with what the process has elsewhere.
fn count_one() {
    #[cfg(test)]
    LOOKED_AT.with(|count| count.set(count.get() + 1));
}

#[cfg(test)]
thread_local! {
    pub static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
1000-3000 rw-p 00000000 00:00 0                          [heap]
Rss:                   4 kB
ProtectionKey:         0
VmFlags: rd wr mr mw me ac dc lo
3000-4000 rw-s 00005000 00:1f 77                         /run/verbatim/mem/12 (deleted)
VmFlags: rd wr sh mr mw me ms
4000-5000 rw-p 00000000 00:00 0 
ProtectionKey:         3
VmFlags: rd wr mr mw me ac
5000-6000 r--p 00000000 00:00 0 [anon: with space]
VmFlags: rd mr mw me ac
";

    #[test]
    fn reads_headers_flags_and_keys() {
        let all = read(TEXT.as_bytes(), |_, _| Wanted::Yes).unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!(
            all.iter().map(Mapping::movable).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        let heap = all[0].attributes();
        assert!(heap.dont_fork && heap.locked == (true, false) && !heap.dont_dump && !heap.no_reserve);
        let ours = FileId {
            device: (0, 0x1f),
            inode: 77,
        };
        assert!(all[1].is_shared(ours) && all[1].offset == 0x5000);
        assert_eq!(all[3].name, "[anon: with space]");
    }

    #[test]
    fn stops_after_the_range_and_needs_flags_to_move() {
        let some = read(TEXT.as_bytes(), |_, mapping| {
            Wanted::within(&(0x2000..0x3001), mapping)
        })
        .unwrap();
        assert_eq!(
            some.iter().map(|m| m.range.start).collect::<Vec<_>>(),
            [0x1000, 0x3000]
        );
        let bare = read("1000-3000 rw-p 00000000 00:00 0 \n".as_bytes(), |_, _| {
            Wanted::Yes
        })
        .unwrap();
        assert!(
            !bare[0].movable(),
            "a kernel that hides the flags hides huge pages too"
        );
    }

    #[test]
    fn reads_this_process() {
        let local = 0u8;
        let here = (&raw const local).addr();
        let found = overlapping(&(here..here + 1)).unwrap();
        assert!(found.len() == 1 && found[0].readable() && found[0].has("wr"));
        assert!(all().unwrap().len() > 5);
        let further = as_far_as(&(here..here + 1)).unwrap();
        assert!(further.contains(&found[0]));
    }

    #[test]
    fn the_kernel_tells_the_same_by_address_as_in_text() {
        let boxed = vec![0u8; 1 << 20];
        let here = boxed.as_ptr().addr();
        let Some(asked) = covering(&(here..here + 1)) else {
            eprintln!("skipped: the kernel cannot be asked for a single mapping (Linux 6.11)");
            return;
        };
        let read = overlapping(&(here..here + 1)).unwrap();
        let facts = |mapping: &Mapping| {
            (
                mapping.range.clone(),
                mapping.permissions.clone(),
                mapping.file,
                mapping.offset,
            )
        };
        assert_eq!(
            asked.iter().map(facts).collect::<Vec<_>>(),
            read.iter().map(facts).collect::<Vec<_>>()
        );
        let mut plain = asked[0].clone();
        assert!(!plain.is_plain());
        plain.assume_plain();
        assert!(plain.is_plain());
        assert_eq!(covering(&(0..1)), None);
    }
}

//! The process's own mappings, from `/proc/self/maps` and `/proc/self/smaps` (proc_pid_smaps(5)).

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;

use crate::error::AdoptError;
use crate::sys::swap::Attributes;

const MAPS: &str = "/proc/self/maps";
const SMAPS: &str = "/proc/self/smaps";

/// Kinds of memory, from `VmFlags`, whose pages do not move: huge TLB, growing down, I/O, raw page frames, not
/// expandable, mixed, watched by the program's own userfaultfd (missing, write-protect, minor), wiped on fork, sealed,
/// shadow stack, droppable, guarded.
const UNMOVABLE: &[&str] = &[
    "ht", "gd", "io", "pf", "de", "mm", "um", "uw", "ui", "wf", "sl", "ss", "dp", "gu",
];

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

    /// What has to be said again to a mapping that takes its place.
    pub fn attributes(&self) -> Attributes {
        let permission = |index: usize, letter: u8| self.permissions.as_bytes().get(index) == Some(&letter);
        Attributes {
            access: (permission(0, b'r'), permission(1, b'w')),
            locked: (self.has("lo"), self.has("lf")),
            dont_fork: self.has("dc"),
            dont_dump: self.has("dd"),
            huge: self.has("hg"),
            no_huge: self.has("nh"),
            no_reserve: self.has("nr"),
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

/// The mappings that overlap `range`, with their flags.
pub fn overlapping(range: &Range<usize>) -> Result<Vec<Mapping>, AdoptError> {
    let file = File::open(SMAPS).map_err(|source| AdoptError::Maps { path: SMAPS, source })?;
    read(BufReader::new(file), range).map_err(|source| AdoptError::Maps { path: SMAPS, source })
}

/// All mappings, without flags.
pub fn all() -> Result<Vec<Mapping>, AdoptError> {
    let file = File::open(MAPS).map_err(|source| AdoptError::Maps { path: MAPS, source })?;
    read(BufReader::new(file), &(0..usize::MAX)).map_err(|source| AdoptError::Maps { path: MAPS, source })
}

fn read(mut lines: impl BufRead, range: &Range<usize>) -> std::io::Result<Vec<Mapping>> {
    let mut found: Vec<Mapping> = Vec::new();
    let mut within = false;
    let mut line = Vec::new();
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok(found);
        }
        // A path may hold any bytes; keys, numbers and flags are ASCII.
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches('\n');
        if text.as_bytes().first().is_some_and(u8::is_ascii_uppercase) {
            if let Some(mapping) = found.last_mut().filter(|_| within) {
                if let Some(flags) = text.strip_prefix("VmFlags:") {
                    mapping.flags = flags.trim().to_owned();
                } else if let Some(key) = text.strip_prefix("ProtectionKey:") {
                    mapping.protection_key = key.trim().parse().unwrap_or(u32::MAX);
                }
            }
            continue;
        }
        let Some(mapping) = Mapping::parse(text) else {
            within = false;
            continue;
        };
        if mapping.range.start >= range.end {
            return Ok(found);
        }
        within = mapping.range.end > range.start;
        if within {
            found.push(mapping);
        }
    }
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
        let all = read(TEXT.as_bytes(), &(0..usize::MAX)).unwrap();
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
        let some = read(TEXT.as_bytes(), &(0x2000..0x3001)).unwrap();
        assert_eq!(
            some.iter().map(|m| m.range.start).collect::<Vec<_>>(),
            [0x1000, 0x3000]
        );
        let bare = read("1000-3000 rw-p 00000000 00:00 0 \n".as_bytes(), &(0..usize::MAX)).unwrap();
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
    }
}

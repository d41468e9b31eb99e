//! The mappings of a process (proc_pid_maps(5)).

use std::ops::Range;

use crate::error::Error;

/// A mapping, and what it is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping<'a> {
    pub range: Range<u64>,
    pub is_private: bool,
    pub is_executable: bool,
    /// Where in its file it begins, in bytes.
    pub offset: u64,
    /// The file that is mapped; all zeroes if none is.
    pub file: MappedFile,
    pub name: &'a str,
}

/// Where a mapping is, in memory and in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    pub range: Range<u64>,
    /// Where in its file it begins, in bytes.
    pub offset: u64,
}

impl Mapping<'_> {
    /// Where it is.
    pub fn area(&self) -> Area {
        Area {
            range: self.range.clone(),
            offset: self.offset,
        }
    }
}

/// A file, as `/proc/PID/maps` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MappedFile {
    /// Its device's major number.
    pub major: u32,
    /// Its device's minor number.
    pub minor: u32,
    /// Its inode.
    pub inode: u64,
}

impl MappedFile {
    /// That of a file of tmpfs. (Others may be called otherwise in `/proc/PID/maps` than stat(2) calls them: those of btrfs, or of overlayfs.)
    pub fn of(file: &std::fs::File) -> std::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self {
            major: rustix::fs::major(stat.st_dev),
            minor: rustix::fs::minor(stat.st_dev),
            inode: stat.st_ino,
        })
    }
}

/// Reads `/proc/PID/maps`; empty if the process has no memory (any more).
pub fn read(pid: u32) -> Result<String, Error> {
    let path = format!("/proc/{pid}/maps");
    // Names of files need not be UTF-8.
    let bytes = std::fs::read(path).map_err(Error::io("read the mappings of a process"))?;
    match bytes.is_empty() {
        true => Err(Error::Gone),
        false => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

/// Whether a process maps a file, privately or not.
pub fn maps_file(pid: u32, file: MappedFile) -> Result<bool, Error> {
    Ok(parse(&read(pid)?).any(|mapping| mapping.file == file))
}

/// Whether a process has a mapping whose name begins so.
pub fn names_mapping(pid: u32, prefix: &str) -> Result<bool, Error> {
    Ok(parse(&read(pid)?).any(|mapping| mapping.name.starts_with(prefix)))
}

/// The mappings in it.
pub fn parse(text: &str) -> impl Iterator<Item = Mapping<'_>> {
    text.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = u64::from_str_radix(words.next()?, 16).ok()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let file = MappedFile {
            major: u32::from_str_radix(major, 16).ok()?,
            minor: u32::from_str_radix(minor, 16).ok()?,
            // The last word of a mapping that has no name.
            inode: words.next()?.trim_end().parse().ok()?,
        };
        let name = words.next().unwrap_or_default().trim_start();
        Some(Mapping {
            range: u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?,
            is_private: rights.ends_with('p'),
            is_executable: rights.as_bytes().get(2) == Some(&b'x'),
            offset,
            file,
            name,
        })
    })
}

impl Mapping<'_> {
    /// Whether it is memory of the process alone, without a file: what CRIU can leave out of its images.
    pub fn is_anonymous(&self) -> bool {
        let named = |name: &str| name == "[heap]" || name.starts_with("[stack") || name.starts_with("[anon:");
        self.is_private && (self.name.is_empty() || named(self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_without_a_file_is_found() {
        let text = "\
55a0c0a00000-55a0c0a21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 
7f0000021000-7f0000022000 ---p 00000000 00:00 0 [anon: glibc: malloc]
7f0000100000-7f0000200000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f0000300000-7f0000400000 r-xp 00000000 fe:00 99                         /usr/lib/a b.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
7ffc00030000-7ffc00034000 r--p 00000000 00:00 0                          [vvar]
7ffc00034000-7ffc00036000 r-xp 00000000 00:00 0                          [vdso]
";
        let text = text.replace("[anon: ", "[anon:");
        let all: Vec<_> = parse(&text).collect();
        assert_eq!(all.len(), 8);
        let anonymous: Vec<_> = all.iter().map(Mapping::is_anonymous).collect();
        assert_eq!(anonymous, [true, true, true, false, false, true, false, false]);
        assert_eq!(all[4].name, "/usr/lib/a b.so");
        assert_eq!(all[1].range, 0x7f00_0000_0000..0x7f00_0002_1000);
        assert!(all[7].is_executable && !all[0].is_executable);
        let file = MappedFile {
            major: 0xfe,
            minor: 0,
            inode: 99,
        };
        assert_eq!((all[4].file, all[4].offset), (file, 0));
        assert_eq!(all[1].file, MappedFile::default());
    }
}

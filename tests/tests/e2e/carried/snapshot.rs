//! All that a folder has, looked at without a change.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps};

/// A file, however many names it has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    kind: FileType,
    mode: u32,
    owner: (u32, u32),
    length: u64,
    links: u64,
    /// The first of its names.
    first: PathBuf,
    /// Written and read: seconds and nanoseconds.
    times: [(i64, i64); 2],
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    content: Vec<u8>,
    /// Whether it has holes.
    is_sparse: bool,
}

/// A folder's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot(BTreeMap<PathBuf, File>);

fn open(path: &Path, flags: OFlags) -> anyhow::Result<std::os::fd::OwnedFd> {
    Ok(rustix::fs::openat(
        CWD,
        path,
        flags | OFlags::NOATIME | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// All below `root`, the folder itself as an empty path, folders before what is in them.
pub fn paths(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut all = vec![PathBuf::new()];
    let mut next = 0;
    while let Some(folder) = all.get(next).cloned() {
        next += 1;
        if kind(&stat(&root.join(&folder))?) != FileType::Directory {
            continue;
        }
        for entry in Dir::new(open(&root.join(&folder), OFlags::RDONLY | OFlags::DIRECTORY)?)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                all.push(folder.join(name));
            }
        }
    }
    Ok(all)
}

fn stat(path: &Path) -> anyhow::Result<Stat> {
    // A trailing slash would be followed.
    let path: PathBuf = path.components().collect();
    Ok(rustix::fs::statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn attributes(path: &Path) -> anyhow::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut list = vec![0u8; 1 << 16];
    let length = rustix::fs::llistxattr(path, &mut list[..])?;
    let mut found = BTreeMap::new();
    for name in list[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0u8; 1 << 16];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..])?;
        found.insert(name.to_vec(), value[..length].to_vec());
    }
    Ok(found)
}

/// Where a link leads. That it was read is not noted.
fn target(path: &Path, before: &Stat) -> anyhow::Result<Vec<u8>> {
    let target = std::fs::read_link(path)?;
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: before.st_atime,
            tv_nsec: before.st_atime_nsec as _,
        },
        last_modification: Timespec {
            tv_sec: before.st_mtime,
            tv_nsec: before.st_mtime_nsec as _,
        },
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(target.into_os_string().into_encoded_bytes())
}

impl Snapshot {
    /// That of `root`.
    pub fn of(root: &Path) -> anyhow::Result<Self> {
        let mut found = BTreeMap::new();
        let mut firsts: HashMap<u64, PathBuf> = HashMap::new();
        let mut paths = paths(root)?;
        paths.sort();
        for path in paths {
            let at: PathBuf = root.join(&path).components().collect();
            let stat = stat(&at)?;
            let kind = kind(&stat);
            let content = match kind {
                FileType::RegularFile => {
                    let mut content = Vec::new();
                    let mut file = std::fs::File::from(open(&at, OFlags::RDONLY)?);
                    std::io::Read::read_to_end(&mut file, &mut content)?;
                    content
                }
                FileType::Symlink => target(&at, &stat)?,
                _ => Vec::new(),
            };
            let first = firsts.entry(stat.st_ino).or_insert_with(|| path.clone()).clone();
            let file = File {
                kind,
                mode: stat.st_mode & 0o7777,
                owner: (stat.st_uid, stat.st_gid),
                // That of a folder is its file system's business.
                length: if kind == FileType::Directory {
                    0
                } else {
                    stat.st_size as u64
                },
                links: stat.st_nlink as u64,
                first,
                times: [
                    (stat.st_mtime, stat.st_mtime_nsec as i64),
                    (stat.st_atime, stat.st_atime_nsec as i64),
                ],
                attributes: attributes(&at)?,
                is_sparse: kind == FileType::RegularFile && stat.st_blocks * 512 < stat.st_size,
                content,
            };
            found.insert(path, file);
        }
        Ok(Self(found))
    }

    /// An error that says what differs.
    pub fn must_be(&self, after: &Self) -> anyhow::Result<()> {
        let (before, after) = (&self.0, &after.0);
        let names = |of: &BTreeMap<PathBuf, File>| of.keys().cloned().collect::<Vec<_>>();
        ensure!(
            names(before) == names(after),
            "{:?} became {:?}",
            names(before),
            names(after)
        );
        let short = |file: &File| File {
            content: file.content.iter().take(32).copied().collect(),
            ..file.clone()
        };
        let differing: Vec<_> = before
            .iter()
            .filter(|(path, file)| after[*path] != **file)
            .map(|(path, file)| {
                format!(
                    "{}: {:?} became {:?}",
                    path.display(),
                    short(file),
                    short(&after[path])
                )
            })
            .collect();
        ensure!(differing.is_empty(), "{}", differing.join("\n"));
        Ok(())
    }
}

//! Puts parts of files in their places.
//!
//! A hostile program decides what the parts say: what it had in its folder at the source, in any order, is made here by root. So
//! no path is resolved twice. A part's folder is opened below the root of the folder and through no link (`man 2 openat2`);
//! all else is done to descriptors, or to a plain name in that folder that is not followed if it is a link. Whatever is in the way of
//! what a part names is removed, and never written through; but for sockets, which are this host's own.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::attributes;
use super::pieces::{self, PieceOf};
use super::private_tmpfs::PIECE_BYTES;
use super::stamps::Stamps;
use crate::beneath;
use crate::proto::FilePart;
use crate::proto::file_part::Kind;
use crate::quotas;

/// Writes below one folder, and nowhere else.
#[derive(Debug)]
pub struct Placer {
    root: PathBuf,
    /// The root, once something was placed.
    folder: Option<OwnedFd>,
    open: OpenFiles,
    /// What is zero is written, too: a hole is what has not come.
    writes_zeroes: bool,
    /// A path, and the file elsewhere that has its content.
    elsewhere: Option<(PathBuf, File)>,
    stamps: Stamps,
}

impl Placer {
    /// Files are written below `root`, which exists when the first of them comes.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            folder: None,
            open: OpenFiles::default(),
            writes_zeroes: false,
            elsewhere: None,
            stamps: Stamps::default(),
        }
    }

    /// Nothing is placed for now: no file is open any more. Otherwise tasks that are restored could have no lease on it.
    pub fn let_go(&mut self) {
        self.open = OpenFiles::default();
    }

    /// Gives all files the times that were told of them.
    pub fn stamp(&mut self) -> io::Result<()> {
        self.stamps.give(&self.root)
    }

    /// From now on zeroes take room, and a hole in a file is what never came.
    pub fn writing_zeroes(mut self) -> Self {
        self.write_zeroes();
        self
    }

    /// As [`Self::writing_zeroes`]: what lies in the files keeps its pages.
    pub fn write_zeroes(&mut self) {
        self.writes_zeroes = true;
    }

    /// From now on the content of `path` goes to this file, whose owner and mode stay, and whose length is right.
    pub fn stand_in(&mut self, path: &Path, file: File) {
        self.elsewhere = Some((path.to_owned(), file));
    }

    /// Where what `path` names lies on this host.
    pub fn place_of(&self, path: &[u8]) -> PathBuf {
        let path = Path::new(OsStr::from_bytes(path));
        match self.elsewhere.as_ref().filter(|(from, _)| from == path) {
            Some((_, file)) => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
                .read_link()
                .unwrap_or_default(),
            None => self.root.join(path),
        }
    }

    /// Puts one part in its place and says how many bytes of content it had. `landed` is the content of a part that has it not with
    /// it.
    pub fn place(&mut self, part: &FilePart, landed: Option<&[u8]>) -> io::Result<u64> {
        if part.kind() == Kind::Times {
            for stamp in &part.stamps {
                self.stamps.keep(plain(&stamp.path)?, stamp)?;
            }
            return Ok(0);
        }
        let path = plain(&part.path)?;
        if part.kind() == Kind::File {
            return self.place_data(path, part, landed);
        }
        // What is open keeps its room, also below a folder that is gone.
        self.open.close(path);
        let (folder, name) = match self.folder_of(path) {
            // What it was in was removed before it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && part.kind() == Kind::Removed => {
                return Ok(0);
            }
            found => found?,
        };
        match part.kind() {
            Kind::Directory => {
                match rustix::fs::mkdirat(&folder, name, Mode::RWXU) {
                    Err(Errno::EXIST) if kind(&folder, name)? != Some(FileType::Directory) => {
                        remove(&folder, name, path)?;
                        rustix::fs::mkdirat(&folder, name, Mode::RWXU)?;
                    }
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                let made = beneath::open_any(&folder, name.as_ref(), flags, Mode::empty())?;
                own(&File::from(made), part, Some(part.mode))?;
            }
            Kind::Symlink => {
                let is_it = kind(&folder, name)? == Some(FileType::Symlink)
                    && rustix::fs::readlinkat(&folder, name, Vec::new())?.to_bytes() == part.data;
                if !is_it {
                    remove(&folder, name, path)?;
                    rustix::fs::symlinkat(OsStr::from_bytes(&part.data), &folder, name)?;
                }
                own_by_path(&folder, name, part, None)?;
            }
            Kind::Fifo | Kind::Socket => {
                let made = match part.kind() {
                    Kind::Socket if is_in_root(path) => {
                        return Err(refused(path, "would be a socket of this host's"));
                    }
                    Kind::Socket => FileType::Socket,
                    _ => FileType::Fifo,
                };
                // One that is there already may have further names.
                if kind(&folder, name)? != Some(made) {
                    remove(&folder, name, path)?;
                    rustix::fs::mknodat(&folder, name, made, Mode::RUSR | Mode::WUSR, 0)?;
                }
                own_by_path(&folder, name, part, Some(part.mode))?;
            }
            Kind::Link => self.link(path, plain(&part.data)?, &folder, name)?,
            Kind::Removed => remove(&folder, name, path)?,
            Kind::File | Kind::Times => unreachable!("placed above"),
        }
        Ok(0)
    }

    /// Makes `path`, that is `name` in `folder`, a further name of what is at `to`.
    fn link(&mut self, path: &Path, to: &Path, folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
        let (first_folder, first) = self.folder_of(to)?;
        let inode = |folder: &OwnedFd, name: &OsStr| {
            let metadata = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            Ok::<_, Errno>((metadata.st_dev, metadata.st_ino))
        };
        match kind(&first_folder, first)? {
            None => return Err(refused(to, "names nothing that could have a further name")),
            Some(FileType::Directory) => return Err(refused(to, "is a folder, which has one name")),
            Some(FileType::Socket) if is_in_root(to) => {
                return Err(refused(to, "is a socket of this host's own"));
            }
            Some(_) => {}
        }
        let wanted = inode(&first_folder, first)?;
        if inode(folder, name).is_ok_and(|found| found == wanted) {
            return Ok(());
        }
        remove(folder, name, path)?;
        Ok(rustix::fs::linkat(
            &first_folder,
            first,
            folder,
            name,
            AtFlags::empty(),
        )?)
    }

    fn place_data(&mut self, path: &Path, part: &FilePart, landed: Option<&[u8]>) -> io::Result<u64> {
        let pieces = pieces::of(part, landed)?;
        let elsewhere = self.elsewhere.as_ref().filter(|(from, _)| from == path);
        let file = match elsewhere {
            Some((_, file)) => {
                if file.metadata()?.len() != part.length {
                    return Err(io::Error::other(format!(
                        "{} has another length here",
                        path.display()
                    )));
                }
                file
            }
            None => {
                let file = match self.open.get(path) {
                    Some(file) => file,
                    None => {
                        let file = self.open_file(path)?;
                        self.open.keep(path, file)
                    }
                };
                own(file, part, (part.mode != 0).then_some(part.mode))?;
                if file.metadata()?.len() != part.length {
                    file.set_len(part.length)?;
                }
                file
            }
        };
        let mut bytes = 0;
        for piece in pieces {
            match piece {
                PieceOf::Data(offset, data) => {
                    match self.writes_zeroes {
                        true => write_in_pieces(file, data, offset)?,
                        false => file.write_all_at(data, offset)?,
                    }
                    bytes += data.len() as u64;
                }
                PieceOf::Zeroes(range) if self.writes_zeroes => {
                    bytes += range.end - range.start;
                    write_zeroes(file, range)?;
                }
                PieceOf::Zeroes(range) => {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(file, flags, range.start, range.end - range.start)?;
                    bytes += range.end - range.start;
                }
            }
        }
        Ok(bytes)
    }

    /// The regular file at `path`, which is made if there is none.
    fn open_file(&mut self, path: &Path) -> io::Result<File> {
        let (folder, name) = self.folder_of(path)?;
        let flags = OFlags::RDWR | OFlags::CREATE;
        let mode = Mode::RUSR | Mode::WUSR;
        match beneath::open_any(&folder, name.as_ref(), flags, mode) {
            Ok(file) => {
                let file = File::from(file);
                if file.metadata()?.is_file() {
                    return Ok(file);
                }
            }
            // A link, a folder, a socket.
            Err(Errno::LOOP | Errno::XDEV | Errno::ISDIR | Errno::NXIO) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.open.close(path);
        remove(&folder, name, path)?;
        let file = beneath::open_any(&folder, name.as_ref(), flags | OFlags::EXCL, mode)?;
        Ok(File::from(file))
    }

    /// The folder that `path` is in, which may be the root, and its name there.
    fn folder_of<'p>(&mut self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let root = match &self.folder {
            Some(root) => root,
            None => self.folder.insert(beneath::folder(&self.root)?),
        };
        let name = path.file_name().ok_or_else(|| refused(path, "has no name"))?;
        let within = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match beneath::open_any(root, within, flags, Mode::empty()) {
            Ok(folder) => Ok((folder, name)),
            Err(Errno::LOOP | Errno::NOTDIR | Errno::XDEV) => {
                Err(refused(path, "leads through what is not a folder"))
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

/// As many bytes as fit, each time, into one folio.
fn write_in_pieces(file: &File, mut data: &[u8], mut offset: u64) -> io::Result<()> {
    while !data.is_empty() {
        let room = (PIECE_BYTES - offset % PIECE_BYTES) as usize;
        let (now, later) = data.split_at(room.min(data.len()));
        file.write_all_at(now, offset)?;
        offset += now.len() as u64;
        data = later;
    }
    Ok(())
}

fn write_zeroes(file: &File, range: Range<u64>) -> io::Result<()> {
    static ZEROES: [u8; PIECE_BYTES as usize] = [0; PIECE_BYTES as usize];
    let mut at = range.start;
    while at < range.end {
        let room = (PIECE_BYTES - at % PIECE_BYTES).min(range.end - at);
        file.write_all_at(&ZEROES[..room as usize], at)?;
        at += room;
    }
    Ok(())
}

fn refused(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("the path {path:?} {why}"))
}

/// A path that names something below a folder.
fn plain(path: &[u8]) -> io::Result<&Path> {
    let path = Path::new(OsStr::from_bytes(path));
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    match is_plain && path != Path::new("") {
        true => Ok(path),
        false => Err(refused(path, "is not a plain relative path")),
    }
}

fn owner(part: &FilePart) -> (Option<Uid>, Option<Gid>) {
    (part.uid.map(Uid::from_raw), part.gid.map(Gid::from_raw))
}

/// Gives a file that is open its owner, then its extended attributes, and then its mode: a change of the owner takes capabilities and
/// bits of the mode from it, and an ACL has bits of the mode.
fn own(file: &File, part: &FilePart, mode: Option<u32>) -> io::Result<()> {
    let (uid, gid) = owner(part);
    if uid.is_some() || gid.is_some() {
        rustix::fs::fchown(file, uid, gid)?;
    }
    attribute(file.as_fd(), part)?;
    match mode {
        Some(mode) => file.set_permissions(Permissions::from_mode(mode & 0o7777)),
        None => Ok(()),
    }
}

/// The same for what cannot be opened, or would wait for somebody.
fn own_by_path(folder: &OwnedFd, name: &OsStr, part: &FilePart, mode: Option<u32>) -> io::Result<()> {
    let file = beneath::open_any(folder, name.as_ref(), OFlags::PATH, Mode::empty())?;
    let (uid, gid) = owner(part);
    if uid.is_some() || gid.is_some() {
        rustix::fs::chownat(&file, "", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    attribute(file.as_fd(), part)?;
    match mode {
        // By the descriptor: the path may be another's by now.
        Some(mode) => std::fs::set_permissions(
            format!("/proc/self/fd/{}", file.as_raw_fd()),
            Permissions::from_mode(mode & 0o7777),
        ),
        None => Ok(()),
    }
}

fn attribute(file: BorrowedFd<'_>, part: &FilePart) -> io::Result<()> {
    match &part.attributes {
        Some(attributes) => attributes::write(file, attributes),
        None => Ok(()),
    }
}

/// Sockets there are this host's own.
fn is_in_root(path: &Path) -> bool {
    path.parent() == Some(Path::new(""))
}

/// What kind of file `name` is, itself and not what it leads to; `None` if there is none.
fn kind(folder: &OwnedFd, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(metadata) => Ok(Some(FileType::from_raw_mode(metadata.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Removes whatever `name`, that is `path`, is in the folder, if it is there.
fn remove(folder: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<()> {
    let removed = match kind(folder, name)? {
        None => return Ok(()),
        Some(FileType::Socket) if is_in_root(path) => {
            return Err(refused(path, "is a socket of this host's own"));
        }
        // By the folder's descriptor; below it the standard library goes by descriptors itself.
        Some(FileType::Directory) => {
            let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
            std::fs::remove_dir_all(path.join(name))
        }
        Some(_) => rustix::fs::unlinkat(folder, name, AtFlags::empty()).map_err(io::Error::from),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The files that were written to last, up to [`quotas::PLACED_OPEN`] of them.
#[derive(Debug, Default)]
struct OpenFiles {
    /// With when they were used last.
    files: HashMap<PathBuf, (File, u64)>,
    uses: u64,
}

impl OpenFiles {
    fn get(&mut self, path: &Path) -> Option<&File> {
        self.uses += 1;
        let (file, used) = self.files.get_mut(path)?;
        *used = self.uses;
        Some(file)
    }

    fn keep(&mut self, path: &Path, file: File) -> &File {
        if self.files.len() >= quotas::PLACED_OPEN {
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(path, _)| path.clone()) {
                self.files.remove(&oldest);
            }
        }
        let uses = self.uses;
        &self
            .files
            .entry(path.to_owned())
            .insert_entry((file, uses))
            .into_mut()
            .0
    }

    /// Closes the file at `path`, and what is below it.
    fn close(&mut self, path: &Path) {
        self.files.retain(|open, _| !open.starts_with(path));
    }
}

#[cfg(test)]
mod tests;

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
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::beneath;
use super::pieces::{self, PieceOf};
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
}

impl Placer {
    /// Files are written below `root`, which exists when the first of them comes.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            folder: None,
            open: OpenFiles::default(),
            writes_zeroes: false,
        }
    }

    /// From now on zeroes take room, and a hole in a file is what never came.
    pub fn writing_zeroes(mut self) -> Self {
        self.writes_zeroes = true;
        self
    }

    /// Puts one part in its place and says how many bytes of content it had. `landed` is the content of a part that has it not with
    /// it.
    pub fn place(&mut self, part: &FilePart, landed: Option<&[u8]>) -> io::Result<u64> {
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
                    Err(Errno::EXIST) if !is_folder(&folder, name)? => {
                        remove(&folder, name)?;
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
                remove(&folder, name)?;
                rustix::fs::symlinkat(OsStr::from_bytes(&part.data), &folder, name)?;
                let (uid, gid) = owner(part);
                rustix::fs::chownat(&folder, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Kind::Fifo => {
                remove(&folder, name)?;
                rustix::fs::mknodat(&folder, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
                let made = beneath::open_any(&folder, name.as_ref(), OFlags::RDONLY, Mode::empty())?;
                own(&File::from(made), part, Some(part.mode))?;
            }
            Kind::Removed => remove(&folder, name)?,
            Kind::File => unreachable!("placed above"),
        }
        Ok(0)
    }

    fn place_data(&mut self, path: &Path, part: &FilePart, landed: Option<&[u8]>) -> io::Result<u64> {
        let pieces = pieces::of(part, landed)?;
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
        let mut bytes = 0;
        for piece in pieces {
            match piece {
                PieceOf::Data(offset, data) => {
                    file.write_all_at(data, offset)?;
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
        remove(&folder, name)?;
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

fn write_zeroes(file: &File, range: Range<u64>) -> io::Result<()> {
    const ZEROES: [u8; 64 << 10] = [0; 64 << 10];
    let mut at = range.start;
    while at < range.end {
        let now = (range.end - at).min(ZEROES.len() as u64);
        file.write_all_at(&ZEROES[..now as usize], at)?;
        at += now;
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

/// Gives a file that is open its owner, and then its mode, which a change of the owner takes bits from.
fn own(file: &File, part: &FilePart, mode: Option<u32>) -> io::Result<()> {
    let (uid, gid) = owner(part);
    if uid.is_some() || gid.is_some() {
        rustix::fs::fchown(file, uid, gid)?;
    }
    match mode {
        Some(mode) => file.set_permissions(Permissions::from_mode(mode & 0o7777)),
        None => Ok(()),
    }
}

/// What kind of file `name` is, itself and not what it leads to; `None` if there is none.
fn kind(folder: &OwnedFd, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(metadata) => Ok(Some(FileType::from_raw_mode(metadata.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn is_folder(folder: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    Ok(kind(folder, name)? == Some(FileType::Directory))
}

/// Removes whatever `name` is, if it is there.
fn remove(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    let removed = match kind(folder, name)? {
        None => return Ok(()),
        Some(FileType::Socket) => {
            return Err(refused(Path::new(name), "is a socket of this host's own"));
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
mod tests {
    use super::*;
    use crate::proto::Piece;

    impl Placer {
        /// A part that has its content with it.
        fn put(&mut self, part: &FilePart) -> io::Result<u64> {
            self.place(part, None)
        }
    }

    fn part(path: &str, kind: Kind) -> FilePart {
        FilePart {
            path: path.into(),
            kind: kind.into(),
            mode: 0o640,
            ..FilePart::default()
        }
    }

    #[test]
    fn parts_make_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(folder.path().to_owned());
        placer
            .put(&FilePart {
                mode: 0o750,
                ..part("d", Kind::Directory)
            })
            .unwrap();
        let file = FilePart {
            length: 10,
            ..part("d/f", Kind::File)
        };
        placer
            .put(&FilePart {
                offset: 4,
                data: b"four".as_slice().into(),
                ..file.clone()
            })
            .unwrap();
        placer
            .put(&FilePart {
                offset: 0,
                data: b"zero".as_slice().into(),
                ..file
            })
            .unwrap();
        assert_eq!(std::fs::read(folder.path().join("d/f")).unwrap(), b"zerofour\0\0");
        placer
            .put(&FilePart {
                data: b"d/f".as_slice().into(),
                ..part("l", Kind::Symlink)
            })
            .unwrap();
        assert_eq!(
            std::fs::read_link(folder.path().join("l")).unwrap(),
            Path::new("d/f")
        );
        // Each round sends it anew, as long as it is fresh.
        for _ in 0..2 {
            placer.put(&part("p", Kind::Fifo)).unwrap();
        }
        let fifo = std::fs::symlink_metadata(folder.path().join("p")).unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fifo.file_type()));
        assert_eq!(fifo.permissions().mode() & 0o7777, 0o640);
        for path in ["d", "d/f", "d/f/g"] {
            placer.put(&part(path, Kind::Removed)).unwrap();
        }
        assert!(!folder.path().join("d").exists());
        assert!(placer.open.files.is_empty(), "what is removed keeps no room");
    }

    #[test]
    fn no_path_leads_out() {
        let folder = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(folder.path().to_owned());
        placer
            .put(&FilePart {
                data: b"/tmp".as_slice().into(),
                ..part("out", Kind::Symlink)
            })
            .unwrap();
        for path in ["", "/etc/x", "../x", "a/../../x", "out/x", "."] {
            assert!(placer.put(&part(path, Kind::File)).is_err(), "{path}");
        }
    }

    /// A folder of the host with a file in it, and what both are like.
    struct Outside {
        folder: tempfile::TempDir,
        before: Vec<(u32, u32, Vec<u8>)>,
    }

    impl Outside {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("f"), "the host's").unwrap();
            let before = Self::look(folder.path());
            Self { folder, before }
        }

        fn look(folder: &Path) -> Vec<(u32, u32, Vec<u8>)> {
            use std::os::unix::fs::MetadataExt;
            let names: Vec<_> = std::fs::read_dir(folder)
                .unwrap()
                .map(|e| e.unwrap().path())
                .collect();
            let all = names.iter().map(PathBuf::as_path).chain([folder]);
            let look = |path: &Path| {
                let metadata = std::fs::symlink_metadata(path).unwrap();
                (
                    metadata.mode(),
                    metadata.uid(),
                    std::fs::read(path).unwrap_or_default(),
                )
            };
            all.map(look).collect()
        }

        fn link(&self, path: &str, to: &str) -> FilePart {
            let to = self.folder.path().join(to);
            FilePart {
                data: to.as_os_str().as_bytes().to_vec().into(),
                ..part(path, Kind::Symlink)
            }
        }

        fn must_be_as_before(&self, what: &str) {
            assert_eq!(Self::look(self.folder.path()), self.before, "{what}");
        }
    }

    #[test]
    fn no_sequence_of_parts_reaches_the_host() {
        // Only root may give files away.
        let uid = rustix::process::geteuid();
        let uid = if uid.is_root() { 1 } else { uid.as_raw() };
        let own = |part: FilePart| FilePart {
            mode: 0o7777,
            uid: Some(uid),
            length: 3,
            ..part
        };
        let file = |path: &str| FilePart {
            data: b"new".as_slice().into(),
            ..own(part(path, Kind::File))
        };
        let folder = |path: &str| own(part(path, Kind::Directory));
        let outside = Outside::new();
        let sequences = [
            (
                "a link, then a folder",
                vec![outside.link("a", ""), folder("a"), file("a/f")],
            ),
            ("a link, then a file", vec![outside.link("a", "f"), file("a")]),
            (
                "a link to nothing, then a file",
                vec![outside.link("a", "new"), file("a")],
            ),
            (
                "a link, then a FIFO",
                vec![outside.link("a", "f"), own(part("a", Kind::Fifo))],
            ),
            (
                "a link, then a link",
                vec![outside.link("a", ""), own(outside.link("a", "f"))],
            ),
            (
                "a link, then nothing",
                vec![outside.link("a", ""), part("a", Kind::Removed)],
            ),
            ("a FIFO, then a file", vec![own(part("a", Kind::Fifo)), file("a")]),
            (
                "a FIFO, then a folder",
                vec![own(part("a", Kind::Fifo)), folder("a")],
            ),
            (
                "a file, then a link",
                vec![file("a"), outside.link("a", "f"), file("a")],
            ),
            ("a file, then a folder", vec![file("a"), folder("a"), file("a/f")]),
            (
                "a folder, then a file",
                vec![folder("a"), file("a/f"), file("a"), folder("a")],
            ),
            (
                "a folder that becomes a link, with a file open in it",
                vec![
                    folder("a"),
                    file("a/f"),
                    part("a", Kind::Removed),
                    outside.link("a", ""),
                    file("a/f"),
                ],
            ),
            (
                "deep",
                vec![
                    folder("a"),
                    folder("a/b"),
                    outside.link("a/b/c", ""),
                    folder("a/b/c"),
                    file("a/b/c/f"),
                ],
            ),
            (
                "through a link",
                vec![
                    outside.link("a", ""),
                    file("a/f"),
                    folder("a/d"),
                    part("a/f", Kind::Removed),
                ],
            ),
        ];
        for (what, parts) in sequences {
            let root = tempfile::tempdir().unwrap();
            let mut placer = Placer::new(root.path().to_owned());
            for part in parts {
                let placed = placer.put(&part);
                outside.must_be_as_before(what);
                // Whatever was in the way: it is what the part says now, or the part is refused.
                let path = root.path().join(OsStr::from_bytes(&part.path));
                let found = std::fs::symlink_metadata(&path).map(|metadata| metadata.file_type());
                let is_due = match part.kind() {
                    Kind::File => found.as_ref().is_ok_and(std::fs::FileType::is_file),
                    Kind::Directory => found.as_ref().is_ok_and(std::fs::FileType::is_dir),
                    Kind::Symlink => found.as_ref().is_ok_and(std::fs::FileType::is_symlink),
                    Kind::Fifo => found.as_ref().is_ok_and(std::os::unix::fs::FileTypeExt::is_fifo),
                    Kind::Removed => found.is_err(),
                };
                let through_a_link = what == "through a link" && part.path != b"a"
                    || what.starts_with("a folder that becomes a link") && placed.is_err();
                assert_eq!(placed.is_ok(), !through_a_link, "{what}: {placed:?}");
                assert!(is_due || placed.is_err(), "{what}: {part:?}");
            }
        }
    }

    #[test]
    fn a_socket_of_the_host_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(root.path().join("agent.sock")).unwrap();
        let mut placer = Placer::new(root.path().to_owned());
        for kind in [
            Kind::File,
            Kind::Directory,
            Kind::Symlink,
            Kind::Fifo,
            Kind::Removed,
        ] {
            assert!(placer.put(&part("agent.sock", kind)).is_err(), "{kind:?}");
        }
        let found = std::fs::symlink_metadata(root.path().join("agent.sock")).unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()));
    }

    #[test]
    fn names_are_bytes() {
        let root = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(root.path().to_owned());
        let name = OsStr::from_bytes(b"caf\xe9");
        let file = FilePart {
            path: name.as_bytes().to_vec(),
            length: 1,
            data: b"x".as_slice().into(),
            ..FilePart::default()
        };
        placer.put(&file).unwrap();
        let link = FilePart {
            data: name.as_bytes().to_vec().into(),
            ..part("l", Kind::Symlink)
        };
        placer.put(&link).unwrap();
        assert_eq!(std::fs::read(root.path().join(name)).unwrap(), b"x");
        assert_eq!(
            std::fs::read_link(root.path().join("l")).unwrap(),
            Path::new(name)
        );
    }

    #[test]
    fn few_files_are_kept_open() {
        let root = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(root.path().to_owned());
        let files = quotas::PLACED_OPEN * 3;
        for round in 0..2 {
            for number in 0..files {
                let file = FilePart {
                    offset: round,
                    length: 2,
                    data: vec![b'0' + round as u8].into(),
                    ..part(&number.to_string(), Kind::File)
                };
                placer.put(&file).unwrap();
                assert!(placer.open.files.len() <= quotas::PLACED_OPEN);
            }
        }
        for number in 0..files {
            assert_eq!(
                std::fs::read(root.path().join(number.to_string())).unwrap(),
                b"01"
            );
        }
    }

    #[test]
    fn pieces_are_put_where_they_belong_and_zeroes_punched() {
        let root = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(root.path().to_owned());
        let whole = FilePart {
            data: vec![1; 5 * 4096].into(),
            length: 5 * 4096,
            ..part("f", Kind::File)
        };
        placer.put(&whole).unwrap();
        let piece = |offset, length, zeroes| Piece {
            offset,
            length,
            zeroes,
        };
        let changes = FilePart {
            pieces: vec![
                piece(0, 2, false),
                piece(4096, 8192, true),
                piece(4 * 4096, 3, false),
            ],
            data: b"abcde".as_slice().into(),
            length: 5 * 4096,
            ..part("f", Kind::File)
        };
        assert_eq!(placer.put(&changes).unwrap(), 2 + 8192 + 3);
        let mut wanted = vec![1; 5 * 4096];
        wanted[..2].copy_from_slice(b"ab");
        wanted[4096..3 * 4096].fill(0);
        wanted[4 * 4096..][..3].copy_from_slice(b"cde");
        let file = File::open(root.path().join("f")).unwrap();
        assert!(std::fs::read(root.path().join("f")).unwrap() == wanted);
        let hole = |file: &File| rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0)).unwrap();
        assert_eq!(hole(&file), 4096, "zeroes take no room");
        let mut placer = Placer::new(root.path().to_owned()).writing_zeroes();
        placer.put(&changes).unwrap();
        assert!(std::fs::read(root.path().join("f")).unwrap() == wanted);
        assert_eq!(hole(&file), 5 * 4096, "a hole is what never came");
        assert!(
            placer.place(&changes, Some(b"abcde")).is_err(),
            "it has not landed"
        );
    }
}

//! Puts parts of files in their places.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::proto::FilePart;
use crate::proto::file_part::Kind;

/// Writes below one folder, and nowhere else.
#[derive(Debug)]
pub struct Placer {
    root: PathBuf,
    open: HashMap<String, File>,
}

impl Placer {
    /// Files are written below `root`, which exists.
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            open: HashMap::new(),
        }
    }

    /// Puts one part in its place and says how many bytes of content it had.
    pub fn place(&mut self, part: &FilePart) -> io::Result<u64> {
        let target = self.target(&part.path)?;
        if part.kind() == Kind::File {
            return self.place_data(&target, part);
        }
        self.open.remove(&part.path);
        if part.kind() == Kind::Removed {
            // What is open keeps its room, also below a folder that is gone.
            self.open
                .retain(|path, _| !Path::new(path).starts_with(&part.path));
        }
        match part.kind() {
            Kind::Directory => {
                match std::fs::create_dir(&target) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                    _ => {}
                }
                std::os::unix::fs::lchown(&target, part.uid, part.gid)?;
                std::fs::set_permissions(&target, Permissions::from_mode(part.mode))?;
            }
            Kind::Symlink => {
                remove(&target)?;
                let to = String::from_utf8_lossy(&part.data).into_owned();
                std::os::unix::fs::symlink(to, &target)?;
                std::os::unix::fs::lchown(&target, part.uid, part.gid)?;
            }
            Kind::Fifo => {
                remove(&target)?;
                let mode = Mode::from_raw_mode(part.mode);
                mknodat(CWD, &target, FileType::Fifo, mode, 0)?;
                std::os::unix::fs::lchown(&target, part.uid, part.gid)?;
                // What the agent's own file creation mask has taken away.
                std::fs::set_permissions(&target, Permissions::from_mode(part.mode))?;
            }
            Kind::Removed => remove(&target)?,
            Kind::File => unreachable!("placed above"),
        }
        Ok(0)
    }

    fn place_data(&mut self, target: &Path, part: &FilePart) -> io::Result<u64> {
        if !self.open.contains_key(&part.path) {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(target)?;
            self.open.insert(part.path.clone(), file);
        }
        let file = &self.open[&part.path];
        if part.uid.is_some() || part.gid.is_some() {
            std::os::unix::fs::fchown(file, part.uid, part.gid)?;
        }
        if part.mode != 0 {
            file.set_permissions(Permissions::from_mode(part.mode))?;
        }
        if file.metadata()?.len() != part.length {
            file.set_len(part.length)?;
        }
        file.write_all_at(&part.data, part.offset)?;
        Ok(part.data.len() as u64)
    }

    /// The place of a relative path, which may not lead out of the folder.
    fn target(&self, path: &str) -> io::Result<PathBuf> {
        let refused =
            |why: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("the path {path:?} {why}"));
        let relative = Path::new(path);
        if path.is_empty()
            || !relative
                .components()
                .all(|part| matches!(part, Component::Normal(_)))
        {
            return Err(refused("is not a plain relative path"));
        }
        let mut target = self.root.clone();
        for component in relative.parent().into_iter().flat_map(Path::components) {
            target.push(component);
            let kind = std::fs::symlink_metadata(&target).map(|metadata| metadata.file_type());
            if kind.is_ok_and(|kind| kind.is_symlink()) {
                return Err(refused("leads through a symbolic link"));
            }
        }
        Ok(self.root.join(relative))
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(path: &str, kind: Kind) -> FilePart {
        FilePart {
            path: path.to_owned(),
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
            .place(&FilePart {
                mode: 0o750,
                ..part("d", Kind::Directory)
            })
            .unwrap();
        let file = FilePart {
            length: 10,
            ..part("d/f", Kind::File)
        };
        placer
            .place(&FilePart {
                offset: 4,
                data: b"four".as_slice().into(),
                ..file.clone()
            })
            .unwrap();
        placer
            .place(&FilePart {
                offset: 0,
                data: b"zero".as_slice().into(),
                ..file
            })
            .unwrap();
        assert_eq!(std::fs::read(folder.path().join("d/f")).unwrap(), b"zerofour\0\0");
        placer
            .place(&FilePart {
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
            placer.place(&part("p", Kind::Fifo)).unwrap();
        }
        let fifo = std::fs::symlink_metadata(folder.path().join("p")).unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fifo.file_type()));
        assert_eq!(fifo.permissions().mode() & 0o7777, 0o640);
        placer.place(&part("d", Kind::Removed)).unwrap();
        assert!(!folder.path().join("d").exists());
        assert!(placer.open.is_empty(), "what is removed keeps no room");
    }

    #[test]
    fn no_path_leads_out() {
        let folder = tempfile::tempdir().unwrap();
        let mut placer = Placer::new(folder.path().to_owned());
        placer
            .place(&FilePart {
                data: b"/tmp".as_slice().into(),
                ..part("out", Kind::Symlink)
            })
            .unwrap();
        for path in ["", "/etc/x", "../x", "a/../../x", "out/x", "."] {
            assert!(placer.place(&part(path, Kind::File)).is_err(), "{path}");
        }
        // A link in the place of the file itself is not followed either.
        assert!(placer.place(&part("out", Kind::File)).is_err());
    }
}

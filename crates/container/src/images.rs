//! What CRIU's images say of files: those that must be where the container is restored.
//!
//! `files.img` has an entry for each open file, working directory and mapped file (`images/fdinfo.proto`, `images/regfile.proto`), and
//! `remap-fpath.img` says which of them CRIU makes by itself. CRIU opens all others by their names, and refuses one of another length
//! (`criu/files-reg.c`, `validate_file`).

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::needed_file::NeededFile;
use crate::proxy::wire::{self, Malformed};

/// Before the first message: one magic number for all images, and one for this kind.
const HEAD_BYTES: usize = 8;

/// Longer images are not looked at: a file takes some hundred bytes.
const MOST_BYTES: u64 = 16 << 20;

/// Folders of which a container has its own, which move along or are made where it arrives.
const OWN: [&str; 5] = ["/dev", "/proc", "/run", "/sys", "/tmp"];

/// The images that say it, as they were read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileImages {
    files: Vec<u8>,
    remaps: Vec<u8>,
}

impl FileImages {
    /// Reads them from a folder of images.
    pub fn read(images: &Path) -> io::Result<Self> {
        Ok(Self {
            files: read(&images.join("files.img"))?,
            remaps: match read(&images.join("remap-fpath.img")) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                remaps => remaps?,
            },
        })
    }

    /// The files, each once.
    pub fn needed(&self) -> io::Result<Vec<NeededFile>> {
        self.parse().map_err(|Malformed| {
            io::Error::new(io::ErrorKind::InvalidData, "CRIU's images of files are malformed")
        })
    }

    fn parse(&self) -> Result<Vec<NeededFile>, Malformed> {
        let mut made = HashSet::new();
        for remap in messages(&self.remaps) {
            let remap = remap?;
            made.extend(wire::find_varint(remap, 1)?);
            made.extend(wire::find_varint(remap, 2)?);
        }
        let mut needed: BTreeMap<PathBuf, Option<u64>> = BTreeMap::new();
        for entry in messages(&self.files) {
            let Some(file) = wire::find_bytes(entry?, 3)? else {
                continue;
            };
            let Some((path, size)) = regular(file, &made)? else {
                continue;
            };
            let known = needed.entry(path).or_insert(size);
            // Written to by one of its descriptors is enough.
            *known = known.and(size);
        }
        let needed = needed.into_iter();
        Ok(needed.map(|(path, size)| NeededFile { path, size }).collect())
    }
}

/// A regular file that lies where the container has nothing of its own, and its length, if that stays.
fn regular(file: &[u8], made: &HashSet<u64>) -> Result<Option<(PathBuf, Option<u64>)>, Malformed> {
    let number = |field| wire::find_varint(file, field);
    let id = number(1)?.ok_or(Malformed)?;
    let mode = number(10)?;
    let is_regular = mode.is_none_or(|mode| mode & u64::from(libc::S_IFMT) == u64::from(libc::S_IFREG));
    let is_external = number(9)?.is_some_and(|external| external != 0);
    let name = wire::find_bytes(file, 6)?.ok_or(Malformed)?;
    let path = Path::new("/").join(OsStr::from_bytes(name));
    let is_own = path == Path::new("/") || OWN.iter().any(|own| path.starts_with(own));
    if !is_regular || is_external || is_own || made.contains(&id) {
        return Ok(None);
    }
    // The access mode is in the two lowest bits, 0 for reading (`O_ACCMODE`).
    let is_read = number(2)?.is_some_and(|flags| flags & 3 == 0);
    Ok(Some((path, number(8)?.filter(|_| is_read))))
}

/// The messages of an image; each with its length before it.
fn messages(image: &[u8]) -> impl Iterator<Item = Result<&[u8], Malformed>> {
    let mut rest = image.get(HEAD_BYTES..).unwrap_or_default();
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let next = rest.split_first_chunk::<4>().and_then(|(length, after)| {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            after.split_at_checked(length)
        });
        let Some((message, after)) = next else {
            rest = &[];
            return Some(Err(Malformed));
        };
        rest = after;
        Some(Ok(message))
    })
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MOST_BYTES {
        true => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "it has too many open files",
        )),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut image = vec![0x19, 0x43, 0x56, 0x54, 0x11, 0x22, 0x33, 0x44];
        for message in messages {
            image.extend_from_slice(&(message.len() as u32).to_le_bytes());
            image.extend_from_slice(message);
        }
        image
    }

    fn file(id: u64, flags: u64, name: &str, size: u64, mode: u32) -> Vec<u8> {
        let mut regular = Vec::new();
        wire::put_varint(&mut regular, 1, id);
        wire::put_varint(&mut regular, 2, flags);
        wire::put_bytes(&mut regular, 6, name.as_bytes());
        wire::put_varint(&mut regular, 8, size);
        wire::put_varint(&mut regular, 10, mode.into());
        let mut entry = Vec::new();
        wire::put_varint(&mut entry, 1, 1);
        wire::put_varint(&mut entry, 2, id);
        wire::put_bytes(&mut entry, 3, &regular);
        entry
    }

    #[test]
    fn files_of_the_root_file_system_are_needed_once_and_by_their_length_if_they_are_only_read() {
        let regular = libc::S_IFREG | 0o644;
        let mut socket = Vec::new();
        wire::put_varint(&mut socket, 1, 4);
        let mut remap = Vec::new();
        wire::put_varint(&mut remap, 1, 6);
        wire::put_varint(&mut remap, 2, 9);
        let images = FileImages {
            files: image(&[
                file(1, 0, "/usr/lib/x.so", 700, regular),
                file(2, 0, "/usr/lib/x.so", 700, regular),
                file(3, 2, "/var/log/x", 9, regular),
                file(4, 0, "/var/log/x", 9, regular),
                file(5, 0, "/", 4096, libc::S_IFDIR | 0o755),
                file(6, 0, "/srv/deleted", 5, regular),
                file(7, 0, "/tmp/own", 5, regular),
                file(8, 0, "/runaway", 5, regular),
                socket,
            ]),
            remaps: image(&[remap]),
        };
        let needed = images.needed().unwrap();
        let seen: Vec<_> = needed
            .iter()
            .map(|file| (file.path.to_str().unwrap(), file.size))
            .collect();
        assert_eq!(
            seen,
            [
                ("/runaway", Some(5)),
                ("/usr/lib/x.so", Some(700)),
                ("/var/log/x", None)
            ]
        );
    }

    #[test]
    fn an_image_that_is_cut_off_is_an_error() {
        let mut files = image(&[file(1, 0, "/x", 1, libc::S_IFREG)]);
        files.pop();
        let images = FileImages {
            files,
            remaps: Vec::new(),
        };
        assert!(images.needed().is_err());
        assert_eq!(FileImages::default().needed().unwrap(), Vec::new());
    }
}

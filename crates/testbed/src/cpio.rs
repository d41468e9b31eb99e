//! Writing an archive that the kernel takes as an initial RAM disk: the `newc` format of the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_755;

/// An archive that is being written.
pub(crate) struct Archive<W> {
    to: W,
    /// Each entry has one of its own, or the kernel takes two for links to one file.
    inode: u32,
    directories: Vec<String>,
}

impl<W: Write> Archive<W> {
    pub fn new(to: W) -> Self {
        Self {
            to,
            inode: 0,
            directories: Vec::new(),
        }
    }

    /// An empty folder. `path` is relative to the root; its parents are made too, each once.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let folder = &path[..end];
            if !folder.is_empty() && !self.directories.iter().any(|made| made == folder) {
                self.entry(folder, DIRECTORY, &[])?;
                self.directories.push(folder.to_owned());
            }
        }
        Ok(())
    }

    /// A file that anybody may run, with its folders.
    pub fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.parent(path)?;
        self.entry(path, FILE, content)
    }

    /// The end, without which the kernel calls the archive broken.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn parent(&mut self, path: &str) -> io::Result<()> {
        match path.rsplit_once('/') {
            Some((folder, _)) => self.directory(folder),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let too_long = |_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path} is too large for cpio"),
            )
        };
        let size = u32::try_from(content.len()).map_err(too_long)?;
        let name = u32::try_from(path.len() + 1).map_err(too_long)?;
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0];
        self.inode += 1;
        write!(self.to, "070701")?;
        for field in fields {
            write!(self.to, "{field:08X}")?;
        }
        // The name starts at 110; it and the content are padded to a multiple of four.
        write!(self.to, "{path}\0")?;
        self.pad(110 + path.len() + 1)?;
        self.to.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, length: usize) -> io::Result<()> {
        self.to.write_all(&[0; 3][..length.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an archive back: names, modes and contents.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * index..14 + 8 * index]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6) as usize, field(11) as usize);
            let path = String::from_utf8(bytes[110..110 + name - 1].to_vec()).unwrap();
            let start = (110 + name).next_multiple_of(4);
            entries.push((path.clone(), mode, bytes[start..start + size].to_vec()));
            bytes = &bytes[(start + size).next_multiple_of(4)..];
            if path == "TRAILER!!!" {
                assert!(bytes.is_empty());
                return entries;
            }
        }
    }

    #[test]
    fn what_goes_in_comes_out_aligned() {
        let mut archive = Archive::new(Vec::new());
        archive.file("init", b"odd").unwrap();
        archive.file("a/b/file", b"12345678").unwrap();
        let entries = entries(&archive.finish().unwrap());
        let names: Vec<_> = entries
            .iter()
            .map(|(name, mode, _)| (name.as_str(), *mode))
            .collect();
        assert_eq!(
            names,
            [
                ("init", FILE),
                ("a", DIRECTORY),
                ("a/b", DIRECTORY),
                ("a/b/file", FILE),
                ("TRAILER!!!", 0)
            ]
        );
        assert_eq!(entries[0].2, b"odd");
        assert_eq!(entries[3].2, b"12345678");
    }
}

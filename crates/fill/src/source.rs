//! The cache file of a task: one sparse file whose offsets are the task's addresses at the time of the dump.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use crate::sys::window::Window;

/// Bytes that are mapped at once.
const WINDOW: u64 = 64 << 20;

/// It, and what is mapped of it.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    windows: BTreeMap<u64, Window>,
}

impl Source {
    /// The file named `vpid` in folder `cache`.
    pub fn open(cache: &Path, vpid: u32) -> Result<Self, String> {
        let path = cache.join(vpid.to_string());
        // Written to only to punch holes.
        let file = File::options().read(true).write(true).open(&path);
        Ok(Self {
            file: file.map_err(|error| format!("the cache {} cannot be opened: {error}", path.display()))?,
            path,
            windows: BTreeMap::new(),
        })
    }

    /// The file has all of `range`: pages of zeros are written, too, so that a hole is a page that is missing.
    pub fn check(&self, range: &Range<u64>) -> Result<(), String> {
        let missing = |at: u64| {
            format!(
                "the cache {} lacks the page at {at:#x}, which CRIU's page map has left for later; every such page must be in \
                 the cache, those of zeros, too",
                self.path.display()
            )
        };
        match seek(&self.file, SeekFrom::Hole(range.start)) {
            Ok(hole) if hole >= range.end => Ok(()),
            Ok(hole) => Err(missing(hole)),
            // Behind the end of the file.
            Err(Errno::NXIO) => Err(missing(range.start)),
            Err(errno) => Err(format!(
                "the cache {} cannot be searched: {errno}",
                self.path.display()
            )),
        }
    }

    fn window(&mut self, at: u64) -> io::Result<&Window> {
        let start = at / WINDOW * WINDOW;
        if !self.windows.contains_key(&start) {
            let mut window = Window::new(&self.file, start, WINDOW as usize);
            if window.is_err() {
                // A process has no more than so many mappings.
                self.windows.clear();
                window = Window::new(&self.file, start, WINDOW as usize);
            }
            self.windows.insert(start, window?);
        }
        Ok(&self.windows[&start])
    }

    /// Where in this process the content at `origin` is, ready to be copied, and how much of the `bytes` wanted lies
    /// there in one piece.
    pub fn content(&mut self, origin: u64, bytes: u64) -> io::Result<(usize, u64)> {
        let offset = origin % WINDOW;
        let bytes = bytes.min(WINDOW - offset);
        let window = self.window(origin)?;
        window.populate(offset as usize, bytes as usize);
        Ok((window.address(offset as usize), bytes))
    }

    /// Maps all that is there.
    pub fn prepare(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.size();
        let mut at = 0;
        while at < length {
            at = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let end = seek(&self.file, SeekFrom::Hole(at))?;
            while at < end {
                let (_, bytes) = self.content(at, end - at)?;
                at += bytes;
            }
        }
        Ok(())
    }

    /// Gives the memory of `range` back.
    pub fn punch(&self, range: &Range<u64>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(
            &self.file,
            flags,
            range.start,
            range.end - range.start,
        )?)
    }
}

/// `done` without `needed`, which is ascending: what may be given back. Neighbours become one range.
pub fn punchable(mut done: Vec<Range<u64>>, needed: &[Range<u64>]) -> Vec<Range<u64>> {
    done.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in done {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    let mut free = Vec::new();
    let mut needed = needed.iter().peekable();
    // What earlier ranges that are needed cover: they may overlap each other.
    let mut covered = 0;
    for range in merged {
        let mut at = range.start.max(covered);
        while let Some(next) = needed.peek().filter(|next| next.start < range.end) {
            if at < next.start {
                free.push(at..next.start);
            }
            covered = covered.max(next.end);
            at = at.max(covered);
            needed.next();
        }
        if at < range.end {
            free.push(at..range.end);
        }
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    #[test]
    fn what_is_needed_is_never_given_back() {
        for seed in 0..2000 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut ranges = |many| -> Vec<Range<u64>> {
                let range = |_| {
                    let start = random.random_range(0..60);
                    start..random.random_range(start + 1..=64)
                };
                (0..many).map(range).collect()
            };
            let (done, mut needed) = (ranges(5), ranges(4));
            needed.sort_unstable_by_key(|range| range.start);
            let expected: Vec<u64> = (0..64)
                .filter(|page| done.iter().any(|range| range.contains(page)))
                .filter(|page| !needed.iter().any(|range| range.contains(page)))
                .collect();
            let free: Vec<u64> = punchable(done, &needed).into_iter().flatten().collect();
            assert_eq!(free, expected, "seed {seed}");
        }
    }

    #[test]
    fn a_hole_is_a_missing_page() {
        let folder = tempfile::tempdir().unwrap();
        let page = rustix::param::page_size() as u64;
        let file = File::create(folder.path().join("5")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![0; 3 * page as usize], page).unwrap();
        let source = Source::open(folder.path(), 5).unwrap();
        assert_eq!(source.check(&(page..4 * page)), Ok(()));
        assert!(
            source
                .check(&(0..2 * page))
                .unwrap_err()
                .contains("lacks the page at 0x0")
        );
        assert!(
            source
                .check(&(3 * page..5 * page))
                .unwrap_err()
                .contains("lacks the page")
        );
        assert!(
            source
                .check(&(8 * page..9 * page))
                .unwrap_err()
                .contains("lacks the page")
        );
        assert!(
            Source::open(folder.path(), 6)
                .unwrap_err()
                .contains("cannot be opened")
        );
    }
}

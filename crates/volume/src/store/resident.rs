//! Parts of a file that are in the page cache.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of the file that are mapped at a time.
const WINDOW: u64 = 1 << 30;

/// Most bytes of one part.
const PIECE: u64 = 256 << 10;

/// Calls `what` with each part of the first `length` bytes that is in the page cache, at most [`PIECE`] at a
/// time, until one call fails.
pub fn for_each(
    file: &File,
    length: u64,
    mut what: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let page = rustix::param::page_size() as u64;
    for start in (0..length).step_by(WINDOW as usize) {
        let end = length.min(start + WINDOW);
        let pages = pages(file, start, end - start)?;
        let mut offset = start;
        for part in pages.chunk_by(|one, other| one == other) {
            let behind = end.min(offset + part.len() as u64 * page);
            if part[0] {
                for piece in (offset..behind).step_by(PIECE as usize) {
                    what(piece, PIECE.min(behind - piece))?;
                }
            }
            offset = behind;
        }
    }
    Ok(())
}

/// Whether each page is in the page cache (mincore(2)).
fn pages(file: &File, start: u64, length: u64) -> io::Result<Vec<bool>> {
    let length = length as usize;
    let page = rustix::param::page_size();
    let mut there = vec![0_u8; length.div_ceil(page)];
    // SAFETY: a new mapping at an address of the kernel's choice. Nobody reads or writes it.
    let mapping = unsafe {
        mmap(
            ptr::null_mut(),
            length,
            ProtFlags::READ,
            MapFlags::SHARED,
            file.as_fd(),
            start,
        )
    }?;
    // SAFETY: the mapping has that length, and there is a byte for each of its pages.
    let told = match unsafe { libc::mincore(mapping, length, there.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the mapping is ours, and nothing has a reference into it.
    unsafe { munmap(mapping, length) }?;
    told?;
    Ok(there.into_iter().map(|page| page & 1 == 1).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_was_written_is_there_in_pieces() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("data"))
            .expect("a file");
        let length = 4 * PIECE + 100;
        file.set_len(length).expect("longer");
        let data = vec![7; PIECE as usize + 5000];
        file.write_all_at(&data, PIECE).expect("written");
        let mut there = Vec::new();
        for_each(&file, length, |offset, bytes| {
            assert!(bytes <= PIECE && offset + bytes <= length);
            there.push((offset, bytes));
            Ok(())
        })
        .expect("looked at");
        let has = |at: u64| {
            there
                .iter()
                .any(|&(offset, bytes)| (offset..offset + bytes).contains(&at))
        };
        assert!(has(PIECE) && has(2 * PIECE) && has(2 * PIECE + 4999), "{there:?}");
    }
}

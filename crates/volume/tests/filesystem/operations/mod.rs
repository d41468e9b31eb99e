//! The operations, by name. Each works on files of its process, and on the expected content in memory.

mod content;
mod durable;
mod layout;
mod names;

use std::io;

use crate::work::{Outcome, Work};

pub type Operation = fn(&mut Work) -> io::Result<Outcome>;

/// All operations.
pub const OPERATIONS: &[(&str, Operation)] = &[
    ("write", content::write),
    ("write-vectored", content::write_vectored),
    ("write-direct", content::write_direct),
    ("append", content::append),
    ("read", content::read),
    ("read-direct", content::read_direct),
    ("read-from-disk", content::read_from_disk),
    ("mmap-read", content::mmap_read),
    ("mmap-write", content::mmap_write),
    ("mmap-beside-direct", content::mmap_beside_direct),
    ("sendfile", content::sendfile),
    ("copy-file-range", content::copy_file_range),
    ("two-writers", content::two_writers),
    ("truncate-shorter", layout::truncate_shorter),
    ("truncate-longer", layout::truncate_longer),
    ("truncate-beside-write", layout::truncate_beside_write),
    ("punch-hole", layout::punch_hole),
    ("zero-range", layout::zero_range),
    ("zero-range-keep-size", layout::zero_range_keep_size),
    ("collapse-range", layout::collapse_range),
    ("insert-range", layout::insert_range),
    ("preallocate", layout::preallocate),
    ("preallocate-keep-size", layout::preallocate_keep_size),
    ("unshare-range", layout::unshare_range),
    ("reflink", layout::reflink),
    ("reflink-range", layout::reflink_range),
    ("holes-and-data", layout::holes_and_data),
    ("far-offset", layout::far_offset),
    ("rename-over", names::rename_over),
    ("rename-exchange", names::rename_exchange),
    ("rename-no-replace", names::rename_no_replace),
    ("rename-folder", names::rename_folder),
    ("hard-link", names::hard_link),
    ("symbolic-link", names::symbolic_link),
    ("attributes", names::attributes),
    ("unnamed-file", names::unnamed_file),
    ("deleted-while-open", names::deleted_while_open),
    ("many-files", names::many_files),
    ("times-and-modes", names::times_and_modes),
    ("fsync", durable::fsync),
    ("fdatasync", durable::fdatasync),
    ("sync-file-range", durable::sync_file_range),
    ("syncfs", durable::syncfs),
    ("write-dsync", durable::write_dsync),
];

/// An operation without support in the file system is not an error.
fn unless_unknown(result: io::Result<()>) -> io::Result<Outcome> {
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EXDEV)
            ) =>
        {
            Ok(Outcome::NotHere)
        }
        Err(error) => Err(error),
    }
}

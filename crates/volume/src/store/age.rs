//! How often the sidecar of a copy was written, kept with the data: a sidecar that comes from a backup says less (`verbatim_mirror::opening::age`).
//!
//! The extended attribute with the mark of the file has it, behind the mark: a second attribute would take a block of its own. Where a file system keeps none there is no number,
//! and block devices have none. It is not made durable by itself, since that would flush all that clients have written: a power failure takes at most the last seconds of
//! it, and then nothing is found that is not there.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use verbatim_mirror::decision::VolumeId;

use super::identity::MARK;

/// The longest attribute.
const LONGEST: usize = 64;

/// Part of the volume's id: of another volume's data nothing is said.
fn tag(id: VolumeId) -> String {
    format!("{:08x}", id.0 as u32)
}

fn parse(text: &[u8], id: VolumeId) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    let mut words = text.split(' ').skip(1);
    let (number, of) = (words.next()?, words.next()?);
    (of == tag(id))
        .then(|| u64::from_str_radix(number, 16).ok())
        .flatten()
}

/// What the data at that path have seen of that volume's sidecar.
pub fn at(path: &Path, id: VolumeId) -> Option<u64> {
    let mut text = [0; LONGEST];
    let length = rustix::fs::getxattr(path, MARK, &mut text).ok()?;
    parse(&text[..length], id)
}

/// The same of an open file.
pub fn of(file: &File, id: VolumeId) -> Option<u64> {
    let mut text = [0; LONGEST];
    let length = rustix::fs::fgetxattr(file, MARK, &mut text).ok()?;
    parse(&text[..length], id)
}

/// Notes it behind the mark.
pub fn note(file: &File, id: VolumeId, number: u64) -> io::Result<()> {
    let mark = super::identity::mark(file).ok_or(io::ErrorKind::Unsupported)?;
    let text = format!("{mark} {number:x} {}", tag(id));
    Ok(rustix::fs::fsetxattr(
        file,
        MARK,
        text.as_bytes(),
        XattrFlags::empty(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::identity::{Identity, mark};

    #[test]
    fn a_number_is_kept_with_the_mark_and_is_that_of_its_volume_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        let file = File::create(&path).expect("a file");
        let (id, other) = (VolumeId(7), VolumeId(8));
        assert!(note(&file, id, 1).is_err(), "there is no mark");
        Identity::mark(&file);
        let Some(before) = mark(&file) else {
            // Its file system keeps none.
            return;
        };
        assert_eq!(at(&path, id), None);
        for number in [1, 17, 1 << 40] {
            note(&file, id, number).expect("noted");
            assert_eq!((at(&path, id), of(&file, id)), (Some(number), Some(number)));
            assert_eq!(at(&path, other), None);
            assert_eq!(mark(&file).as_ref(), Some(&before), "it is the same file");
        }
        // Data that are made anew have another mark.
        Identity::mark(&file);
        assert_eq!(at(&path, id), None);
    }
}

//! Number of writes of a copy's sidecar, kept with the data: a sidecar from a backup has a lower number
//! (`verbatim_mirror::opening::age`).
//!
//! The number is in the extended attribute of the file's mark, behind the mark: a second attribute would take
//! a block of its own. A file system without extended attributes keeps no number, and neither does a block
//! device. The number is not synced by itself, since that would flush all data that clients have written. A
//! power failure undoes at most its last seconds; then an old sidecar may pass for the current one, but never
//! the current one for an old one.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use verbatim_mirror::decision::VolumeId;

use super::identity::MARK;

/// The longest attribute.
const LONGEST: usize = 64;

/// Part of the volume's id, so that data of another volume have no number for this one.
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

/// The number of this volume's sidecar that the data at this path have seen.
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

/// Notes the number behind the mark.
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
            // The file system keeps no extended attributes.
            return;
        };
        assert_eq!(at(&path, id), None);
        for number in [1, 17, 1 << 40] {
            note(&file, id, number).expect("noted");
            assert_eq!((at(&path, id), of(&file, id)), (Some(number), Some(number)));
            assert_eq!(at(&path, other), None);
            assert_eq!(mark(&file).as_ref(), Some(&before), "it is the same file");
        }
        // New data have another mark.
        Identity::mark(&file);
        assert_eq!(at(&path, id), None);
    }
}

//! How often the sidecar of a copy was written, kept with the data: a sidecar that comes from a backup says less (`verbatim_mirror::opening::age`).
//!
//! An extended attribute of the file has it, where the file system keeps such; block devices have none. It is not made durable by itself, since that would flush all that
//! clients have written: a power failure takes at most the last seconds of it, and then nothing is found that is not there.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use verbatim_mirror::decision::VolumeId;

/// The attribute: a number, and the volume's id.
const WRITTEN: &str = "user.verbatim.written";

fn parse(text: &[u8], id: VolumeId) -> Option<u64> {
    let (number, of) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    (of == String::from(id)).then(|| number.parse().ok()).flatten()
}

/// What the data at that path have seen of that volume's sidecar.
pub fn at(path: &Path, id: VolumeId) -> Option<u64> {
    let mut text = [0; 64];
    let length = rustix::fs::getxattr(path, WRITTEN, &mut text).ok()?;
    parse(&text[..length], id)
}

/// The same of an open file.
pub fn of(file: &File, id: VolumeId) -> Option<u64> {
    let mut text = [0; 64];
    let length = rustix::fs::fgetxattr(file, WRITTEN, &mut text).ok()?;
    parse(&text[..length], id)
}

/// Notes it.
pub fn note(file: &File, id: VolumeId, number: u64) -> io::Result<()> {
    let text = format!("{number} {}", String::from(id));
    Ok(rustix::fs::fsetxattr(
        file,
        WRITTEN,
        text.as_bytes(),
        XattrFlags::empty(),
    )?)
}

/// They are another copy's from now on.
pub fn forget(file: &File) {
    // Most have none.
    let _ = rustix::fs::fremovexattr(file, WRITTEN);
}

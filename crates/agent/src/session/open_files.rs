//! Files that a container has open or mapped, on their way to the host that must have them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use verbatim_container::NeededFile;

use crate::instances::record::Record;
use crate::proto::OpenFile;

/// More are not compared.
const MOST: usize = 4096;

/// As they are sent. Those on volumes of the instance's are left out: they move along.
pub fn write(files: &[NeededFile], record: &Record) -> Vec<OpenFile> {
    let moves = |file: &&NeededFile| {
        record
            .volumes
            .iter()
            .any(|volume| file.path.starts_with(&volume.inside))
    };
    let files = files.iter().filter(|file| !moves(file)).take(MOST);
    files
        .map(|file| OpenFile {
            path: file.path.as_os_str().as_bytes().to_vec(),
            size: file.size,
        })
        .collect()
}

/// As they came.
pub fn read(files: &[OpenFile]) -> Vec<NeededFile> {
    let files = files.iter().take(MOST);
    files
        .map(|file| NeededFile {
            path: OsStr::from_bytes(&file.path).into(),
            size: file.size,
        })
        .collect()
}

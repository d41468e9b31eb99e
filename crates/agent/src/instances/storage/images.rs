//! Files of which the disks of virtual machines consist: whether they are the host's, and whether another
//! host has the same.
//!
//! A file that is only read (a backing file, a CD) need not be on storage that both hosts reach, if both have
//! the same content. Two versions of an image at one path would silently give the guest another disk.

use std::fs::{self, File, Metadata};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use verbatim_vm::File as MachineFile;

use super::{Witnesses, devices, is_seen};
use crate::proto::Image;

/// Files up to this size are compared whole. Of a longer file this many bytes are compared, spread over it,
/// and its modification time.
const WHOLE: u64 = 512 << 20;

/// Size of the pieces that are read.
const PIECE: u64 = 1 << 20;

/// Reasons why another host cannot have the files of the QEMU with process `pid`.
pub fn hidden(pid: u32, files: &[MachineFile]) -> Vec<String> {
    let open = open_files(pid);
    files
        .iter()
        .filter_map(|file| why_hidden(pid, &file.path, &open))
        .collect()
}

/// The files that a process has open.
fn open_files(pid: u32) -> Vec<Metadata> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    entries
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .collect()
}

fn why_hidden(pid: u32, path: &Path, open: &[Metadata]) -> Option<String> {
    let shown = path.display();
    let inside = PathBuf::from(format!("/proc/{pid}/root")).join(path.strip_prefix("/").unwrap_or(path));
    let Ok(inside) = fs::metadata(inside) else {
        return Some(format!(
            "{shown}, which is a part of its disks, is not there any more (it was removed, or renamed): the next host would not find it"
        ));
    };
    if inside.file_type().is_block_device() && devices::name(path).is_none() {
        return Some(format!(
            "{shown}, which is a part of its disks, is a block device and not named by a path below /dev: the next host would not be asked for it"
        ));
    }
    if !inside.is_file() && !inside.file_type().is_block_device() {
        return Some(format!(
            "{shown}, which is a part of its disks, is neither a file nor a block device: another host cannot tell whether it has the same"
        ));
    }
    if !open.iter().any(|open| is_same(open, &inside)) {
        return Some(format!(
            "{shown}, which is a part of its disks, is another file than the one that QEMU has open: the next host would take the wrong one"
        ));
    }
    let here = Path::new("/").join(path);
    match fs::metadata(&here) {
        Ok(here) if is_same(&here, &inside) => None,
        _ => Some(format!(
            "{shown}, which is a part of its disks, is in the virtual machine's own container, and not at that path of the host: the next host does \
             not reach it; make it on storage that both reach"
        )),
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    if one.file_type().is_block_device() || other.file_type().is_block_device() {
        return one.rdev() == other.rdev() && one.file_type() == other.file_type();
    }
    one.dev() == other.dev() && one.ino() == other.ino()
}

/// The files that are only read, as the destination is asked about them.
pub fn of(files: &[MachineFile], witnesses: &Witnesses) -> Vec<Image> {
    let read = files.iter().filter(|file| file.read_only && file.path.is_file());
    let images = read.filter_map(|file| {
        Some(Image {
            path: file.path.to_str()?.to_owned(),
            witness: witnesses.of_image(&file.path),
            content: String::new(),
        })
    });
    images.collect()
}

/// Fills in the content of the images at these paths.
pub fn look_into(images: &mut [Image], paths: &[String]) -> anyhow::Result<()> {
    for image in images.iter_mut().filter(|image| paths.contains(&image.path)) {
        image.content = content(Path::new(&image.path))?;
    }
    Ok(())
}

/// Paths of the images that this host has on other storage, and whose content was not sent.
pub fn elsewhere(images: &[Image]) -> Vec<String> {
    let elsewhere = images
        .iter()
        .filter(|image| image.content.is_empty() && !is_here(image));
    elsewhere.map(|image| image.path.clone()).collect()
}

/// Reasons why a virtual machine with these images cannot come to this host.
pub fn others(images: &[Image]) -> Vec<String> {
    images
        .iter()
        .filter(|image| !is_here(image))
        .filter_map(other)
        .collect()
}

fn is_here(image: &Image) -> bool {
    is_seen(&image.witness) && Path::new(&image.path).is_file()
}

fn other(image: &Image) -> Option<String> {
    let path = &image.path;
    if !Path::new(path).is_file() {
        return Some(format!(
            "{path} is not there: it is a part of the virtual machine's disks, which must be on storage that both hosts reach"
        ));
    }
    // The first question comes without the content.
    if image.content.is_empty() {
        return None;
    }
    match content(Path::new(path)) {
        Ok(here) if here == image.content => None,
        Ok(_) => Some(format!(
            "{path} there is another file than on the source: it is a part of the virtual machine's disks; copy it there \
             with its times (`cp -p`), or \
             put it on storage that both hosts reach"
        )),
        Err(error) => Some(format!("{error:#} there")),
    }
}

/// A fingerprint: equal for files that are taken to be the same.
fn content(path: &Path) -> anyhow::Result<String> {
    let failed = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(failed)?;
    let metadata = file.metadata().with_context(failed)?;
    let length = metadata.len();
    let mut hasher = blake3::Hasher::new();
    let mut piece = Vec::new();
    let whole = length <= WHOLE;
    let count = length.min(WHOLE).div_ceil(PIECE);
    for number in 0..count {
        let start = match whole {
            true => number * PIECE,
            // Spread evenly: the last piece ends with the file.
            false => (u128::from(length - PIECE) * u128::from(number) / u128::from(count - 1)) as u64,
        };
        file.seek(SeekFrom::Start(start)).with_context(failed)?;
        piece.clear();
        (&mut file)
            .take(PIECE)
            .read_to_end(&mut piece)
            .with_context(failed)?;
        hasher.update(&piece);
    }
    let changed = if whole { 0 } else { metadata.mtime() };
    Ok(format!("{length} {changed} {}", hasher.finalize().to_hex()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_content_is_the_same_image_and_another_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        fs::write(&path, vec![1; 3 << 20]).unwrap();
        let name = path.to_str().unwrap().to_owned();
        let mut images = vec![Image {
            path: name.clone(),
            witness: "/no/.verbatim-witness".to_owned(),
            content: String::new(),
        }];
        assert_eq!(elsewhere(&images), std::slice::from_ref(&name));
        look_into(&mut images, std::slice::from_ref(&name)).unwrap();
        assert!(elsewhere(&images).is_empty() && others(&images).is_empty());
        let mut changed = vec![1; 3 << 20];
        changed[2 << 20] = 2;
        fs::write(&path, changed).unwrap();
        assert!(
            others(&images)[0].contains("another file"),
            "one byte of it differs"
        );
        fs::remove_file(&path).unwrap();
        assert!(others(&images)[0].contains("is not there"));
    }

    #[test]
    fn a_long_one_is_known_by_its_ends_and_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long");
        let file = File::create(&path).unwrap();
        file.set_len(WHOLE + 12_345).unwrap();
        let before = content(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], WHOLE + 12_344).unwrap();
        let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
        file.set_times(times).unwrap();
        let after = content(&path).unwrap();
        assert_ne!(before.split(' ').nth(1), after.split(' ').nth(1));
        assert_ne!(
            before.split(' ').nth(2),
            after.split(' ').nth(2),
            "its last byte counts"
        );
    }

    #[test]
    fn what_is_neither_a_file_nor_a_block_device_is_named() {
        let file = MachineFile {
            path: "/dev/null".into(),
            read_only: false,
        };
        let _open = File::open(&file.path).unwrap();
        let said = hidden(std::process::id(), &[file]);
        assert!(
            said[0].contains("/dev/null") && said[0].contains("neither a file nor"),
            "{said:?}"
        );
    }

    #[test]
    fn a_file_that_is_not_the_open_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let _open = File::create(&path).unwrap();
        let file = MachineFile {
            path: path.clone(),
            read_only: false,
        };
        let files = [file];
        assert!(hidden(std::process::id(), &files).is_empty());
        fs::rename(&path, folder.path().join("other")).unwrap();
        assert!(hidden(std::process::id(), &files)[0].contains("not there any more"));
        fs::write(&path, "").unwrap();
        assert!(hidden(std::process::id(), &files)[0].contains("another file than the one"));
    }
}

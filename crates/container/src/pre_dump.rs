//! Memory written down while its container runs, so that a dump needs to hold what was written since only.
//!
//! ```text
//!  images/                 the dump                     parent ──► pre-dump/2
//!  images/pre-dump/1/      all private memory
//!  images/pre-dump/2/      what was written since 1     parent ──► ../1
//! ```
//!
//! CRIU freezes the tasks, notes which pages are dirty by the kernel's soft-dirty bits, puts the pages into pipes, clears the
//! bits, lets the tasks go on, and then writes the images (`criu/cr-dump.c`, `cr_pre_dump_tasks`). It looks at memory only:
//! neither sockets nor files nor shared mappings of files are part of it (`criu/mem.c`, `generate_vma_iovs`), so a
//! program may use its RNIC meanwhile.
//!
//! **Shared memory without a file** (`MAP_SHARED | MAP_ANONYMOUS`, memfd, System V) is the exception: CRIU writes it down, too,
//! and believes in a later dump that a page which no process has mapped dirty is as it was. What a process wrote that has
//! ended since, or unmapped it, or wrote by `write`, would be lost. So a pre-dump's images of it are removed
//! ([`forget_shared`]), and the dump writes all of it, as it does without any pre-dump. The queues of the software RNIC are
//! such memory, which the dump does not even see.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use crate::error::Error;
use crate::gate::Kind;
use crate::host::Host;
use crate::name::ContainerName;
use crate::operation::Operation;
use crate::proxy::wire;

/// Before the magic number of each image of CRIU is one for all, and after it a message with its length (`images/README`;
/// `criu/protobuf.c`).
const HEAD_BYTES: usize = 8 + 4;

/// What to write down, and where.
#[derive(Debug, Clone)]
pub struct PreDumpConfig {
    /// The container, which runs and goes on running.
    pub name: ContainerName,
    /// Where CRIU writes its images; made if missing, and should be empty and on tmpfs.
    pub images: PathBuf,
    /// Where CRIU writes its log and statistics; made if missing.
    pub work: PathBuf,
    /// The images of the pre-dump before, relative to `images`.
    pub parent: Option<PathBuf>,
    /// As in [`CheckpointConfig::rnics`](crate::CheckpointConfig::rnics).
    pub rnics: bool,
}

/// What a pre-dump has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreDumped {
    /// Memory that it wrote down.
    pub bytes: u64,
    /// How long the tasks did not run, if CRIU has said so.
    pub frozen: Option<Duration>,
}

/// Writes the container's private memory down, or what of it was written since the pre-dump before. Needs
/// [`Host::tracks_memory`]. The tasks stop for a moment and go on before the images are written.
///
/// After an error no earlier pre-dump may be the parent of anything: the kernel may have forgotten what was written since.
/// One that has begun is not cut off when this is dropped; [`outlast`](crate::outlast) waits for it.
pub async fn pre_dump(host: &Host, config: PreDumpConfig) -> Result<PreDumped, Error> {
    let PreDumpConfig {
        name,
        images,
        work,
        parent,
        rnics,
    } = config;
    let stats = work.join("stats-dump");
    // That of an earlier one must not explain this one.
    let _ = std::fs::remove_file(&stats);
    let mut command = host.runc().pre_dump(&name, &images, &work, parent.as_deref());
    host.load_plugin(&mut command, rnics)?;
    let operation = Operation::prepare(host, Kind::PreDump, name, command, &images, &work).await?;
    operation.run().await?;
    let failed = |source| Error::file("look at the images in", &images, source);
    forget_shared(&images).map_err(failed)?;
    let bytes = pages(&images)
        .map_err(failed)?
        .iter()
        .map(|(_, bytes)| bytes)
        .sum();
    let frozen = std::fs::read(&stats).ok().and_then(|image| frozen(&image));
    Ok(PreDumped { bytes, frozen })
}

/// Gives the room of a pre-dump's pages back, once somebody else has them. As the parent of another dump it is as good as
/// before: CRIU looks for a page in its list of pages, and never reads it (`criu/page-xfer.c`, `check_pagehole_in_parent`).
pub fn drop_pages(images: &Path) -> io::Result<()> {
    for (path, bytes) in pages(images)?.into_iter().filter(|(_, bytes)| *bytes > 0) {
        let file = OpenOptions::new().write(true).open(path)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, 0, bytes)?;
    }
    Ok(())
}

/// The files of pages (`pages-N.img`) and their lengths in bytes.
fn pages(images: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(images)? {
        let entry = entry?;
        if is_named(&entry.file_name(), "pages-") {
            found.push((entry.path(), entry.metadata()?.len()));
        }
    }
    Ok(found)
}

/// Removes the images of shared memory: the module's page says why.
fn forget_shared(images: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(images)? {
        let list = entry?;
        if !is_named(&list.file_name(), "pagemap-shmem-") {
            continue;
        }
        // Without its list nobody finds the pages; they only take room.
        if let Some(number) = pages_number(&std::fs::read(list.path())?) {
            remove(&images.join(format!("pages-{number}.img")))?;
        }
        remove(&list.path())?;
    }
    Ok(())
}

fn is_named(name: &std::ffi::OsStr, beginning: &str) -> bool {
    name.to_str()
        .is_some_and(|name| name.starts_with(beginning) && name.ends_with(".img"))
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The first message of an image.
fn first_message(image: &[u8]) -> Option<&[u8]> {
    let length = u32::from_le_bytes(image.get(8..HEAD_BYTES)?.try_into().ok()?);
    image.get(HEAD_BYTES..)?.get(..usize::try_from(length).ok()?)
}

/// Which file has the pages of a list: `pages_id` of `pagemap_head` (`images/pagemap.proto`).
fn pages_number(list: &[u8]) -> Option<u64> {
    wire::find_varint(first_message(list)?, 1).ok()?
}

/// `frozen_time` of `dump_stats_entry` (`images/stats.proto`), which is in microseconds.
fn frozen(stats: &[u8]) -> Option<Duration> {
    let dump = wire::find_bytes(first_message(stats)?, 1).ok()??;
    wire::find_varint(dump, 2).ok()?.map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with one message, as CRIU writes them.
    fn image(message: &[u8]) -> Vec<u8> {
        let mut image = vec![0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56];
        image.extend_from_slice(&(message.len() as u32).to_le_bytes());
        image.extend_from_slice(message);
        image
    }

    fn list_of(pages: u64) -> Vec<u8> {
        let mut head = Vec::new();
        wire::put_varint(&mut head, 1, pages);
        // Entries follow.
        [image(&head), vec![4, 0, 0, 0, 1, 2, 3, 4]].concat()
    }

    #[test]
    fn shared_memory_is_forgotten_and_private_memory_kept() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, content: &[u8]| std::fs::write(folder.path().join(name), content).unwrap();
        put("pagemap-1.img", &list_of(1));
        put("pages-1.img", &[7; 8192]);
        put("pagemap-shmem-4711.img", &list_of(2));
        put("pages-2.img", &[8; 4096]);
        put("pagemap-shmem-4712.img", b"cut off");
        put("inventory.img", b"x");
        forget_shared(folder.path()).unwrap();
        let mut left: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["inventory.img", "pagemap-1.img", "pages-1.img"]);
        let pages = pages(folder.path()).unwrap();
        assert_eq!(pages, [(folder.path().join("pages-1.img"), 8192)]);
    }

    #[test]
    fn pages_that_are_dropped_keep_their_length() {
        use std::os::unix::fs::MetadataExt;

        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("pages-1.img");
        std::fs::write(&path, [7; 1 << 16]).unwrap();
        std::fs::write(folder.path().join("pages-2.img"), []).unwrap();
        assert!(path.metadata().unwrap().blocks() > 0);
        drop_pages(folder.path()).unwrap();
        let left = path.metadata().unwrap();
        assert_eq!((left.len(), left.blocks()), (1 << 16, 0));
    }

    #[test]
    fn the_freeze_is_read_from_the_statistics() {
        let mut dump = Vec::new();
        wire::put_varint(&mut dump, 1, 900);
        wire::put_varint(&mut dump, 2, 12_345);
        let mut stats = Vec::new();
        wire::put_bytes(&mut stats, 1, &dump);
        let whole = image(&stats);
        assert_eq!(frozen(&whole), Some(Duration::from_micros(12_345)));
        assert_eq!(frozen(&whole[..whole.len() - 1]), None);
        assert_eq!(frozen(b""), None);
    }
}

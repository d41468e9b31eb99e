//! Files without a name that processes have open or mapped: which of them CRIU takes, and how.

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::SealFlags;

use super::read_text;

/// Files that are deleted and still in use go into CRIU's images, up to so many bytes that are no holes (`--ghost-limit`). They are
/// written while the tasks stand still, some 160 MiB in a second; who wants a limit has one for the whole blackout
/// (`--max-blackout`).
pub(crate) const GHOST_LIMIT_BYTES: u64 = 1 << 30;

/// What `/proc` shows behind the name of a file that is not there (any more).
const DELETED: &str = " (deleted)";

/// Memory that the kernel shows nobody but its process (`memfd_secret`).
const SECRET: &str = "/secretmem";

/// Names of memory that never had one in a folder, and that CRIU takes whatever its size.
const MEMORY: [&str; 5] = [
    "/memfd:",
    "/SYSV",
    "/dev/zero (deleted)",
    "/[aio]",
    "/anon_hugepage",
];

/// The file system that moves along with a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    /// Its device number.
    pub device: u64,
    /// Names of one file are names of one file where it arrives, too.
    pub keeps_links: bool,
}

/// Why a descriptor of that file cannot be moved. `carried` is the file system that moves along.
pub(super) fn descriptor_problem(
    target: &str,
    metadata: &Metadata,
    carried: Option<Carried>,
) -> Option<String> {
    if target.starts_with(SECRET) {
        return Some(
            "is secret memory (memfd_secret), which nobody but its process can read; close and unmap it"
                .to_owned(),
        );
    }
    file_problem(target, metadata, carried).map(|problem| format!("is {problem}"))
}

fn file_problem(target: &str, metadata: &Metadata, carried: Option<Carried>) -> Option<String> {
    let kind = metadata.file_type();
    if !kind.is_file() || MEMORY.iter().any(|name| target.starts_with(name)) {
        return None;
    }
    let bytes = metadata.blocks() * 512;
    if metadata.nlink() == 0 && bytes > GHOST_LIMIT_BYTES {
        return Some(format!(
            "deleted, still in use, and takes {bytes} bytes; up to {GHOST_LIMIT_BYTES} can be moved: keep its name, in a folder that \
             both hosts have"
        ));
    }
    let is_renamed = target.ends_with(DELETED) && metadata.nlink() > 0;
    if !is_renamed {
        return None;
    }
    match carried.filter(|carried| carried.device == metadata.dev()) {
        Some(Carried { keeps_links: true, .. }) => None,
        Some(_) => Some(
            "a file whose name was removed while it has others, and the destination's agent makes each name a file of its own; upgrade that \
             agent, or open the file by a name that stays"
                .to_owned(),
        ),
        None => Some(
            "a file whose name was removed while it has others, outside of /tmp and /dev/shm; open it by a name that stays".to_owned(),
        ),
    }
}

/// Problems of what a process has mapped.
pub(super) fn mapping_problems(pid: i32, carried: Option<Carried>) -> io::Result<Vec<String>> {
    let maps = read_text(Path::new(&format!("/proc/{pid}/maps")))?;
    let (mut seen, mut problems) = (HashSet::new(), Vec::new());
    for mapping in maps.lines().filter_map(Mapping::parse) {
        if !mapping.path.ends_with(DELETED) || !seen.insert((mapping.path, mapping.is_shared)) {
            continue;
        }
        problems.extend(mapping.problem(pid, carried));
    }
    Ok(problems)
}

/// A line of proc_pid_maps(5) with a file.
struct Mapping<'a> {
    start: u64,
    end: u64,
    is_shared: bool,
    path: &'a str,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let is_shared = words.next()?.ends_with('s');
        let path = words.nth(3)?.trim_start();
        let number = |text| u64::from_str_radix(text, 16).ok();
        path.starts_with('/').then_some(Self {
            start: number(start)?,
            end: number(end)?,
            is_shared,
            path,
        })
    }

    fn problem(&self, pid: i32, carried: Option<Carried>) -> Option<String> {
        let path = self.path;
        if path.starts_with(SECRET) {
            return Some(format!(
                "a mapping of secret memory (memfd_secret, at {:#x}), which nobody but its process can read; unmap it",
                self.start
            ));
        }
        let file = format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end);
        // One that is unmapped while we look is no problem.
        let metadata = fs::metadata(&file).ok()?;
        if path.starts_with("/memfd:") {
            return (self.is_shared && is_sealed(&file)).then(|| {
                format!(
                    "a shared mapping of {path}, which is sealed against writing (F_SEAL_WRITE): CRIU cannot seal it again; map it \
                     MAP_PRIVATE"
                )
            });
        }
        file_problem(path, &metadata, carried).map(|problem| format!("a mapping of {path} is {problem}"))
    }
}

/// Whether nobody may write to a memfd any more.
fn is_sealed(file: &str) -> bool {
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(file);
    let seals = opened.and_then(|file| Ok(rustix::fs::fcntl_get_seals(file)?));
    seals.is_ok_and(|seals| seals.contains(SealFlags::WRITE))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;

    fn of(file: &File, target: &str, carried: Option<Carried>) -> Option<String> {
        descriptor_problem(target, &file.metadata().unwrap(), carried)
    }

    #[test]
    fn holes_of_a_deleted_file_do_not_count() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(GHOST_LIMIT_BYTES * 4).unwrap();
        assert_eq!(of(&file, "/tmp/x (deleted)", None), None);
    }

    #[test]
    fn a_name_that_was_removed_beside_others_is_a_problem_where_it_does_not_move() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let file = File::create(&one).unwrap();
        fs::hard_link(&one, &other).unwrap();
        let own = file.metadata().unwrap().dev();
        let on = |device, keeps_links| Some(Carried { device, keeps_links });
        assert_eq!(of(&file, "/one", None), None, "it has its name");
        let gone = of(&file, "/one (deleted)", None).unwrap();
        assert!(gone.contains("whose name was removed"), "{gone}");
        assert!(of(&file, "/one (deleted)", on(own + 1, true)).is_some());
        assert_eq!(of(&file, "/one (deleted)", on(own, true)), None);
        // An agent of an earlier release would give the open file another inode than its names.
        let apart = of(&file, "/one (deleted)", on(own, false)).unwrap();
        assert!(apart.contains("upgrade that agent"), "{apart}");
        assert_eq!(of(&file, "/one", on(own, false)), None, "it has its name");
    }

    #[test]
    fn mappings_of_memory_are_judged_by_their_seals() {
        let own = std::process::id() as i32;
        let page = rustix::param::page_size();
        // SAFETY: a new descriptor, which nobody else has.
        let memory = unsafe {
            let fd = libc::memfd_create(c"judged".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC);
            File::from_raw_fd(fd)
        };
        memory.set_len(page as u64).unwrap();
        let problems = || -> Vec<String> {
            let all = mapping_problems(own, None).unwrap();
            all.into_iter()
                .filter(|problem| problem.contains("judged"))
                .collect()
        };
        rustix::fs::fcntl_add_seals(&memory, SealFlags::WRITE).unwrap();
        let map = |flags| {
            // SAFETY: a new mapping, at an address of the kernel's choice.
            let address = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    page,
                    libc::PROT_READ,
                    flags,
                    memory.as_raw_fd(),
                    0,
                )
            };
            (address != libc::MAP_FAILED).then_some(address)
        };
        let private = map(libc::MAP_PRIVATE).unwrap();
        assert_eq!(problems(), Vec::<String>::new());
        // Linux 6.7 and later.
        if let Some(shared) = map(libc::MAP_SHARED) {
            let found = problems();
            assert!(found.len() == 1 && found[0].contains("F_SEAL_WRITE"), "{found:?}");
            // SAFETY: mapped above, and used by nobody.
            unsafe { libc::munmap(shared, page) };
        }
        // SAFETY: as above.
        unsafe { libc::munmap(private, page) };
    }
}

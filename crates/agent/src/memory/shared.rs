//! Memory that processes share and that is in no file which moves with the instance: System V segments, memfds, shared anonymous
//! memory, and files without a name. No round sends it: CRIU takes it while the instance stands still.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::private::tree;
use super::tree::Inode;

/// What the RNIC has given a program: gone before the program is frozen.
const OF_THE_RNIC: &str = "/memfd:verbatim-";

/// What `/proc` shows behind the name of a file that has none.
const DELETED: &str = " (deleted)";

/// How much of it a process and all that descend from it have, in bytes, each file once.
pub fn bytes_of_tree(root: i32) -> u64 {
    let mut found = HashMap::new();
    for process in tree(root) {
        // What ends meanwhile has none.
        mapped(&process, &mut found);
        opened(&process, &mut found);
    }
    found.values().sum()
}

fn mapped(process: &Path, found: &mut HashMap<Inode, u64>) {
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    for name in maps.lines().filter_map(nameless_mapping) {
        note(&process.join("map_files").join(name), found);
    }
}

fn opened(process: &Path, found: &mut HashMap<Inode, u64>) {
    for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let link = entry.path();
        if fs::read_link(&link).is_ok_and(|target| is_nameless(&target.to_string_lossy())) {
            note(&link, found);
        }
    }
}

/// The name in `/proc/PID/map_files` of a line of proc_pid_maps(5), if that is of a file without a name.
fn nameless_mapping(line: &str) -> Option<String> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let path = words.nth(4)?.trim_start();
    if !is_nameless(path) {
        return None;
    }
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(format!("{:x}-{:x}", number(start)?, number(end)?))
}

fn is_nameless(path: &str) -> bool {
    path.starts_with('/') && path.ends_with(DELETED) && !path.starts_with(OF_THE_RNIC)
}

fn note(link: &Path, found: &mut HashMap<Inode, u64>) {
    let Ok(metadata) = fs::metadata(link) else { return };
    if metadata.is_file() && metadata.nlink() == 0 {
        let inode = Inode {
            device: metadata.dev(),
            number: metadata.ino(),
        };
        found.insert(inode, metadata.blocks() * 512);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_a_name_are_found_among_mappings() {
        let of = |line: &str| nameless_mapping(line);
        let file =
            "7f0000200000-7f0000201000 rw-s 00000000 00:01 99                         /dev/zero (deleted)";
        assert_eq!(of(file).as_deref(), Some("7f0000200000-7f0000201000"));
        let low = "00400000-00401000 rw-s 00000000 00:01 99   /SYSV00001234 (deleted)";
        assert_eq!(of(low).as_deref(), Some("400000-401000"));
        for other in [
            "7f00-7f01 rw-p 00000000 00:00 0 ",
            "7f00-7f01 rw-p 00000000 00:00 0      [heap]",
            "7f00-7f01 rw-s 00000000 00:01 9      /memfd:verbatim-arena (deleted)",
            "7f00-7f01 r-xp 00000000 08:01 9      /usr/lib/x y.so",
            "nonsense",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn each_file_counts_once_and_holes_not_at_all() {
        let own = std::process::id().cast_signed();
        let file = rustix::fs::memfd_create("counted", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let second = file.try_clone().unwrap();
        let mut found = HashMap::new();
        let count = |found: &mut HashMap<Inode, u64>| {
            opened(Path::new(&format!("/proc/{own}")), found);
            let metadata = rustix::fs::fstat(&file).unwrap();
            found[&Inode::of(&metadata)]
        };
        rustix::fs::ftruncate(&file, 1 << 30).unwrap();
        assert_eq!(count(&mut found), 0);
        rustix::io::pwrite(&second, &[1; 1 << 16], 1 << 20).unwrap();
        assert_eq!(count(&mut found), 1 << 16);
    }
}

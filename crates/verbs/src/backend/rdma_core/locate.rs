//! Where the system's libibverbs is.
//!
//! Its name alone does not tell: `libverbatim.so` may stand in the place of `libibverbs.so.1`, and then the loader would find
//! ourselves under that name. So the file is looked for here, and ours is left out whatever its name is.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Names the library's file, for systems where it is in no usual place.
pub const PATH_VARIABLE: &str = "VERBATIM_LIBIBVERBS";

const SONAME: &str = "libibverbs.so.1";

/// Where distributions put libraries, the machine's own architecture first.
const FOLDERS: &[&str] = &[
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "x86_64")]
    "/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/usr/lib",
    "/lib",
];

/// What identifies a file, whatever its name.
type Identity = (u64, u64);

fn identity(path: &Path) -> Option<Identity> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some((metadata.dev(), metadata.ino()))
}

/// The library that this process would use without us: the one that is named, the one that the program itself has loaded,
/// one in `LD_LIBRARY_PATH`, one in a usual place.
pub fn library() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PATH_VARIABLE).filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let ours = file_of(&maps, library as *const () as usize).and_then(identity);
    let search_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    first(candidates(&maps, &search_path), ours)
}

fn candidates(maps: &str, search_path: &OsStr) -> Vec<PathBuf> {
    let loaded = maps.lines().filter_map(mapped_file);
    let is_verbs = |path: &&Path| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with("libibverbs.so")
    };
    let loaded = loaded.filter(is_verbs).map(Path::to_owned);
    let searched = std::env::split_paths(search_path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(SONAME));
    let usual = FOLDERS.iter().map(|folder| Path::new(folder).join(SONAME));
    loaded.chain(searched).chain(usual).collect()
}

fn first(candidates: Vec<PathBuf>, ours: Option<Identity>) -> Option<PathBuf> {
    let is_other = |path: &PathBuf| identity(path).is_some_and(|found| Some(found) != ours);
    candidates.into_iter().find(is_other)
}

/// The path of a line of `/proc/PID/maps`.
fn mapped_file(line: &str) -> Option<&Path> {
    let start = line.find('/')?;
    Some(Path::new(&line[start..]))
}

/// The file that is mapped at `address`.
fn file_of(maps: &str, address: usize) -> Option<&Path> {
    let covers = |line: &&str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        range.is_some_and(|(start, end)| {
            let parse = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            (parse(start)..parse(end)).contains(&address)
        })
    };
    maps.lines().find(covers).and_then(mapped_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c0000000-55d0c0001000 r--p 00000000 fe:01 11 /usr/bin/program
7f0000000000-7f0000007000 r--p 00000000 fe:01 12 /opt/verbs/libibverbs.so.1.14.44.0
7f0000100000-7f0000107000 rw-p 00000000 00:00 0
7f0000200000-7f0000207000 r-xp 00002000 fe:01 13 /opt/a folder/libverbatim.so
";

    #[test]
    fn the_programs_own_library_comes_first_and_relative_folders_do_not_count() {
        let found = candidates(MAPS, OsStr::new("/x/lib::lib:/y"));
        let expected = [
            "/opt/verbs/libibverbs.so.1.14.44.0",
            "/x/lib/libibverbs.so.1",
            "/y/libibverbs.so.1",
        ];
        assert!(
            expected.iter().zip(&found).all(|(a, b)| Path::new(a) == b),
            "{found:?}"
        );
        assert_eq!(found.len(), expected.len() + FOLDERS.len());
    }

    #[test]
    fn an_address_tells_its_file() {
        let at = |address| file_of(MAPS, address).map(|path| path.to_str().unwrap());
        assert_eq!(at(0x7f00_0020_0004), Some("/opt/a folder/libverbatim.so"));
        assert_eq!(at(0x7f00_0010_0004), None);
        assert_eq!(at(0x7f00_0020_7000), None);
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let ours = file_of(&maps, library as *const () as usize).unwrap();
        assert_eq!(identity(ours), identity(&std::env::current_exe().unwrap()));
    }

    #[test]
    fn we_are_left_out_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let [ours, disguise, other] =
            ["libverbatim.so", "libibverbs.so.1", "other"].map(|n| folder.path().join(n));
        fs::write(&ours, "ours").unwrap();
        std::os::unix::fs::symlink(&ours, &disguise).unwrap();
        fs::write(&other, "other").unwrap();
        let missing = folder.path().join("missing");
        let found = first(vec![missing, disguise, other.clone()], identity(&ours));
        assert_eq!(found, Some(other));
    }
}

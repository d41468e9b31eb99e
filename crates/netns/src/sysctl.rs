//! Sysctls of a network namespace: the files below `/proc/sys/net` that can be written.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

const ROOT: &str = "/proc/sys/net";

/// A longer value is not read.
const MAX_VALUE: usize = 16 << 10;

/// Those of this thread's namespace, by their paths below [`ROOT`]. What can be read only, or written only, is left out: it says
/// how things are, or does something.
pub(crate) fn read() -> io::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(Path::new(ROOT).join(&folder))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let name = match folder.is_empty() {
                true => name,
                false => format!("{folder}/{name}"),
            };
            if entry.file_type()?.is_dir() {
                folders.push(name);
                continue;
            }
            // A link, and its files, may go meanwhile.
            let Ok(mode) = entry.metadata().map(|meta| meta.permissions().mode()) else {
                continue;
            };
            if mode & 0o200 != 0
                && mode & 0o400 != 0
                && let Some(value) = read_one(&name)
            {
                found.insert(name, value);
            }
        }
    }
    Ok(found)
}

/// The values of those that [`read`] has found before: half of the time goes into finding them.
pub(crate) fn read_known<'n>(
    names: impl Iterator<Item = &'n String>,
) -> io::Result<BTreeMap<String, String>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::open(ROOT, flags, Mode::empty())?;
    let mut buffer = vec![0; MAX_VALUE + 1];
    let mut found = BTreeMap::new();
    for name in names {
        // One may have gone with its module.
        let Ok(file) = rustix::fs::openat(
            &root,
            name.as_str(),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        ) else {
            continue;
        };
        // The kernel gives a value in one piece.
        let Ok(length) = rustix::io::read(&file, &mut buffer[..]) else {
            continue;
        };
        if let Ok(value) = std::str::from_utf8(&buffer[..length])
            && length <= MAX_VALUE
        {
            found.insert(name.clone(), value.trim_end_matches('\n').to_owned());
        }
    }
    Ok(found)
}

/// The value of one. Some cannot be read before they are set.
pub(crate) fn read_one(name: &str) -> Option<String> {
    let value = std::fs::read_to_string(Path::new(ROOT).join(name)).ok()?;
    (value.len() <= MAX_VALUE).then(|| value.trim_end_matches('\n').to_owned())
}

/// Sets one that [`read`] has found.
pub(crate) fn write(name: &str, value: &str) -> io::Result<()> {
    std::fs::write(Path::new(ROOT).join(name), format!("{value}\n"))
}

/// As an operator writes it.
pub(crate) fn told(name: &str) -> String {
    format!("net.{}", name.replace('/', "."))
}

/// What `name` would be in a namespace that is new and has the same links.
pub(crate) fn usual<'a>(new: &'a BTreeMap<String, String>, name: &str) -> Option<&'a String> {
    new.get(name).or_else(|| {
        // What is set for each link begins as what is set for links to come. For neighbours only the first namespace says that; `lo`
        // has it everywhere.
        let mut parts: Vec<_> = name.split('/').collect();
        ["default", "lo"].iter().find_map(|link| {
            *parts.get_mut(2)? = link;
            new.get(&parts.join("/"))
        })
    })
}

/// In which order they are set: what is set for all links changes what is set for each.
pub(crate) fn order(name: &str) -> u8 {
    match name {
        "ipv4/ip_forward" => 0,
        _ if name.contains("/all/") => 1,
        _ if name.contains("/default/") => 2,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_begins_as_links_to_come() {
        let new = BTreeMap::from([
            ("ipv4/conf/default/rp_filter".to_owned(), "2".to_owned()),
            ("ipv4/neigh/lo/locktime".to_owned(), "100".to_owned()),
            ("core/somaxconn".to_owned(), "4096".to_owned()),
        ]);
        let of = |name| usual(&new, name).map(String::as_str);
        assert_eq!(of("ipv4/conf/eth0/rp_filter"), Some("2"));
        assert_eq!(of("ipv4/neigh/eth0/locktime"), Some("100"));
        assert_eq!(of("core/somaxconn"), Some("4096"));
        assert_eq!(of("core/other"), None);
        assert_eq!(told("ipv4/conf/eth0/rp_filter"), "net.ipv4.conf.eth0.rp_filter");
    }
}

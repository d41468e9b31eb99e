//! Extended attributes of files that move, POSIX ACLs among them (`man 7 xattr`).
//!
//! What the host's own security modules have written (`security.selinux` and others) is this host's policy and stays here. All else
//! is taken along, or named.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, removexattr, setxattr};
use rustix::io::Errno;

use crate::proto::{Attribute, Attributes};
use crate::quotas;

/// Capabilities of a program. A write to the file, or another owner, takes them away.
pub const CAPABILITY: &[u8] = b"security.capability";

/// Prefixes of names that move.
const MOVED: [&[u8]; 4] = [b"user.", b"trusted.", b"system.posix_acl_", CAPABILITY];

/// Of modules that label all files of a host by its own policy.
const LABELS: [&[u8]; 6] = [
    b"security.selinux",
    b"security.apparmor",
    b"security.SMACK64",
    b"security.ima",
    b"security.evm",
    b"security.sehash",
];

/// Attempts where a program changes them while they are read.
const ATTEMPTS: usize = 16;

/// The path by which attributes of what is open are reached, also of a symbolic link and by a descriptor of `O_PATH`.
fn by_descriptor(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn moves(name: &[u8]) -> bool {
    MOVED.iter().any(|prefix| name.starts_with(prefix))
}

/// Those of what is open, by their names. `Unsupported` if there is one that cannot be taken along, or more than there is room for.
pub fn read(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let path = by_descriptor(file);
    let mut all = Vec::new();
    let mut bytes = 0;
    for name in names(&path)? {
        if !moves(name.to_bytes()) {
            if LABELS.iter().any(|label| name.to_bytes().starts_with(label)) {
                continue;
            }
            return Err(unsupported(format!(
                "has the extended attribute {}, which cannot be moved",
                name.to_string_lossy()
            )));
        }
        let Some(value) = value(&path, &name)? else {
            continue;
        };
        bytes += name.count_bytes() + value.len();
        if bytes > quotas::ATTRIBUTE_BYTES {
            return Err(unsupported(format!(
                "has more than {} KiB of extended attributes",
                quotas::ATTRIBUTE_BYTES >> 10
            )));
        }
        all.push(Attribute {
            name: name.into_bytes(),
            value,
        });
    }
    Ok(Attributes { all })
}

/// Gives what is open these, and takes all others from it that move.
pub fn write(file: BorrowedFd<'_>, wanted: &Attributes) -> io::Result<()> {
    let mut values = BTreeMap::new();
    let mut bytes = 0;
    for Attribute { name, value } in &wanted.all {
        bytes += name.len() + value.len();
        if bytes > quotas::ATTRIBUTE_BYTES {
            return Err(invalid("there are too many extended attributes"));
        }
        if !moves(name) {
            return Err(invalid("an extended attribute has a name that does not move"));
        }
        let name = CString::new(&name[..]).map_err(|_| invalid("an extended attribute has no name"))?;
        values.insert(name, value);
    }
    let path = by_descriptor(file);
    for name in names(&path)? {
        if !moves(name.to_bytes()) {
            continue;
        }
        match values.get(&name) {
            Some(wanted) => {
                if value(&path, &name)?.is_some_and(|found| found == wanted[..]) {
                    values.remove(&name);
                }
            }
            None => match removexattr(&path, &name) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno.into()),
            },
        }
    }
    for (name, value) in values {
        setxattr(&path, &name, value, XattrFlags::empty()).map_err(|errno| {
            let error = io::Error::from(errno);
            let text = format!("the extended attribute {}: {error}", name.to_string_lossy());
            io::Error::new(error.kind(), text)
        })?;
    }
    Ok(())
}

/// Whether capabilities are among them.
pub fn has_capability(attributes: &Attributes) -> bool {
    attributes
        .all
        .iter()
        .any(|attribute| attribute.name == CAPABILITY)
}

fn names(path: &str) -> io::Result<Vec<CString>> {
    for _ in 0..ATTEMPTS {
        let length = match listxattr_query(path) {
            Err(Errno::OPNOTSUPP) | Ok(0) => return Ok(Vec::new()),
            length => length?,
        };
        let mut list = vec![0u8; length];
        match listxattr(path, &mut list[..]) {
            Err(Errno::RANGE) => continue,
            read => list.truncate(read?),
        }
        let names = list.split_inclusive(|byte| *byte == 0);
        return Ok(names
            .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
            .map(CStr::to_owned)
            .collect());
    }
    Err(io::Error::other("its extended attributes change again and again"))
}

/// `None` if there is none any more.
fn value(path: &str, name: &CStr) -> io::Result<Option<Vec<u8>>> {
    for _ in 0..ATTEMPTS {
        let length = match getxattr_query(path, name) {
            Err(Errno::NODATA) => return Ok(None),
            length => length?,
        };
        let mut value = vec![0u8; length];
        match getxattr(path, name, &mut value[..]) {
            Err(Errno::RANGE) => continue,
            Err(Errno::NODATA) => return Ok(None),
            read => value.truncate(read?),
        }
        return Ok(Some(value));
    }
    Err(io::Error::other("its extended attributes change again and again"))
}

fn unsupported(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn attribute(name: &str, value: &[u8]) -> Attribute {
        Attribute {
            name: name.into(),
            value: value.to_vec(),
        }
    }

    #[test]
    fn what_is_written_is_read_and_others_go() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let wanted = Attributes {
            all: vec![attribute("user.a", b"1"), attribute("user.empty", b"")],
        };
        let first = Attributes {
            all: vec![attribute("user.a", b"old"), attribute("user.gone", b"x")],
        };
        let found = |attributes: &Attributes| {
            write(file.as_fd(), attributes).unwrap();
            let mut found = read(file.as_fd()).unwrap().all;
            found.sort_by(|a, b| a.name.cmp(&b.name));
            found
        };
        assert_eq!(found(&first), first.all);
        assert_eq!(found(&wanted), wanted.all);
        assert!(found(&Attributes::default()).is_empty());
    }

    #[test]
    fn names_that_do_not_move_and_too_many_are_refused() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let refused = |all: Vec<Attribute>| write(file.as_fd(), &Attributes { all }).is_err();
        for name in [
            "",
            "user",
            "security.selinux",
            "security.x",
            "user.a\0b",
            "system.x",
        ] {
            assert!(refused(vec![attribute(name, b"x")]), "{name:?}");
        }
        let long = vec![7; quotas::ATTRIBUTE_BYTES / 2];
        assert!(refused(vec![
            attribute("user.a", &long),
            attribute("user.b", &long)
        ]));
        assert!(read(file.as_fd()).unwrap().all.is_empty(), "nothing was written");
    }
}

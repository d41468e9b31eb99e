//! A file or device that two hosts see: shared storage.

use std::collections::BTreeMap;

use super::identity::{Identity, PARTITION};

/// What shows that both identities, found on two hosts, are of the same file or device, or of a disk and a part of it;
/// `None` if nothing does. `with_names`: the names of devices count, and not only the blocks that daemons have written.
pub fn sign_of_same(one: &Identity, other: &Identity, with_names: bool) -> Option<String> {
    match (one, other) {
        (
            Identity::File {
                mark,
                file_system,
                handle,
            },
            Identity::File {
                mark: other_mark,
                file_system: other_file_system,
                handle: other_handle,
            },
        ) => {
            let same = |one: &Option<String>, other: &Option<String>| one.is_some() && one == other;
            let may_be =
                file_system == other_file_system || file_system.is_none() || other_file_system.is_none();
            // A handle alone says which file of its file system it is.
            let is_same = same(handle, other_handle)
                && may_be
                && (same(file_system, other_file_system) || same(mark, other_mark));
            is_same.then(|| "it is the same file of the same file system".to_owned())
        }
        (
            Identity::Device { names, signature },
            Identity::Device {
                names: other_names,
                signature: other_signature,
            },
        ) => {
            let by_names = compare(names, other_names);
            let is_signed = signature.is_some() && signature == other_signature;
            match by_names {
                // A copy of the blocks of another device.
                Names::Differ => None,
                _ if is_signed => Some("it has the same signature behind the volume".to_owned()),
                Names::Same(name) if with_names => Some(name),
                Names::Same(_) | Names::SayNothing => None,
            }
        }
        // A loop device on the file.
        (
            Identity::Device { names, .. },
            Identity::File {
                file_system: Some(file_system),
                handle: Some(handle),
                ..
            },
        )
        | (
            Identity::File {
                file_system: Some(file_system),
                handle: Some(handle),
                ..
            },
            Identity::Device { names, .. },
        ) => {
            let is_its = names.get(BACKING) == Some(&format!("{file_system}/{handle}"));
            is_its.then(|| "one is a loop device on the other".to_owned())
        }
        _ => None,
    }
}

/// The name of a loop device's file.
const BACKING: &str = "backing_file";

/// What the names of two devices say.
enum Names {
    /// They have one in common, in words.
    Same(String),
    Differ,
    SayNothing,
}

fn compare(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> Names {
    let common = |(name, value)| Some((name, value, other.get(name)?));
    let common: Vec<(&String, &String, &String)> = one.iter().filter_map(common).collect();
    if common.iter().any(|(_, value, other)| value != other) {
        return Names::Differ;
    }
    // A partition has the same number on every disk, and a file without the name of its file system the same handle.
    let tells = |name: &str, value: &str| name != PARTITION && !(name == BACKING && value.starts_with('/'));
    let first = common.iter().find(|(name, value, _)| tells(name, value));
    match first {
        Some((name, value, _)) => Names::Same(format!("its {name} is {value} on both hosts")),
        None => Names::SayNothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::signature::Signature;

    fn file(mark: Option<&str>, file_system: Option<&str>, handle: Option<&str>) -> Identity {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Identity::File {
            mark: own(mark),
            file_system: own(file_system),
            handle: own(handle),
        }
    }

    fn device(names: &[(&str, &str)], number: Option<&str>) -> Identity {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Identity::Device {
            names: names.iter().map(own).collect(),
            signature: number.map(|number| Signature {
                offset: 4096,
                number: number.to_owned(),
            }),
        }
    }

    fn is_same(one: &Identity, other: &Identity) -> bool {
        let said = sign_of_same(one, other, true);
        assert_eq!(
            sign_of_same(other, one, true).is_some(),
            said.is_some(),
            "{one:?} {other:?}"
        );
        said.is_some()
    }

    #[test]
    fn a_disk_that_both_hosts_see_is_known_by_any_name() {
        for (name, value) in [
            ("wwid", "naa.6001405"),
            ("dm_uuid", "LVM-x"),
            ("md_uuid", "1:2"),
            ("serial", "S1"),
        ] {
            let disk = device(&[(name, value)], None);
            assert!(
                is_same(&disk, &device(&[(name, value), ("other", "1")], None)),
                "{name}"
            );
            assert!(!is_same(&disk, &device(&[(name, "2")], None)), "{name}");
            let said = sign_of_same(&disk, &disk, true).expect("the same");
            assert!(said.contains(name) && said.contains(value), "{said}");
            assert_eq!(
                sign_of_same(&disk, &disk, false),
                None,
                "an operator says that names tell nothing"
            );
        }
        // A serial number that two makers have given.
        let (one, other) = (
            device(&[("wwid", "a"), ("serial", "1")], None),
            device(&[("wwid", "b"), ("serial", "1")], None),
        );
        assert!(!is_same(&one, &other));
        assert!(!is_same(&device(&[], None), &device(&[], None)));
    }

    #[test]
    fn partitions_of_a_disk_are_disks_of_their_own_and_all_of_it_is_not() {
        let part = |number| device(&[("wwid", "a"), ("partition", number)], None);
        assert!(is_same(&part("1"), &part("1")));
        assert!(!is_same(&part("1"), &part("2")));
        assert!(
            is_same(&part("1"), &device(&[("wwid", "a")], None)),
            "one is within the other"
        );
        assert!(!is_same(
            &part("1"),
            &device(&[("wwid", "b"), ("partition", "1")], None)
        ));
    }

    #[test]
    fn a_device_without_a_name_is_known_by_its_signature() {
        let disk = device(&[], Some("1"));
        assert!(is_same(&disk, &disk));
        assert!(
            sign_of_same(&disk, &disk, false).is_some(),
            "whatever an operator says of names"
        );
        assert!(!is_same(&disk, &device(&[], Some("2"))));
        assert!(!is_same(
            &device(&[("wwid", "a")], Some("1")),
            &device(&[("wwid", "b")], Some("1"))
        ));
    }

    #[test]
    fn a_file_that_both_hosts_see_is_known_by_its_file_system_and_its_handle() {
        let noted = file(Some("m"), Some("f"), Some("h"));
        assert!(is_same(&noted, &noted));
        assert!(is_same(&noted, &file(None, Some("f"), Some("h"))));
        // A network file system has no UUID.
        assert!(is_same(
            &file(Some("m"), None, Some("h")),
            &file(Some("m"), None, Some("h"))
        ));
        for other in [
            // Copies of the file, and files with the same handle elsewhere.
            file(Some("m"), Some("g"), Some("h")),
            file(Some("m"), Some("f"), Some("i")),
            file(None, None, Some("h")),
            file(Some("m"), None, None),
            device(&[], None),
        ] {
            assert!(!is_same(&noted, &other), "{other:?}");
        }
    }

    #[test]
    fn a_loop_device_on_a_file_is_that_file() {
        let on = |name| device(&[(BACKING, name)], None);
        assert!(is_same(&on("f/h"), &on("f/h")));
        assert!(!is_same(&on("f/h"), &on("f/i")));
        assert!(!is_same(&on("/h"), &on("/h")), "of whatever file system");
        assert!(is_same(&on("f/h"), &file(None, Some("f"), Some("h"))));
        assert!(!is_same(&on("f/h"), &file(None, Some("g"), Some("h"))));
    }
}

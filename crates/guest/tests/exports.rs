//! The reviewed list of symbols against what is built and what is installed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const LIST: &str = include_str!("../exports.txt");

/// Each line's symbol (or pattern ending in `*`) and kind.
fn list() -> BTreeMap<&'static str, &'static str> {
    let lines = LIST
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut all = BTreeMap::new();
    for line in lines {
        let (name, kind) = line
            .split_once(' ')
            .unwrap_or_else(|| panic!("exports.txt: {line:?} has no kind"));
        assert!(
            ["implemented", "refused", "own", "system", "wait"].contains(&kind),
            "exports.txt: {line:?}"
        );
        assert_eq!(all.insert(name, kind), None, "exports.txt has {name} twice");
    }
    all
}

/// The functions that a shared library defines, without their versions.
fn defined(library: &Path) -> Option<BTreeSet<String>> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .ok()?;
    assert!(
        output.status.success(),
        "nm {}: {}",
        library.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("symbols are ASCII");
    let functions = text
        .lines()
        .filter_map(|line| line.split_once(" T "))
        .map(|(_, name)| name);
    Some(
        functions
            .map(|name| name.split('@').next().unwrap_or(name).to_owned())
            .collect(),
    )
}

/// Cargo puts the cdylib beside its test programs.
fn our_library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    test.with_file_name("libverbatim.so")
}

#[test]
fn we_export_what_the_list_says_and_nothing_else() {
    let Some(exported) = defined(&our_library()) else {
        eprintln!("skipped: there is no nm (binutils)");
        return;
    };
    let listed: BTreeSet<String> = list()
        .into_iter()
        .filter(|(_, kind)| *kind != "system" && (*kind != "wait" || cfg!(target_arch = "x86_64")))
        .map(|(name, _)| name.to_owned())
        .collect();
    let missing: Vec<_> = listed.difference(&exported).collect();
    let unlisted: Vec<_> = exported.difference(&listed).collect();
    assert!(missing.is_empty(), "in exports.txt but not exported: {missing:?}");
    assert!(
        unlisted.is_empty(),
        "exported but not in exports.txt: {unlisted:?}"
    );
}

#[test]
fn what_is_refused_is_what_the_list_calls_so() {
    let listed: BTreeSet<_> = list()
        .into_iter()
        .filter(|(_, kind)| *kind == "refused")
        .map(|(name, _)| name)
        .collect();
    let refused: BTreeSet<_> = verbatim::verbs::REFUSED.iter().copied().collect();
    assert_eq!(listed, refused);
}

#[test]
fn every_symbol_of_the_installed_library_has_been_thought_of() {
    let places = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
    ];
    let installed = places
        .iter()
        .map(|place| Path::new(place).join("libibverbs.so.1"))
        .find(|path| path.exists());
    let Some(real) = installed else {
        eprintln!("skipped: libibverbs.so.1 is not installed (package libibverbs1)");
        return;
    };
    let Some(symbols) = defined(&real) else {
        eprintln!("skipped: there is no nm (binutils)");
        return;
    };
    let list = list();
    let both = symbols
        .iter()
        .find(|name| list.get(name.as_str()) == Some(&"own"));
    assert_eq!(both, None, "not ours alone");
    let known = |name: &str| {
        list.contains_key(name)
            || list.keys().any(|pattern| {
                pattern
                    .strip_suffix('*')
                    .is_some_and(|start| name.starts_with(start))
            })
    };
    let forgotten: Vec<_> = symbols.iter().filter(|name| !known(name)).collect();
    assert!(forgotten.is_empty(), "not in exports.txt: {forgotten:?}");
}

/// One way, and the other: each function that the header declares is one of ours.
#[test]
fn what_is_ours_alone_is_what_our_header_declares() {
    let header = include_str!("../../../include/verbatim.h");
    // Outside of comments, at the beginning of a line: a type, a name, its parameters.
    let mut in_comment = false;
    let mut declared = BTreeSet::new();
    for line in header.lines() {
        let starts = line.trim_start().starts_with("/*");
        let is_code = !in_comment && !starts;
        in_comment = (in_comment || starts) && !line.contains("*/");
        if is_code && (line.starts_with("int ") || line.starts_with("size_t ")) {
            let (name, _) = line.split_once('(').expect("a function");
            declared.extend(name.split(' ').next_back());
        }
    }
    let listed = list();
    let own = listed.iter().filter(|(_, kind)| **kind == "own");
    assert_eq!(own.map(|(name, _)| *name).collect::<BTreeSet<_>>(), declared);
}

//! The reviewed list of symbols against what is built and what is installed.

#[expect(dead_code, reason = "shared with `programs.rs`, which uses the rest")]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const LIST: &str = include_str!("../exports.txt");

/// What libibverbs 44 has for programs: further versions came later.
const NEWEST_OF_44: u32 = 14;

/// What the list says of a symbol.
#[derive(Debug, PartialEq, Eq)]
struct Listed {
    kind: &'static str,
    /// The version in libibverbs 44, and one of before.
    versions: Vec<&'static str>,
}

/// Each line's symbol, or pattern ending in `*`.
fn list() -> BTreeMap<&'static str, Listed> {
    let lines = LIST
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut all = BTreeMap::new();
    for line in lines {
        let mut words = line.split(' ');
        let (Some(name), Some(kind)) = (words.next(), words.next()) else {
            panic!("exports.txt: {line:?} has no kind");
        };
        assert!(
            ["implemented", "refused", "own", "system", "libc"].contains(&kind),
            "exports.txt: {line:?}"
        );
        let versions = words.collect();
        assert_eq!(
            all.insert(name, Listed { kind, versions }),
            None,
            "exports.txt has {name} twice"
        );
    }
    all
}

/// How a symbol is exported.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Symbol {
    name: String,
    /// None if any version that is asked for finds it.
    version: Option<String>,
    /// Whether a program that asks for no version, or a linker, gets this one.
    default: bool,
}

/// The functions that a shared library defines.
fn defined(library: &Path) -> Option<BTreeSet<Symbol>> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--with-symbol-versions"])
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
    let symbol = |text: &str| {
        let (name, version) = text.split_once('@').unwrap_or((text, ""));
        Symbol {
            name: name.to_owned(),
            version: Some(version.trim_start_matches('@').to_owned()).filter(|version| !version.is_empty()),
            default: version.is_empty() || version.starts_with('@'),
        }
    };
    Some(functions.map(symbol).collect())
}

/// Of `IBVERBS_1.N`, N.
fn public(version: &str) -> Option<u32> {
    version.strip_prefix("IBVERBS_1.")?.parse().ok()
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
    let list = list();
    let ours = list.iter().filter(|(_, listed)| {
        listed.kind != "system" && (listed.kind != "libc" || cfg!(target_arch = "x86_64"))
    });
    let listed: BTreeSet<Symbol> = ours
        .flat_map(|(name, listed)| {
            let symbol = |version: Option<&&str>, default| Symbol {
                name: (*name).to_owned(),
                version: version.map(|version| (*version).to_owned()),
                default,
            };
            let of_before = listed.versions.get(1).map(|version| symbol(Some(version), false));
            std::iter::once(symbol(listed.versions.first(), true)).chain(of_before)
        })
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
        .filter(|(_, listed)| listed.kind == "refused")
        .map(|(name, _)| name)
        .collect();
    let refused: BTreeSet<_> = verbatim::verbs::REFUSED.iter().copied().collect();
    assert_eq!(listed, refused);
}

fn installed_library() -> Option<PathBuf> {
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
    if installed.is_none() {
        eprintln!("skipped: libibverbs.so.1 is not installed (package libibverbs1)");
    }
    installed
}

#[test]
fn every_symbol_of_the_installed_library_has_been_thought_of() {
    let Some(symbols) = installed_library().and_then(|library| defined(&library)) else {
        eprintln!("skipped: there is no nm (binutils), or no library");
        return;
    };
    let list = list();
    let both = symbols.iter().find(|symbol| {
        list.get(symbol.name.as_str())
            .is_some_and(|listed| listed.kind == "own")
    });
    assert_eq!(both, None, "not ours alone");
    let known = |symbol: &&Symbol| {
        let name = symbol.name.as_str();
        list.contains_key(name)
            || list.keys().any(|pattern| {
                pattern
                    .strip_suffix('*')
                    .is_some_and(|start| name.starts_with(start))
            })
    };
    let forgotten: Vec<_> = symbols.iter().filter(|symbol| !known(symbol)).collect();
    assert!(forgotten.is_empty(), "not in exports.txt: {forgotten:?}");
}

/// One way, and the other: what the installed library has for programs is ours under the same name and version, and we have no
/// such version that it does not have.
#[test]
fn what_libibverbs_has_for_programs_is_ours_in_the_same_versions() {
    let both = installed_library()
        .and_then(|library| defined(&library))
        .zip(defined(&our_library()));
    let Some((theirs, ours)) = both else {
        eprintln!("skipped: there is no nm (binutils), or no library");
        return;
    };
    // Between the library and its providers, although its version is that of a function for programs.
    let for_programs = |symbol: &&Symbol| symbol.name != "ibv_register_driver";
    let of_44 = |symbol: &&Symbol| {
        let number = symbol.version.as_deref().and_then(public);
        number.is_some_and(|number| number <= NEWEST_OF_44)
    };
    let wanted: BTreeSet<_> = theirs.iter().filter(of_44).filter(for_programs).collect();
    let exported: BTreeSet<_> = ours.iter().filter(|symbol| symbol.version.is_some()).collect();
    assert!(wanted.len() > 80, "{wanted:?}");
    let missing: Vec<_> = wanted.difference(&exported).collect();
    assert!(
        missing.is_empty(),
        "libibverbs has them, and we do not: {missing:?}"
    );
    let has_all = theirs
        .iter()
        .any(|symbol| symbol.version.as_deref().and_then(public) == Some(NEWEST_OF_44));
    if has_all {
        let invented: Vec<_> = exported.difference(&wanted).collect();
        assert!(
            invented.is_empty(),
            "we have them, and libibverbs does not: {invented:?}"
        );
    }
    // What is newer is found in any version.
    let newer = theirs.iter().filter(|symbol| {
        let number = symbol.version.as_deref().and_then(public);
        number.is_some_and(|number| number > NEWEST_OF_44)
    });
    let list = list();
    for symbol in newer.filter(|symbol| list[symbol.name.as_str()].kind != "system") {
        let any = ours
            .iter()
            .any(|ours| ours.name == symbol.name && ours.version.is_none());
        assert!(any, "{symbol:?} is not found in that version");
    }
}

/// Functions that take plain numbers and memory answer as the installed library's do.
#[test]
fn helpers_answer_as_those_of_the_installed_library() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("helpers");
    if support::build::build(&[support::build::source("helpers")], &program).is_none() {
        return;
    }
    let said = |preload: Option<PathBuf>| {
        let mut command = Command::new(&program);
        command.arg(folder.path()).env("SYSFS_PATH", "/sys/kernel//");
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let output = command.output().expect("it was just built");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("ASCII")
    };
    let (theirs, ours) = (said(None), said(Some(our_library())));
    assert!(theirs.contains("libibverbs.so.1\n"), "{theirs}");
    assert!(ours.contains("libverbatim.so\n"), "{ours}");
    let answers = |text: &str| text.split_once('\n').map(|(_, answers)| answers.to_owned());
    assert_eq!(answers(&ours), answers(&theirs));
}

/// A program that was linked without versions, and one that asks for the oldest.
#[test]
fn each_program_finds_the_functions_that_it_was_made_for() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    if !support::build::has_header() {
        return;
    }
    std::fs::write(
        at("stub.c"),
        "int ibv_get_device_list(int *n) { *n = -7; return 0; }\n",
    )
    .unwrap();
    std::fs::write(at("stub.map"), "IBVERBS_1.0 { global: ibv_get_device_list; };\n").unwrap();
    std::fs::write(
        at("program.c"),
        "#include <stdio.h>\n#include <errno.h>\nvoid *ibv_get_device_list(int *n);\n\
         int main(void) { int n = -1; errno = 0; void *list = ibv_get_device_list(&n);\n\
         printf(\"%d %s\\n\", n, list ? \"list\" : errno == EOPNOTSUPP ? \"refused\" : \"none\"); }\n",
    )
    .unwrap();
    let cc = |arguments: &[&str]| {
        let output = Command::new("cc")
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let mut said = Vec::new();
    for versions in [&[][..], &["-Wl,--version-script=stub.map"]] {
        let stub = [
            "-shared",
            "-fPIC",
            "-o",
            "libibverbs.so.1",
            "-Wl,-soname,libibverbs.so.1",
            "stub.c",
        ];
        cc(&[&stub[..], versions].concat());
        cc(&["-o", "program", "program.c", "./libibverbs.so.1"]);
        let output = Command::new(at("program"))
            .env("LD_PRELOAD", our_library())
            .env("LD_LIBRARY_PATH", folder.path())
            .env("VERBATIM_RUNTIME", folder.path())
            .output()
            .unwrap();
        said.push(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    assert_eq!(said, ["0 list\n", "-1 refused\n"]);
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
    let own = listed.iter().filter(|(_, listed)| listed.kind == "own");
    assert_eq!(own.map(|(name, _)| *name).collect::<BTreeSet<_>>(), declared);
}

//! Gives `libverbatim.so` the symbol versions that libibverbs has, from `exports.txt`.
//!
//! rustc hides what is not exported by a version script of its own, in which nothing has a version, and a linker takes no second
//! one beside such a one. So the linker is called by `link/ld.bfd`, which leaves rustc's script out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

const LIST: &str = "exports.txt";

/// The linker script's file name, by which `link/ld.bfd` knows it.
const SCRIPT: &str = "exports.map";

/// What rustc would hide: the language's own names, and what only assembly calls.
///
/// The node stands first. A program without versions gets, of a symbol that has several, the one of the first node, which is to be
/// none of those of before 2007.
const FIRST: &str =
    "VERBATIM { local: _ZN*; _R*; __rust*; rust_*; __rg_*; __rdl_*; anon.*; verbatim_old_*; };\n";

fn main() {
    println!("cargo::rerun-if-changed={LIST}");
    println!("cargo::rerun-if-changed=link/ld.bfd");
    let variable = |name| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
    let list = std::fs::read_to_string(LIST).expect("the list of exports");
    let path = variable("OUT_DIR").join(SCRIPT);
    std::fs::write(&path, script(&list)).expect("a folder to write to");

    let arguments = [
        format!("-B{}/", variable("CARGO_MANIFEST_DIR").join("link").display()),
        "-fuse-ld=bfd".to_owned(),
        "-Wl,--exclude-libs,ALL".to_owned(),
        format!("-Wl,--version-script={}", path.display()),
    ];
    for argument in arguments {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}

/// A line of the list is a name, a kind, and, where libibverbs has them, its version and one of before.
fn script(list: &str) -> String {
    let mut nodes: BTreeMap<Vec<u32>, (&str, Vec<&str>)> = BTreeMap::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let (Some(name), Some(_kind)) = (words.next(), words.next()) else {
            continue;
        };
        for (index, version) in words.enumerate() {
            let (_, numbers) = version.split_once('_').expect("IBVERBS_1.1");
            let numbers = numbers.split('.').map(|number| number.parse().expect("a number"));
            let node = nodes.entry(numbers.collect()).or_insert((version, Vec::new()));
            // The one of before is named by `src/verbs/old.rs`.
            if index == 0 {
                node.1.push(name);
            }
        }
    }
    let mut script = FIRST.to_owned();
    let mut before = String::new();
    for (version, names) in nodes.into_values() {
        let names: String = names.iter().map(|name| format!(" {name};")).collect();
        let global = if names.is_empty() {
            String::new()
        } else {
            format!(" global:{names}")
        };
        writeln!(script, "{version} {{{global} }}{before};").expect("memory");
        before = format!(" {version}");
    }
    script
}

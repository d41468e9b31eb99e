//! Building C programs against the installed header.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds a program, or says why its test is skipped.
pub fn build(sources: &[PathBuf], binary: &Path) -> Option<()> {
    compile(sources, binary, &[])
}

/// As [`build`], for one that calls what is ours alone: it sees `verbatim.h` and is linked with our library.
pub fn build_with_ours(sources: &[PathBuf], binary: &Path) -> Option<()> {
    let folder = std::env::current_exe().expect("a test knows where it is");
    let folder = folder.parent().expect("a folder").display().to_string();
    let include = include_folder().display().to_string();
    let rpath = format!("-Wl,-rpath,{folder}");
    compile(
        sources,
        binary,
        &["-I", &include, "-L", &folder, "-lverbatim", &rpath],
    )
}

/// Where `verbatim.h` is.
pub fn include_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include")
}

/// `tests/c/NAME.c`
pub fn source(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    folder.join(name).with_extension("c")
}

fn compile(sources: &[PathBuf], binary: &Path, last: &[&str]) -> Option<()> {
    if !has_header() {
        return None;
    }
    let mut compiler = Command::new("cc");
    compiler
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"])
        .arg(binary);
    compiler
        .args(sources)
        .args(["-libverbs", "-ldl", "-pthread"])
        .args(last);
    match compiler.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => {
            eprintln!("skipped: cc: {error}");
            return None;
        }
    }
    Some(())
}

/// Whether verbs programs can be built here; says so if not.
pub fn has_header() -> bool {
    let there = Path::new("/usr/include/infiniband/verbs.h").exists();
    if !there {
        eprintln!("skipped: <infiniband/verbs.h> is not installed (package libibverbs-dev)");
    }
    there
}

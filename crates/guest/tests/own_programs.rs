//! Our own C programs, built against the installed header and run with our library in front of the system's.

#[expect(dead_code, reason = "shared with `programs.rs`, which uses the rest")]
mod support;

use std::path::Path;
use std::process::Command;

use support::{Pair, run};

/// Builds and runs `tests/c/NAME.c`; it exits with 0 if all its checks hold.
fn check(name: &str) {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: <infiniband/verbs.h> is not installed (package libibverbs-dev)");
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(name)
        .with_extension("c");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&binary)
        .arg(source)
        .args(["-libverbs", "-ldl"]);
    match compiler.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => {
            eprintln!("skipped: cc: {error}");
            return;
        }
    }
    let output = run(Pair::start().client.prepare(Command::new(&binary)));
    assert_eq!(output, "done\n");
}

#[test]
fn every_way_to_post_works_and_errors_are_told() {
    check("data");
}

#[test]
fn control_verbs_keep_their_conventions() {
    check("control");
}

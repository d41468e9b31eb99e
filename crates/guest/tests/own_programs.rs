//! Our own C programs, built against the installed header and run with our library in front of the system's.

#[expect(dead_code, reason = "shared with `programs.rs`, which uses the rest")]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Pair, run};

/// Builds a program, or says why its test is skipped.
fn build(sources: &[PathBuf], binary: &Path) -> Option<()> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: <infiniband/verbs.h> is not installed (package libibverbs-dev)");
        return None;
    }
    let mut compiler = Command::new("cc");
    compiler
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"])
        .arg(binary);
    compiler.args(sources).args(["-libverbs", "-ldl", "-pthread"]);
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

/// Builds and runs `tests/c/NAME.c`; it exits with 0 if all its checks hold.
fn check(name: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(name)
        .with_extension("c");
    if build(&[source], &binary).is_some() {
        let output = run(Pair::start().client.prepare(Command::new(&binary)));
        assert_eq!(output, "done\n");
    }
}

#[test]
fn every_way_to_post_works_and_errors_are_told() {
    check("data");
}

#[test]
fn control_verbs_keep_their_conventions() {
    check("control");
}

#[test]
fn threads_share_a_queue_pair() {
    check("threads");
}

/// The workspace's own check program: every operation at once, in random sizes, each message's content verified.
#[test]
fn vcheck_finds_nothing_lost_doubled_or_changed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join("vcheck");
    let vcheck = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vcheck");
    let files = std::fs::read_dir(vcheck).expect("vcheck is part of the workspace");
    let sources: Vec<PathBuf> = files
        .map(|file| file.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    if build(&sources, &binary).is_some() {
        let mix = [
            "--op",
            "mix",
            "-q",
            "4",
            "-s",
            "65536",
            "--random-size",
            "-n",
            "500",
            "--bidirectional",
        ];
        for output in Pair::start().play_at("--port", &binary, &mix) {
            assert!(output.contains("\"verdict\":\"ok\""), "{output}");
        }
    }
}

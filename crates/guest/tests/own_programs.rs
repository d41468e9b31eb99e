//! Our own C programs, built against the installed header and run with our library in front of the system's.

#[expect(dead_code, reason = "shared with `programs.rs`, which uses the rest")]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::build::{build, source};
use support::{Pair, run, run_until_ready};

/// Builds `tests/c/NAME.c` and gives it to `run`.
fn with_program(name: &str, run: impl FnOnce(Command)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join(name);
    if build(&[source(name)], &binary).is_some() {
        run(Command::new(&binary));
    }
}

/// Builds and runs `tests/c/NAME.c`; it exits with 0 if all its checks hold.
fn check(name: &str) {
    with_program(name, |program| {
        let output = run(Pair::start().client.prepare(program));
        assert_eq!(output, "done\n");
    });
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

#[test]
fn datagrams_are_sent_received_and_answered() {
    check("datagrams");
}

#[test]
fn events_wake_who_waits_and_are_acknowledged() {
    check("events");
}

#[test]
fn a_shared_receive_queue_serves_its_queue_pairs() {
    check("srq");
}

#[test]
fn memory_windows_open_and_close() {
    check("windows");
}

#[test]
fn on_chip_memory_and_domains_work_like_any_other() {
    check("memory");
}

#[test]
fn no_child_shares_registered_memory() {
    check("processes");
}

#[test]
fn completion_queues_tell_the_time_and_change_their_size() {
    check("queues");
}

#[test]
fn atomics_are_atomic() {
    check("atomics");
}

#[test]
fn a_program_outlives_its_rnic() {
    with_program("killed", |program| {
        let Pair { client, .. } = &mut Pair::start();
        let output = run_until_ready(client.prepare(program), || client.end_rnic());
        assert_eq!(output, "ready\ndone\n");
    });
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

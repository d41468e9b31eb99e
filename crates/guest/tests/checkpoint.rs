//! Programs that dump their contexts and restore them, and the header that they see.

#[expect(dead_code, reason = "shared with `programs.rs`, which uses the rest")]
mod support;

use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, Mode};
use support::build::{build_with_ours, has_header, include_folder, source};
use support::{Host, run, start};

/// As in `checkpoint.c`.
const GENERATIONS: usize = 5;

/// Each generation of the program runs on one of these hosts, its partner on a host of its own. What the partner sees is
/// checked by itself, to the byte.
fn in_generations(hosts: &[&Host], secret: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join("checkpoint");
    if build_with_ours(&[source("checkpoint")], &binary).is_none() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may ask an RNIC for numbers");
        return;
    }
    for fifo in ["to_partner", "to_program", "end"] {
        rustix::fs::mkfifoat(CWD, folder.path().join(fifo), Mode::RUSR | Mode::WUSR).expect("a FIFO");
    }
    let command = |role: &str| {
        let mut command = Command::new(&binary);
        command.arg(role).arg(folder.path()).arg(secret);
        command
    };
    let there = Host::start();
    let partner = start(there.prepare(command("partner")));
    for generation in 0..GENERATIONS {
        let host = hosts[generation % hosts.len()];
        let output = run(host.prepare(command(&generation.to_string())));
        let expected = match generation + 1 < GENERATIONS {
            true => "dumped\n",
            false => "done\n",
        };
        assert_eq!(output, expected, "generation {generation}");
    }
    assert_eq!(partner.finish(), "done\n");
}

#[test]
fn a_partner_that_knows_of_nothing_loses_nothing() {
    in_generations(&[&Host::start()], "none");
}

#[test]
fn with_a_secret_the_partner_waits() {
    in_generations(&[&Host::start()], "secret");
}

#[test]
fn with_a_secret_the_program_may_come_back_elsewhere() {
    let hosts = [Host::start(), Host::start()];
    // The second generation is where the first was: its two ends that are connected to each other are both in the dump.
    in_generations(&[&hosts[0], &hosts[0], &hosts[1], &hosts[0], &hosts[1]], "secret");
}

#[test]
fn what_is_damaged_taken_or_not_possible_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join("checkpoint_refused");
    if build_with_ours(&[source("checkpoint_refused")], &binary).is_some() {
        let host = Host::start();
        assert_eq!(run(host.prepare(Command::new(&binary))), "done\n");
    }
}

/// Compiles a program of a few lines that includes the header and uses all of it.
fn compiles(compiler: &str, standard: &str, extension: &str) {
    if !has_header() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("program").with_extension(extension);
    let text = r"
        #include <verbatim.h>
        int main(void)
        {
            uint64_t dump[64] = { 0 };
            const struct ibv_dump_record *record = ibv_dump_next(dump, sizeof(dump), NULL);
            void *object = NULL;
            int count;
            return record != NULL || ibv_dump_context(NULL, &count, dump, verbatim_dump_bytes(NULL)) ||
                   verbatim_check_dump(dump, sizeof(dump)) || verbatim_set_qp_secret(NULL, NULL, 0) ||
                   ibv_restore_object(NULL, &object, IBV_OBJECT_QP, IBV_RESTORE_REFILL, NULL, 0);
        }
    ";
    std::fs::write(&program, text).expect("it can be written");
    let mut command = Command::new(compiler);
    command
        .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-c", "-o"])
        .arg(Path::new("/dev/null"));
    command.arg("-I").arg(include_folder()).arg(&program);
    match command.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => eprintln!("skipped: {compiler}: {error}"),
    }
}

#[test]
fn the_header_is_c11() {
    compiles("cc", "-std=c11", "c");
}

#[test]
fn the_header_is_cpp17() {
    compiles("c++", "-std=c++17", "cpp");
}

/// The table of `docs/checkpoint-api.md` comes from here: what an object takes in a dump (MigrOS, Table 1).
#[test]
fn objects_take_few_bytes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let binary = folder.path().join("checkpoint_sizes");
    if build_with_ours(&[source("checkpoint_sizes")], &binary).is_none() {
        return;
    }
    let host = Host::start();
    let output = run(host.prepare(Command::new(&binary)));
    println!("{output}");
    let sizes: std::collections::HashMap<&str, u32> = output
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, bytes)| (name, bytes.parse().expect("a number")))
        .collect();
    // What is said there, with room for numbers that take a byte more elsewhere.
    for (name, at_most) in [
        ("head", 24),
        ("pd", 16),
        ("channel", 20),
        ("cq", 32),
        ("srq", 32),
        ("mr", 44),
        ("ah", 48),
        ("mw", 52),
        ("qp", 300),
        ("qp_srq", 300),
    ] {
        let bytes = sizes[name];
        assert!(bytes > 0 && bytes <= at_most, "{name}: {bytes} bytes");
    }
    for (full, idle, each_at_most) in [
        ("cq_full", "cq", 28),
        ("srq_full", "srq", 24),
        ("qp_recvs", "qp", 24),
        ("qp_sends", "qp", 90),
    ] {
        let each = (sizes[full] - sizes[idle]) / 8;
        assert!(each > 0 && each <= each_at_most, "{full}: {each} bytes each");
    }
}

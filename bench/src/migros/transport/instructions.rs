//! Instructions of a message, of both ends' transports together, counted by valgrind: the same in each run.
//!
//! Two ends in memory, driven as the RNIC drives them: the request off the ring, gather, packets, ICRC; its check, store, completion,
//! acknowledgement; its check, completion. With a secret at both ends and without.
//!
//! Either way a packet meets the tests for being stopped or waiting; [`TESTS`] are all of them. What is executed at the lines of each is
//! counted. That is an upper bound of what pause and resume cost: the same lines ask for what the standard has, too, and a test of
//! many states at once (a mask) has as many instructions with one state less.
//!
//! The transport calls no kernel: it forbids unsafe code and has no I/O, and the part of the RNIC that has does not know of secrets.

mod lines;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde::Serialize;

use super::pair::Messages;

/// Size, messages before the first that is counted (by then every vector has its size), and messages that are counted.
const SIZES: [(u32, u32, u32); 3] = [(64, 300, 512), (4096, 300, 512), (1 << 20, 4, 16)];

/// Where the transport asks whether a connection is stopped or waits, or whether a packet tells of that: what for, a file of
/// `crates/roce/src`, the text where the test begins, and the next one where it ends.
const TESTS: [(&str, &str, &str, &str); 5] = [
    ("is any packet let in", "shell.rs", "let closed = matches!(", ");"),
    ("is it closed", "shell.rs", "let reason = if closed {", "{"),
    (
        "is a response wanted",
        "rc/queue_pair.rs",
        "let passive = matches!(self.shell.phase, Phase::Waiting | Phase::Rtr)",
        ";",
    ),
    (
        "is it no acknowledgement",
        "rc/queue_pair.rs",
        "if matches!(packet.info.kind, Kind::Congestion | Kind::Migration) {",
        "{",
    ),
    (
        "may all be sent",
        "rc/queue_pair.rs",
        "let outcome = match self.shell.phase {",
        "{",
    ),
];

/// Messages of one kind.
#[derive(Debug, Serialize)]
pub struct Row {
    operation: &'static str,
    bytes: u32,
    /// Of both directions.
    packets: f64,
    /// Instructions of a message without a secret, and with one.
    plain: f64,
    migratable: f64,
    /// Of them at the lines of each of [`TESTS`], with a secret.
    tests: Vec<(&'static str, f64)>,
}

/// Counts, prints. Empty where there is no valgrind.
pub fn measure(out: &Path) -> anyhow::Result<Vec<Row>> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("instructions are not counted: install valgrind for that");
        return Ok(Vec::new());
    }
    println!(
        "instructions of a message, both ends together, by callgrind; of them those of the tests for pause and resume"
    );
    println!(
        "{:6} {:>8} {:>8} {:>12} {:>12} {:>8} {:>8}  each",
        "", "bytes", "packets", "plain", "migratable", "extra", "tests"
    );
    let mut rows = Vec::new();
    for operation in ["send", "write"] {
        for place in 0..SIZES.len() {
            let row = row(operation, place, out)?;
            let each: Vec<_> = row
                .tests
                .iter()
                .map(|(what, instructions)| format!("{what} {instructions:.2}"))
                .collect();
            println!(
                "{operation:6} {:>8} {:>8.2} {:>12.2} {:>12.2} {:>+8.2} {:>8.2}  {}",
                row.bytes,
                row.packets,
                row.plain,
                row.migratable,
                row.migratable - row.plain,
                row.tests
                    .iter()
                    .map(|(_, instructions)| instructions)
                    .sum::<f64>(),
                each.join(", "),
            );
            rows.push(row);
        }
    }
    Ok(rows)
}

fn row(operation: &'static str, place: usize, out: &Path) -> anyhow::Result<Row> {
    let (bytes, _, messages) = SIZES[place];
    let plain = counted(false, operation, place, out)?;
    let migratable = counted(true, operation, place, out)?;
    let again = counted(true, operation, place, out)?;
    ensure!(
        migratable == again,
        "valgrind has counted {migratable:?}, and then {again:?}: this is no figure"
    );
    let each = |count: u64| count as f64 / f64::from(messages);
    Ok(Row {
        operation,
        bytes,
        packets: each(migratable.packets),
        plain: each(plain.instructions),
        migratable: each(migratable.instructions),
        tests: TESTS
            .iter()
            .zip(migratable.tests)
            .map(|((what, ..), count)| (*what, each(count)))
            .collect(),
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Counted {
    instructions: u64,
    tests: Vec<u64>,
    packets: u64,
}

/// This program's messages once more, under valgrind.
fn counted(secret: bool, operation: &str, place: usize, out: &Path) -> anyhow::Result<Counted> {
    let profile = out.with_extension("callgrind");
    // Of one length, so that the stacks begin at the same place.
    let secret = if secret { "1" } else { "0" };
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .args([
            "--compress-pos=no",
            "--compress-strings=no",
            "--collect-atstart=no",
            "--toggle-collect=verbatim_bench::migros::transport::instructions::counted_messages*",
        ])
        .arg(std::env::current_exe()?)
        .args(["transport-messages", secret, operation, &place.to_string()])
        .output()
        .context("cannot start valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind has failed:\n{text}");
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .and_then(|(_, count)| count.trim().parse::<u64>().ok());
    let Some(instructions) = collected.filter(|collected| *collected > 0) else {
        bail!("valgrind has counted nothing:\n{text}");
    };
    let written = std::fs::read_to_string(&profile)?;
    std::fs::remove_file(&profile)?;
    let tests = TESTS.iter().map(|(_, file, begin, end)| {
        let lines = lines::find(file, begin, end)?;
        lines::count(&written, file, &lines)
    });
    let tests = tests.collect::<anyhow::Result<_>>()?;
    Ok(Counted {
        instructions,
        tests,
        packets: String::from_utf8_lossy(&output.stdout).trim().parse()?,
    })
}

/// What runs under valgrind: prints the packets of the messages that are counted.
pub fn messages(arguments: &[String]) -> anyhow::Result<()> {
    let [secret, operation, place] = arguments else {
        bail!("transport-messages wants 0 or 1 for a secret, an operation and a size");
    };
    let (bytes, warm_up, counted) = *SIZES.get(place.parse::<usize>()?).context("no such size")?;
    let mut messages = Messages::new(operation == "send", bytes, secret == "1");
    for _ in 0..warm_up {
        messages.exchange();
    }
    let before = messages.packets();
    counted_messages(&mut messages, counted);
    println!("{}", messages.packets() - before);
    Ok(())
}

/// What valgrind is told to count, by this name.
#[inline(never)]
fn counted_messages(messages: &mut Messages, count: u32) {
    for _ in 0..count {
        messages.exchange();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_changes_nothing_on_the_wire() {
        for (send, bytes) in [(true, 64), (false, 1 << 20)] {
            let [plain, migratable] = [false, true].map(|secret| {
                let mut messages = Messages::new(send, bytes, secret);
                for _ in 0..3 {
                    messages.exchange();
                }
                messages.packets()
            });
            assert_eq!(plain, migratable);
            assert!(plain >= 6);
        }
    }

    #[test]
    fn the_tests_for_pause_and_resume_are_where_they_are_looked_for() {
        for (what, file, begin, end) in TESTS {
            let lines = lines::find(file, begin, end).unwrap();
            assert!(
                (1..10).contains(&(lines.end() - lines.start() + 1)),
                "{what}: {lines:?}"
            );
        }
    }
}

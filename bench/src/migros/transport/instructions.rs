//! Instructions of a message, of both ends' transports together, counted by valgrind: the same in each run.
//!
//! Two ends in memory, driven as the RNIC drives them: the request off the ring, gather, packets, ICRC; its check, store, completion,
//! acknowledgement; its check, completion. Three ways: the transport as it is, with a secret and without, and one that was compiled
//! without the tests for pause and resume on the way of a packet (the feature `plain` of `crates/roce`: whether the queue pair is
//! stopped or waits in `Shell::admits`, `RcQp::handle_packet` and `RcQp::poll_transmit`, and whether a packet is a message of the
//! extension). What the latter saves is what those tests cost.
//!
//! The transport calls no kernel: it forbids unsafe code and has no I/O, and the part of the RNIC that has does not know of secrets.

use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde::Serialize;

use super::migratable::pair::Messages;
use super::plain::pair::Messages as PlainMessages;

const SIZES: [u32; 3] = [64, 4096, 1 << 20];
/// Messages before the first that is counted: by then every vector has its size.
const WARM_UP: u32 = 300;
/// Messages that are counted.
const MESSAGES: u32 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Compiled without the tests for pause and resume.
    WithoutTests,
    /// No secret: nothing of the extension is ever sent.
    Plain,
    /// Both ends have a secret.
    Migratable,
}

const WAYS: [Way; 3] = [Way::WithoutTests, Way::Plain, Way::Migratable];

/// Messages of one kind.
#[derive(Debug, Serialize)]
pub struct Row {
    operation: &'static str,
    bytes: u32,
    /// Of both directions.
    packets_per_message: f64,
    /// In the order of [`WAYS`].
    instructions_per_message: [f64; 3],
    /// More with a secret than without.
    of_the_secret: f64,
    /// More with the tests for pause and resume than without.
    of_the_tests: f64,
}

/// Counts, prints. Empty where there is no valgrind.
pub fn measure() -> anyhow::Result<Vec<Row>> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("instructions are not counted: install valgrind for that");
        return Ok(Vec::new());
    }
    println!("instructions of a message, both ends together, by callgrind");
    println!(
        "{:6} {:>8} {:>8} {:>14} {:>12} {:>12} {:>10} {:>10}",
        "", "bytes", "packets", "without tests", "plain", "migratable", "secret", "tests"
    );
    let mut rows = Vec::new();
    for operation in ["send", "write"] {
        for bytes in SIZES {
            let row = row(operation, bytes)?;
            let [without, plain, migratable] = row.instructions_per_message;
            println!(
                "{operation:6} {bytes:>8} {:>8.2} {without:>14.2} {plain:>12.2} {migratable:>12.2} {:>+10.2} {:>+10.2}",
                row.packets_per_message, row.of_the_secret, row.of_the_tests
            );
            rows.push(row);
        }
    }
    Ok(rows)
}

fn row(operation: &'static str, bytes: u32) -> anyhow::Result<Row> {
    let mut counts = [0.0; 3];
    let mut packets = 0;
    for (count, way) in counts.iter_mut().zip(WAYS) {
        let first = counted(way, operation, bytes)?;
        let again = counted(way, operation, bytes)?;
        ensure!(
            first == again,
            "valgrind has counted {first:?}, and then {again:?}: this is no figure"
        );
        *count = first.0 as f64 / f64::from(MESSAGES);
        packets = first.1;
    }
    let [without, plain, migratable] = counts;
    Ok(Row {
        operation,
        bytes,
        packets_per_message: packets as f64 / f64::from(MESSAGES),
        instructions_per_message: counts,
        of_the_secret: migratable - plain,
        of_the_tests: plain - without,
    })
}

/// Instructions and packets of [`MESSAGES`] messages: this program's once more, under valgrind.
fn counted(way: Way, operation: &str, bytes: u32) -> anyhow::Result<(u64, u64)> {
    let way = WAYS.iter().position(|other| *other == way).expect("all are there");
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--collect-atstart=no",
            "--toggle-collect=verbatim_bench::migros::transport::instructions::counted_messages*",
        ])
        .arg(std::env::current_exe()?)
        .args(["transport-messages", &way.to_string(), operation, &bytes.to_string()])
        .output()
        .context("cannot start valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind has failed:\n{text}");
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .and_then(|(_, count)| count.trim().parse::<u64>().ok());
    let Some(collected) = collected.filter(|collected| *collected > 0) else {
        bail!("valgrind has counted nothing:\n{text}");
    };
    let packets = String::from_utf8_lossy(&output.stdout).trim().parse()?;
    Ok((collected, packets))
}

/// What runs under valgrind: prints the packets of the messages that are counted.
pub fn messages(arguments: &[String]) -> anyhow::Result<()> {
    let [way, operation, bytes] = arguments else {
        bail!("transport-messages wants a way, an operation and a size");
    };
    let way = *WAYS.get(way.parse::<usize>()?).context("no such way")?;
    let (send, bytes) = (operation == "send", bytes.parse()?);
    let packets = match way {
        Way::WithoutTests => {
            let mut messages = PlainMessages::new(send, bytes, false);
            run(&mut || messages.exchange());
            messages.packets()
        }
        Way::Plain | Way::Migratable => {
            let mut messages = Messages::new(send, bytes, way == Way::Migratable);
            run(&mut || messages.exchange());
            messages.packets()
        }
    };
    // Each message takes as many.
    println!("{}", packets * u64::from(MESSAGES) / u64::from(WARM_UP + MESSAGES));
    Ok(())
}

fn run(exchange: &mut dyn FnMut()) {
    for _ in 0..WARM_UP {
        exchange();
    }
    counted_messages(exchange);
}

/// What valgrind is told to count, by this name.
#[inline(never)]
fn counted_messages(exchange: &mut dyn FnMut()) {
    for _ in 0..MESSAGES {
        exchange();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_transports_say_the_same_on_the_wire() {
        for (send, bytes) in [(true, 64), (false, 1 << 20)] {
            let mut plain = PlainMessages::new(send, bytes, false);
            let mut migratable = Messages::new(send, bytes, true);
            for _ in 0..3 {
                plain.exchange();
                migratable.exchange();
            }
            assert_eq!(plain.packets(), migratable.packets());
            assert!(plain.packets() >= 6);
        }
    }
}

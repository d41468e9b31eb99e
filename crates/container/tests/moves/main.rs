//! Containers that move between two hosts of this machine, for real: runc, CRIU, namespaces, TCP.
//!
//! The program plays several parts ([`support`]): beside the test itself, the proxy and the program in the container it
//! is the peer that this one talks to.
//!
//! `cargo test -p verbatim-container --test moves -- [NAME…]` runs the stories whose names contain a NAME;
//! `VERBATIM_TEST_MOVES=100` sets how often the one that measures moves its container.

mod rights;
mod stories;
#[path = "../support/mod.rs"]
mod support;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use support::workload;

/// The stories take seconds; hundreds of moves of the one that measures take minutes.
const LIMIT: Duration = Duration::from_secs(1800);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if support::is_called("criu") {
        verbatim_container::criu_proxy_main();
    }
    match arguments.get(1).map(String::as_str) {
        Some("workload") => workload::run(&arguments[2]),
        Some("keyring") => rights::keyring(),
        Some("peer") => workload::serve(&arguments[2]),
        Some("doomed-agent") => stories::doomed_agent(arguments.get(2).map_or("", String::as_str)),
        // `cargo test` asks every test binary for its list.
        Some("--list") => {
            stories::names().for_each(|name| println!("{name}: test"));
            ExitCode::SUCCESS
        }
        _ if support::inside().is_some() => stories::run(&arguments[1..]),
        _ => run(&arguments[1..]),
    }
}

/// Runs the stories in namespaces, or says why that cannot be.
fn run(arguments: &[String]) -> ExitCode {
    if let Some(reason) = support::reason_to_skip() {
        println!("skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let unique = support::unique();
    match support::enter_namespaces(&unique, ":", arguments).spawn() {
        Ok(child) => support::finish(child, &unique, LIMIT),
        Err(error) => {
            eprintln!("unshare cannot be started: {error}");
            ExitCode::FAILURE
        }
    }
}

//! Containers that move between two hosts of this machine, for real: runc, CRIU, namespaces, TCP.
//!
//! The program has its own `main`, because it plays several parts: the test itself, the proxy that runc starts under
//! the name `criu`, the program in the container, and the peer that it talks to. The test runs in mount, network, PID,
//! UTS and IPC namespaces of its own, so whatever it leaves is gone when it ends.
//!
//! `cargo test -p verbatim-container --test moves -- [NAME…]` runs the stories whose names contain a NAME;
//! `VERBATIM_TEST_MOVES=100` sets how often the one that measures moves its container.

mod host;
mod rights;
mod stories;
mod table;
mod workload;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Set for the part of the program that runs in its own namespaces.
const INSIDE: &str = "VERBATIM_TEST_INSIDE";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let called = Path::new(&arguments[0]).file_name().unwrap_or_default();
    if called == "criu" {
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
        _ if std::env::var_os(INSIDE).is_some() => stories::run(&arguments[1..]),
        _ => enter_namespaces(&arguments[1..]),
    }
}

/// Starts the program again in namespaces of its own, or says why it cannot.
fn enter_namespaces(arguments: &[String]) -> ExitCode {
    if let Some(reason) = reason_to_skip() {
        println!("skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("a program knows its own path");
    // The tmpfs on /run is a virtual host's: CRIU keeps what it has probed there.
    let script = "mount -t tmpfs -o mode=755 run /run && ip link set lo up && exec \"$@\"";
    let error = Command::new("unshare")
        .args([
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        .args(["sh", "-c", script, "sh"])
        .arg(program)
        .args(arguments)
        .env(INSIDE, "1")
        .exec();
    eprintln!("unshare cannot be started: {error}");
    ExitCode::FAILURE
}

fn reason_to_skip() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root may make containers and namespaces".to_owned());
    }
    for tool in ["runc", "unshare", "ip", "nsenter"] {
        let found = Command::new(tool)
            .arg("--version")
            .output()
            .or_else(|_| Command::new(tool).arg("-V").output());
        if found.is_err() {
            return Some(format!("{tool} is not installed"));
        }
    }
    verbatim_container::Criu::find()
        .err()
        .map(|error| error.to_string())
}

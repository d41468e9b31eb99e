//! Swap on another host's memory, with a kernel that swaps: a guest whose disk it is ([`guest`]), a host whose own swap it is
//! ([`host`]), and either for long ([`storm`]). And how fast programs are meanwhile ([`programs`]), which is no test.
//!
//! Which page of a disk counts is the matter of `crates/lease`, and what a disk does to its clients that of `crates/cli/tests/remote_memory`; here
//! Linux is the client, has less memory than its programs, and those compare every page (`pager.c`).
//!
//! They need a kernel that not every machine has, so plain `cargo test` only lists them; `make swap-test` runs them, and `make swap-bench` measures.

mod built;
mod guest;
mod host;
#[path = "../../../crates/cli/tests/remote_memory/lab.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod lab;
mod machine;
mod pager;
mod programs;
mod storm;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    if std::env::args().nth(1).as_deref() == Some(programs::ASKED_FOR) {
        return match programs::tell() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let mut arguments = Arguments::from_args();
    // One machine at a time.
    arguments.test_threads = Some(1);
    let trials = guest::ALL
        .iter()
        .chain(host::ALL)
        .chain(storm::ALL)
        .map(|&(name, run)| {
            let run = move || run().map_err(|error| Failed::from(format!("{error:#}")));
            Trial::test(name, run).with_ignored_flag(true)
        });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

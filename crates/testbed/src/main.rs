//! `testbed`: virtual machines with a kernel of our choice.

mod args;
mod commands;

use clap::Parser;
use std::process::ExitCode;

/// Exit status when the machine or the tool failed, and not the command.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    match commands::run(args::Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("testbed: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

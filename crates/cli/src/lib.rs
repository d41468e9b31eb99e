//! The `verbatim` command: everything of Verbatim but the guest library, in one program.
//!
//! Besides what is typed, it takes roles in which it starts itself again: CRIU's proxy under the name `criu`, the keeper
//! of a session's RNIC connections or of a volume's block device, the helper that makes objects on trial, those who give restored tasks their memory, and the processes of a lab.

mod args;
mod commands;
mod hosts;
mod output;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use verbatim_agent::Config;
use verbatim_agent::faults::Faults;

/// The whole program. `faults` says what fails in an agent with this configuration: nothing, but in tests.
pub fn main(faults: fn(&Config) -> Faults) -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    if Path::new(&name).file_name().is_some_and(|name| name == "criu") {
        verbatim_container::criu_proxy_main();
    }
    verbatim_keeper::run_role();
    verbatim_volume::run_role();
    if name == verbatim_agent::trial::PROGRAM_NAME {
        verbatim_agent::trial::trial_main(|device, record, memory| {
            verbatim_verbs::trial::make(device, record, memory).map_err(|error| error.to_string())
        });
    }
    if name == verbatim_fill::PROGRAM_NAME {
        return verbatim_fill::main(std::env::args_os());
    }
    // Before any thread is started.
    verbatim_lab::run_role();
    commands::self_test::run_role();
    let arguments = args::Arguments::parse();
    output::start_logging(arguments.verbose);
    match commands::run(arguments, faults) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(1)
        }
    }
}

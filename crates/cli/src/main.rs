//! The `verbatim` command.

use std::process::ExitCode;

use verbatim_agent::faults::Faults;

fn main() -> ExitCode {
    verbatim_cli::main(|_| Faults::default())
}

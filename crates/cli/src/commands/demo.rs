//! `verbatim demo`.

use std::process::ExitCode;

use crate::args::DemoArguments;

/// Runs the demo.
pub fn run(arguments: DemoArguments) -> anyhow::Result<ExitCode> {
    anyhow::bail!("in preparation: {}", arguments.out.display())
}

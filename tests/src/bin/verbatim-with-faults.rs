//! The `verbatim` command, with agents that fail where a test orders it. It is not shipped.

use std::process::ExitCode;

use verbatim_e2e::OrderedFaults;

fn main() -> ExitCode {
    verbatim_cli::main(|config| {
        let faults = OrderedFaults::new(config.runtime_dir.join("faults"), config.nic_socket());
        verbatim_agent::faults::Faults::injected(Box::new(faults))
    })
}

//! `verbatim agent`.

use std::process::ExitCode;

use anyhow::Context;
use verbatim_agent::Config;
use verbatim_agent::faults::Faults;

use crate::args::AgentArguments;

/// The name of CRIU's plugin, beside this program.
pub const CRIU_PLUGIN: &str = "libverbatim_criu_plugin.so";

/// Runs the agent until it is told to stop.
pub fn agent(arguments: AgentArguments, faults: fn(&Config) -> Faults) -> anyhow::Result<ExitCode> {
    verbatim_jail::umask::keep_private();
    let name = match arguments.name {
        Some(name) => name,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .context("cannot read the host name")?
            .trim()
            .to_owned(),
    };
    let library = match arguments.library {
        Some(library) => library,
        None => super::lab::library()?,
    };
    let told = arguments.config_dir.as_ref().unwrap_or(&arguments.runtime_dir);
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let config = Config {
        name,
        hosts: told.join("hosts.json"),
        tls: told.join("tls"),
        runtime_dir: arguments.runtime_dir,
        state_dir: arguments.state_dir,
        library,
        criu_plugin: arguments
            .criu_plugin
            .unwrap_or_else(|| program.with_file_name(CRIU_PLUGIN)),
        program,
        memory_device: arguments.memory_device,
        instance_files: match arguments.instance_files {
            Some(bytes) => bytes,
            None => verbatim_agent::usual_instance_files()?,
        },
        memory_overcommit: arguments.memory_overcommit,
        bridge: arguments.bridge,
        mtu: arguments.mtu,
        filters_addresses: !arguments.no_address_filter,
        confirm_peers: arguments.confirm_peers,
        cgroup_parent: arguments.cgroup_parent,
    };
    verbatim_agent::raise_priority();
    verbatim_agent::share_freed_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let faults = faults(&config);
    runtime.block_on(verbatim_agent::run(config, faults))?;
    Ok(ExitCode::SUCCESS)
}

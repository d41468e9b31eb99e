//! `verbatim nic`: the software RNIC, and looking into one that runs.

mod capture;
mod pcap;
mod stat;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_device::control::{Reply, Request, SOCKET_NAME};
use verbatim_nic::{HostNumber, NicConfig, Port};
use verbatim_seqpacket::Socket;

use crate::args::{NicArguments, NicCommand, NicRunArguments};

/// Does what was typed.
pub fn run(arguments: NicArguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        None => serve(arguments.run),
        Some(NicCommand::Stat(arguments)) => stat::run(&arguments),
        Some(NicCommand::Capture(arguments)) => capture::run(&arguments),
    }
}

/// Runs the software RNIC until it is told to stop.
fn serve(arguments: NicRunArguments) -> anyhow::Result<ExitCode> {
    verbatim_jail::umask::keep_private();
    // Programs of every user reach its socket there.
    verbatim_jail::folders::reachable(&arguments.runtime_dir)
        .with_context(|| format!("cannot make {}", arguments.runtime_dir.display()))?;
    let mut config = NicConfig::new(&arguments.runtime_dir);
    config.port = match arguments.address {
        Some(address) => Port::Address(address),
        None => Port::Interface(arguments.interface),
    };
    config.all_addresses = !arguments.only_address;
    config.filters_users = !arguments.no_port_filter;
    config.core = arguments.cpu;
    if let Some(microseconds) = arguments.spin {
        config.spin = Duration::from_micros(microseconds.into());
    }
    config.nice = arguments.nice;
    config.locked = arguments.locked;
    config.jailed = !arguments.no_jail;
    if arguments.no_jail {
        tracing::warn!("the RNIC keeps all rights of its user (--no-jail)");
    }
    config.host_number = arguments.host_number.and_then(HostNumber::new);
    let limits = &mut config.limits;
    let one = &mut limits.per_program;
    one.max_qp = arguments.max_qp.unwrap_or(one.max_qp);
    one.max_mr = arguments.max_mr.unwrap_or(one.max_mr);
    one.max_cq = arguments.max_cq.unwrap_or(one.max_cq);
    one.max_cqes = arguments.max_cqe.map_or(one.max_cqes, u64::from);
    one.max_contexts = arguments.max_contexts.unwrap_or(one.max_contexts);
    if let Some(seconds) = arguments.pause_limit {
        limits.pause_limit = Duration::from_secs(seconds.into());
    }
    limits.window_bytes = arguments.window.unwrap_or(limits.window_bytes);
    verbatim_nic::run(config)?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the RNIC for something that needs no context.
fn ask(runtime_dir: &Path, request: &Request) -> anyhow::Result<(Socket, Reply)> {
    let path = runtime_dir.join(SOCKET_NAME);
    let socket = Socket::connect(&path).with_context(|| {
        format!(
            "no software RNIC answers at {}: start one, or name its folder with --runtime-dir",
            path.display()
        )
    })?;
    match socket.call::<_, Reply>(request, &[])?.message {
        Reply::Error { message, .. } => bail!("the software RNIC refuses: {message}"),
        reply => Ok((socket, reply)),
    }
}

//! One file per command.

mod check;
mod daemons;
mod demo;
mod hosts;
mod instances;
pub mod lab;
mod migrate;
mod nic;
mod pause;
pub mod self_test;
mod sessions;

use std::process::ExitCode;

use verbatim_agent::Config;
use verbatim_agent::faults::Faults;

use crate::args::{Arguments, Command};

/// Does what was typed; `faults` is an agent's.
pub fn run(arguments: Arguments, faults: fn(&Config) -> Faults) -> anyhow::Result<ExitCode> {
    let lab = arguments.lab;
    match arguments.command {
        Command::Lab { command } => lab::run(&lab, command),
        Command::Nic(arguments) => nic::run(arguments),
        Command::Agent(arguments) => daemons::agent(arguments, faults),
        Command::Demo(arguments) => demo::run(arguments),
        Command::Hosts(arguments) => hosts::run(&arguments),
        Command::Volume { command } => verbatim_volume::command::run(command, verbatim_volume::faults::none),
        Command::Memory { command } => verbatim_swap::command::memory(command),
        Command::Swap { command } => verbatim_swap::command::swap(command),
        command => in_runtime(async {
            match command {
                Command::Run(arguments) => instances::run(&lab, arguments).await,
                Command::Attach(arguments) => instances::attach(&lab, arguments).await,
                Command::Detach { name } => instances::detach(&lab, &name).await,
                Command::Exec(arguments) => instances::exec(&lab, arguments).await,
                Command::Ps { json } => instances::ps(&lab, json).await,
                Command::Logs { name, follow } => instances::logs(&lab, &name, follow).await,
                Command::Wait { name } => instances::wait(&lab, &name).await,
                Command::Stop { name } => instances::stop(&lab, &name).await,
                Command::Migrate(arguments) => migrate::run(&lab, arguments).await,
                Command::Cancel { name, json } => sessions::cancel(&lab, &name, json).await,
                Command::Pause(arguments) => pause::pause(&lab, arguments).await,
                Command::Resume(arguments) => pause::resume(&lab, arguments).await,
                Command::Sessions { all, json } => sessions::list(&lab, all, json).await,
                Command::Session { command } => sessions::one(&lab, command).await,
                Command::Check(arguments) => check::run(&lab, arguments).await,
                Command::Lab { .. }
                | Command::Nic(_)
                | Command::Agent(_)
                | Command::Demo(_)
                | Command::Hosts(_)
                | Command::Memory { .. }
                | Command::Swap { .. }
                | Command::Volume { .. } => unreachable!("dealt with above"),
            }
        }),
    }
}

fn in_runtime<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

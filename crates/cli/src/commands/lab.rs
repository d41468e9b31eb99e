//! `verbatim lab`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use verbatim_lab::{Lab, LabConfig, Service, ServiceState, VOLUMES};
use verbatim_volume::transport::Wanted;

use crate::args::LabCommand;
use crate::output::table;

/// The guest library's name.
const LIBRARY: &str = "libverbatim.so";

/// A lab that is taken down on every way out.
pub struct TakenDown(Option<Lab>);

impl TakenDown {
    /// Of a lab that is up.
    pub fn new(lab: Lab) -> Self {
        Self(Some(lab))
    }

    /// The lab.
    pub fn get(&self) -> &Lab {
        self.0.as_ref().expect("taken only by value")
    }

    /// Takes it down now.
    pub fn down(mut self) -> anyhow::Result<()> {
        let lab = self.0.take().expect("taken here and when it is dropped");
        lab.down().context("cannot take the lab down")
    }
}

impl Drop for TakenDown {
    fn drop(&mut self) {
        let Some(lab) = self.0.take() else { return };
        let name = lab.name().to_owned();
        if let Err(error) = lab.down() {
            eprintln!("warning: {error}; `verbatim --lab {name} lab down` tries again");
        }
    }
}

/// Does a lab command.
pub fn run(name: &str, command: LabCommand) -> anyhow::Result<ExitCode> {
    match command {
        LabCommand::Up {
            hosts,
            binaries,
            volumes,
            ready_timeout,
        } => {
            let lab = up_with(
                name,
                hosts,
                &binaries,
                volumes,
                Duration::from_secs(ready_timeout),
            )?;
            eprintln!(
                "lab {} is up: {}",
                lab.name(),
                lab.hosts().collect::<Vec<_>>().join(", ")
            );
        }
        LabCommand::Down => {
            Lab::open(name)?.down()?;
            eprintln!("lab {name} is down");
        }
        LabCommand::Status { json } => status(name, json)?,
        LabCommand::Exec { host, plain, command } => return exec(name, &host, plain, &command),
    }
    Ok(ExitCode::SUCCESS)
}

/// Brings up a lab whose hosts have a software RNIC and an agent each.
pub fn up(name: &str, hosts: Vec<String>, ready_timeout: Duration) -> anyhow::Result<Lab> {
    up_with(name, hosts, &[], None, ready_timeout)
}

/// The same; these hosts run what is in these folders, and a volume daemon if that is wanted.
fn up_with(
    name: &str,
    hosts: Vec<String>,
    binaries: &[(String, PathBuf)],
    volumes: Option<Wanted>,
    ready_timeout: Duration,
) -> anyhow::Result<Lab> {
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let config = LabConfig {
        ready_timeout,
        ..LabConfig::new(name, services(&program, &library()?, volumes))?
    };
    let mut config = config.with_hosts(hosts);
    for (name, folder) in binaries {
        let host = config.hosts.iter_mut().find(|host| host.name == *name);
        let host = host.with_context(|| format!("--binaries names {name}, which is no host of the lab"))?;
        host.services = Some(services(&folder.join("verbatim"), &folder.join(LIBRARY), volumes));
    }
    Ok(Lab::up(config)?)
}

/// An RNIC and an agent of this program, whose instances get this library; before them a volume daemon.
fn services(program: &Path, library: &Path, volumes: Option<Wanted>) -> Vec<Service> {
    let nic = Service::new("nic", program, ["-v", "nic"]).socket("/run/verbatim/nic.sock");
    let library = library.display().to_string();
    let arguments = ["-v", "agent", "--mtu", "9000", "--library", &library];
    let agent = Service::new("agent", program, arguments).socket("/run/verbatim/api.sock");
    let daemon = volumes.map(|transport| {
        let mut arguments = vec![
            "-v",
            "volume",
            "daemon",
            "--config-dir",
            "/run/verbatim",
            "--state-dir",
            "/run/verbatim-state/volumes",
        ];
        // Daemons of earlier releases do not know the option.
        match transport {
            Wanted::Tls => {}
            Wanted::Rdma => arguments.push("--copy-transport=rdma"),
            Wanted::Auto => arguments.push("--copy-transport=auto"),
        }
        Service::new(VOLUMES, program, arguments).socket("/run/verbatim/volumes.sock")
    });
    daemon.into_iter().chain([nic, agent]).collect()
}

/// The guest library beside this program.
pub fn library() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let library = program.with_file_name(LIBRARY);
    std::fs::metadata(&library).with_context(|| {
        format!(
            "the guest library {} is missing; run `make build`",
            library.display()
        )
    })?;
    Ok(library)
}

fn status(name: &str, json: bool) -> anyhow::Result<()> {
    let status = Lab::open(name)?.status()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&status)?);
        return Ok(());
    }
    let rows: Vec<_> = status
        .hosts
        .iter()
        .map(|host| {
            let services = host.services.iter().map(|service| match &service.state {
                ServiceState::Running { .. } => format!("{} runs", service.name),
                other => format!("{} {other:?}", service.name),
            });
            vec![
                host.name.clone(),
                host.address.to_string(),
                if host.running { "up" } else { "down" }.to_owned(),
                host.pid.to_string(),
                services.collect::<Vec<_>>().join(", "),
            ]
        })
        .collect();
    print!(
        "{}",
        table(&["HOST", "ADDRESS", "STATE", "PID", "SERVICES"], &rows)
    );
    Ok(())
}

fn exec(name: &str, host: &str, plain: bool, command: &[String]) -> anyhow::Result<ExitCode> {
    let lab = Lab::open(name)?;
    let (program, arguments) = command.split_first().context("there is no command to run")?;
    let mut process = lab.command(host, Path::new(program))?;
    process.args(arguments);
    if !plain {
        process.env("LD_PRELOAD", library()?);
    }
    let status = process
        .status()
        .with_context(|| format!("cannot run a command in {host}"))?;
    Ok(ExitCode::from(
        u8::try_from(status.code().unwrap_or(255)).unwrap_or(255),
    ))
}

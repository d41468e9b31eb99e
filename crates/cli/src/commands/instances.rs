//! `verbatim run`, `exec`, `ps`, `logs`, `wait` and `stop`.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Serialize;
use verbatim_agent::proto::{AttachRequest, ExecRequest, Instance, RunRequest};

use crate::args::{AttachArguments, ExecArguments, RunArguments};
use crate::hosts::Hosts;
use crate::output::table;

/// An instance as `ps --json` and `run --json` show it.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    host: &'a str,
    address: &'a str,
    /// The length of the prefix of its network.
    prefix: u32,
    state: &'a str,
    pid: Option<i32>,
    exit_status: Option<i32>,
    connections: u32,
    paused: u32,
    /// In bytes: memory that it lacks while it runs, as far as that is known.
    missing_bytes: Option<u64>,
    /// The host that has it, if that is another one.
    missing_from: Option<&'a str>,
    /// Troubles of a virtual machine on this host.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    troubles: &'a [String],
    command: &'a [String],
}

impl<'a> From<&'a Instance> for Row<'a> {
    fn from(instance: &'a Instance) -> Self {
        let missing = instance.missing.as_ref();
        Self {
            name: &instance.name,
            host: &instance.host,
            address: &instance.address,
            prefix: instance.prefix,
            state: &instance.state,
            pid: Some(instance.pid).filter(|pid| *pid != 0),
            exit_status: instance.exit_status,
            connections: instance.connections,
            paused: instance.paused,
            missing_bytes: missing.map(|missing| missing.bytes),
            missing_from: missing
                .map(|missing| missing.from.as_str())
                .filter(|host| !host.is_empty()),
            troubles: &instance.troubles,
            command: &instance.command,
        }
    }
}

/// Starts an instance.
pub async fn run(lab: &str, arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let machine = arguments.vm.is_some();
    let name = arguments.vm.or(arguments.name);
    let name = name.context("an instance needs a name")?;
    let hosts = Hosts::connect(lab).await?;
    let host = hosts.host(arguments.host.as_deref())?;
    is_free(&hosts, &name).await?;
    let bundle = match arguments.bundle {
        Some(path) => std::path::absolute(path)?
            .into_os_string()
            .into_string()
            .ok()
            .context("the bundle's path is not UTF-8")?,
        None => String::new(),
    };
    let request = RunRequest {
        name,
        command: arguments.command,
        bundle,
        environment: arguments.env,
        address: arguments.address.unwrap_or_default(),
        rnics: arguments.rnic,
        machine,
        volumes: arguments.volume,
        swap: arguments.swap,
        files: arguments.tmp_size.unwrap_or_default(),
        prealloc: arguments.prealloc,
        binds: arguments.bind,
        further_addresses: arguments.allow_address.iter().map(ToString::to_string).collect(),
    };
    tell(&host.run(request).await?, arguments.json)
}

/// An error if an instance has that name, wherever it is.
async fn is_free(hosts: &Hosts, name: &str) -> anyhow::Result<()> {
    let instances = hosts.instances().await?;
    if let Some(taken) = instances.iter().find(|instance| instance.name == name) {
        bail!(
            "the name {} is taken by an instance on {}; choose another, or `verbatim stop` it",
            taken.name,
            taken.host
        );
    }
    Ok(())
}

/// Says where a new instance is.
fn tell(instance: &Instance, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        println!("{}", serde_json::to_string(&Row::from(instance))?);
    } else {
        eprintln!(
            "{} runs on {} with the address {}/{}",
            instance.name, instance.host, instance.address, instance.prefix
        );
        for note in &instance.notes {
            eprintln!("note: {note}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes a QEMU that runs for an instance.
pub async fn attach(lab: &str, arguments: AttachArguments) -> anyhow::Result<ExitCode> {
    let AttachArguments {
        name,
        qmp,
        libvirt,
        host,
        address,
        json,
    } = arguments;
    let hosts = Hosts::connect(lab).await?;
    let host = hosts.host(host.as_deref())?;
    is_free(&hosts, &name).await?;
    let qmp = match qmp {
        Some(path) => {
            let path = std::path::absolute(path)?.into_os_string().into_string();
            path.ok().context("the socket's path is not UTF-8")?
        }
        None => String::new(),
    };
    let request = AttachRequest {
        name,
        qmp,
        libvirt: libvirt.unwrap_or_default(),
        address: address.unwrap_or_default(),
    };
    tell(&host.attach(request).await?, json)
}

/// Forgets such an instance.
pub async fn detach(lab: &str, name: &str) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(name).await?;
    host.detach(name).await?;
    Ok(ExitCode::SUCCESS)
}

/// Adds a command to an instance.
pub async fn exec(lab: &str, arguments: ExecArguments) -> anyhow::Result<ExitCode> {
    let ExecArguments { name, env, command } = arguments;
    let hosts = Hosts::connect(lab).await?;
    let (host, _) = hosts.of_instance(&name).await?;
    let request = ExecRequest {
        name,
        command,
        environment: env,
    };
    host.exec(request).await?;
    Ok(ExitCode::SUCCESS)
}

/// The state of an instance, with its troubles, or else its missing memory.
fn state(instance: &Instance) -> String {
    if !instance.troubles.is_empty() {
        return format!("{} ({})", instance.state, instance.troubles.join("; "));
    }
    let Some(missing) = &instance.missing else {
        return instance.state.clone();
    };
    let mib = missing.bytes.div_ceil(1 << 20);
    match missing.from.as_str() {
        "" => format!("{} ({mib} MiB of memory to come)", instance.state),
        host => format!("{} ({mib} MiB of memory to come from {host})", instance.state),
    }
}

/// Lists the instances.
pub async fn ps(lab: &str, json: bool) -> anyhow::Result<ExitCode> {
    let instances = Hosts::connect(lab).await?.instances().await?;
    if json {
        let rows: Vec<_> = instances.iter().map(Row::from).collect();
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(ExitCode::SUCCESS);
    }
    let dash = |value: Option<i32>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
    let rows: Vec<_> = instances
        .iter()
        .map(|instance| {
            vec![
                instance.name.clone(),
                instance.host.clone(),
                format!("{}/{}", instance.address, instance.prefix),
                state(instance),
                dash(Some(instance.pid).filter(|pid| *pid != 0)),
                dash(instance.exit_status),
                match instance.paused {
                    0 => instance.connections.to_string(),
                    paused => format!("{} ({paused} paused)", instance.connections),
                },
                instance.command.join(" "),
            ]
        })
        .collect();
    let head = [
        "NAME",
        "HOST",
        "ADDRESS",
        "STATE",
        "PID",
        "EXIT",
        "CONNECTIONS",
        "COMMAND",
    ];
    print!("{}", table(&head, &rows));
    Ok(ExitCode::SUCCESS)
}

/// Prints an instance's output; with `follow`, from host to host.
pub async fn logs(lab: &str, name: &str, follow: bool) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let mut printed = 0;
    loop {
        let (host, instance) = hosts.of_instance(name).await?;
        // The output moves along whole: what was printed from the last host comes again first.
        let mut skip = printed;
        host.logs_and_notes(
            name,
            follow,
            |data| {
                let fresh = &data[skip.min(data.len())..];
                skip -= data.len() - fresh.len();
                printed += fresh.len();
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(fresh)?;
                stdout.flush()
            },
            |note| eprintln!("note: {note}"),
        )
        .await?;
        if !follow || instance.state == "exited" {
            return Ok(ExitCode::SUCCESS);
        }
        let moved = host.wait(name).await?;
        if moved.exit_status.is_some() {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Waits for the end of an instance, from host to host.
pub async fn wait(lab: &str, name: &str) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    let (mut host, _) = hosts.of_instance(name).await?;
    loop {
        let reply = host.wait(name).await?;
        if let Some(status) = reply.exit_status {
            return Ok(ExitCode::from(u8::try_from(status).unwrap_or(255)));
        }
        let moved_to = reply
            .moved_to
            .context("the agent does not say where the instance went")?;
        host = hosts
            .host(Some(&moved_to))
            .with_context(|| format!("{name} has moved to {moved_to}"))?;
    }
}

/// Ends an instance.
pub async fn stop(lab: &str, name: &str) -> anyhow::Result<ExitCode> {
    let hosts = Hosts::connect(lab).await?;
    hosts.of_instance(name).await?.0.remove(name).await?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_shown_beside_the_state() {
        let well = Instance {
            state: "running".to_owned(),
            ..Instance::default()
        };
        assert_eq!(state(&well), "running");
        assert!(
            serde_json::to_value(Row::from(&well))
                .unwrap()
                .get("troubles")
                .is_none()
        );
        let ill = Instance {
            troubles: vec!["stands still: no lock".to_owned()],
            ..well
        };
        assert_eq!(state(&ill), "running (stands still: no lock)");
        assert_eq!(
            serde_json::to_value(Row::from(&ill)).unwrap()["troubles"][0],
            "stands still: no lock"
        );
    }

    #[test]
    fn scripts_get_the_bare_address() {
        let instance = Instance {
            address: "10.77.3.1".to_owned(),
            prefix: 16,
            ..Instance::default()
        };
        let row = serde_json::to_value(Row::from(&instance)).unwrap();
        assert_eq!(
            (&row["address"], &row["prefix"]),
            (&"10.77.3.1".into(), &16.into())
        );
        assert!(
            row["address"]
                .as_str()
                .unwrap()
                .parse::<std::net::Ipv4Addr>()
                .is_ok()
        );
    }
}

//! What the subcommands do.

use crate::args::{Arguments, Command, Execution, Machine};
use anyhow::{Context, bail};
use std::io::Write;
use std::path::Path;
use std::process::{self, ExitCode, Stdio};
use verbatim_testbed::{Image, Kernel, Names, Network, Output, Session, Vm, VmRecord};

/// Does what was asked for.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let names = Names::default();
    match arguments.command {
        Command::Image { json } => image(json)?,
        Command::Run { machine, execution } => {
            let name = format!("run-{}", process::id());
            let vm = Vm::boot(&machine.config(&name), &network(&names, &machine)?)?;
            return execute(vm.record(), execution);
        }
        Command::Up { name, machine } => {
            let record = Vm::boot_detached(&machine.config(&name), &network(&names, &machine)?)?;
            eprintln!("machine {name} is up: Linux {}", record.release);
        }
        Command::Exec { name, execution } => return execute(&names.open(&name)?, execution),
        Command::Copy {
            from: (name, path),
            to,
        } => copy(&names.open(&name)?, &path, &to)?,
        Command::List { json } => list(&names, json)?,
        Command::Console { name } => {
            let record = names.list().into_iter().find(|record| record.name == name);
            let path = record
                .with_context(|| format!("there is no machine {name}"))?
                .console();
            let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            std::io::stdout().write_all(&text)?;
        }
        Command::Down { names: given, all } => {
            let listed = if all {
                names.list().into_iter().map(|record| record.name).collect()
            } else {
                given
            };
            for name in listed {
                if !names.down(&name)? {
                    bail!("there is no machine {name}; `testbed list` shows what there is");
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn network(names: &Names, machine: &Machine) -> verbatim_testbed::Result<Network> {
    match (&machine.lab, &machine.with) {
        (Some(lab), _) => Network::of_lab(lab),
        (_, Some(other)) => Network::of_process(names.open(other)?.process.pid),
        _ => Network::new(),
    }
}

fn image(json: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let image = Image::of(&Kernel::find()?, &program)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&image)?);
    } else {
        println!("kernel  {} (Linux {})", image.kernel.display(), image.release);
        println!("initrd  {}", image.initrd.display());
    }
    Ok(())
}

/// Runs a command; its output is ours, and so is its exit status.
fn execute(vm: &VmRecord, execution: Execution) -> anyhow::Result<ExitCode> {
    let mut command = verbatim_testbed::Command::new(execution.command).directory(execution.directory);
    for (name, value) in execution.env {
        command = command.env(name, value);
    }
    let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
    let code = Session::open(vm)?.run(&command, execution.limit, |piece| match piece {
        Output::Stdout(bytes) => stdout.write_all(bytes).and_then(|()| stdout.flush()),
        Output::Stderr(bytes) => stderr.write_all(bytes),
    })?;
    // 128 + N is what a status may be at most.
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}

/// Copies through tar(1), which keeps modes, links and times.
fn copy(vm: &VmRecord, path: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        bail!("{} is no path to copy", path.display());
    };
    let mut unpack = process::Command::new("tar")
        .args(["-xf", "-", "-C"])
        .arg(to)
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start tar")?;
    let mut pipe = unpack.stdin.take().context("tar's stdin is piped")?;
    let pack = ["tar", "-cf", "-", "-C"].map(str::to_owned);
    let places = [parent.as_os_str(), name].map(|part| part.to_string_lossy().into_owned());
    let command = verbatim_testbed::Command::new(pack.into_iter().chain(places));
    let code = Session::open(vm)?.run(&command, None, |piece| match piece {
        Output::Stdout(bytes) => pipe.write_all(bytes),
        Output::Stderr(bytes) => std::io::stderr().write_all(bytes),
    });
    drop(pipe);
    let unpacked = unpack.wait().context("cannot wait for tar")?;
    if code? != 0 || !unpacked.success() {
        bail!("{}:{} could not be copied", vm.name, path.display());
    }
    Ok(())
}

fn list(names: &Names, json: bool) -> anyhow::Result<()> {
    let records = names.list();
    if json {
        let rows: Vec<_> = records
            .iter()
            .map(|record| {
                let address = record.address.map(|address| address.to_string());
                serde_json::json!({
                    "name": record.name, "running": record.is_alive(), "pid": record.process.pid,
                    "address": address, "release": record.release,
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    for record in records {
        let state = if record.is_alive() { "runs" } else { "has ended" };
        let address = record
            .address
            .map_or_else(|| "-".to_owned(), |address| address.to_string());
        println!(
            "{:<16} {state:<10} {address:<20} Linux {}",
            record.name, record.release
        );
    }
    Ok(())
}

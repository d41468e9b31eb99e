//! `verbatim memory …` and `verbatim swap …`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use tokio::io::BufReader;
use tokio::net::UnixStream;

use crate::attach::{self, BackupChoice, Wanted};
use crate::control::{Sockets, order};
use crate::disk::{Order, Status};
use crate::server::{self, Config};

/// Interval of the checks whether all owners have left.
const LOOK: Duration = Duration::from_millis(200);

/// The port of memory servers.
pub const PORT: u16 = 4795;

/// The default limit for a server to transfer a page.
pub const DEADLINE_MS: u64 = 3000;

/// The commands on this host's memory.
#[derive(Debug, Subcommand)]
#[allow(missing_docs, reason = "a comment would become a command's help")]
pub enum MemoryCommand {
    /// Give memory of this host to swap disks of other hosts.
    #[command(
        after_help = "Example:\n  verbatim memory serve --size 64G --name host2\n\nOn SIGTERM owners are told to go, and have --leave \
                      seconds for it: those with a backup lose nothing. `verbatim nic` must run here."
    )]
    Serve(ServeArguments),
    /// Hand the memory given from here over to another memory server, while its owners go on.
    #[command(
        after_help = "Examples:\n  verbatim memory hand-over --to host3\n  verbatim memory hand-over --cancel\n\nReturns when all pages have left; the server \
                      can be ended then, and gives nothing to anybody until --cancel. Owners take their pages themselves. Ctrl-C leaves them to it.\nExit status: 0 \
                      all have left, 1 they have not."
    )]
    HandOver {
        /// The other memory server. `verbatim memory serve` must run there, with room.
        #[arg(long, value_name = "HOST", required_unless_present = "cancel")]
        to: Option<String>,
        /// Leave the rest of the pages here.
        #[arg(long, conflicts_with = "to")]
        cancel: bool,
        /// The longest wait until all owners have left.
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
        #[command(flatten)]
        common: Common,
    },
    /// List the owners and their shares.
    #[command(after_help = "Example:\n  verbatim memory status --json")]
    Status {
        #[command(flatten)]
        common: Common,
    },
}

/// The commands on memory of other hosts.
#[derive(Debug, Subcommand)]
#[allow(missing_docs, reason = "a comment would become a command's help")]
#[allow(clippy::large_enum_variant, reason = "there is one, for a moment")]
pub enum SwapCommand {
    /// Make a swap disk of another host's memory; prints its NBD address.
    #[command(
        after_help = "Examples:\n  verbatim swap attach host2 8G\n  verbatim swap attach host2 8G --backup file=/dev/vg/swap\n  \
                      verbatim swap attach host2 8G --backup mirror=host3 --name guest7\n  verbatim swap attach host2 8G --device && mkswap \
                      /dev/nbd0 && swapon --discard /dev/nbd0\n\nA guest's disk: qemu -drive \
                      file=\"$(verbatim swap attach host2 8G --name guest7)\",format=raw,if=virtio,discard=unmap,cache=none\nA process of its own serves \
                      it until `verbatim swap detach`."
    )]
    Attach(AttachArguments),
    /// List the swap disks of this host.
    #[command(after_help = "Example:\n  verbatim swap list --json")]
    List {
        #[command(flatten)]
        common: Common,
    },
    /// Show the state of a swap disk: its copies, and the pages of each.
    #[command(after_help = "Example:\n  verbatim swap status host2")]
    Status {
        /// The disk.
        name: String,
        #[command(flatten)]
        common: Common,
    },
    /// End a swap disk; its content is lost.
    #[command(
        after_help = "Example:\n  swapoff /dev/nbd0 && nbd-client -d /dev/nbd0 && verbatim swap detach host2"
    )]
    Detach {
        /// The disk.
        name: String,
        /// Even while clients use it.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        common: Common,
    },
}

/// Arguments that most commands share.
#[derive(Debug, Args)]
pub struct Common {
    /// The folder of the sockets.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// JSON instead of lines.
    #[arg(long)]
    pub json: bool,
}

/// The identity of this host.
#[derive(Debug, Args)]
pub struct Host {
    /// This host's name in hosts.json and in its certificate; its host name if not given.
    #[arg(long = "own-name", value_name = "NAME")]
    pub own: Option<String>,
    /// The folder of hosts.json and tls/.
    #[arg(long, value_name = "DIR", default_value = "/etc/verbatim")]
    pub config_dir: PathBuf,
    /// The TCP port of memory servers.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,
}

/// Arguments of a memory server.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// The most memory to give, in bytes, or with K, M, G or T. It is taken from this host when it is given.
    #[arg(long, value_parser = size)]
    pub size: u64,
    /// This host's name in hosts.json and in its certificate; its host name if not given.
    #[arg(long)]
    pub name: Option<String>,
    /// The folder of hosts.json and tls/.
    #[arg(long, value_name = "DIR", default_value = "/etc/verbatim")]
    pub config_dir: PathBuf,
    /// The folder of the RNIC's socket and of this server's.
    #[arg(long, default_value = "/run/verbatim")]
    pub runtime_dir: PathBuf,
    /// The TCP port.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,
    /// How long a lease outlives its owner's connection.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// How long owners may take to go when this server is told to end.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub leave: u64,
}

/// Arguments of a disk.
#[derive(Debug, Args)]
#[allow(missing_docs, reason = "a comment would become the command's help")]
pub struct AttachArguments {
    /// The memory server.
    pub host: String,
    /// The length, in bytes, or with K, M, G or T.
    #[arg(value_parser = size)]
    pub size: u64,
    /// The stand-in when the server dies, hangs or leaves: file, file=PATH (a file or block device),
    /// mirror=HOST, or none.
    #[arg(long, value_parser = backup, default_value = "file")]
    pub backup: BackupChoice,
    /// The disk's name on this host; by default the server's.
    #[arg(long)]
    pub name: Option<String>,
    /// Make it a block device of this machine as well, by the kernel's NBD client (/dev/nbd*), and print the
    /// device's path. `verbatim nic --locked` must run here.
    #[arg(long)]
    pub device: bool,
    /// Limit for the server to transfer a page before it is given up.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = DEADLINE_MS, value_parser = clap::value_parser!(u64).range(10..))]
    pub deadline: u64,
    /// Time for which the disk's process looks for requests and pages before it sleeps. A longer time saves
    /// wake-ups, and takes a core meanwhile. `verbatim nic --spin` is the same for the RNIC. The process then
    /// has no real-time priority, so this is not for --device.
    #[arg(long, value_name = "MICROSECONDS", env = "VERBATIM_SWAP_SPIN", default_value_t = 0, conflicts_with = "device", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub spin: u32,
    /// The folder of backup files without a name.
    #[arg(long, default_value = "/var/lib/verbatim/swap")]
    pub state_dir: PathBuf,
    /// The socket for clients, in place of DIR/swap/NAME.sock of the runtime folder. Its folder must exist.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The instance that the disk belongs to; given by agents.
    #[arg(long, hide = true)]
    pub instance: Option<String>,
    /// The session of agents in which the disk comes from another host; given by agents.
    #[arg(long, hide = true)]
    pub arriving: Option<u64>,
    /// Serve in this process, until a signal stops it.
    #[arg(long)]
    pub foreground: bool,
    #[command(flatten)]
    pub of: Host,
    #[command(flatten)]
    pub common: Common,
}

/// Runs the command.
pub fn memory(command: MemoryCommand) -> anyhow::Result<ExitCode> {
    match command {
        MemoryCommand::Serve(arguments) => {
            verbatim_jail::umask::keep_private();
            let config = Config {
                name: own_name(arguments.name)?,
                config_dir: arguments.config_dir,
                runtime_dir: arguments.runtime_dir,
                port: arguments.port,
                bytes: arguments.size,
                grace: Duration::from_secs(arguments.grace),
                leave: Duration::from_secs(arguments.leave),
            };
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            runtime.block_on(server::run(config))?;
            // Memory that is being allocated or freed goes with the process.
            runtime.shutdown_timeout(Duration::from_millis(100));
        }
        MemoryCommand::Status { common } => {
            let status = in_runtime(ask_server(&common, &server::Order::Status))?;
            print_served(&status, common.json)?;
        }
        MemoryCommand::HandOver {
            to, timeout, common, ..
        } => {
            let status = in_runtime(hand_over(&common, to, Duration::from_secs(timeout)))?;
            print_served(&status, common.json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the command.
pub fn swap(command: SwapCommand) -> anyhow::Result<ExitCode> {
    match command {
        SwapCommand::Attach(arguments) => attach(arguments)?,
        SwapCommand::List { common } => {
            let mut all = Vec::new();
            for sockets in Sockets::all(&common.runtime_dir) {
                match in_runtime(order(&sockets, &Order::Status)) {
                    Ok(status) => all.push(status),
                    // The disk's process was killed.
                    Err(_) => sockets.remove(),
                }
            }
            match common.json {
                true => println!("{}", serde_json::to_string_pretty(&all)?),
                false => print!("{}", table(&all)),
            }
        }
        SwapCommand::Status { name, common } => {
            let sockets = Sockets::new(&common.runtime_dir, &name);
            let status = in_runtime(order(&sockets, &Order::Status))?;
            match common.json {
                true => println!("{}", serde_json::to_string_pretty(&status)?),
                false => print!("{}{}", table(std::slice::from_ref(&status)), details(&status)),
            }
        }
        SwapCommand::Detach { name, force, common } => {
            let sockets = Sockets::new(&common.runtime_dir, &name);
            let status = in_runtime(order(&sockets, &Order::Detach { force }))?;
            match common.json {
                true => println!("{}", serde_json::to_string_pretty(&status)?),
                false => eprintln!("done"),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn ask_server(common: &Common, order: &server::Order) -> anyhow::Result<server::Status> {
    let path = common.runtime_dir.join("memory.sock");
    let stream = UnixStream::connect(&path).await;
    let mut stream = stream.context("no memory server runs here; start one with `verbatim memory serve`")?;
    verbatim_volume::control::send(&mut stream, order).await?;
    let answer = verbatim_volume::control::receive(&mut BufReader::new(stream)).await?;
    let answer: Result<_, String> = answer.context("the memory server has gone away")?;
    answer.map_err(anyhow::Error::msg)
}

/// Returns when all owners have left, or when the hand-over is cancelled.
async fn hand_over(common: &Common, to: Option<String>, limit: Duration) -> anyhow::Result<server::Status> {
    let end = tokio::time::Instant::now() + limit;
    let mut status = ask_server(common, &server::Order::HandOver { to: to.clone() }).await?;
    while to.is_some() && !status.leases.is_empty() {
        anyhow::ensure!(
            status.hands_over_to == to,
            "it was cancelled, or another server was named meanwhile"
        );
        anyhow::ensure!(
            tokio::time::Instant::now() < end,
            "{} leases are still here, with {} MiB; they go on leaving. `verbatim swap status` at their owners says why",
            status.leases.len(),
            mib(status.leased_bytes)
        );
        tokio::time::sleep(LOOK).await;
        status = ask_server(common, &server::Order::Status).await?;
    }
    Ok(status)
}

fn in_runtime<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

fn own_name(given: Option<String>) -> anyhow::Result<String> {
    match given {
        Some(name) => Ok(name),
        None => {
            let name =
                std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host name")?;
            Ok(name.trim().to_owned())
        }
    }
}

fn attach(arguments: AttachArguments) -> anyhow::Result<()> {
    // This command becomes the disk's process, or makes its folders and log.
    verbatim_jail::umask::keep_private();
    let absolute = |path: &PathBuf| std::path::absolute(path);
    let name = arguments.name.unwrap_or_else(|| arguments.host.clone());
    anyhow::ensure!(
        !name.is_empty() && !name.contains(['/', '\0']) && name.len() < 64,
        "{name:?} is no name of a disk"
    );
    let wanted = Wanted {
        host: arguments.host,
        bytes: arguments.size,
        name,
        backup: arguments.backup,
        device: arguments.device,
        deadline: Duration::from_millis(arguments.deadline),
        spin: Duration::from_micros(arguments.spin.into()),
        own: own_name(arguments.of.own)?,
        port: arguments.of.port,
        config_dir: absolute(&arguments.of.config_dir)?,
        runtime_dir: absolute(&arguments.common.runtime_dir)?,
        state_dir: absolute(&arguments.state_dir)?,
        socket: arguments.socket.as_ref().map(absolute).transpose()?,
        instance: arguments.instance,
        arriving: arguments.arriving,
    };
    let place = match arguments.foreground {
        true => {
            let ready = attach::prepare(&wanted)?;
            attach::announce(&ready.place());
            return ready.run();
        }
        false => {
            let backup = match &wanted.backup {
                BackupChoice::None => "none".to_owned(),
                BackupChoice::File(None) => "file".to_owned(),
                BackupChoice::File(Some(path)) => format!("file={}", absolute(path)?.display()),
                BackupChoice::Mirror(host) => format!("mirror={host}"),
            };
            let mut typed: Vec<std::ffi::OsString> =
                vec!["swap".into(), "attach".into(), (&wanted.host).into()];
            typed.push(wanted.bytes.to_string().into());
            typed.push("--foreground".into());
            if wanted.device {
                typed.push("--device".into());
            }
            let mut option = |name: &str, value: std::ffi::OsString| typed.extend([name.into(), value]);
            option("--name", (&wanted.name).into());
            option("--backup", backup.into());
            option("--deadline", arguments.deadline.to_string().into());
            if arguments.spin > 0 {
                option("--spin", arguments.spin.to_string().into());
            }
            option("--own-name", (&wanted.own).into());
            option("--port", wanted.port.to_string().into());
            option("--config-dir", (&wanted.config_dir).into());
            option("--runtime-dir", (&wanted.runtime_dir).into());
            option("--state-dir", (&wanted.state_dir).into());
            if let Some(socket) = &wanted.socket {
                option("--socket", socket.into());
            }
            if let Some(instance) = &wanted.instance {
                option("--instance", instance.into());
            }
            if let Some(arriving) = wanted.arriving {
                option("--arriving", arriving.to_string().into());
            }
            attach::in_background(&wanted, typed)?
        }
    };
    match arguments.common.json {
        true => {
            let uri = wanted.sockets().uri();
            let device = wanted.device.then_some(&place);
            println!(
                "{}",
                serde_json::json!({ "name": wanted.name, "uri": uri, "device": device })
            );
        }
        false => println!("{place}"),
    }
    Ok(())
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

fn table(all: &[Status]) -> String {
    let mut text = format!(
        "{:<16} {:<8} {:>10} {:>10} {:>10} {:>7} COPIES\n",
        "NAME", "ROLE", "MIB", "USED", "LOST", "CLIENTS"
    );
    for status in all {
        let copies = status
            .copies
            .iter()
            .map(|copy| format!("{} {} ({})", copy.kind, copy.place, copy.state));
        text += &format!(
            "{:<16} {:<8} {:>10} {:>10} {:>10} {:>7} {}\n",
            status.name,
            status.role,
            mib(status.bytes),
            mib(status.used_bytes),
            mib(status.lost_bytes),
            status.clients,
            copies.collect::<Vec<_>>().join(", ")
        );
    }
    text
}

fn details(status: &Status) -> String {
    let totals = &status.requests;
    let device = status
        .device
        .iter()
        .map(|device| format!(", {}", device.display()));
    let instance = status.instance.as_ref();
    let instance = instance.map_or_else(String::new, |name| format!("a disk of the instance {name}\n"));
    let other = match (&status.other_host, status.role.as_str()) {
        (Some(host), "moved") => format!("the lease is that of {host} now\n"),
        (Some(host), _) => format!("on its way to {host}\n"),
        (None, _) => String::new(),
    };
    let mut text = format!(
        "{instance}{other}{}{}\nprocess {}; {} reads, {} writes, {} discards; {} failed\n",
        status.uri,
        device.collect::<String>(),
        status.pid,
        totals.reads,
        totals.writes,
        totals.zeros,
        totals.failed
    );
    for copy in &status.copies {
        text += &format!("{} {}: {} MiB", copy.kind, copy.place, mib(copy.bytes));
        if copy.failures > 0 {
            text += &format!(", given up {} times", copy.failures);
        }
        if let Some(reason) = &copy.reason {
            text += &format!("; {reason}");
        }
        text.push('\n');
    }
    text
}

fn print_served(status: &server::Status, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        println!("{}", serde_json::to_string_pretty(status)?);
        return Ok(());
    }
    let leaving = if status.leaving { ", about to end" } else { "" };
    let to = status
        .hands_over_to
        .iter()
        .map(|to| format!(", handed over to {to}"));
    let to = to.collect::<String>();
    println!(
        "{} of {} MiB are given{leaving}{to}",
        mib(status.leased_bytes),
        mib(status.bytes)
    );
    for row in &status.leases {
        let owner = if row.connected { "connected" } else { "gone" };
        let moves = row.moves_to.iter().map(|to| format!(", moves to {to}"));
        let moves = moves.collect::<String>();
        println!(
            "{:<16} {:<16} {:>10} {owner}{moves}",
            row.host,
            row.name,
            mib(row.bytes)
        );
    }
    Ok(())
}

/// Parses the stand-in for the server.
pub fn backup(text: &str) -> Result<BackupChoice, String> {
    match text.split_once('=') {
        None if text == "none" => Ok(BackupChoice::None),
        None if text == "file" => Ok(BackupChoice::File(None)),
        Some(("file", path)) if !path.is_empty() => Ok(BackupChoice::File(Some(path.into()))),
        Some(("mirror", host)) if !host.is_empty() => Ok(BackupChoice::Mirror(host.to_owned())),
        _ => Err("file, file=PATH, mirror=HOST or none".to_owned()),
    }
}

/// Parses a size in bytes, or with K, M, G or T.
pub fn size(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let (number, shift) = match upper.find(['K', 'M', 'G', 'T']) {
        Some(at) if at + 1 == upper.len() => {
            let unit = "KMGT".find(&upper[at..]).expect("it is one of them");
            (&upper[..at], 10 * (unit + 1))
        }
        _ => (upper.as_str(), 0),
    };
    let bytes = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift));
    bytes
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{text:?} is no size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_backups_are_read() {
        assert_eq!(
            [size("4096"), size("3g"), size("2T")],
            [Ok(4096), Ok(3 << 30), Ok(2 << 40)]
        );
        for bad in ["", "G", "-1", "0", "1.5G", "KG", "99999999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(backup("file=/a=b"), Ok(BackupChoice::File(Some("/a=b".into()))));
        assert_eq!(backup("mirror=c"), Ok(BackupChoice::Mirror("c".into())));
        for bad in ["", "file=", "mirror", "mirror=", "tape"] {
            assert!(backup(bad).is_err(), "{bad}");
        }
    }
}

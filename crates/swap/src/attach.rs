//! The process of a disk: its start, and its end.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::mpsc::unbounded_channel;
use verbatim_lease::Copy;
use verbatim_paging::Urgency;
use verbatim_volume::Hosts;

use crate::backup::Backup;
use crate::block::PAGE_BYTES;
use crate::control::{self, Control, Sockets};
use crate::device::Device;
use crate::disk::{Disk, Inbox, Message, SLOTS, Second, Server, Settings};
use crate::link;
use crate::wire::Session;

/// Limit for the goodbyes to servers.
const GOODBYE: Duration = Duration::from_secs(2);

/// The stand-in for the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupChoice {
    /// None: pages that are lost with a server read as errors.
    None,
    /// A file or block device; without a path, a file of this process's own.
    File(Option<PathBuf>),
    /// Another server.
    Mirror(String),
}

/// Parameters of a disk to attach.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The server.
    pub host: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The disk's name on this host.
    pub name: String,
    /// The stand-in for the server.
    pub backup: BackupChoice,
    /// Make the disk a block device of this machine as well.
    pub device: bool,
    /// Limit for the server to transfer a page.
    pub deadline: Duration,
    /// Time for which the disk's process looks for work before it sleeps.
    pub spin: Duration,
    /// This host's name.
    pub own: String,
    /// The servers' port.
    pub port: u16,
    /// The folder of hosts.json and tls/.
    pub config_dir: PathBuf,
    /// The folder of the sockets.
    pub runtime_dir: PathBuf,
    /// The folder of a file without a path.
    pub state_dir: PathBuf,
    /// The socket for clients, if it is not the usual one. Its folder exists.
    pub socket: Option<PathBuf>,
    /// The instance that the disk belongs to.
    pub instance: Option<String>,
    /// The session in which the disk comes from another host.
    pub arriving: Option<Session>,
}

impl Wanted {
    /// The sockets of the disk.
    pub fn sockets(&self) -> Sockets {
        Sockets::new(&self.runtime_dir, &self.name).at(self.socket.clone())
    }
}

/// A disk that is ready; this process becomes the disk's from here on.
pub struct Ready {
    disk: Disk,
    device: Option<PathBuf>,
    sockets: Sockets,
    control: Control,
    ended: mpsc::Receiver<()>,
}

/// Makes the disk; the error names a missing requirement.
pub fn prepare(wanted: &Wanted) -> anyhow::Result<Ready> {
    if !wanted.bytes.is_multiple_of(PAGE_BYTES) {
        bail!("a swap disk has whole pages of {PAGE_BYTES} bytes");
    }
    let sockets = wanted.sockets();
    std::fs::create_dir_all(wanted.runtime_dir.join("swap"))?;
    if std::os::unix::net::UnixStream::connect(sockets.control()).is_ok() {
        bail!(
            "there is a swap disk {} already; --name gives this one another name",
            wanted.name
        );
    }
    let urgency = match wanted.spin.is_zero() {
        true => Urgency::RealTime,
        false => Urgency::Ordinary,
    };
    // Later threads inherit this.
    for line in verbatim_paging::enter(urgency) {
        tracing::warn!("{line}");
    }
    let hosts = Hosts::load(&wanted.config_dir)?;
    let inbox = Inbox::new()?;
    let second = match &wanted.backup {
        BackupChoice::File(path) => {
            let path = match path {
                Some(path) => path.clone(),
                None => {
                    std::fs::create_dir_all(&wanted.state_dir)?;
                    wanted
                        .state_dir
                        .join(format!("{}.{}", wanted.name, std::process::id()))
                }
            };
            let backup = Backup::open(&path, wanted.bytes, SLOTS.into(), inbox.waker())?;
            if backup.is_cached {
                tracing::warn!(
                    "{} goes through the page cache: its file system has no direct I/O. Under memory pressure it may wait for itself",
                    path.display()
                );
            }
            Some((Some(backup), path.display().to_string()))
        }
        BackupChoice::Mirror(host) if *host == wanted.host => bail!("{host} cannot stand in for itself"),
        BackupChoice::Mirror(host) => Some((None, host.clone())),
        BackupChoice::None => None,
    };
    let (ended_by, ended) = mpsc::channel();
    let pattern = link::Config {
        hosts,
        own: wanted.own.clone(),
        host: wanted.host.clone(),
        port: wanted.port,
        name: wanted.name.clone(),
        bytes: wanted.bytes,
        runtime_dir: wanted.runtime_dir.clone(),
        slots: SLOTS,
        arriving: wanted.arriving,
    };
    let link = |host: &str, copy| -> anyhow::Result<Server> {
        let (sender, receiver) = unbounded_channel();
        let (config, tell) = (pattern.of(host), tell(&inbox, copy));
        link::start(config, tell, receiver, ended_by.clone())?;
        Ok(Server::new(host.to_owned(), sender))
    };
    let first = link(&wanted.host, Copy::First)?;
    let second = match second {
        None => Second::None,
        Some((Some(backup), path)) => Second::File(backup, path),
        Some((None, host)) => Second::Server(link(&host, Copy::Second)?),
    };
    let settings = Settings {
        name: wanted.name.clone(),
        bytes: wanted.bytes,
        deadline: wanted.deadline,
        spin: wanted.spin,
        uri: wanted.socket.as_ref().map(|_| sockets.uri()),
        instance: wanted.instance.clone(),
        arriving: wanted.arriving,
        connect: {
            let inbox = inbox.clone();
            Box::new(move |host, copy| {
                let (sender, receiver) = unbounded_channel();
                // The lease is new, even if the disk's first one was not.
                let config = link::Config {
                    arriving: None,
                    ..pattern.of(host)
                };
                link::start_later(config, tell(&inbox, copy), receiver, ended_by.clone())?;
                Ok(Server::new(host.to_owned(), sender))
            })
        },
    };
    let disk = Disk::new(settings, inbox.clone(), first, second)?;
    let device = wanted.device.then(|| Device::new(wanted.bytes)).transpose()?;
    let path = device.map(|(device, kernel)| {
        inbox.put(Message::Kernel(kernel));
        device.path().to_owned()
    });
    let control = control::start(&sockets, wanted.bytes, path.clone(), inbox)?;
    if let Some(line) = verbatim_paging::lock() {
        tracing::warn!("{line}");
    }
    Ok(Ready {
        disk,
        device: path,
        sockets,
        control,
        ended,
    })
}

/// Passes the news of a link to the disk.
fn tell(inbox: &Inbox, copy: Copy) -> link::Tell {
    let inbox = inbox.clone();
    Box::new(move |news| inbox.link(copy, news))
}

impl Ready {
    /// The device, or the clients' address.
    pub fn place(&self) -> String {
        match &self.device {
            Some(device) => device.display().to_string(),
            None => self.sockets.uri(),
        }
    }

    /// Serves the disk until it is detached.
    pub fn run(self) -> anyhow::Result<()> {
        let served = self.disk.run();
        self.sockets.remove();
        self.control.end();
        // Links say goodbye; without it a server ends the lease by itself, later.
        let _ = self.ended.recv_timeout(GOODBYE);
        served
    }
}

/// Starts the disk's process in the background, and waits until the disk is ready. `arguments` are those of
/// this process; with them the other one runs in the foreground. Returns its output: the disk's place.
pub fn in_background(wanted: &Wanted, arguments: Vec<std::ffi::OsString>) -> anyhow::Result<String> {
    let sockets = wanted.sockets();
    std::fs::create_dir_all(wanted.runtime_dir.join("swap"))?;
    let log =
        File::create(sockets.log()).with_context(|| format!("cannot make {}", sockets.log().display()))?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(arguments)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        // Keys of a terminal are not meant for this process.
        .process_group(0);
    let mut child = command.spawn().context("cannot start the disk's process")?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line)?;
    if !line.is_empty() {
        return Ok(line.trim().to_owned());
    }
    child.wait()?;
    let said = std::fs::read_to_string(sockets.log()).unwrap_or_default();
    let why = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
    bail!("{}", why.unwrap_or(&said).trim())
}

/// Announces the disk to the waiting command. Does not wait for its reader.
pub fn announce(line: &str) {
    let mut output = std::io::stdout();
    // The reader may have gone.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

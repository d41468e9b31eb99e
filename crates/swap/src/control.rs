//! The thread of a disk that takes clients, commands and signals.

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{Mode, OFlags};
use tokio::io::BufReader;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use verbatim_volume::control::{receive, send};

use crate::device;
use crate::disk::{Inbox, Message, Order, Status};
use crate::negotiation::negotiate;

/// The sockets of a disk.
#[derive(Debug, Clone)]
pub struct Sockets {
    folder: PathBuf,
    name: String,
    /// The socket for clients, if it is not in the folder.
    own: Option<PathBuf>,
}

impl Sockets {
    /// The sockets in the common folder.
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        Self {
            folder: runtime_dir.join("swap"),
            name: name.to_owned(),
            own: None,
        }
    }

    /// The same with another socket for clients.
    pub fn at(self, own: Option<PathBuf>) -> Self {
        Self { own, ..self }
    }

    /// The sockets of all disks of this host, by name.
    pub fn all(runtime_dir: &Path) -> Vec<Self> {
        let entries = std::fs::read_dir(runtime_dir.join("swap"))
            .into_iter()
            .flatten()
            .flatten();
        let names = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            name.strip_suffix(".control").map(str::to_owned)
        });
        let mut names: Vec<_> = names.collect();
        names.sort();
        names.iter().map(|name| Self::new(runtime_dir, name)).collect()
    }

    /// The socket for clients.
    pub fn nbd(&self) -> PathBuf {
        let usual = || self.folder.join(format!("{}.sock", self.name));
        self.own.clone().unwrap_or_else(usual)
    }

    /// The socket for commands.
    pub fn control(&self) -> PathBuf {
        self.folder.join(format!("{}.control", self.name))
    }

    /// The log of a process in the background.
    pub fn log(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.name))
    }

    /// The address for NBD clients.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.name, self.nbd().display())
    }

    /// Removes both sockets.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(self.control());
        let _ = std::fs::remove_file(self.nbd());
    }
}

/// Gives an order to the process of a disk.
pub async fn order(sockets: &Sockets, order: &Order) -> anyhow::Result<Status> {
    let stream = UnixStream::connect(sockets.control()).await;
    let mut stream = stream.with_context(|| none(sockets))?;
    send(&mut stream, order).await?;
    match receive::<Result<Status, String>>(&mut BufReader::new(stream)).await? {
        Some(Ok(status)) if status.uri.is_empty() => Ok(Status {
            uri: sockets.uri(),
            ..status
        }),
        Some(Ok(status)) => Ok(status),
        Some(Err(why)) => bail!("{why}"),
        None => bail!("the process of {} has ended", sockets.name),
    }
}

/// The same for a thread that may block, within this limit.
pub fn order_now(sockets: &Sockets, order: &Order, limit: Duration) -> anyhow::Result<Status> {
    let stream = StdStream::connect(sockets.control());
    let mut stream = stream.with_context(|| none(sockets))?;
    let said = || -> anyhow::Result<Option<Result<Status, String>>> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = String::new();
        std::io::BufReader::new(stream).read_line(&mut answer)?;
        Ok((!answer.is_empty())
            .then(|| serde_json::from_str(&answer))
            .transpose()?)
    };
    match said().with_context(|| format!("the process of {} does not answer", sockets.name))? {
        Some(status) => status.map_err(anyhow::Error::msg),
        None => bail!("the process of {} has ended", sockets.name),
    }
}

fn none(sockets: &Sockets) -> String {
    format!("no swap disk {} is attached", sockets.name)
}

/// Whether an order failed because the disk has no process.
pub fn is_nobody_there(error: &anyhow::Error) -> bool {
    verbatim_volume::control::is_nobody_there(error)
}

/// Listens on a socket, and replaces one that a killed process has left.
fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    let bind = || {
        let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else {
            return Err(std::io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        // The path goes through the folder's descriptor, since the path of a socket has at most 107 bytes.
        let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
        let _ = std::fs::remove_file(&short);
        UnixListener::bind(&short)
    };
    bind().with_context(|| format!("cannot listen on {}", socket.display()))
}

/// Limit for the last answers to commands.
const LAST: Duration = Duration::from_secs(2);

/// The thread.
pub struct Control {
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Control {
    /// Accepts nothing more. Commands have their answers when this returns.
    pub fn end(self) {
        // The thread may have ended already.
        let _ = self.end.send(());
        let _ = self.thread.join();
    }
}

/// Accepts clients and commands from here on. The sockets exist when this returns.
pub fn start(
    sockets: &Sockets,
    bytes: u64,
    device: Option<PathBuf>,
    inbox: Inbox,
) -> anyhow::Result<Control> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (nbd, control, stop) = runtime.block_on(async {
        let stop = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        anyhow::Ok((listen(&sockets.nbd())?, listen(&sockets.control())?, stop))
    })?;
    // A socket of its own has no other export.
    let name = match sockets.own {
        Some(_) => String::new(),
        None => sockets.name.clone(),
    };
    let (end, ended) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("control".to_owned())
        .stack_size(512 << 10)
        .spawn(move || {
            let mut commands = JoinSet::new();
            runtime.block_on(async {
                tokio::select! {
                    _ = ended => {}
                    () = run((nbd, control), stop, (&name, bytes, device.as_deref()), &inbox, &mut commands) => {}
                }
                let answers = async { while commands.join_next().await.is_some() {} };
                // Clients that are still negotiating see the end of their connection.
                let _ = tokio::time::timeout(LAST, answers).await;
            });
            // Clients that are just connecting see the same.
            runtime.shutdown_background();
        })?;
    Ok(Control { end, thread })
}

async fn run(
    (nbd, control): (UnixListener, UnixListener),
    mut stop: (tokio::signal::unix::Signal, tokio::signal::unix::Signal),
    (name, bytes, device): (&str, u64, Option<&Path>),
    inbox: &Inbox,
    commands: &mut JoinSet<()>,
) {
    loop {
        tokio::select! {
            _ = stop.0.recv() => ask_to_end(inbox),
            _ = stop.1.recv() => ask_to_end(inbox),
            accepted = nbd.accept() => if let Ok((stream, _)) = accepted {
                let (name, inbox) = (name.to_owned(), inbox.clone());
                if let Ok(stream) = stream.into_std() {
                    tokio::task::spawn_blocking(move || client(stream, &name, bytes, &inbox));
                }
            },
            accepted = control.accept() => if let Ok((stream, _)) = accepted {
                let (inbox, device) = (inbox.clone(), device.map(Path::to_owned));
                commands.spawn(async move {
                    // The command sees the end of its connection.
                    let _ = command(stream, &inbox, device).await;
                });
            },
            // A command that has ended.
            Some(_) = commands.join_next() => {}
        }
    }
}

/// A signal ends the disk even while clients use it.
fn ask_to_end(inbox: &Inbox) {
    let (answer, _) = oneshot::channel();
    inbox.put(Message::Order(Order::Detach { force: true }, answer));
}

fn client(mut stream: StdStream, name: &str, bytes: u64, inbox: &Inbox) {
    let negotiated = stream
        .set_nonblocking(false)
        .and_then(|()| negotiate(&mut stream, name, bytes));
    match negotiated {
        Ok(true) => inbox.put(Message::Client(stream)),
        Ok(false) => {}
        Err(error) => tracing::info!("a client has come to nothing: {error}"),
    }
}

async fn command(stream: UnixStream, inbox: &Inbox, device: Option<PathBuf>) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let Some(order) = receive::<Order>(&mut stream).await? else {
        return Ok(());
    };
    if let (Order::Detach { force: false }, Some(path)) = (&order, device.clone()) {
        let asked = path.clone();
        if tokio::task::spawn_blocking(move || device::is_in_use(&asked)).await? {
            let why = format!(
                "{} is in use; swapoff first, or --force, which loses what is there",
                path.display()
            );
            return send(stream.get_mut(), &Err::<Status, _>(why)).await;
        }
    }
    let (answer, answered) = oneshot::channel();
    inbox.put(Message::Order(order, answer));
    let answer = answered.await?.map(|status| Status { device, ..status });
    send(stream.get_mut(), &answer).await
}

//! Protocol between the command and the daemon of a host: a line of JSON each, on a Unix socket.

use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use verbatim_mirror::decision::{AgentSession, Keep};

use crate::transport::{Carriage, Wanted};

/// The longest line.
const MAX_LINE: u64 = 1 << 20;

/// An order to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as the commands call them")]
pub enum Order {
    Create {
        name: String,
        length: u64,
        data: Option<PathBuf>,
        /// The existing file becomes the volume as it is.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        adopt: bool,
        /// All of it is allocated on the disk.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        preallocate: bool,
        /// Also where nothing tells the data from others of their kind.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unnamed: bool,
    },
    /// Accept the volume's present data, after a failed flush or with another file.
    Accept {
        name: String,
    },
    /// Set the place for the data of a volume that is to move here.
    Place {
        name: String,
        data: PathBuf,
        /// Also where nothing tells it from others of its kind.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unnamed: bool,
    },
    Attach {
        name: String,
        /// As a block device of this machine, too.
        #[serde(default)]
        device: bool,
        /// By vhost-user-blk, too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        vhost_user: bool,
        /// Only for this instance: as a block device, or on a socket.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holder: Option<String>,
        /// The instance is restored here in this session of the agents, which is not decided yet.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<AgentSession>,
        /// By NBD on this socket, for the virtual machine of this instance. The socket's folder exists as
        /// long as the instance.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        socket: Option<PathBuf>,
        /// The instance may only read.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        read_only: bool,
    },
    Detach {
        name: String,
        /// Only the device or socket of this instance.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holder: Option<String>,
    },
    List,
    /// End for good: no device is left. Refused where a device is in use, unless forced.
    Stop {
        force: bool,
    },
    /// Make acknowledged writes durable. Where the volume is not served there is nothing to do.
    Sync {
        name: String,
    },
    Resize {
        name: String,
        length: u64,
    },
    Delete {
        name: String,
        /// Also a copy that serves and whose data are gone for good.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    Migrate {
        name: String,
        to: String,
        bytes_per_second: Option<u64>,
        /// Transport for the copy; the daemon's default if not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        transport: Option<Wanted>,
        /// Some written data may be only in the page cache here: all data are sent through it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rescue: bool,
    },
    /// Check whether the volume could move there now, as far as both hosts can tell. The answer is its row;
    /// `trouble` has the obstacle, if there is one.
    Check {
        name: String,
        to: String,
    },
    Cancel {
        name: String,
    },
    /// Decide in the place of a destination that never answers.
    Resolve {
        name: String,
        keep: Keep,
        force: bool,
    },
    /// Serve a copy again that has moved away, since all that served after it are lost.
    Revive {
        name: String,
        force: bool,
    },
    /// Copy it to another host, for a session of the agents which decides what becomes of it. Answered when it has begun.
    Follow {
        name: String,
        to: String,
        by: AgentSession,
        bytes_per_second: Option<u64>,
    },
    /// Answered when the other host has all data, so that the volume can be held.
    Mirrored {
        name: String,
        by: AgentSession,
    },
    /// Hold its clients, and have the other host promise the copy. The volume then waits for
    /// [`Order::Settle`].
    Hold {
        name: String,
        by: AgentSession,
    },
    /// The session is decided. Also sent to copies that have no part in it. The answer is always a row: only
    /// its role tells the result.
    Settle {
        name: String,
        by: AgentSession,
        is_committed: bool,
    },
    /// Which state folder the daemon has. The answer is a row with nothing else.
    StateFolder,
}

impl Order {
    /// The volume that it is about; `None` if it is about all.
    pub fn volume(&self) -> Option<&str> {
        match self {
            Self::List | Self::Stop { .. } | Self::StateFolder => None,
            Self::Create { name, .. }
            | Self::Accept { name }
            | Self::Place { name, .. }
            | Self::Attach { name, .. }
            | Self::Detach { name, .. }
            | Self::Sync { name }
            | Self::Resize { name, .. }
            | Self::Delete { name, .. }
            | Self::Migrate { name, .. }
            | Self::Check { name, .. }
            | Self::Cancel { name }
            | Self::Resolve { name, .. }
            | Self::Revive { name, .. }
            | Self::Follow { name, .. }
            | Self::Mirrored { name, .. }
            | Self::Hold { name, .. }
            | Self::Settle { name, .. } => Some(name),
        }
    }
}

/// A volume as the daemon sees it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its identity, on all hosts.
    pub id: String,
    /// Its size.
    pub length_bytes: u64,
    /// Number of its moves, plus one.
    pub generation: u64,
    /// serving, deciding, moved, incoming, incomplete, held or ready. Or, with numbers that are 0: placed, if
    /// it is not here yet; unknown, if the role is not known; busy, while another order has it. In the
    /// answer to [`Order::Settle`]: gone, if there was a copy here and it was deleted; none, if the state folder never had one.
    pub role: String,
    /// The other host, if the role has one.
    pub other_host: Option<String>,
    /// Path of its data, present or planned, unless it is a file of the daemon's.
    #[serde(default)]
    pub data: Option<PathBuf>,
    /// The reason why it is not served although its role is to serve; the daemon tries again.
    #[serde(default)]
    pub waits: Option<String>,
    /// A flush of its disk has failed: data written since the last good one may be only in the page cache.
    /// Reads go on, writes fail.
    #[serde(default)]
    pub suspect: bool,
    /// Nothing had ever been written to it when an instance got it, as far as is known; `None` from older daemons, and where no instance has it.
    #[serde(default)]
    pub fresh: Option<bool>,
    /// Clients may connect.
    pub attached: bool,
    /// The clients' address.
    pub uri: Option<String>,
    /// Its block device on this machine.
    #[serde(default)]
    pub device: Option<PathBuf>,
    /// Where virtual machines connect by vhost-user-blk.
    #[serde(default)]
    pub vhost_user: Option<VhostUser>,
    /// The instance that has exclusive use of it.
    #[serde(default)]
    pub holder: Option<String>,
    /// The socket for the virtual machine of this instance.
    #[serde(default)]
    pub socket: Option<PathBuf>,
    /// Transport of a migration's chunks, and the reason for it.
    #[serde(default)]
    pub copy: Option<Carriage>,
    /// Progress of a migration.
    pub migration: Option<serde_json::Value>,
    /// The session of the agents that decides about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<AgentSession>,
    /// Its trouble, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The reason why its copy makes no progress, if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
    /// The identity of the daemon's state folder, in the answer to [`Order::StateFolder`], and to [`Order::Settle`] where that has
    /// no copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_folder: Option<String>,
}

/// A volume as the disk of a virtual machine by vhost-user-blk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VhostUser {
    /// The socket to which QEMU connects.
    pub socket: PathBuf,
    /// A virtual machine is connected.
    pub connected: bool,
    /// Arguments of QEMU for a machine of 2 GiB.
    pub qemu: String,
}

impl VhostUser {
    /// For a volume of that name.
    pub fn new(name: &str, socket: &Path, connected: bool) -> Self {
        // A comma in the value of an option is written twice, and an identifier begins with a letter.
        let path = socket.display().to_string().replace(',', ",,");
        let qemu = format!(
            "-m 2G -object memory-backend-memfd,id=ram,size=2G,share=on -machine memory-backend=ram \
             -chardev socket,id=disk-{name},path={path},reconnect=1 -device vhost-user-blk-pci,chardev=disk-{name}"
        );
        Self {
            socket: socket.to_owned(),
            connected,
            qemu,
        }
    }
}

/// The answer to an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The order is carried out; the rows of the volumes concerned.
    Volumes(Vec<Row>),
    /// The cost of a move that has succeeded.
    Moved(Moved),
    /// The order was not carried out; the reason.
    Failed(String),
}

impl Outcome {
    /// The rows. An error if it is something else.
    pub fn rows(self) -> anyhow::Result<Vec<Row>> {
        match self {
            Self::Volumes(rows) => Ok(rows),
            Self::Failed(why) => bail!("{why}"),
            Self::Moved(moved) => bail!(
                "the volume daemon answers what a move of {} has cost, which was not asked: is it of another release? Start it again",
                moved.name
            ),
        }
    }
}

/// The cost of a move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The volume.
    pub name: String,
    /// The destination.
    pub to: String,
    /// Its generation at the destination.
    pub generation: u64,
    /// Time from the order to the commit.
    pub seconds: f64,
    /// Time for which requests waited at the end.
    pub blackout_ms: f64,
    /// Bytes sent, changes included.
    pub sent_bytes: u64,
    /// Bytes copied; chunks that were copied again count again.
    pub copied_bytes: u64,
    /// Number of times that the destination was silent or gone.
    pub interruptions: u32,
    /// Transport of the chunks, and the reason for it.
    #[serde(default)]
    pub copy: Option<Carriage>,
}

/// Gives an order and waits for its outcome.
pub async fn order(socket: &Path, order: &Order) -> anyhow::Result<Outcome> {
    let stream = UnixStream::connect(socket).await;
    let mut stream = stream.with_context(|| nobody(socket))?;
    send(&mut stream, order).await?;
    done(receive(&mut BufReader::new(stream)).await?)
}

/// The same for a thread that may block, within this limit.
pub fn order_now(socket: &Path, order: &Order, limit: Duration) -> anyhow::Result<Outcome> {
    let stream = std::os::unix::net::UnixStream::connect(socket);
    let mut stream = stream.with_context(|| nobody(socket))?;
    let said = || -> anyhow::Result<Option<Outcome>> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.write_all(&line(order)?)?;
        let mut answer = Vec::new();
        io::BufReader::new(stream)
            .take(MAX_LINE)
            .read_until(b'\n', &mut answer)?;
        read(&answer)
    };
    done(said().context("the volume daemon does not answer")?)
}

/// Whether an order failed because there is no daemon.
pub fn is_nobody_there(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(
        kind,
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    )
}

fn nobody(socket: &Path) -> String {
    format!(
        "no volume daemon answers at {}; start one with `verbatim volume daemon`",
        socket.display()
    )
}

fn done(outcome: Option<Outcome>) -> anyhow::Result<Outcome> {
    match outcome {
        Some(Outcome::Failed(why)) => bail!("{why}"),
        Some(outcome) => Ok(outcome),
        None => bail!("the volume daemon has gone away; what it was doing goes on when it is started again"),
    }
}

fn line(value: &impl Serialize) -> anyhow::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Parses one line, if there is one.
fn read<T: for<'a> Deserialize<'a>>(line: &[u8]) -> anyhow::Result<Option<T>> {
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(line)?)),
        Some(_) => bail!("a line is cut off or too long"),
    }
}

/// Sends one line.
pub async fn send(stream: &mut UnixStream, value: &impl Serialize) -> anyhow::Result<()> {
    Ok(stream.write_all(&line(value)?).await?)
}

/// Takes one line, if there is one.
pub async fn receive<T: for<'a> Deserialize<'a>>(
    stream: &mut BufReader<UnixStream>,
) -> anyhow::Result<Option<T>> {
    let mut line = Vec::new();
    stream.take(MAX_LINE).read_until(b'\n', &mut line).await?;
    read(&line)
}

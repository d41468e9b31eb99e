//! The thread that asks a server for a lease, and asks again when the lease is lost.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_rustls::client::TlsStream;
use verbatim_far::{Connection, Device, Options};
use verbatim_lease::SlotId;
use verbatim_volume::Hosts;
use verbatim_volume::wire::{frame, receive, send};

use crate::block::SLOT_BYTES;
use crate::remote::Remote;
use crate::wire::{PIECE, Session, ToOwner, ToServer, Token, VERSION};

/// Interval of the owner's pings, and of its calls for a lease.
const BEAT: Duration = Duration::from_secs(1);

/// Limit for a server to accept a call.
const CALL: Duration = Duration::from_secs(5);

/// Limit for a server to allocate memory.
const GRANT: Duration = Duration::from_secs(600);

/// Most READs and WRITEs in the queue pair.
const WINDOW: u32 = 256;

/// Parameters of a lease.
#[derive(Clone)]
pub struct Config {
    /// The list of hosts.
    pub hosts: Hosts,
    /// This host.
    pub own: String,
    /// The server.
    pub host: String,
    /// The server's port.
    pub port: u16,
    /// The disk's name.
    pub name: String,
    /// The disk's length.
    pub bytes: u64,
    /// The folder of the RNIC's control socket.
    pub runtime_dir: PathBuf,
    /// Number of slots that need room.
    pub slots: SlotId,
    /// The session in which the lease of another host comes here.
    pub arriving: Option<Session>,
}

impl Config {
    /// The same parameters for another server.
    pub fn of(&self, host: &str) -> Self {
        Self {
            host: host.to_owned(),
            ..self.clone()
        }
    }
}

/// News for the disk.
#[allow(clippy::large_enum_variant, reason = "it is boxed in the inbox")]
pub enum News {
    /// There is memory at the server.
    Up {
        /// The connection to the memory.
        remote: Remote,
        /// The memory has its earlier content.
        kept: bool,
    },
    /// The server's connection has ended. The next call shows whether its memory is lost.
    Lost,
    /// The server could not be called, or has no memory, for this reason.
    Unreachable(String),
    /// The server is about to end.
    Leaving,
    /// The other host of this session may adopt the lease.
    Offered(Session),
    /// The server has the map of the pages.
    Deposited(Session),
    /// The lease is this host's, and no other host reaches it. The map of the pages, as it was sent.
    Taken(Vec<u8>),
    /// The lease no longer exists. The link asks for another one.
    NotTaken,
    /// The lease belongs to this host.
    Gone(String),
    /// The pages are to go to this other server; or no longer.
    HandOver(Option<String>),
}

/// Orders of the disk to a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Make another queue pair: the present one is useless.
    Again,
    /// Give this lease up; another one will do when the server is back.
    Leave,
    /// End the link and the lease.
    Goodbye,
    /// Let this host adopt the lease.
    Offer {
        /// The host.
        to: String,
        /// The session.
        by: Session,
        /// Number of the [`News::Up`] that the offer is for. The offer is not sent for another lease.
        call: u64,
    },
    /// Take the offer back.
    Withdraw {
        /// The session of the offer.
        by: Session,
    },
    /// Send the map of the pages.
    Deposit {
        /// The session of the offer.
        by: Session,
        /// The whole map.
        map: Arc<[u8]>,
        /// Number of the [`News::Up`], as in an offer.
        call: u64,
    },
    /// The session is committed: the lease that was adopted in it becomes this host's.
    TakeOver {
        /// The session.
        by: Session,
    },
    /// Give this lease up, and ask this other server for the next one.
    LeaveFor(String),
    /// End the link; the lease is another host's.
    Abandon,
}

/// Passes news to the disk.
pub type Tell = Box<dyn Fn(News) + Send>;

struct Link {
    config: Config,
    tell: Tell,
    device: Option<Device>,
    token: Option<Token>,
    /// The session in which the lease comes, until the lease is this host's.
    arriving: Option<Session>,
    /// The session is committed.
    is_decided: bool,
    /// Number of times that there was memory.
    calls: u64,
}

/// Failure of a call.
#[derive(Debug)]
enum Refusal {
    /// Another call may succeed.
    Error(anyhow::Error),
    /// No lease comes to this host.
    NotOffered,
    /// The lease belongs to this host.
    Gone(String),
}

impl<E: Into<anyhow::Error>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// Asks for the first lease; the error says why there is none. Then a thread goes on with this lease, and
/// drops `ended` at its end.
pub fn start(
    config: Config,
    tell: Tell,
    mut wanted: UnboundedReceiver<Wanted>,
    ended: mpsc::Sender<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut link = Link {
        arriving: config.arriving,
        is_decided: false,
        calls: 1,
        config,
        tell,
        device: None,
        token: None,
    };
    let host = link.config.host.clone();
    let called = runtime.block_on(link.call()).map_err(|refusal| match refusal {
        Refusal::Error(error) => error,
        Refusal::NotOffered => anyhow::anyhow!("no lease of that name comes here"),
        Refusal::Gone(to) => anyhow::anyhow!("the lease is that of {to}"),
    });
    let (stream, remote, kept) = called.with_context(|| format!("no memory of {host}"))?;
    (link.tell)(News::Up { remote, kept });
    std::thread::Builder::new()
        .name(format!("link {host}"))
        .stack_size(1 << 20)
        .spawn(move || {
            runtime.block_on(link.look_after(Some(stream), &mut wanted));
            drop(ended);
        })?;
    Ok(())
}

/// The same for a disk that is served already: it gets the result as news.
pub fn start_later(
    config: Config,
    tell: Tell,
    mut wanted: UnboundedReceiver<Wanted>,
    ended: mpsc::Sender<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let link = Link {
        arriving: config.arriving,
        is_decided: false,
        calls: 0,
        config,
        tell,
        device: None,
        token: None,
    };
    std::thread::Builder::new()
        .name(format!("link {}", link.config.host))
        .stack_size(1 << 20)
        .spawn(move || {
            runtime.block_on(link.look_after(None, &mut wanted));
            drop(ended);
        })?;
    Ok(())
}

impl Link {
    async fn look_after(
        mut self,
        first: Option<TlsStream<TcpStream>>,
        wanted: &mut UnboundedReceiver<Wanted>,
    ) {
        let mut stream = first;
        let mut is_told = false;
        loop {
            if let Some(stream) = stream.take() {
                is_told = false;
                if self.talk(stream, wanted).await {
                    return;
                }
            } else {
                // The next call comes after a pause, or never.
                let pause = tokio::time::sleep(BEAT);
                tokio::pin!(pause);
                loop {
                    tokio::select! {
                        word = wanted.recv() => match word {
                            Some(Wanted::TakeOver { .. }) => self.is_decided = true,
                            // The disk repeats this when there is a connection.
                            Some(Wanted::Again | Wanted::Leave | Wanted::Offer { .. } | Wanted::Withdraw { .. } | Wanted::Deposit { .. }) => {}
                            Some(Wanted::LeaveFor(host)) => self.leave_for(host),
                            Some(Wanted::Goodbye | Wanted::Abandon) | None => return,
                        },
                        () = &mut pause => break,
                    }
                }
            }
            match self.call().await {
                Ok((new, remote, kept)) => {
                    self.calls += 1;
                    (self.tell)(News::Up { remote, kept });
                    stream = Some(new);
                }
                Err(Refusal::Gone(to)) => {
                    (self.tell)(News::Gone(to));
                    return;
                }
                Err(Refusal::NotOffered) if self.is_decided => {
                    tracing::warn!(
                        "the lease of {} has ended before it was taken over",
                        self.config.host
                    );
                    self.arriving = None;
                    self.token = None;
                    (self.tell)(News::NotTaken);
                }
                Err(refusal) => {
                    let why = match refusal {
                        Refusal::Error(error) => format!("{error:#}"),
                        _ => "no lease of that name comes here any more".to_owned(),
                    };
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!(
                            "no memory of {}: {why}; it is asked again each second",
                            self.config.host
                        );
                    }
                    (self.tell)(News::Unreachable(why));
                }
            }
        }
    }

    /// Talks on a connection until it is useless; returns whether that was the end.
    async fn talk(&mut self, stream: TlsStream<TcpStream>, wanted: &mut UnboundedReceiver<Wanted>) -> bool {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut beat = tokio::time::interval(BEAT);
        let mut map = Vec::new();
        let ended = loop {
            let mut next = std::pin::pin!(receive::<ToOwner>(&mut reader));
            let message = loop {
                tokio::select! {
                    message = &mut next => break message,
                    _ = beat.tick() => if let Err(error) = send(&mut writer, &ToServer::Ping).await {
                        break Err(error);
                    },
                    word = wanted.recv() => match word {
                        Some(Wanted::Again) => return false,
                        Some(Wanted::Leave) => {
                            self.token = None;
                            let _ = send(&mut writer, &ToServer::Goodbye).await;
                            return false;
                        }
                        Some(Wanted::Goodbye) | None => {
                            // Without a goodbye the lease ends a little later.
                            let _ = send(&mut writer, &ToServer::Goodbye).await;
                            return true;
                        }
                        Some(Wanted::Abandon) => return true,
                        Some(Wanted::LeaveFor(host)) => {
                            let _ = send(&mut writer, &ToServer::Goodbye).await;
                            self.leave_for(host);
                            return false;
                        }
                        Some(word) => if let Err(error) = self.say(&mut writer, word).await {
                            break Err(error);
                        },
                    },
                }
            };
            match message {
                Ok((ToOwner::Pong, _)) => {}
                Ok((ToOwner::Leaving, _)) => (self.tell)(News::Leaving),
                Ok((ToOwner::HandOver { to }, _)) => (self.tell)(News::HandOver(to)),
                Ok((ToOwner::Offered { by }, _)) => (self.tell)(News::Offered(by)),
                Ok((ToOwner::Deposited { by }, _)) => (self.tell)(News::Deposited(by)),
                Ok((ToOwner::Taken { by, at, total }, piece)) => {
                    if self.arriving != Some(by) || at != map.len() as u64 {
                        break "a piece of a map comes out of turn".to_owned();
                    }
                    map.extend(piece);
                    if map.len() as u64 >= total {
                        self.arriving = None;
                        (self.tell)(News::Taken(std::mem::take(&mut map)));
                        if let Err(error) = send(&mut writer, &ToServer::HasMap { by }).await {
                            break error.to_string();
                        }
                    }
                }
                Ok((ToOwner::Gone { to }, _)) => {
                    (self.tell)(News::Gone(to));
                    return true;
                }
                Ok(_) => break "it says what does not belong here".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        tracing::warn!("the connection to {} has ended: {ended}", self.config.host);
        (self.tell)(News::Lost);
        false
    }

    fn leave_for(&mut self, host: String) {
        self.token = None;
        self.config.host = host;
    }

    /// Sends an order of the disk to a connected server.
    async fn say(&mut self, writer: &mut (impl AsyncWrite + Unpin), word: Wanted) -> std::io::Result<()> {
        match word {
            Wanted::Offer { call, .. } | Wanted::Deposit { call, .. } if call != self.calls => Ok(()),
            Wanted::Offer { to, by, .. } => send(writer, &ToServer::Offer { to, by }).await,
            Wanted::Withdraw { by } => send(writer, &ToServer::Withdraw { by }).await,
            Wanted::Deposit { by, map, .. } => {
                let total = map.len() as u64;
                for (number, piece) in map.chunks(PIECE).enumerate() {
                    let at = (number * PIECE) as u64;
                    writer
                        .write_all(&frame(&ToServer::Deposit { by, at, total }, piece.len()))
                        .await?;
                    writer.write_all(piece).await?;
                }
                writer.flush().await
            }
            Wanted::TakeOver { by } => {
                self.is_decided = true;
                match self.arriving {
                    Some(_) => send(writer, &ToServer::TakeOver { by }).await,
                    None => Ok(()),
                }
            }
            Wanted::Again | Wanted::Leave | Wanted::LeaveFor(_) | Wanted::Goodbye | Wanted::Abandon => Ok(()),
        }
    }

    async fn call(&mut self) -> Result<(TlsStream<TcpStream>, Remote, bool), Refusal> {
        let Config { host, port, .. } = &self.config;
        let call = self.config.hosts.connect(host, *port);
        let mut stream = match tokio::time::timeout(CALL, call).await {
            Ok(called) => called.with_context(|| {
                format!("cannot call {host} on port {port}; does `verbatim memory serve` run there?")
            })?,
            Err(_) => return Err(anyhow!("{host} does not answer on port {port}").into()),
        };
        if self.device.as_ref().is_none_or(Device::is_gone) {
            self.device = Some(Device::open(&self.config.runtime_dir)?);
        }
        let device = self.device.as_ref().expect("it was just opened");
        let mut connection: Connection = device.connection(Options {
            window_bytes: u64::MAX,
            window_requests: WINDOW,
            ..Options::default()
        })?;
        let staging = connection.locked_buffer(usize::from(self.config.slots) * SLOT_BYTES)?;
        let (version, host, name) = (VERSION, self.config.own.clone(), self.config.name.clone());
        let (bytes, end, resume) = (self.config.bytes, connection.end(), self.token);
        let lease = match self.arriving {
            None => ToServer::Lease {
                version,
                host,
                name,
                bytes,
                end,
                resume,
            },
            Some(by) => ToServer::Adopt {
                version,
                host,
                name,
                bytes,
                by,
                end,
                resume,
            },
        };
        send(&mut stream, &lease).await?;
        let answer = tokio::time::timeout(GRANT, receive::<ToOwner>(&mut stream)).await;
        match answer.context("it does not say whether it has memory")??.0 {
            ToOwner::Granted {
                token,
                end,
                memory,
                kept,
            } => {
                if memory.length < self.config.bytes {
                    return Err(anyhow!("its memory is too short").into());
                }
                connection.connect(&end)?;
                // A new lease's memory has no content of this disk.
                let kept = kept && (self.token == Some(token) || self.arriving.is_some());
                self.token = Some(token);
                Ok((stream, Remote::new(connection, staging, memory), kept))
            }
            ToOwner::Refused(why) => Err(anyhow!("{why}").into()),
            ToOwner::NotOffered => Err(Refusal::NotOffered),
            ToOwner::Gone { to } => Err(Refusal::Gone(to)),
            _ => Err(anyhow!("it says what does not belong here").into()),
        }
    }
}

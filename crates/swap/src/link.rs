//! The thread that asks a server for a lease, and asks again when that is lost.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_rustls::client::TlsStream;
use verbatim_far::{Connection, Device, Options};
use verbatim_lease::SlotId;
use verbatim_volume::Hosts;
use verbatim_volume::wire::{receive, send};

use crate::block::SLOT_BYTES;
use crate::remote::Remote;
use crate::wire::{ToOwner, ToServer, Token, VERSION};

/// How often the owner says that it is there, and asks again for a lease.
const BEAT: Duration = Duration::from_secs(1);

/// So long a server may take to take a call.
const CALL: Duration = Duration::from_secs(5);

/// So long it may take to make memory.
const GRANT: Duration = Duration::from_secs(600);

/// READs and WRITEs in the queue pair at most.
const WINDOW: u32 = 256;

/// Which memory is wanted.
#[derive(Clone)]
pub struct Config {
    /// Who the hosts are.
    pub hosts: Hosts,
    /// This host.
    pub own: String,
    /// The server.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The disk's name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The RNIC's control socket is in it.
    pub runtime_dir: PathBuf,
    /// So many slots need room.
    pub slots: SlotId,
}

/// What the disk hears.
#[allow(clippy::large_enum_variant, reason = "it is boxed in the inbox")]
pub enum News {
    /// There is memory.
    Up {
        /// The way there.
        remote: Remote,
        /// Its content is what it was before.
        kept: bool,
    },
    /// The server's connection has ended. Whether its memory has, the next call shows.
    Lost,
    /// It could not be called, or has none: why.
    Unreachable(String),
    /// It is about to end.
    Leaving,
}

/// What the disk says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Another queue pair: this one is of no use any more.
    Again,
    /// This lease is over; another one will do when the server is back.
    Leave,
    /// Nothing any more.
    Goodbye,
}

/// How the disk hears it.
pub type Tell = Box<dyn Fn(News) + Send>;

struct Link {
    config: Config,
    tell: Tell,
    device: Option<Device>,
    token: Option<Token>,
}

/// Asks for the first lease, and says why there is none. The thread that looks after it begins with that; it lets go of `ended` when it ends.
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
        config,
        tell,
        device: None,
        token: None,
    };
    let host = link.config.host.clone();
    let (stream, remote, kept) = runtime
        .block_on(link.call())
        .with_context(|| format!("no memory of {host}"))?;
    (link.tell)(News::Up { remote, kept });
    std::thread::Builder::new()
        .name(format!("link {host}"))
        .stack_size(1 << 20)
        .spawn(move || {
            runtime.block_on(link.look_after(stream, &mut wanted));
            drop(ended);
        })?;
    Ok(())
}

impl Link {
    async fn look_after(mut self, first: TlsStream<TcpStream>, wanted: &mut UnboundedReceiver<Wanted>) {
        let mut stream = Some(first);
        let mut is_told = false;
        loop {
            if let Some(stream) = stream.take() {
                is_told = false;
                if self.talk(stream, wanted).await {
                    return;
                }
            } else {
                // The next call comes after a while; or there is none.
                let pause = tokio::time::sleep(BEAT);
                tokio::pin!(pause);
                loop {
                    tokio::select! {
                        word = wanted.recv() => match word {
                            Some(Wanted::Again | Wanted::Leave) => {}
                            Some(Wanted::Goodbye) | None => return,
                        },
                        () = &mut pause => break,
                    }
                }
            }
            match self.call().await {
                Ok((new, remote, kept)) => {
                    (self.tell)(News::Up { remote, kept });
                    stream = Some(new);
                }
                Err(error) => {
                    let why = format!("{error:#}");
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

    /// Until the connection is of no use any more; whether that was the end.
    async fn talk(&mut self, stream: TlsStream<TcpStream>, wanted: &mut UnboundedReceiver<Wanted>) -> bool {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut beat = tokio::time::interval(BEAT);
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
                            // Without it the lease ends a little later.
                            let _ = send(&mut writer, &ToServer::Goodbye).await;
                            return true;
                        }
                    },
                }
            };
            match message {
                Ok((ToOwner::Pong, _)) => {}
                Ok((ToOwner::Leaving, _)) => (self.tell)(News::Leaving),
                Ok(_) => break "it says what does not belong here".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        tracing::warn!("the connection to {} has ended: {ended}", self.config.host);
        (self.tell)(News::Lost);
        false
    }

    async fn call(&mut self) -> anyhow::Result<(TlsStream<TcpStream>, Remote, bool)> {
        let Config { host, port, .. } = &self.config;
        let call = self.config.hosts.connect(host, *port);
        let mut stream = match tokio::time::timeout(CALL, call).await {
            Ok(called) => called.with_context(|| {
                format!("cannot call {host} on port {port}; does `verbatim memory serve` run there?")
            })?,
            Err(_) => bail!("{host} does not answer on port {port}"),
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
        let lease = ToServer::Lease {
            version: VERSION,
            host: self.config.own.clone(),
            name: self.config.name.clone(),
            bytes: self.config.bytes,
            end: connection.end(),
            resume: self.token,
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
                    bail!("its memory is too short");
                }
                connection.connect(&end)?;
                // Memory of a lease that nobody had before is no one's.
                let kept = kept && self.token == Some(token);
                self.token = Some(token);
                Ok((stream, Remote::new(connection, staging, memory), kept))
            }
            ToOwner::Refused(why) => bail!("{why}"),
            ToOwner::Pong | ToOwner::Leaving => bail!("it says what does not belong here"),
        }
    }
}

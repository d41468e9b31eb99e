//! `verbatim memory serve`: memory of this host for others, as leases.
//!
//! A lease is locked memory that one queue pair reaches. It ends on the owner's order, or some time after the
//! owner's connection has ended. An owner that returns before that, with the lease's token, finds its content
//! on a new queue pair, and the old one is gone before the new one is announced. A lease can go to another
//! host ([`moves`]).

mod moves;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_rustls::server::TlsStream;
use verbatim_far::{Buffer, Connection, Device, End, Options};
use verbatim_volume::Hosts;
use verbatim_volume::control;
use verbatim_volume::wire::{receive, send};

use crate::wire::{ToOwner, ToServer, Token, VERSION};
use moves::{Arrived, Offer};

/// Limit for an owner to be silent; it sends something each second.
const SILENCE: Duration = Duration::from_secs(10);

/// Limit for a caller's first message.
const GREETING: Duration = Duration::from_secs(10);

/// The most READs and WRITEs in the queue pair of an owner. The server posts none.
const WINDOW: u32 = 1;

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The host's name in hosts.json and in its certificate.
    pub name: String,
    /// The folder of hosts.json and tls/.
    pub config_dir: PathBuf,
    /// The folder of the RNIC's control socket, and of memory.sock.
    pub runtime_dir: PathBuf,
    /// The TCP port for owners.
    pub port: u16,
    /// The most memory to give.
    pub bytes: u64,
    /// Time for which a lease outlives its owner's connection.
    pub grace: Duration,
    /// Limit for owners to leave when the server is to end.
    pub leave: Duration,
}

/// An order of a command to a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Report the leases.
    Status,
    /// Ask owners to take their pages to this other server; or no longer.
    HandOver {
        /// The other server.
        to: Option<String>,
    },
}

/// A lease, for display.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The owner's host.
    pub host: String,
    /// The owner's name of the lease.
    pub name: String,
    /// The length in bytes.
    pub bytes: u64,
    /// The owner is connected.
    pub connected: bool,
    /// A host that has adopted the lease, and takes it over if its session is committed, in which the owner's
    /// instance goes there.
    #[serde(default)]
    pub moves_to: Option<String>,
}

/// The state of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The most memory to give.
    pub bytes: u64,
    /// The memory given.
    pub leased_bytes: u64,
    /// The server is about to end.
    pub leaving: bool,
    /// The memory server to which it hands its leases over.
    #[serde(default)]
    pub hands_over_to: Option<String>,
    /// The leases.
    pub leases: Vec<Row>,
}

struct Lease {
    host: String,
    name: String,
    bytes: u64,
    /// The owner's connection that counts, the latest.
    visit: u64,
    is_connected: bool,
    /// The host that may adopt the lease, and the map that it gets.
    offer: Option<Offer>,
    /// The lease's arrival at its owner, if another host had it before.
    arrived: Option<Arrived>,
    // Dropped in this order: the queue pair goes before the memory.
    connection: Option<Connection>,
    memory: Option<Arc<Buffer>>,
}

#[derive(Default)]
struct Leases {
    of: HashMap<Token, Lease>,
    visits: u64,
    /// Memory of leases, including those that are being made.
    bytes: u64,
    device: Option<Device>,
}

/// Result of a greeting.
enum Greeted {
    /// The caller has memory: its name of the lease, the token, the number of its connection, and the answer.
    /// (The answer may be that it is not reached just now.)
    Has(String, Token, u64, ToOwner),
    /// There is no such lease for the caller.
    HasNot(ToOwner),
}

struct Server {
    config: Config,
    hosts: Hosts,
    leases: Mutex<Leases>,
    leaving: watch::Sender<bool>,
    /// The server to which owners are to take their pages.
    hands_over: watch::Sender<Option<String>>,
    /// Changes when a lease ends, or changes hands.
    ended: watch::Sender<u64>,
}

/// Serves until SIGTERM or SIGINT; then owners have some time to take their pages elsewhere.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let hosts = Hosts::load(&config.config_dir)?;
    let address = hosts.address(&config.name)?;
    let listener = TcpListener::bind((address, config.port)).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} port {}", config.port))?;
    let socket = config.runtime_dir.join("memory.sock");
    // A server that was killed leaves its socket.
    let _ = std::fs::remove_file(&socket);
    let device = Device::open(&config.runtime_dir)?;
    let control = UnixListener::bind(&socket);
    let control = control.with_context(|| format!("cannot listen on {}", socket.display()))?;
    let mut stop = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let server = Arc::new(Server {
        hosts,
        leases: Mutex::new(Leases {
            device: Some(device),
            ..Leases::default()
        }),
        leaving: watch::Sender::new(false),
        hands_over: watch::Sender::new(None),
        ended: watch::Sender::new(0),
        config,
    });
    tracing::info!(
        "{} bytes are served on {address} port {}",
        server.config.bytes,
        server.config.port
    );
    let taking = tokio::spawn(take(server.clone(), listener));
    loop {
        tokio::select! {
            _ = stop.0.recv() => break,
            _ = stop.1.recv() => break,
            accepted = control.accept() => {
                if let Ok((stream, _)) = accepted {
                    let server = server.clone();
                    // The command sees the end of its connection.
                    tokio::spawn(async move { server.ordered(stream).await });
                }
            }
        }
    }
    server.leaving.send_replace(true);
    let limit = server.config.leave;
    tokio::select! {
        _ = stop.0.recv() => {}
        _ = stop.1.recv() => {}
        gone = tokio::time::timeout(limit, server.all_gone()) => if gone.is_err() {
            tracing::warn!("owners have not gone within {} s; what they have here is lost", limit.as_secs_f64());
        }
    }
    taking.abort();
    let _ = std::fs::remove_file(&socket);
    Ok(())
}

async fn take(server: Arc<Server>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let server = server.clone();
                tokio::spawn(async move {
                    if let Err(error) = server.caller(stream).await {
                        tracing::info!("a caller has ended: {error:#}");
                    }
                });
            }
            Err(error) => {
                tracing::warn!("nobody can be taken just now: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        let leases = self.lock();
        let mut rows: Vec<_> = leases.of.values().map(row).collect();
        rows.sort_by(|a, b| (&a.host, &a.name).cmp(&(&b.host, &b.name)));
        Status {
            bytes: self.config.bytes,
            leased_bytes: leases.bytes,
            leaving: *self.leaving.borrow(),
            hands_over_to: self.hands_over.borrow().clone(),
            leases: rows,
        }
    }

    /// Handles an order of a command.
    async fn ordered(&self, stream: tokio::net::UnixStream) -> anyhow::Result<()> {
        let mut stream = tokio::io::BufReader::new(stream);
        let Some(order) = control::receive::<Order>(&mut stream).await? else {
            return Ok(());
        };
        let done = match order {
            Order::Status => Ok(()),
            Order::HandOver { to: Some(to) } if to == self.config.name => {
                Err(format!("{to} is this host itself"))
            }
            Order::HandOver { to } => match to.as_ref().map(|to| self.hosts.address(to)) {
                Some(Err(error)) => Err(format!("{error:#}")),
                _ => {
                    self.hands_over.send_replace(to);
                    Ok(())
                }
            },
        };
        let answer = done.map(|()| self.status());
        control::send(stream.get_mut(), &answer).await
    }

    async fn all_gone(&self) {
        let mut ended = self.ended.subscribe();
        while !self.lock().of.is_empty() {
            if ended.changed().await.is_err() {
                return;
            }
        }
    }

    async fn caller(self: &Arc<Self>, stream: TcpStream) -> anyhow::Result<()> {
        let mut stream = tokio::time::timeout(GREETING, self.hosts.accept(stream)).await??;
        let greeting = tokio::time::timeout(GREETING, receive::<ToServer>(&mut stream))
            .await??
            .0;
        let (ToServer::Lease { version, host, .. } | ToServer::Adopt { version, host, .. }) = &greeting
        else {
            bail!("it does not say what it wants");
        };
        let (version, host) = (*version, host.clone());
        let is_new = matches!(greeting, ToServer::Lease { resume: None, .. });
        let refusal = if version != VERSION {
            Some(format!("this server speaks version {VERSION}, and not {version}"))
        } else if !Hosts::is_from(&stream, &host) {
            Some(format!("the certificate is not one of {host}"))
        } else if let Err(error) = self.hosts.address(&host) {
            // Clients of volumes have certificates of the same authority.
            Some(format!("{error:#}"))
        } else if *self.leaving.borrow() && !self.has_for(&greeting) {
            Some(format!(
                "the memory server of {} is about to end",
                self.config.name
            ))
        } else if let (Some(to), true) = (&*self.hands_over.borrow(), is_new) {
            Some(format!(
                "{} hands its memory over to {to}: ask that",
                self.config.name
            ))
        } else {
            None
        };
        if let Some(why) = refusal {
            send(&mut stream, &ToOwner::Refused(why.clone())).await?;
            bail!("{host} is refused: {why}");
        }
        let server = self.clone();
        // Much memory takes long to allocate.
        let granted = tokio::task::spawn_blocking(move || server.greeted(greeting)).await?;
        let (name, token, visit, answer) = match granted {
            Ok(Greeted::Has(name, token, visit, answer)) => (name, token, visit, answer),
            Ok(Greeted::HasNot(answer)) => {
                send(&mut stream, &answer).await?;
                bail!("{host} asks for a lease that is not its own");
            }
            Err(error) => {
                let why = format!("{error:#}");
                send(&mut stream, &ToOwner::Refused(why.clone())).await?;
                bail!("{host} is refused: {why}");
            }
        };
        match &answer {
            ToOwner::Refused(why) => tracing::warn!("{host} does not reach its memory for {name}: {why}"),
            _ => tracing::info!("{host} has memory for {name}"),
        }
        let said = self.attend(stream, &answer, token, visit).await;
        let is_over = said.as_ref().is_ok_and(|goodbye| *goodbye);
        self.unadopt(token, visit);
        if is_over {
            self.end(token, visit).await;
            tracing::info!("{host} has given up its lease for {name}");
            return Ok(());
        }
        if self.is_orphan(token, visit) {
            let grace = self.config.grace;
            tracing::info!(
                "the connection of {host} for {name} has ended; its lease ends in {} s",
                grace.as_secs_f64()
            );
            tokio::time::sleep(grace).await;
            self.while_adopted(token, visit).await;
            self.end(token, visit).await;
        }
        said.map(drop)
    }

    /// Serves an owner, or a future one, until a goodbye (true), or the end of its messages.
    async fn attend(
        self: &Arc<Self>,
        stream: TlsStream<TcpStream>,
        answer: &ToOwner,
        token: Token,
        visit: u64,
    ) -> anyhow::Result<bool> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        send(&mut writer, answer).await?;
        let mut ended = self.ended.subscribe();
        let mut leaving = self.leaving.subscribe();
        let mut hands_over = self.hands_over.subscribe();
        if hands_over.borrow().is_some() {
            hands_over.mark_changed();
        }
        if *leaving.borrow() {
            leaving.mark_changed();
        }
        let mut is_told = false;
        loop {
            let mut next = std::pin::pin!(receive::<ToServer>(&mut reader));
            let limit = tokio::time::Instant::now() + SILENCE;
            let message = loop {
                // A server that was stopped for a while reads waiting messages first, and checks the time
                // after them.
                tokio::select! {
                    biased;
                    message = &mut next => break message?,
                    _ = ended.changed() => if let Some(to) = self.gone_to(token) {
                        send(&mut writer, &ToOwner::Gone { to }).await?;
                        return Ok(false);
                    },
                    _ = hands_over.changed() => {
                        let to = hands_over.borrow_and_update().clone();
                        send(&mut writer, &ToOwner::HandOver { to }).await?;
                    }
                    _ = leaving.changed(), if !is_told => {
                        is_told = true;
                        send(&mut writer, &ToOwner::Leaving).await?;
                    }
                    () = tokio::time::sleep_until(limit) => bail!("it says nothing any more"),
                }
            };
            match message {
                (ToServer::Ping, _) => send(&mut writer, &ToOwner::Pong).await?,
                (ToServer::Goodbye, _) => return Ok(true),
                (ToServer::Lease { .. } | ToServer::Adopt { .. }, _) => bail!("it asks twice"),
                (message, data) => self.moves(&mut writer, token, visit, message, &data).await?,
            }
        }
    }

    /// Whether there may be a lease for this caller already. It is still reached while the server is about to
    /// end: pages may be there alone.
    fn has_for(&self, greeting: &ToServer) -> bool {
        match greeting {
            ToServer::Lease {
                host,
                resume: Some(token),
                ..
            } => {
                let leases = self.lock();
                leases.of.get(token).is_some_and(|lease| lease.host == *host)
            }
            // Makes no lease where there is none.
            ToServer::Adopt { .. } => true,
            _ => false,
        }
    }

    fn greeted(&self, greeting: ToServer) -> anyhow::Result<Greeted> {
        match greeting {
            ToServer::Lease {
                host,
                name,
                bytes,
                end,
                resume,
                ..
            } => {
                if let Some(to) = resume.and_then(|token| self.gone_to(token)) {
                    return Ok(Greeted::HasNot(ToOwner::Gone { to }));
                }
                let granted = self.grant((host, name.clone(), bytes), &end, resume);
                granted.map(|(token, visit, answer)| Greeted::Has(name, token, visit, answer))
            }
            ToServer::Adopt {
                host,
                name,
                bytes,
                by,
                end,
                resume,
                ..
            } => {
                let adopted = self.adopt((host, name.clone(), bytes), end, by, resume)?;
                Ok(match adopted {
                    Some((token, visit, answer)) => Greeted::Has(name, token, visit, answer),
                    None => Greeted::HasNot(ToOwner::NotOffered),
                })
            }
            _ => bail!("it does not say what it wants"),
        }
    }

    fn grant(
        &self,
        (host, name, bytes): (String, String, u64),
        theirs: &End,
        resume: Option<Token>,
    ) -> anyhow::Result<(Token, u64, ToOwner)> {
        let device = self.device()?;
        let options = Options {
            window_requests: WINDOW,
            ..Options::default()
        };
        let resumed = resume.and_then(|token| {
            let mut leases = self.lock();
            leases.visits += 1;
            let visit = leases.visits;
            let lease = leases.of.get_mut(&token)?;
            if lease.host != host || lease.bytes != bytes {
                return None;
            }
            lease.visit = visit;
            lease.is_connected = true;
            Some((token, visit, lease.connection.take(), lease.memory.clone()?))
        });
        let is_kept = resumed.is_some();
        let (token, visit, old, memory) = match resumed {
            Some((token, visit, old, memory)) => (token, visit, old, Some(memory)),
            None => {
                let (token, visit) = self.reserve(host, name, bytes)?;
                (token, visit, None, None)
            }
        };
        // From here on nothing of the old queue pair lands any more.
        drop(old);
        let made = (|| {
            let mut connection = device.connection(options)?;
            let buffer = match &memory {
                Some(memory) => connection.share(memory)?,
                None => connection.locked_buffer(usize::try_from(bytes)?)?,
            };
            connection.connect(theirs)?;
            anyhow::Ok((connection, buffer))
        })();
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&token).filter(|lease| lease.visit == visit);
        match (made, lease) {
            (Ok((connection, buffer)), Some(lease)) => {
                let answer = ToOwner::Granted {
                    token,
                    end: connection.end(),
                    memory: buffer.exposed(),
                    kept: is_kept,
                };
                lease.connection = Some(connection);
                lease.memory = Some(buffer);
                Ok((token, visit, answer))
            }
            (Ok(_), None) => bail!("the owner has called again meanwhile"),
            // The owner calls again, and finds its pages, unless it has been away for too long by then.
            (Err(error), Some(_)) if is_kept => {
                let why = format!("{} cannot connect it: {error:#}", self.config.name);
                Ok((token, visit, ToOwner::Refused(why)))
            }
            (Err(error), _) => {
                let ended = take_lease(&mut leases, token, visit);
                drop(leases);
                drop(ended);
                self.ended.send_modify(|count| *count += 1);
                Err(error.context(format!("{} has no memory for it", self.config.name)))
            }
        }
    }

    /// The RNIC. After a restart of the RNIC it is opened again; earlier leases are no longer reachable.
    fn device(&self) -> anyhow::Result<Device> {
        let mut leases = self.lock();
        if let Some(device) = leases.device.as_ref().filter(|device| !device.is_gone()) {
            return Ok(device.clone());
        }
        let lost = std::mem::take(&mut leases.of);
        leases.bytes = 0;
        leases.device = None;
        let device = Device::open(&self.config.runtime_dir)?;
        leases.device = Some(device.clone());
        drop(leases);
        if !lost.is_empty() {
            tracing::warn!("the RNIC is another one: {} leases have ended", lost.len());
        }
        drop(lost);
        self.ended.send_modify(|count| *count += 1);
        Ok(device)
    }

    /// Takes room for a new lease.
    fn reserve(&self, host: String, name: String, bytes: u64) -> anyhow::Result<(Token, u64)> {
        let mut leases = self.lock();
        let left = self.config.bytes.saturating_sub(leases.bytes);
        if bytes == 0 || bytes > left {
            bail!(
                "{} has {} of {} MiB left, and {} MiB are wanted",
                self.config.name,
                left >> 20,
                self.config.bytes >> 20,
                bytes.div_ceil(1 << 20)
            );
        }
        leases.bytes += bytes;
        leases.visits += 1;
        let (token, visit) = (Token(rand::random()), leases.visits);
        let lease = Lease {
            host,
            name,
            bytes,
            visit,
            is_connected: true,
            offer: None,
            arrived: None,
            connection: None,
            memory: None,
        };
        leases.of.insert(token, lease);
        Ok((token, visit))
    }

    /// The owner's connection has ended, and there is no other yet. Returns whether this connection was the
    /// one that counts.
    fn is_orphan(&self, token: Token, visit: u64) -> bool {
        let mut leases = self.lock();
        let lease = leases.of.get_mut(&token).filter(|lease| lease.visit == visit);
        lease.map(|lease| lease.is_connected = false).is_some()
    }

    /// Ends this lease, unless its owner has come back.
    async fn end(self: &Arc<Self>, token: Token, visit: u64) {
        let Some(lease) = take_lease(&mut self.lock(), token, visit) else {
            return;
        };
        tracing::info!("the lease of {} for {} has ended", lease.host, lease.name);
        // Much memory takes long to free.
        let _ = tokio::task::spawn_blocking(move || drop(lease)).await;
        self.ended.send_modify(|count| *count += 1);
    }
}

fn take_lease(leases: &mut Leases, token: Token, visit: u64) -> Option<Lease> {
    let is_it = leases.of.get(&token).is_some_and(|lease| lease.visit == visit);
    let lease = is_it.then(|| leases.of.remove(&token)).flatten()?;
    leases.bytes -= lease.bytes;
    Some(lease)
}

fn row(lease: &Lease) -> Row {
    Row {
        host: lease.host.clone(),
        name: lease.name.clone(),
        bytes: lease.bytes,
        connected: lease.is_connected,
        moves_to: lease.offer.as_ref().and_then(Offer::adopted_by),
    }
}

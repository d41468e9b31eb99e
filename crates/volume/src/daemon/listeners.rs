//! Listeners for commands, clients, and the daemons of other hosts.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_rustls::server;

use super::Daemon;
use crate::callers::{
    CLIENTS, OF_CLIENT, OF_PEER, OF_TLS, PEERS, PROOF, Place, Places, Proving, UNREAD, Unproven, accepted,
    descriptors,
};
use crate::control::{self, Order, Outcome};
use crate::nbd::export::{Export, Exports};
use crate::nbd::local;
use crate::nbd::server::{Negotiated, Tls, negotiate, transmit};
use crate::own_thread::OwnThread;
use crate::tls::Hosts;
use crate::volume::Volume;
use crate::wire::{self, Hello, Purpose, ToSource};

/// Interval at which the list of hosts is checked for changes.
const LOOK: Duration = Duration::from_secs(2);

/// Accepts connections until the daemon is told to stop.
pub async fn run(daemon: Arc<Daemon>) -> anyhow::Result<()> {
    let mut stop = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let control = listen(&daemon.config.control_socket())?;
    let mut renew = signal(SignalKind::hangup())?;
    if let Some(hosts) = daemon.hosts.clone() {
        let address = hosts.address(&daemon.config.name)?;
        let bind = |port| async move {
            let listener = TcpListener::bind((address, port)).await;
            listener.with_context(|| format!("cannot listen on {address} port {port}"))
        };
        let peers = bind(daemon.config.port).await?;
        let callers = Arc::new(Peers {
            daemon: daemon.clone(),
            hosts: hosts.clone(),
            unproven: Arc::default(),
            of: std::sync::Mutex::default(),
        });
        tokio::spawn(async move {
            loop {
                let (stream, from) = accepted(|| peers.accept()).await;
                let callers = callers.clone();
                tokio::spawn(async move {
                    if let Err(error) = callers.prove(stream, from.ip()).await {
                        tracing::info!("a connection of another daemon is not served: {error:#}");
                    }
                });
            }
        });
        if let Some(port) = daemon.config.nbd_port {
            let clients = bind(port).await?;
            let (of, unproven) = (daemon.clone(), Arc::new(Unproven::default()));
            tokio::spawn(async move {
                loop {
                    let (stream, from) = accepted(|| clients.accept()).await;
                    let (daemon, proving) = (of.clone(), unproven.begin(from.ip()));
                    tokio::spawn(async move { ended(tls_client(&daemon, stream, proving).await) });
                }
            });
        }
        let name = daemon.config.name.clone();
        tokio::spawn(async move { watch(&hosts, &name, address, &mut renew).await });
    } else {
        // Without hosts there is no list to read again, but without a handler the signal would end the
        // daemon.
        tokio::spawn(async move { while renew.recv().await.is_some() {} });
    }
    let unread = Places::new(UNREAD);
    loop {
        tokio::select! {
            _ = stop.0.recv() => break,
            _ = stop.1.recv() => break,
            () = daemon.is_over.notified() => break,
            (stream, _) = accepted(|| control.accept()) => {
                let place = unread.take(|| "callers that do not say what they want".to_owned());
                let daemon = daemon.clone();
                tokio::spawn(async move {
                    if let Err(error) = command(&daemon, stream, place).await {
                        tracing::info!("a command was cut off: {error:#}");
                    }
                });
            }
        }
    }
    Ok(())
}

/// Reads the list of hosts again when it has changed, or on SIGHUP.
async fn watch(hosts: &Hosts, own: &str, listens: IpAddr, renew: &mut Signal) {
    loop {
        let is_asked = tokio::select! {
            asked = renew.recv() => asked.is_some(),
            () = tokio::time::sleep(LOOK) => false,
        };
        let (of, name) = (hosts.clone(), own.to_owned());
        let renewed = tokio::task::spawn_blocking(move || of.renew(&name, is_asked)).await;
        match renewed.expect("it does not panic") {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!("the list of hosts was read again: {}", hosts.names());
                if hosts.address(own).is_ok_and(|address| address != listens) {
                    tracing::warn!(
                        "this host has another address in the list of hosts now: the daemon still listens on {listens}, until it is started again"
                    );
                }
            }
            Err(error) => {
                tracing::error!("the list of hosts cannot be read again, and stays as it was: {error:#}");
            }
        }
    }
}

/// Daemons of other hosts.
struct Peers {
    daemon: Arc<Daemon>,
    hosts: Hosts,
    unproven: Arc<Unproven>,
    of: std::sync::Mutex<BTreeMap<String, Arc<Places>>>,
}

impl Peers {
    /// Has a caller prove that it is a host, and then serves it on a thread of its own.
    async fn prove(self: Arc<Self>, stream: TcpStream, from: IpAddr) -> anyhow::Result<()> {
        let Some(first) = descriptors().take(1, "a connection of another daemon") else {
            return Ok(());
        };
        let mut proving = self.unproven.begin(from);
        let mut stream = proving.within(self.hosts.accept(stream)).await??;
        let Some(host) = self.hosts.caller(&stream) else {
            let why = format!(
                "the certificate of the caller is that of no host in hosts.json of {}, which has {}",
                self.daemon.config.name,
                self.hosts.names()
            );
            proving.within(refuse(&mut stream, &why)).await??;
            bail!("{why}");
        };
        drop(proving);
        let places = {
            let mut of = self.of.lock().expect("no panic under this lock");
            of.entry(host.clone())
                .or_insert_with(|| Places::new(PEERS))
                .clone()
        };
        let place = places.take(|| format!("connections of {host}"));
        let others = descriptors().take(OF_PEER, "a connection of another daemon");
        let (Some(place), Some(others)) = (place, others) else {
            return Ok(());
        };
        let (daemon, main) = (self.daemon.clone(), Handle::current());
        OwnThread::start("peer")?.spawn(async move {
            let _held = (first, place, others);
            let served = async {
                to_this_thread(&mut stream)?;
                daemon.peer(stream, &host, &main).await
            };
            if let Err(error) = served.await {
                tracing::info!("a connection of {host} has ended: {error:#}");
            }
        });
        Ok(())
    }
}

/// Sends the reason if the caller waits for an answer.
async fn refuse(stream: &mut server::TlsStream<TcpStream>, why: &str) -> anyhow::Result<()> {
    let (hello, _) = wire::receive::<Hello>(stream).await?;
    if !matches!(hello.purpose, Purpose::Chunks { .. }) {
        wire::send(stream, &ToSource::Refused(why.to_owned())).await?;
    }
    Ok(())
}

/// Moves the socket to the calling thread's runtime.
fn to_this_thread(stream: &mut server::TlsStream<TcpStream>) -> io::Result<()> {
    let (socket, _) = stream.get_mut();
    let other = std::net::TcpStream::from(socket.as_fd().try_clone_to_owned()?);
    *socket = TcpStream::from_std(other)?;
    Ok(())
}

/// Accepts clients of this volume on a socket of its own.
pub fn nbd(socket: &Path, name: &str, volume: Arc<Volume>) -> anyhow::Result<JoinHandle<()>> {
    Ok(take(listen(socket)?, name, volume.into()))
}

/// The same on an existing socket.
pub fn take(listener: UnixListener, name: &str, export: Export) -> JoinHandle<()> {
    let export = Arc::new(One {
        name: name.to_owned(),
        export,
    });
    let places = Places::new(CLIENTS);
    tokio::spawn(async move {
        loop {
            let (stream, export) = (accepted(|| listener.accept()).await.0, export.clone());
            let place = places.take(|| format!("connections of {}", export.name));
            let descriptors = descriptors().take(OF_CLIENT, "a client");
            let (Some(place), Some(descriptors)) = (place, descriptors) else {
                continue;
            };
            tokio::spawn(async move {
                let _held = (place, descriptors);
                ended(client(&export, stream).await);
            });
        }
    })
}

/// Listens on a socket at this path, and replaces one that was left there.
pub fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    // A daemon that was killed leaves its sockets.
    let _ = std::fs::remove_file(socket);
    UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))
}

fn ended(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::info!("a client's connection has ended: {error}");
    }
}

struct One {
    name: String,
    export: Export,
}

impl Exports for One {
    fn find(&self, name: &str) -> Option<Export> {
        (name.is_empty() || name == self.name).then(|| self.export.clone())
    }

    fn names(&self) -> Vec<String> {
        vec![self.name.clone()]
    }
}

/// Volumes that were attached when the client connected.
struct All(Vec<One>);

impl Exports for All {
    fn find(&self, name: &str) -> Option<Export> {
        self.0
            .iter()
            .find(|one| one.name == name)
            .map(|one| one.export.clone())
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|one| one.name.clone()).collect()
    }
}

/// Limits the time of a negotiation.
async fn in_time<T>(negotiation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let negotiated = tokio::time::timeout(PROOF, negotiation).await;
    negotiated.unwrap_or_else(|_| Err(io::Error::other("it did not say what it wants in time")))
}

async fn client(exports: &One, mut stream: UnixStream) -> io::Result<()> {
    match in_time(negotiate(&mut stream, exports, Tls::None)).await? {
        Negotiated::Go(export) => match export.clone().served().await {
            Some(volume) => {
                local::transmit(stream, volume, export.is_read_only(), export.ends_unless()).await
            }
            None => Ok(()),
        },
        Negotiated::StartTls | Negotiated::Ended => Ok(()),
    }
}

async fn tls_client(daemon: &Arc<Daemon>, mut stream: TcpStream, mut proving: Proving) -> io::Result<()> {
    let Some(_held) = descriptors().take(OF_TLS, "a client") else {
        return Ok(());
    };
    stream.set_nodelay(true)?;
    let acceptor = daemon.hosts.as_ref().expect("there is a port").acceptor();
    let proves = async {
        let none = All(Vec::new());
        match negotiate(&mut stream, &none, Tls::Wanted).await? {
            Negotiated::StartTls => acceptor.accept(stream).await.map(Some),
            Negotiated::Go(_) | Negotiated::Ended => Ok(None),
        }
    };
    let Some(mut stream) = proving.within(proves).await.map_err(io::Error::other)?? else {
        return Ok(());
    };
    drop(proving);
    let all = daemon.attached().await;
    match in_time(negotiate(&mut stream, &all, Tls::Done)).await? {
        Negotiated::Go(export) => {
            let _place = export.place(|| "clients of a volume by TLS".to_owned())?;
            match export.clone().served().await {
                Some(volume) => transmit(stream, volume, export.is_read_only()).await,
                None => Ok(()),
            }
        }
        Negotiated::StartTls | Negotiated::Ended => Ok(()),
    }
}

/// Carries out an order on a thread of its own, since it may wait for a disk.
async fn command(daemon: &Arc<Daemon>, stream: UnixStream, place: Option<Place>) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let Some(place) = place else {
        let why = format!("{UNREAD} callers have not said yet what they want: try again");
        return control::send(stream.get_mut(), &Outcome::Failed(why)).await;
    };
    let order = tokio::time::timeout(PROOF, control::receive::<Order>(&mut stream)).await;
    let Some(order) = order.context("it does not say what it wants")?? else {
        return Ok(());
    };
    drop(place);
    let ends = matches!(order, Order::Stop { .. });
    let outcome = match daemon.turn(&order).await {
        Ok(turn) => {
            let (daemon, main) = (daemon.clone(), Handle::current());
            let carried_out = tokio::task::spawn_blocking(move || {
                let _held = turn;
                main.block_on(daemon.carry_out(order))
            });
            carried_out.await.context("it ends")?
        }
        Err(error) => Err(error),
    };
    let ends = ends && outcome.is_ok();
    let outcome = outcome.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
    let sent = control::send(stream.get_mut(), &outcome).await;
    if ends {
        daemon.is_over.notify_one();
    }
    sent
}

impl Daemon {
    /// Places for the order, so that a hanging disk does not block other volumes' orders.
    async fn turn(&self, order: &Order) -> anyhow::Result<Vec<Place>> {
        match order.volume() {
            Some(name) => {
                let entry = self.entry(name).await?;
                self.orders.take(Some((name, &entry.orders)))
            }
            None => self.orders.take(None),
        }
    }

    /// All attached volumes, without waiting for their locks.
    async fn attached(&self) -> All {
        let mut all = Vec::new();
        for entry in self.entries.lock().await.values() {
            let served = entry.served.lock().expect("no panic under this lock");
            if let Some(volume) = &*served {
                all.push(One {
                    name: entry.name.clone(),
                    export: Export::from(volume.clone()).counted(entry.remote.clone()),
                });
            }
        }
        All(all)
    }
}

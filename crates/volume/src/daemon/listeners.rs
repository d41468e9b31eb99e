//! Who connects: commands, clients, and the daemons of other hosts.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::io::BufReader;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::Daemon;
use crate::control::{self, Order, Outcome};
use crate::nbd::export::{Export, Exports};
use crate::nbd::local;
use crate::nbd::server::{Negotiated, Tls, negotiate, transmit};
use crate::own_thread::OwnThread;
use crate::tls::Hosts;
use crate::volume::Volume;

/// So many callers may be proving that they are hosts at a time, and so long each: a thread waits for each of them.
const UNPROVEN: usize = 256;
const PROOF: Duration = Duration::from_secs(15);

/// After a connection that could not be taken.
const REFUSED: Duration = Duration::from_millis(100);

/// Takes everybody, until the daemon is told to stop.
pub async fn run(daemon: Arc<Daemon>) -> anyhow::Result<()> {
    let mut stop = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let control = listen(&daemon.config.control_socket())?;
    if let Some(hosts) = daemon.hosts.clone() {
        let address = hosts.address(&daemon.config.name)?;
        let bind = |port| async move {
            let listener = TcpListener::bind((address, port)).await;
            listener.with_context(|| format!("cannot listen on {address} port {port}"))
        };
        let peers = bind(daemon.config.port).await?;
        let of = daemon.clone();
        let unproven = Arc::new(Semaphore::new(UNPROVEN));
        tokio::spawn(async move {
            loop {
                let stream = accepted(|| peers.accept()).await;
                if let Err(error) = peer(&of, &hosts, stream, &unproven).await {
                    tracing::warn!("a connection of another daemon is not served: {error}");
                }
            }
        });
        if let Some(port) = daemon.config.nbd_port {
            let clients = bind(port).await?;
            let of = daemon.clone();
            tokio::spawn(async move {
                loop {
                    let (stream, daemon) = (accepted(|| clients.accept()).await, of.clone());
                    tokio::spawn(async move { ended(tls_client(&daemon, stream).await) });
                }
            });
        }
    }
    loop {
        tokio::select! {
            _ = stop.0.recv() => break,
            _ = stop.1.recv() => break,
            stream = accepted(|| control.accept()) => {
                let daemon = daemon.clone();
                tokio::spawn(async move {
                    if let Err(error) = command(&daemon, stream).await {
                        tracing::info!("a command was cut off: {error:#}");
                    }
                });
            }
        }
    }
    Ok(())
}

/// Serves the connection of another daemon, on a thread of its own.
async fn peer(
    daemon: &Arc<Daemon>,
    hosts: &Hosts,
    stream: tokio::net::TcpStream,
    unproven: &Arc<Semaphore>,
) -> io::Result<()> {
    let permit = unproven.clone().acquire_owned().await;
    let permit = permit.expect("it is never closed");
    let stream = stream.into_std()?;
    let (daemon, hosts, main) = (daemon.clone(), hosts.clone(), Handle::current());
    OwnThread::start("peer")?.spawn(async move {
        let served = async {
            let proving = hosts.accept(tokio::net::TcpStream::from_std(stream)?);
            let stream = tokio::time::timeout(PROOF, proving).await;
            drop(permit);
            daemon
                .peer(stream.context("it did not prove who it is")??, &main)
                .await
        };
        if let Err(error) = served.await {
            tracing::info!("a connection of another daemon has ended: {error:#}");
        }
    });
    Ok(())
}

/// Takes clients of that volume on a socket of its own.
pub fn nbd(socket: &Path, name: &str, volume: Arc<Volume>) -> anyhow::Result<JoinHandle<()>> {
    Ok(take(listen(socket)?, name, volume.into()))
}

/// The same on one that is there.
pub fn take(listener: UnixListener, name: &str, export: Export) -> JoinHandle<()> {
    let export = Arc::new(One {
        name: name.to_owned(),
        export,
    });
    tokio::spawn(async move {
        loop {
            let (stream, export) = (accepted(|| listener.accept()).await, export.clone());
            tokio::spawn(async move { ended(client(&export, stream).await) });
        }
    })
}

/// A socket of that path, whoever has left one there.
pub fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    // A daemon that was killed leaves its sockets.
    let _ = std::fs::remove_file(socket);
    UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))
}

/// The next one. A caller that has left before is no reason to take nobody any more; nor is a process with too many open files, which are fewer later.
async fn accepted<S, A, F>(accept: impl Fn() -> F) -> S
where
    F: Future<Output = io::Result<(S, A)>>,
{
    loop {
        match accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => tracing::warn!("a connection could not be taken: {error}"),
        }
        tokio::time::sleep(REFUSED).await;
    }
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

/// Those that were attached when the client connected.
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

async fn client(exports: &One, mut stream: UnixStream) -> io::Result<()> {
    match negotiate(&mut stream, exports, Tls::None).await? {
        Negotiated::Go(export) => match export.served().await {
            Some(volume) => local::transmit(stream, volume).await,
            None => Ok(()),
        },
        Negotiated::StartTls | Negotiated::Ended => Ok(()),
    }
}

async fn tls_client(daemon: &Arc<Daemon>, mut stream: tokio::net::TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let none = All(Vec::new());
    let Negotiated::StartTls = negotiate(&mut stream, &none, Tls::Wanted).await? else {
        return Ok(());
    };
    let acceptor = daemon.hosts.as_ref().expect("there is a port").acceptor();
    let mut stream = acceptor.accept(stream).await?;
    let all = daemon.attached().await;
    match negotiate(&mut stream, &all, Tls::Done).await? {
        Negotiated::Go(export) => match export.served().await {
            Some(volume) => transmit(stream, volume).await,
            None => Ok(()),
        },
        Negotiated::StartTls | Negotiated::Ended => Ok(()),
    }
}

async fn command(daemon: &Arc<Daemon>, stream: UnixStream) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let Some(order) = control::receive::<Order>(&mut stream).await? else {
        return Ok(());
    };
    let outcome = daemon.carry_out(order).await;
    let outcome = outcome.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
    control::send(stream.get_mut(), &outcome).await
}

impl Daemon {
    async fn attached(&self) -> All {
        let mut all = Vec::new();
        for entry in self.entries.lock().await.values() {
            let state = entry.state.lock().await;
            if let (true, Some(volume)) = (state.settings.attached, &state.volume) {
                all.push(One {
                    name: entry.name.clone(),
                    export: volume.clone().into(),
                });
            }
        }
        All(all)
    }
}

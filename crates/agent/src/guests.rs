//! The guest libraries of the programs on this host.
//!
//! Each process that opened a device keeps one connection (see [`verbatim_channel`]); it is served by a task of its own,
//! which passes orders on one at a time. [`Guests`] knows them all.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};
use verbatim_channel::{Answer, Endpoint, Greeting, MovedEndpoint, Order, Resolved, RoadMap};
use verbatim_seqpacket::{Error as SocketError, Listener, Socket};

/// What comes back for an order.
type Reply = anyhow::Result<(Answer, Vec<OwnedFd>)>;

struct Call {
    order: Order,
    fds: Vec<OwnedFd>,
    reply: oneshot::Sender<Reply>,
}

/// One process with a guest library.
#[derive(Clone)]
pub struct Guest {
    id: u64,
    /// The instance that it belongs to; `None` for a program outside of any.
    pub instance: Option<String>,
    /// Its PID in its own PID namespace.
    pub pid: u32,
    /// The program's name.
    pub program: String,
    /// It waited at the gate and has not been given its queues back yet.
    pub quiesced: bool,
    calls: mpsc::Sender<Call>,
}

impl Guest {
    /// Gives an order and waits for the answer.
    pub async fn order(&self, order: Order, fds: Vec<OwnedFd>) -> Reply {
        let (reply, answer) = oneshot::channel();
        let gone = || {
            format!(
                "{} (process {}) has ended or closed its channel",
                self.program, self.pid
            )
        };
        self.calls
            .send(Call { order, fds, reply })
            .await
            .map_err(|_| anyhow::anyhow!(gone()))?;
        let (answer, fds) = answer.await.with_context(gone)??;
        match answer {
            Answer::Error { message } => bail!("{} (process {}): {message}", self.program, self.pid),
            answer => Ok((answer, fds)),
        }
    }

    /// Its road map.
    pub async fn describe(&self) -> anyhow::Result<RoadMap> {
        match self.order(Order::Describe, Vec::new()).await?.0 {
            Answer::Described(road_map) => Ok(road_map),
            other => Err(unexpected(&other, "Described")),
        }
    }
}

/// An answer that does not belong to the order.
pub fn unexpected(answer: &Answer, due: &str) -> anyhow::Error {
    anyhow::anyhow!("the guest library answered {answer:?} where {due} was due")
}

/// Answers the question where an endpoint is today.
pub trait Resolver: Send + Sync + 'static {
    /// The same endpoint and no keys if it never moved, or nobody knows.
    fn resolve(&self, endpoint: Endpoint) -> impl Future<Output = Resolved> + Send;
    /// The datagram queue pairs that programs know under this GID and that are elsewhere.
    fn ways(&self, gid: [u8; 16]) -> Vec<MovedEndpoint>;
}

/// All guests of this host.
#[derive(Clone)]
pub struct Guests {
    known: Arc<Mutex<HashMap<u64, Guest>>>,
    changed: watch::Sender<()>,
    next_id: Arc<AtomicU64>,
}

impl Default for Guests {
    fn default() -> Self {
        Self {
            known: Arc::default(),
            changed: watch::Sender::new(()),
            next_id: Arc::default(),
        }
    }
}

impl Guests {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Guest>> {
        self.known.lock().expect("no panic under this lock")
    }

    /// All of them.
    pub fn all(&self) -> Vec<Guest> {
        self.lock().values().cloned().collect()
    }

    /// Those of one instance, by PID.
    pub fn of_instance(&self, instance: &str) -> Vec<Guest> {
        let mut guests: Vec<_> = self
            .lock()
            .values()
            .filter(|guest| guest.instance.as_deref() == Some(instance))
            .cloned()
            .collect();
        guests.sort_by_key(|guest| guest.pid);
        guests
    }

    /// Waits until the process `pid` of `instance` has come back from the gate.
    pub async fn returned(&self, instance: &str, pid: u32) -> Guest {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let found = self
                .of_instance(instance)
                .into_iter()
                .find(|guest| guest.pid == pid && guest.quiesced);
            if let Some(guest) = found {
                return guest;
            }
            // The sender is part of self.
            let _ = changed.changed().await;
        }
    }

    /// Waits until the process has closed its channel, which is the last thing that it closes when it is quiesced.
    pub async fn gone(&self, guest: &Guest) {
        let mut changed = self.changed.subscribe();
        while {
            changed.mark_unchanged();
            self.lock().contains_key(&guest.id)
        } {
            // The sender is part of self.
            let _ = changed.changed().await;
        }
    }

    /// The process has its queues back.
    pub fn claimed(&self, guest: &Guest) {
        if let Some(known) = self.lock().get_mut(&guest.id) {
            known.quiesced = false;
        }
    }

    /// Serves everyone who connects to `listener`, until the task is aborted.
    pub fn serve(
        &self,
        listener: Listener,
        instance: Option<String>,
        resolver: Arc<impl Resolver>,
    ) -> anyhow::Result<tokio::task::JoinHandle<()>> {
        listener.set_nonblocking(true)?;
        // SAFETY: the listener owns its descriptor, never changes it, and lives as long as the registration.
        let listener = unsafe { AsyncFd::register(listener) }?;
        let guests = self.clone();
        Ok(tokio::spawn(async move {
            loop {
                let Ok(mut ready) = listener.readable().await else {
                    return;
                };
                let socket = match listener.get_ref().accept() {
                    Ok(socket) => socket,
                    Err(SocketError::WouldBlock) => {
                        ready.clear_ready();
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a guest library");
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                        continue;
                    }
                };
                let (guests, instance, resolver) = (guests.clone(), instance.clone(), resolver.clone());
                tokio::spawn(async move {
                    if let Err(error) = guests.connection(socket, instance, &*resolver).await {
                        tracing::debug!(error = format!("{error:#}"), "a guest library's connection ended");
                    }
                });
            }
        }))
    }

    async fn connection(
        &self,
        socket: Socket,
        instance: Option<String>,
        resolver: &impl Resolver,
    ) -> anyhow::Result<()> {
        let socket = Channel::new(socket)?;
        match socket.recv::<Greeting>().await?.0 {
            Greeting::Resolve { version, endpoint } => {
                check_version(version)?;
                socket.send(&resolver.resolve(endpoint).await, &[]).await
            }
            Greeting::Ways { version, gid } => {
                check_version(version)?;
                socket.send(&resolver.ways(gid), &[]).await
            }
            Greeting::Process {
                version,
                pid,
                program,
                generation: _,
                quiesced,
            } => {
                check_version(version)?;
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                let (calls, orders) = mpsc::channel(8);
                tracing::debug!(?instance, pid, program, quiesced, "a guest library connected");
                self.lock().insert(
                    id,
                    Guest {
                        id,
                        instance,
                        pid,
                        program,
                        quiesced,
                        calls,
                    },
                );
                self.changed.send_replace(());
                let result = pass_on(&socket, orders).await;
                self.lock().remove(&id);
                self.changed.send_replace(());
                result
            }
        }
    }
}

fn check_version(version: u32) -> anyhow::Result<()> {
    if version != verbatim_channel::VERSION {
        bail!(
            "a guest library speaks version {version}, not {}",
            verbatim_channel::VERSION
        );
    }
    Ok(())
}

/// Passes orders on, one at a time, until the guest goes.
async fn pass_on(socket: &Channel, mut orders: mpsc::Receiver<Call>) -> anyhow::Result<()> {
    loop {
        let call = tokio::select! {
            call = orders.recv() => call.context("nobody can give orders any more")?,
            // Between orders a guest says nothing, so whatever comes is the end of the connection, or an error.
            word = socket.recv::<Answer>() => {
                word?;
                bail!("a guest library spoke without having been asked");
            }
        };
        let reply = async {
            socket.send(&call.order, &call.fds).await?;
            socket.recv::<Answer>().await
        };
        let reply = reply.await;
        let failed = reply.is_err();
        // Who asked may have given up.
        let _ = call.reply.send(reply);
        if failed {
            bail!("the channel broke");
        }
    }
}

/// A non-blocking channel to a guest.
struct Channel(AsyncFd<Socket>);

impl Channel {
    fn new(socket: Socket) -> anyhow::Result<Self> {
        socket.set_nonblocking(true)?;
        // SAFETY: the socket owns its descriptor, never changes it, and lives as long as the registration.
        Ok(Self(unsafe { AsyncFd::register(socket) }?))
    }

    async fn recv<T: serde::de::DeserializeOwned>(&self) -> anyhow::Result<(T, Vec<OwnedFd>)> {
        loop {
            let mut ready = self.0.readable().await?;
            match verbatim_channel::recv(self.0.get_ref()) {
                Err(SocketError::WouldBlock) => ready.clear_ready(),
                result => return Ok(result?),
            }
        }
    }

    async fn send<T: serde::Serialize>(&self, message: &T, fds: &[OwnedFd]) -> anyhow::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        loop {
            let mut ready = self.0.writable().await?;
            match verbatim_channel::send(self.0.get_ref(), message, &fds) {
                Err(SocketError::WouldBlock) => ready.clear_ready(),
                result => return Ok(result?),
            }
        }
    }
}

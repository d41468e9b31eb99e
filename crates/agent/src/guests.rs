//! The guest libraries of the programs on this host.
//!
//! Each process that opened a device keeps one connection (see [`verbatim_channel`]); it is served by a task of its own,
//! which passes orders on one at a time. [`Guests`] knows them all.

mod describing;
mod rate;
mod room;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use verbatim_bounded::{PEAK, memory_of};
use verbatim_channel::{
    Answer, Arrived, Endpoint, Greeting, KeyPair, MadeAgain, MovedEndpoint, Order, Resolved,
};
use verbatim_seqpacket::{Error as SocketError, Listener, Process, Socket};
use verbatim_versions::{Mismatch, Side, Versioned, Versions, agree};

use crate::identity;
use crate::protocol;
use crate::quotas::{self, Given};
use rate::Rate;
pub use room::Held;
use room::{Full, Limits, Room, Rooms};

/// What comes back for an order.
type Reply = anyhow::Result<(Answer, Vec<OwnedFd>)>;

/// The same with the answer's place in memory.
type HeldReply = anyhow::Result<(Answer, Vec<OwnedFd>, Held)>;

/// From this version of the contract on guest libraries say which contexts they make again.
const WITH_MADE_AGAIN: u32 = 8;

/// A guest library that was refused comes back at least this often; one that does not has ended.
const KNOCKS: Duration = Duration::from_secs(5);

/// A longer answer is read beside the agent's other work: it takes milliseconds.
const LONG: usize = 1 << 20;

struct Call {
    order: Order,
    fds: Vec<OwnedFd>,
    reply: oneshot::Sender<HeldReply>,
}

/// One process with a guest library.
#[derive(Clone)]
pub struct Guest {
    id: u64,
    /// The instance that it belongs to; `None` for a program outside of any.
    pub instance: Option<String>,
    /// Its PID in its own PID namespace.
    pub pid: u32,
    /// The process that made the channel, by the kernel's word.
    process: Arc<Process>,
    /// The program's name.
    pub program: String,
    /// The version of the contract that is spoken with its guest library.
    pub version: u32,
    /// It waited at the gate and has not been given its queues back yet.
    pub quiesced: bool,
    /// Which of its contexts it makes again where it moves to, as it said when it was last described.
    made_again: Arc<Mutex<Vec<MadeAgain>>>,
    calls: mpsc::Sender<Call>,
    /// The same process has greeted again, over another channel.
    replaced: Arc<Notify>,
}

impl Guest {
    /// Gives an order and waits for the answer.
    pub async fn order(&self, order: Order, fds: Vec<OwnedFd>) -> Reply {
        let (answer, fds, _) = self.order_held(order, fds).await?;
        Ok((answer, fds))
    }

    /// The same; the answer counts for its tenant until its place is given up.
    async fn order_held(&self, order: Order, fds: Vec<OwnedFd>) -> HeldReply {
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
        let (answer, fds, held) = answer.await.with_context(gone)??;
        match answer {
            Answer::Error { message } => bail!(
                "{} (process {}): {}",
                self.program,
                self.pid,
                short(message, quotas::TEXT_BYTES)
            ),
            answer => Ok((answer, fds, held)),
        }
    }

    /// Its channel's number, which no other has or will have.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its number in this process's PID namespace; `None` if it has ended, whoever holds its channel.
    pub fn host_pid(&self) -> Option<i32> {
        self.process.pid()
    }

    /// Whether its library knows of markers ([`Order::Mark`]).
    pub fn knows_markers(&self) -> bool {
        self.version >= WITH_MADE_AGAIN
    }

    /// Which of its contexts it makes again where it moves to, as of the last road map.
    pub fn made_again(&self) -> Vec<MadeAgain> {
        self.made_again.lock().expect("no panic under this lock").clone()
    }
}

/// A program's text, cut off at so many bytes: it is kept, and shown to operators.
fn short(mut text: String, most: usize) -> String {
    let end = (0..=most.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text.shrink_to_fit();
    text
}

/// An answer that does not belong to the order.
pub fn unexpected(answer: &Answer, due: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "the guest library answered {} where {due} was due",
        name_of(answer)
    )
}

/// What kind of answer it is, without what is in it, which may be long.
fn name_of(answer: &Answer) -> String {
    struct Name(String);
    impl std::fmt::Write for Name {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            let name = text
                .split(|c: char| !c.is_alphanumeric())
                .next()
                .unwrap_or_default();
            self.0.push_str(name);
            match name.len() == text.len() {
                true => Ok(()),
                false => Err(std::fmt::Error),
            }
        }
    }
    let mut name = Name(String::new());
    // It ends with an error where the name does.
    let _ = std::fmt::write(&mut name, format_args!("{answer:?}"));
    name.0
}

/// Answers the question where an endpoint is today.
pub trait Resolver: Send + Sync + 'static {
    /// The same endpoint and no keys if it never moved, or nobody knows. `asker` is the instance that asks.
    fn resolve(&self, endpoint: Endpoint, asker: Option<&str>) -> impl Future<Output = Resolved> + Send;
    /// Whether a process may be told the keys of an endpoint that it has asked for, and that is at `now`.
    fn may_know(&self, asker: &Process, now: Endpoint) -> impl Future<Output = bool> + Send;
    /// A number of the host with `gid` under which this host's queue pair is found; of a datagram queue pair, how often its
    /// context has moved.
    fn publish(
        &self,
        gid: [u8; 16],
        qpn: u32,
        keys: Vec<KeyPair>,
        datagram: Option<u32>,
    ) -> impl Future<Output = Option<u32>> + Send;
    /// The datagram queue pairs that programs know under this GID and that are elsewhere.
    fn ways(&self, gid: [u8; 16]) -> Vec<MovedEndpoint>;
}

/// Who shares what an agent keeps and opens: the programs of an instance, or of a user outside of any.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Tenant {
    Instance(String),
    User(u32),
}

/// What a tenant has of this agent.
#[derive(Debug, Default)]
struct Tally {
    connections: usize,
    /// For what its programs answer.
    room: Arc<Room>,
    /// It was told in the log that it has too many.
    refused: bool,
    published: Given,
    resolved: Rate,
}

/// A tenant's place for one connection.
struct Place {
    tenant: Tenant,
    guests: Guests,
    rooms: Rooms,
}

impl Place {
    fn tally<T>(&self, with: impl FnOnce(&mut Tally) -> T) -> T {
        let mut tallies = self.guests.tallies.lock().expect("no panic under this lock");
        with(tallies.entry(self.tenant.clone()).or_default())
    }

    /// How long it waits before it may ask once more where an endpoint is; `None`: too many ask already.
    fn resolve_after(&self) -> Option<Duration> {
        let now = Instant::now();
        self.tally(|tally| tally.resolved.take(now))
    }

    /// Whether it may have one more number published, with these keys.
    fn may_publish(&self, bytes: usize) -> bool {
        let now = Instant::now();
        let may = |tally: &mut Tally| {
            let (most, most_bytes) = (quotas::PUBLISHED, quotas::PUBLISHED_BYTES);
            tally.published.take(now, bytes, most, most_bytes)
        };
        self.tally(may)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut tallies = self.guests.tallies.lock().expect("no panic under this lock");
        if let Some(tally) = tallies.get_mut(&self.tenant) {
            tally.connections -= 1;
            let now = Instant::now();
            if tally.connections == 0 && tally.published.is_empty(now) && tally.resolved.is_forgotten(now) {
                tallies.remove(&self.tenant);
            }
        }
    }
}

type Strangers = BTreeMap<(Option<String>, u32), (Instant, String)>;

/// All guests of this host.
#[derive(Clone)]
pub struct Guests {
    known: Arc<Mutex<HashMap<u64, Guest>>>,
    changed: watch::Sender<()>,
    next_id: Arc<AtomicU64>,
    /// What this agent speaks with guest libraries.
    versions: Versions,
    /// Programs whose guest library speaks none of that, by instance and PID: what they are told.
    strangers: Arc<Mutex<Strangers>>,
    /// Sessions that were undone while a process may not have heard of it.
    undone: Arc<Mutex<BTreeSet<u64>>>,
    tallies: Arc<Mutex<HashMap<Tenant, Tally>>>,
    /// For answers of all of them.
    room: Arc<Room>,
    /// How long a connection may say nothing before its greeting.
    greeting_time: Duration,
}

impl Default for Guests {
    fn default() -> Self {
        Self {
            known: Arc::default(),
            changed: watch::Sender::new(()),
            next_id: Arc::default(),
            versions: verbatim_channel::VERSIONS,
            strangers: Arc::default(),
            undone: Arc::default(),
            tallies: Arc::default(),
            room: Arc::new(Room::new(Limits::ALL)),
            greeting_time: quotas::GREETING_TIME,
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

    /// Those of one process of this host.
    pub fn of_process(&self, host_pid: i32) -> Vec<Guest> {
        let mut guests = self.all();
        guests.retain(|guest| guest.host_pid() == Some(host_pid));
        guests
    }

    /// Waits until the process `pid` of `instance` has come back from the gate.
    pub async fn returned(&self, instance: &str, pid: u32) -> Guest {
        self.found(|guest| guest.instance.as_deref() == Some(instance) && guest.pid == pid && guest.quiesced)
            .await
    }

    /// Waits until the process `pid` of `instance`, or outside of any, is connected.
    pub async fn present(&self, instance: Option<&str>, pid: u32) -> Guest {
        self.found(|guest| guest.instance.as_deref() == instance && guest.pid == pid)
            .await
    }

    async fn found(&self, wanted: impl Fn(&Guest) -> bool) -> Guest {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let found = self.lock().values().find(|guest| wanted(guest)).cloned();
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

    /// Whether a process is still connected.
    pub fn is_here(&self, guest: &Guest) -> bool {
        self.lock().contains_key(&guest.id)
    }

    /// Processes of an instance whose guest library this agent does not understand, in words.
    pub fn refused(&self, instance: &str) -> Vec<String> {
        let strangers = self.strangers.lock().expect("no panic under this lock");
        let of_it = strangers
            .iter()
            .filter(|((owner, _), (seen, _))| owner.as_deref() == Some(instance) && seen.elapsed() < KNOCKS);
        of_it.map(|(_, (_, what))| what.clone()).collect()
    }

    /// A session of an earlier agent is undone: every process that is here or comes back hears of it. For one that had
    /// no part in it that is nothing.
    pub fn undo(&self, session: u64) {
        self.undone
            .lock()
            .expect("no panic under this lock")
            .insert(session);
        for guest in self.all() {
            tokio::spawn(abort(guest, vec![session]));
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
                let Some(place) = guests.place(&socket, instance.as_deref()) else {
                    // Closed unheard: its programs' libraries say that the agent closed the channel.
                    continue;
                };
                let (guests, instance, resolver) = (guests.clone(), instance.clone(), resolver.clone());
                tokio::spawn(async move {
                    if let Err(error) = guests.connection(socket, instance, &*resolver, &place).await {
                        tracing::debug!(error = format!("{error:#}"), "a guest library's connection ended");
                    }
                });
            }
        }))
    }

    /// One more guest. A process has one: whoever it was before it executed another program, or was quiesced, is no more.
    fn insert(&self, guest: Guest) {
        let mut known = self.lock();
        known.retain(|_, other| {
            let same = other.instance == guest.instance && other.process.number() == guest.process.number();
            if same {
                other.replaced.notify_one();
            }
            !same
        });
        known.insert(guest.id, guest);
    }

    /// A place for one more connection of a tenant, if it has not too many.
    fn place(&self, socket: &Socket, instance: Option<&str>) -> Option<Place> {
        let tenant = match instance {
            Some(instance) => Tenant::Instance(instance.to_owned()),
            None => Tenant::User(socket.peer().ok()?.uid),
        };
        let mut tallies = self.tallies.lock().expect("no panic under this lock");
        let tally = tallies.entry(tenant.clone()).or_default();
        if tally.connections >= quotas::CONNECTIONS {
            if !std::mem::replace(&mut tally.refused, true) {
                let most = quotas::CONNECTIONS;
                tracing::warn!(?tenant, "has {most} connections to its agent, and gets no more");
            }
            return None;
        }
        tally.connections += 1;
        let own = Arc::clone(&tally.room);
        drop(tallies);
        let (guests, all) = (self.clone(), Arc::clone(&self.room));
        let rooms = Rooms { own, all };
        Some(Place {
            tenant,
            guests,
            rooms,
        })
    }

    /// An error if the version that a guest library greets with is none of this agent's.
    fn check_version(&self, program: &str, pid: impl Display, version: u32) -> Result<(), Mismatch> {
        let here = Side::new("this host's agent", self.versions);
        agree("channel", here, protocol::library(program, pid, version)).map(drop)
    }

    async fn connection(
        &self,
        socket: Socket,
        instance: Option<String>,
        resolver: &impl Resolver,
        place: &Place,
    ) -> anyhow::Result<()> {
        let process = socket.peer_process()?;
        let socket = Channel::new(socket)?;
        let greeting = socket.recv::<Greeting>(quotas::GREETING_BYTES);
        let greeting = tokio::time::timeout(self.greeting_time, greeting).await;
        match greeting.context("it did not greet in time")??.0 {
            Greeting::Resolve { version, endpoint } => {
                self.check_version("a program", process.number(), version)?;
                let after = place.resolve_after();
                let after = after.context("its programs ask too often where endpoints are")?;
                tokio::time::sleep(after).await;
                let mut resolved = resolver.resolve(endpoint, instance.as_deref()).await;
                if !resolved.keys.is_empty() && !resolver.may_know(&process, resolved.endpoint).await {
                    tracing::warn!(
                        ?instance,
                        by = process.number(),
                        "asks for the keys of a connection that it does not have or make"
                    );
                    resolved.keys.clear();
                }
                socket.send_as(version, &resolved, &[]).await
            }
            Greeting::Publish {
                version,
                gid,
                qpn,
                keys,
                datagram,
            } => {
                self.check_version("a program", process.number(), version)?;
                let bytes = keys.len() * size_of::<KeyPair>();
                if !place.may_publish(bytes) {
                    tracing::warn!(tenant = ?place.tenant, "has too many numbers published, and gets no more");
                    return socket.send(&None::<u32>, &[]).await;
                }
                let number = resolver.publish(gid, qpn, keys, datagram).await;
                if number.is_none() {
                    place.tally(|tally| tally.published.give_back(bytes));
                }
                socket.send(&number, &[]).await
            }
            Greeting::Ways { version, gid } => {
                self.check_version("a program", process.number(), version)?;
                socket.send(&resolver.ways(gid), &[]).await
            }
            Greeting::Process {
                version,
                pid,
                program,
                generation: _,
                quiesced,
            } => {
                let program = short(program, quotas::NAME_BYTES);
                // It says what it is called inside; who says what another is called speaks in its name.
                if !process.pid().is_some_and(|known| identity::is_called(known, pid)) {
                    tracing::warn!(
                        ?instance,
                        pid,
                        by = process.number(),
                        "a guest library greets in another's name"
                    );
                    bail!("process {} greets as process {pid}", process.number());
                }
                if let Err(mismatch) = self.check_version(&program, pid, version) {
                    let what = mismatch.to_string();
                    let mut strangers = self.strangers.lock().expect("no panic under this lock");
                    strangers.retain(|_, (seen, _)| seen.elapsed() < KNOCKS);
                    strangers.insert((instance, pid), (Instant::now(), what));
                    return Err(mismatch.into());
                }
                // It may have greeted in a newer version first.
                let stranger = (instance.clone(), pid);
                self.strangers
                    .lock()
                    .expect("no panic under this lock")
                    .remove(&stranger);
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                let (calls, orders) = mpsc::channel(8);
                tracing::debug!(
                    ?instance,
                    pid,
                    program,
                    version,
                    quiesced,
                    "a guest library connected"
                );
                let guest = Guest {
                    id,
                    instance,
                    pid,
                    process: Arc::new(process),
                    program,
                    version,
                    quiesced,
                    made_again: Arc::default(),
                    calls,
                    replaced: Arc::default(),
                };
                let replaced = Arc::clone(&guest.replaced);
                self.insert(guest.clone());
                let undone: Vec<_> = self
                    .undone
                    .lock()
                    .expect("no panic under this lock")
                    .iter()
                    .copied()
                    .collect();
                if !undone.is_empty() {
                    tokio::spawn(abort(guest, undone));
                }
                self.changed.send_replace(());
                let result = tokio::select! {
                    biased;
                    () = replaced.notified() => Err(anyhow::anyhow!("its process has greeted again")),
                    result = pass_on(&socket, version, orders, &place.rooms) => result,
                };
                self.lock().remove(&id);
                self.changed.send_replace(());
                result
            }
        }
    }
}

/// Tells a process that sessions are undone. One that waits at the gate, or has its new queues, refuses: for it there is
/// more to do.
async fn abort(guest: Guest, sessions: Vec<u64>) {
    for session in sessions {
        if let Err(error) = guest.order(Order::Abort { session }, Vec::new()).await {
            tracing::debug!(pid = guest.pid, error = format!("{error:#}"), "not aborted");
        }
    }
}

/// Passes orders on, one at a time, until the guest goes.
async fn pass_on(
    socket: &Channel,
    version: u32,
    mut orders: mpsc::Receiver<Call>,
    rooms: &Rooms,
) -> anyhow::Result<()> {
    loop {
        let call = tokio::select! {
            call = orders.recv() => call.context("nobody can give orders any more")?,
            // Between orders a guest says nothing, so whatever comes is the end of the connection, or an error.
            word = socket.arrived() => {
                word?;
                bail!("a guest library spoke without having been asked");
            }
        };
        let reply = async {
            socket.send_as(version, &call.order, &call.fds).await?;
            read(socket.arrived().await?, version, rooms).await
        };
        let reply = reply.await;
        let failed = reply.as_ref().is_err_and(|error| !error.is::<Full>());
        // Who asked may have given up.
        let _ = call.reply.send(reply);
        if failed {
            bail!("the channel broke");
        }
    }
}

/// Reads an answer as soon as there is room for it.
async fn read(arrived: Arrived, version: u32, rooms: &Rooms) -> HeldReply {
    let bytes = arrived.bytes();
    if bytes > quotas::ANSWER_BYTES {
        bail!(
            "the guest library answered with {bytes} bytes, more than {}",
            quotas::ANSWER_BYTES
        );
    }
    let length = usize::try_from(bytes).expect("it is within the limit");
    let most = memory_of(length).min(quotas::ANSWER_MEMORY);
    let reading = rooms.read(length + PEAK * most).await?;
    let read = move || {
        let mut left = most;
        let (answer, fds) = arrived.read_as::<Answer>(version, quotas::ANSWER_BYTES, &mut left)?;
        anyhow::Ok((answer, fds, reading.done(most - left)?))
    };
    match length > LONG {
        true => tokio::task::spawn_blocking(read)
            .await
            .context("reading an answer panicked")?,
        false => read(),
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

    /// A message of at most so many bytes, which has one form in all versions.
    async fn recv<T: serde::de::DeserializeOwned>(&self, most: u64) -> anyhow::Result<(T, Vec<OwnedFd>)> {
        self.when_readable(|socket| verbatim_channel::recv_at_most(socket, most))
            .await
    }

    /// One that is not read yet.
    async fn arrived(&self) -> anyhow::Result<Arrived> {
        self.when_readable(verbatim_channel::arrived).await
    }

    async fn send<T: serde::Serialize>(&self, message: &T, fds: &[OwnedFd]) -> anyhow::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.when_writable(|socket| verbatim_channel::send(socket, message, &fds))
            .await
    }

    async fn send_as<T: Versioned>(&self, version: u32, message: &T, fds: &[OwnedFd]) -> anyhow::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.when_writable(|socket| verbatim_channel::send_as(socket, version, message, &fds))
            .await
    }

    async fn when_readable<T>(&self, take: impl Fn(&Socket) -> Result<T, SocketError>) -> anyhow::Result<T> {
        loop {
            let mut ready = self.0.readable().await?;
            match take(self.0.get_ref()) {
                Err(SocketError::WouldBlock) => ready.clear_ready(),
                result => return Ok(result?),
            }
        }
    }

    async fn when_writable(&self, put: impl Fn(&Socket) -> Result<(), SocketError>) -> anyhow::Result<()> {
        loop {
            let mut ready = self.0.writable().await?;
            match put(self.0.get_ref()) {
                Err(SocketError::WouldBlock) => ready.clear_ready(),
                result => return Ok(result?),
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Control connections: accepting, serving, and cleaning up after those that are gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use verbatim_device::control::{self, Reply, Request, SOCKET_NAME};
use verbatim_roce::Time;
use verbatim_seqpacket::{Credentials, Error, Listener, Process, Received, Socket};

use super::Nic;
use crate::authority::{self, Caller, Origin, Stage};
use crate::context::Context;
use crate::error::{NicError, Refused};
use crate::poller::Token;
use crate::requests::{Asker, Desk, MAX_NAME_BYTES};
use crate::table::Table;
use crate::tenant::{Seat, Tenant};

/// Requests of one connection served in a row.
const REQUESTS_PER_TURN: usize = 16;

/// Turns of the data path before a request that depends on what was posted before it.
const TURNS_TO_CATCH_UP: usize = 16;

/// The control socket in the runtime folder.
#[derive(Debug)]
pub struct Endpoint {
    listener: Listener,
    path: PathBuf,
}

impl Endpoint {
    pub fn bind(runtime_dir: &Path) -> Result<Self, NicError> {
        let path = runtime_dir.join(SOCKET_NAME);
        let wrap = |source| NicError::Listen {
            path: path.clone(),
            source,
        };
        let listener = Listener::bind(&path).map_err(wrap)?;
        listener.set_nonblocking(true).map_err(wrap)?;
        listener.pass_credentials().map_err(wrap)?;
        // Programs may run as any user; the kernel says who they are.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).map_err(|source| {
            NicError::File {
                path: path.clone(),
                source,
            }
        })?;
        Ok(Self { listener, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// One connection, and its context once that is opened.
#[derive(Debug)]
struct Client {
    socket: Socket,
    /// Over which socket it came.
    origin: Origin,
    /// Who is charged for the connection, and for what is made on it.
    seat: Seat,
    /// The process that connected, as far as this one can see it.
    pid: i32,
    /// The same, until it opens a context.
    process: Option<Process>,
    context: Option<Context>,
}

impl Client {
    /// The version of the contract that is spoken on it. What is said without a context has one form in all versions.
    fn version(&self) -> u32 {
        self.context
            .as_ref()
            .map_or(control::VERSION, |context| context.version)
    }

    fn receive(&self) -> Result<Received<Request>, Error> {
        verbatim_device::recv(&self.socket, self.version())
    }

    fn send(&self, reply: &Reply, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        verbatim_device::send(&self.socket, self.version(), reply, fds)
    }

    /// Who sends a request over it.
    fn caller(&self, sender: Credentials) -> Caller {
        Caller {
            root: sender.uid == 0,
            origin: self.origin,
            stage: match &self.context {
                None => Stage::NoContext,
                Some(context) => context.stage(sender),
            },
        }
    }
}

/// All connections, and the sockets that they come from.
#[derive(Debug)]
pub struct Clients {
    clients: Table<Client>,
    /// Those with a context.
    open: Vec<u32>,
    /// Given up for a moment when there is no other left.
    spare: Option<OwnedFd>,
}

fn spare_descriptor() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}

impl Clients {
    pub fn new(max: u32) -> Self {
        Self {
            clients: Table::new(1, max, 0),
            open: Vec::new(),
            spare: spare_descriptor(),
        }
    }

    /// How many contexts there are.
    pub fn contexts(&self) -> usize {
        self.open.len()
    }

    pub fn context(&self, id: u32) -> Option<&Context> {
        self.clients.get(id)?.context.as_ref()
    }

    /// Whether there may be one more connection of a process: those without a context are as limited as those with one,
    /// so that nobody keeps all others out without having anything.
    fn check_room(&self, pid: i32, most: u32) -> Result<(), String> {
        if !self.clients.has_room() {
            return Err("the RNIC has as many contexts as it can have".to_owned());
        }
        let waiting = |(_, client): &(u32, &Client)| client.pid == pid && client.context.is_none();
        // Processes that this one cannot see all have number 0.
        if pid != 0 && self.clients.iter().filter(waiting).count() >= most as usize {
            return Err(format!(
                "process {pid} has {most} connections without a context, and may have no more"
            ));
        }
        Ok(())
    }

    /// Whether a process may open one more context.
    fn check_share(&self, process: Credentials, most: u32) -> Result<(), Refused> {
        let of_process = |id: &&u32| {
            self.context(**id)
                .is_some_and(|context| context.credentials.pid == process.pid)
        };
        // Processes that this one cannot see all have number 0.
        if process.pid == 0 || self.open.iter().filter(of_process).count() < most as usize {
            return Ok(());
        }
        Err(Refused::new(
            libc::ENOMEM,
            format!(
                "process {} has {most} contexts, and may have no more",
                process.pid
            ),
        ))
    }

    pub fn socket(&self, id: u32) -> Option<&Socket> {
        Some(&self.clients.get(id)?.socket)
    }

    /// Who is charged for a connection, in words.
    pub fn tenant(&self, id: u32) -> String {
        let client = self.clients.get(id);
        client.map_or_else(String::new, |client| client.seat.payer().tenant().to_string())
    }

    pub fn context_mut(&mut self, id: u32) -> Option<&mut Context> {
        self.clients.get_mut(id)?.context.as_mut()
    }

    pub fn for_each_context(&mut self, mut visit: impl FnMut(u32, &mut Context)) {
        for id in &self.open {
            if let Some(context) = self
                .clients
                .get_mut(*id)
                .and_then(|client| client.context.as_mut())
            {
                visit(*id, context);
            }
        }
    }

    /// Tells programs to wake the RNIC for their requests from now on, except for those whose requests gather: until when
    /// they do. It fails if somebody has rung meanwhile.
    pub fn fall_asleep(&mut self, now: Time) -> Result<Option<Time>, Rung> {
        let mut rung = false;
        let mut gathered: Option<Time> = None;
        self.for_each_context(|_, context| match context.gathers_until {
            Some(until) if until > now => {
                gathered = Some(gathered.map_or(until, |earliest| earliest.min(until)));
            }
            _ => rung |= context.set_sleeping(true),
        });
        if rung {
            self.wake_up();
            return Err(Rung);
        }
        Ok(gathered)
    }

    /// Programs need not wake the RNIC any more.
    pub fn wake_up(&mut self) {
        self.for_each_context(|_, context| {
            context.set_sleeping(false);
        });
    }
}

/// A program has rung before it knew that the RNIC is about to sleep.
#[derive(Debug)]
pub struct Rung;

impl Nic {
    /// Takes new connections.
    pub(super) fn accept(&mut self, token: Token) {
        loop {
            let listener = match token {
                Token::Listener(id) => match self.listeners.get(id) {
                    Some(listener) => listener,
                    None => return,
                },
                _ => &self.main_listener.listener,
            };
            match listener.accept() {
                Ok(socket) => self.welcome(socket, token),
                Err(Error::WouldBlock) => return,
                Err(error)
                    if matches!(error.errno(), libc::EMFILE | libc::ENFILE)
                        && self.clients.spare.is_some() =>
                {
                    // A connection that stays in the queue would wake the loop again and again: take and close it.
                    self.clients.spare = None;
                    drop(listener.accept());
                    self.clients.spare = spare_descriptor();
                    tracing::warn!("out of file descriptors: a program was turned away");
                }
                Err(error) => {
                    tracing::debug!(%error, ?token, "accept");
                    match token {
                        // It was shut down (accept(2)) and is over. After any other error it is asked again: an instance that lost
                        // it could not come to this RNIC any more.
                        Token::Listener(id) if error.errno() == libc::EINVAL => self.forget_listener(id),
                        _ => {}
                    }
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: Socket, token: Token) {
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        let Ok(Credentials { pid, uid, .. }) = socket.peer() else {
            return;
        };
        let most = self.device.limits.per_program.max_contexts;
        let room = self.clients.check_room(pid, most);
        let seat = room.and_then(|()| self.seat(token, uid).map_err(|refused| refused.message));
        let seat = match seat {
            Ok(seat) => seat,
            Err(message) => {
                // It is turned away, whether it hears why or not.
                let _ = socket.send(
                    &Reply::Error {
                        errno: libc::ENOMEM,
                        message,
                    },
                    &[],
                );
                return;
            }
        };
        let origin = match token {
            Token::MainListener => Origin::Main,
            _ => Origin::Instance,
        };
        let socket_process = socket.peer_process().ok();
        let client = Client {
            socket,
            origin,
            seat,
            pid,
            process: socket_process,
            context: None,
        };
        let id = self
            .clients
            .clients
            .insert_with(|_, _| client)
            .expect("there was room");
        let client = self.clients.clients.get(id).expect("just inserted");
        if let Err(error) = self.poller.add(&client.socket, Token::Client(id)) {
            tracing::warn!(%error, "a program was turned away");
            self.clients.clients.remove(id);
        }
    }

    /// A connection is charged to the instance whose socket it came over, or else to the user that connects.
    fn seat(&mut self, token: Token, uid: u32) -> Result<Seat, Refused> {
        let instance = match token {
            Token::Listener(id) => self.listeners.instance(id),
            _ => None,
        };
        let of_host_root = instance.is_none() && uid == 0;
        let tenant = instance.map_or(Tenant::User(uid), |name| Tenant::Instance(name.to_owned()));
        Seat::take(self.tenants.payer(tenant, of_host_root))
    }

    /// Root of the host opens contexts for instances, and says for which. The connection is that instance's from now on.
    fn charge(&mut self, id: u32, name: &str, sender: Credentials) -> Result<(), Refused> {
        let known = self.clients.clients.get_mut(id);
        let known = known.filter(|client| client.context.is_none() && client.origin == Origin::Main);
        if let Some(client) = known.filter(|_| sender.uid == 0 && name.len() <= MAX_NAME_BYTES) {
            let tenant = Tenant::Instance(name.to_owned());
            client.seat = Seat::take(self.tenants.payer(tenant, true))?;
        }
        Ok(())
    }

    /// Answers what a connection asks.
    pub(super) fn serve(&mut self, id: u32, now: Time) {
        for _ in 0..REQUESTS_PER_TURN {
            let Some(client) = self.clients.clients.get_mut(id) else {
                return;
            };
            let mut attached = None;
            let answer = match client.receive() {
                Ok(received) => {
                    self.counters.requests += 1;
                    self.answer(id, received, &mut attached, now)
                }
                Err(Error::WouldBlock) => return,
                Err(error @ (Error::Malformed { .. } | Error::TooLong { .. } | Error::TooLarge { .. })) => {
                    Err(Refused::new(libc::EPROTO, error.to_string()))
                }
                Err(_) => return self.disconnect(id),
            };
            let Some(client) = self.clients.clients.get_mut(id) else {
                return;
            };
            let sent = match (&answer, &client.context) {
                (Ok(reply @ Reply::Context { .. }), Some(context)) => {
                    client.send(reply, &[context.arena.as_fd(), context.eventfd.as_fd()])
                }
                (Ok(reply), _) => match &attached {
                    Some(attached) => client.send(reply, &[attached.as_fd()]),
                    None => client.send(reply, &[]),
                },
                (Err(Refused { errno, message }), _) => {
                    self.counters.refused_requests += 1;
                    tracing::debug!(id, errno, message, "request refused");
                    client.send(
                        &Reply::Error {
                            errno: *errno,
                            message: message.clone(),
                        },
                        &[],
                    )
                }
            };
            // One that does not read its answers, or is gone.
            if let Err(error) = sent {
                tracing::debug!(id, %error, "answer not taken");
                return self.disconnect(id);
            }
        }
    }

    fn answer(
        &mut self,
        id: u32,
        received: Received<Request>,
        attached: &mut Option<OwnedFd>,
        now: Time,
    ) -> Result<Reply, Refused> {
        let Received {
            message: request,
            fds,
            credentials,
        } = received;
        let credentials = credentials
            .ok_or_else(|| Refused::new(libc::EPERM, "the kernel did not say who sent the request"))?;
        let client = self
            .clients
            .clients
            .get(id)
            .ok_or_else(|| Refused::no_such("connection", id))?;
        authority::check(&request, client.caller(credentials))?;
        match request {
            Request::AddListener { instance } => return self.add_listener(instance, fds),
            Request::RemoveListener { instance } => return Ok(self.remove_listener(&instance)),
            Request::QueryListeners { after } => return Ok(self.query_listeners(after.as_deref())),
            Request::QueryStatistics { from_qpn } => {
                return Ok(self.query_statistics(from_qpn, credentials));
            }
            Request::QueryOwners { qpns } => return self.query_owners(&qpns),
            Request::TakePeerQuestions => return Ok(self.take_peer_questions(id, now)),
            Request::AnswerPeerQuestions { answers } => return self.answer_peer_questions(&answers, now),
            Request::MeetPeers { pairs } => return self.meet_peers(&pairs, now),
            Request::PeersGone { pairs } => return self.peers_gone(&pairs, now),
            Request::PeersHeard { pairs } => return self.peers_heard(&pairs),
            Request::StartCapture { snap_bytes, qpn } => return self.start_capture(id, snap_bytes, qpn),
            Request::OpenContext { ref name, .. } => {
                let most = self.device.limits.per_program.max_contexts;
                self.clients.check_share(credentials, most)?;
                self.charge(id, name, credentials)?;
            }
            Request::ResizeCq { .. } => self.catch_up(),
            _ => {}
        }
        let client = self
            .clients
            .clients
            .get_mut(id)
            .ok_or_else(|| Refused::no_such("connection", id))?;
        let was_open = client.context.is_some();
        let mut changed_qps = Vec::new();
        let mut desk = Desk {
            device: &self.device,
            objects: &mut self.objects,
            effects: &mut self.effects,
            changed_qps: &mut changed_qps,
            poller: &self.poller,
            now,
        };
        let answer = desk.answer(
            request,
            &mut Asker {
                id,
                context: &mut client.context,
                credentials,
                connected_by: &mut client.process,
                payer: client.seat.payer(),
                fds,
                attached,
            },
        );
        if let (false, Some(context)) = (was_open, &client.context) {
            if let Err(error) = self.poller.add_edge(&context.eventfd, Token::Doorbell(id)) {
                client.context = None;
                return Err(Refused::new(libc::ENOMEM, error.to_string()));
            }
            self.clients.open.push(id);
        }
        for qpn in changed_qps {
            if let Some(qp) = self.objects.qps.get_mut(qpn) {
                self.touched.add(qpn, qp);
            }
        }
        answer
    }

    /// Takes what programs have posted before the request that is answered next: whether a smaller completion queue holds
    /// what is in it must not depend on who was faster.
    fn catch_up(&mut self) {
        for _ in 0..TURNS_TO_CATCH_UP {
            // What is wrong with a turn comes up again in the next one.
            if !matches!(self.turn(super::now()), Ok(true)) {
                return;
            }
        }
    }

    /// Nobody holds the connection any more: all that was made on it goes.
    fn disconnect(&mut self, id: u32) {
        let Some(client) = self.clients.clients.remove(id) else {
            return;
        };
        self.poller.remove(&client.socket);
        self.captures.retain(|sink| sink.id != id);
        self.asked = self.asked.filter(|asked| *asked != id);
        if let Some(context) = client.context {
            tracing::debug!(id, name = context.name, "context closed");
            // The program may still have this descriptor, so that closing it here does not end the watch.
            self.poller.remove(&context.eventfd);
            if let Some(events) = &context.events {
                self.poller.remove(events);
            }
            for channel in &context.channels {
                if let Some(channel) = self.objects.channels.get_mut(*channel) {
                    self.poller.remove(&channel.outbox);
                }
            }
            self.clients.open.retain(|open| *open != id);
            for channel in &context.cm_channels {
                self.remove_cm_channel(*channel, super::now());
            }
            self.objects.cm.remove_program(id);
            self.objects.remove_all(context, super::now());
        }
    }
}

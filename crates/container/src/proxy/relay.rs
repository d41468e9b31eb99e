//! The conversation between runc and CRIU, with the gate's two stops in it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::RecvFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use verbatim_seqpacket::{Error, Listener, Socket};

use super::lazy::{self, Connection, PageServer};
use super::request::{self, Private, Response};
use crate::bundle::TERMINALS;
use crate::cgroup::{Cgroup, CgroupVersion, LIMIT};
use crate::gate::{
    CGROUP_VARIABLE, CONNECT, Kind, LAZY_VARIABLE, NO_TERMINALS_VARIABLE, Order, Report, Stop, held_path,
    monotonic_now,
};
use crate::marker;
use crate::operation::go_on;
use crate::rnic;

/// Whoever is at the other end of `runc` and of the gate, until CRIU is done. Returns the exit status.
pub(super) fn run(gate: &Path) -> anyhow::Result<i32> {
    let runc = super::runc_socket();
    let Some(kind) = request::operation(&peek(&runc)?)? else {
        // A question about versions or features: nothing to hold. The socket's number is still 3.
        return super::become_criu(runc);
    };
    let request = runc.recv_bytes().context("runc's request")?.message;
    let held_at = held_path(gate);
    let gate = Socket::connect(gate).with_context(|| format!("the gate at {}", gate.display()))?;
    let runc_pid = runc.peer()?.pid;
    let is_lazy = std::env::var_os(LAZY_VARIABLE).is_some();
    let page_server = match kind {
        Kind::Dump if is_lazy => Some(PageServer::new().context("a connection for CRIU's pages")?),
        Kind::Dump | Kind::PreDump | Kind::Restore => None,
    };
    let private = match is_lazy {
        true => Private::LeftOut {
            configuration: page_server.as_ref().map(PageServer::configuration),
        },
        false => Private::InImages,
    };
    let cgroup = match std::env::var(CGROUP_VARIABLE) {
        Ok(text) if kind == Kind::Dump => Some(Cgroup::from_variable(&text).context(CGROUP_VARIABLE)?),
        _ => None,
    };
    let external = match &cgroup {
        Some(cgroup) => handed_over(cgroup).context("the RNICs of the container's processes")?,
        None => Vec::new(),
    };
    let no_terminals = kind == Kind::Dump && std::env::var_os(NO_TERMINALS_VARIABLE).is_some();
    let skipped: &[&str] = if no_terminals { &[TERMINALS] } else { &[] };
    let adapted = request::adapt(&request, runc_pid, &private, &external, skipped)?;
    let marked = match kind {
        Kind::Restore => Some(mark(adapted.work.as_ref(), runc_pid)?),
        Kind::Dump | Kind::PreDump => None,
    };
    let (child, criu) = super::start_criu()?;
    let criu_process = Pid::from_raw(i32::try_from(child.id())?).context("CRIU has a number")?;
    let criu_process = pidfd_open(criu_process, PidfdFlags::empty()).context("CRIU's process")?;
    let relay = Relay {
        kind,
        page_server: page_server.map(PageServer::inherited),
        marked,
        cgroup,
        goes_on: Cell::new(true),
        committed: Cell::new(false),
        runc,
        criu,
        criu_process,
        gate: RefCell::new(gate),
        child,
        runc_pid,
        held_at,
        held: Cell::new(false),
        listener: None,
    };
    super::hurry::hurry(&relay.child);
    relay
        .criu
        .send_bytes(&request::are_you_there(), &[])
        .context("CRIU's socket")?;
    relay.criu.recv_bytes().context("CRIU did not start")?;
    // What lets CRIU go on. A dump comes as far as to where CRIU has not touched the tasks yet; of a restore not even the first
    // image is there.
    let go = match kind {
        Kind::Dump => match relay.up_to_the_first_notification(&adapted.message)? {
            true => request::acceptance(),
            false => return Ok(1),
        },
        Kind::PreDump | Kind::Restore => adapted.message,
    };
    relay
        .gate
        .borrow()
        .send(&Report::Requested { kind }, &[])
        .context("the gate")?;
    match relay.wait_for_order() {
        Ok(Order::Go) => {}
        Ok(Order::Hold | Order::Commit | Order::Abort) | Err(Lost) => return relay.cancel(),
    }
    relay.criu.send_bytes(&go, &[]).context("CRIU's socket")?;
    relay.pass_on()
}

/// Nodes of RNICs that were opened where the container's mounts are not, as CRIU names such files (`criu/files-reg.c`, `dump_one_reg_file`): it
/// would look for their mount.
fn handed_over(cgroup: &Cgroup) -> std::io::Result<Vec<String>> {
    let mut files = BTreeSet::new();
    for pid in cgroup.processes()? {
        match rnic::handed_over(pid) {
            Ok(found) => files.extend(found),
            // It has ended.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    let names = files.into_iter();
    Ok(names
        .map(|(mount, inode)| format!("file[{mount:x}:{inode:x}]"))
        .collect())
}

/// Writes down that the tasks of a restore have not run; returns the directory in which it says so.
fn mark(work: Option<&File>, runc_pid: i32) -> anyhow::Result<File> {
    let work = work
        .context("runc's request names no work directory")?
        .try_clone()?;
    // runc has moved us, and with us CRIU and what it restores, to the container's cgroup, and has stayed outside.
    let cgroup = Cgroup::apart(std::process::id(), runc_pid.unsigned_abs())?;
    marker::prepare(&work, &cgroup).context("cannot write the restore's marker")?;
    Ok(work)
}

/// The first notification of a dump: CRIU has read the request and knows the kernel, and the tasks run (`criu/cr-dump.c`,
/// `cr_dump_tasks`).
const FIRST: &str = "pre-dump";

/// A message of CRIU's or runc's, with its descriptors.
type Bytes = verbatim_seqpacket::Received<Vec<u8>>;

/// Whom we waited with, or for, is gone: an abort that nobody has ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lost;

struct Relay {
    kind: Kind,
    /// As long as it is there CRIU serves the pages that a lazy dump has left out.
    page_server: Option<Connection>,
    /// Where the marker of a restore is.
    marked: Option<File>,
    /// Where the tasks of a dump are.
    cgroup: Option<Cgroup>,
    /// They are to go on when we end: frozen there by now, or with connections that a lost CRIU has left as it had them.
    goes_on: Cell<bool>,
    /// They are to be killed.
    committed: Cell<bool>,
    runc: Socket,
    criu: Socket,
    criu_process: OwnedFd,
    gate: RefCell<Socket>,
    child: Child,
    runc_pid: i32,
    /// Where another agent finds us after [`Order::Hold`].
    held_at: PathBuf,
    /// The agent has said [`Order::Hold`].
    held: Cell<bool>,
    /// Then another one may come here. It is there before the order can be given: an agent that gives the order and is lost at
    /// once has a successor that finds us.
    listener: Option<Listener>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(cgroup) = self.cgroup.as_ref().filter(|_| self.goes_on.get())
            && let Err(error) = go_on(cgroup)
        {
            eprintln!("verbatim: the tasks cannot go on as they were: {error}");
        }
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.held_at);
        }
    }
}

impl Relay {
    /// Gives CRIU the request of a dump and takes its `pre-dump`, which is to be answered; false if CRIU will not do it.
    fn up_to_the_first_notification(&self, request: &[u8]) -> anyhow::Result<bool> {
        self.criu.send_bytes(request, &[]).context("CRIU's socket")?;
        let Some(message) = self.next_from_criu()? else {
            self.report_end(false, "CRIU ended when it was asked".to_owned());
            return Ok(false);
        };
        match request::response(&message.message)? {
            Response::Notify { script, .. } if script == FIRST => Ok(true),
            Response::Notify { script, .. } => {
                bail!("CRIU has come to {script} without {FIRST}; this release of CRIU is not known")
            }
            Response::Final { success, reason } => {
                self.report_end(success, reason);
                let _ = self.runc.send_bytes(&message.message, &[]);
                Ok(false)
            }
        }
    }

    /// Passes CRIU's notifications to runc and runc's answers back, until CRIU's last word.
    fn pass_on(mut self) -> anyhow::Result<i32> {
        loop {
            let Some(message) = self.next_from_criu()? else {
                let status = self.child.wait()?;
                self.report_end(false, format!("CRIU ended without a last word ({status})"));
                return Ok(1);
            };
            let at = monotonic_now();
            let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
            match request::response(&message.message)? {
                Response::Notify { script, pid } => {
                    let stop = self.kind.stop_at(&script);
                    if self.kind == Kind::Dump && stop == Some(Stop::Decision) {
                        // Without it the tasks stay frozen all the same; then only a person can let them go.
                        self.listener = Listener::bind(&self.held_at).ok();
                    }
                    self.report(&Report::Reached {
                        name: script.clone(),
                        at,
                        pid,
                        stop,
                    });
                    let mut has_more = false;
                    let answer = match stop {
                        Some(Stop::Decision) => {
                            let answer = self.decide(&message.message)?;
                            has_more = self.page_server.take().is_some();
                            answer
                        }
                        // Runc has nothing to say to that.
                        Some(Stop::Network) => match self.wait_for_order() {
                            Ok(Order::Go) => request::acceptance(),
                            Ok(Order::Hold | Order::Commit | Order::Abort) | Err(Lost) => request::refusal(),
                        },
                        None if request::runc_ignores(&script) || script == lazy::SERVING => {
                            request::acceptance()
                        }
                        None => {
                            self.runc.send_bytes(&message.message, &fds)?;
                            self.runc.recv_bytes()?.message
                        }
                    };
                    self.criu.send_bytes(&answer, &[])?;
                    // It kills the dumped when it is done with serving.
                    if self.committed.get() && !has_more {
                        self.kill_the_dumped();
                    }
                }
                Response::Final { success, reason } => {
                    self.report_end(success, reason);
                    // A runc that was killed must not keep CRIU's end from being waited for.
                    let _ = self.runc.send_bytes(&message.message, &fds);
                    if self.kind == Kind::PreDump {
                        // CRIU would take another pre-dump, or the dump (`criu/cr-service.c`, `pre_dump_loop`); runc
                        // makes each with a CRIU of its own. Its exit status tells that it was not asked.
                        rustix::net::shutdown(&self.criu, rustix::net::Shutdown::Both)?;
                        self.child.wait()?;
                        return Ok(if success { 0 } else { 1 });
                    }
                    let status = self.child.wait()?;
                    return Ok(if success && status.success() { 0 } else { 1 });
                }
            }
        }
    }

    /// Keeps CRIU waiting until the agent has decided; returns the answer for CRIU.
    fn decide(&mut self, notification: &[u8]) -> anyhow::Result<Vec<u8>> {
        match self.kind {
            // runc marks the container as checkpointed: only if it is.
            Kind::Dump | Kind::PreDump => {
                let order = self.wait_for_order();
                let kept = match order {
                    Ok(order) => order == Order::Commit,
                    Err(Lost) => self.held.get(),
                };
                self.goes_on.set(!kept);
                self.committed.set(order == Ok(Order::Commit));
                match order {
                    Ok(Order::Commit) => self.ask_runc(notification),
                    Ok(Order::Go | Order::Hold | Order::Abort) | Err(Lost) => Ok(request::refusal()),
                }
            }
            // runc writes its state down, which it can do meanwhile: it takes it back if CRIU fails afterwards.
            Kind::Restore => {
                self.runc.send_bytes(notification, &[])?;
                let order = self.wait_for_order();
                let answer = self.runc.recv_bytes()?.message;
                if order != Ok(Order::Commit) {
                    return Ok(request::refusal());
                }
                if let Some(work) = self
                    .marked
                    .as_ref()
                    .filter(|_| request::accepts(&answer).unwrap_or(true))
                {
                    // Without it nothing may run. Our end is a refusal, too.
                    marker::release(work).context("cannot rename the restore's marker")?;
                    self.report(&Report::Reached {
                        name: CONNECT.to_owned(),
                        at: monotonic_now(),
                        pid: None,
                        stop: Some(Stop::Network),
                    });
                    // A lost agent changes nothing any more: the next one connects the network.
                    let _ = self.wait_for_order();
                }
                Ok(answer)
            }
        }
    }

    /// CRIU's next message; `None` if it is gone. Its socket does not tell: tasks that it has begun to restore have it open, too.
    fn next_from_criu(&self) -> anyhow::Result<Option<Bytes>> {
        let mut ends = [
            PollFd::new(&self.criu, PollFlags::IN),
            PollFd::new(&self.criu_process, PollFlags::IN),
        ];
        retry_on_intr(|| poll(&mut ends, None))?;
        if ends[0].revents().is_empty() {
            return Ok(None);
        }
        Ok(self.criu.recv_bytes().ok())
    }

    /// Sees to it that the tasks of a dump are dead before runc hears of CRIU's end: CRIU kills them now. Those that version 1 of
    /// the freezer holds die when they are thawed, and CRIU waits for that; but until it has killed them all it still looks into
    /// them, and may be lost.
    fn kill_the_dumped(&self) {
        let Some(cgroup) = &self.cgroup else { return };
        let mut ready = [
            PollFd::new(&self.criu, PollFlags::IN),
            PollFd::new(&self.criu_process, PollFlags::IN),
        ];
        let killed = match cgroup.version() {
            CgroupVersion::V1 => {
                let now = Timespec::default();
                cgroup.await_kills(
                    || poll(&mut ready, Some(&now)).is_ok_and(|ready| ready > 0),
                    LIMIT,
                )
            }
            CgroupVersion::V2 => retry_on_intr(|| poll(&mut ready, None))
                .map(drop)
                .map_err(Into::into),
        };
        if let Err(error) = killed.and_then(|()| cgroup.kill(LIMIT)) {
            // The agent, which misses an end that is good, kills them, too.
            eprintln!("verbatim: the tasks do not end: {error}");
        }
    }

    fn ask_runc(&mut self, notification: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.runc.send_bytes(notification, &[])?;
        Ok(self.runc.recv_bytes()?.message)
    }

    /// The agent's next order, unless the agent, runc or CRIU is lost first; after [`Order::Hold`] only a lost CRIU counts,
    /// with which there is nothing to wait for, and another agent may come.
    fn wait_for_order(&self) -> Result<Order, Lost> {
        let [next, end] = [PollFlags::IN, PollFlags::empty()];
        let mut gate_is_lost = false;
        loop {
            let mut gate = self.gate.borrow_mut();
            let mut watched = vec![
                PollFd::new(&self.criu, end),
                PollFd::new(&self.criu_process, next),
            ];
            if !self.held.get() {
                watched.push(PollFd::new(&self.runc, end));
            }
            let ends = watched.len();
            match (&self.listener, gate_is_lost) {
                (_, false) => watched.push(PollFd::new(&*gate, next)),
                (Some(listener), true) => watched.push(PollFd::new(listener, next)),
                (None, true) => {}
            }
            match poll(&mut watched, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return Err(Lost),
                Ok(_) => {}
            }
            if watched[..ends].iter().any(|end| !end.revents().is_empty()) {
                return Err(Lost);
            }
            drop(watched);
            if let (Some(listener), true) = (&self.listener, gate_is_lost) {
                let runc = self.runc_pid;
                if let Ok(other) = listener.accept()
                    && other.send(&Report::Held { runc }, &[]).is_ok()
                {
                    *gate = other;
                    gate_is_lost = false;
                }
                continue;
            }
            match gate.recv::<Order>() {
                Ok(received) if received.message == Order::Hold => self.held.set(true),
                Ok(received) => return Ok(received.message),
                Err(Error::WouldBlock) => {}
                Err(_) if self.held.get() => gate_is_lost = true,
                Err(_) => return Err(Lost),
            }
        }
    }

    /// Ends everything before CRIU has done anything.
    fn cancel(mut self) -> anyhow::Result<i32> {
        let _ = self
            .runc
            .send_bytes(&request::failure(self.kind, libc::ECANCELED), &[]);
        // CRIU ends when its socket does: its other end is in nobody's hands.
        rustix::net::shutdown(&self.criu, rustix::net::Shutdown::Both)?;
        self.child.wait()?;
        Ok(1)
    }

    fn report_end(&self, success: bool, reason: String) {
        self.report(&Report::Finished {
            success,
            reason,
            at: monotonic_now(),
        });
    }

    /// Tells the agent. If it is gone, the next wait for an order notices.
    fn report(&self, report: &Report) {
        let _ = self.gate.borrow().send(report, &[]);
    }
}

/// The first message on a socket, which stays there.
fn peek(socket: &Socket) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; verbatim_seqpacket::MAX_MESSAGE_BYTES];
    let (length, _) =
        rustix::net::recv(socket, bytes.as_mut_slice(), RecvFlags::PEEK).context("runc's request")?;
    bytes.truncate(length);
    Ok(bytes)
}

//! One checkpoint or restore under way: runc, the proxy behind it, and the gate between the proxy and us.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use verbatim_seqpacket::{Listener, Socket};

use crate::cgroup::Cgroup;
use crate::error::{Error, make_dir};
use crate::gate::{CGROUP_VARIABLE, GATE_VARIABLE, Kind, Order, Report, Stop};
use crate::host::Host;
use crate::marker;
use crate::name::ContainerName;
use crate::room;
use crate::runc::{Runc, last_lines};
use crate::timings::Timings;
use crate::watch::{Raw, watch};

mod hold;
mod outlast;
mod remains;

pub(crate) use hold::{go_on, kill};
use outlast::{note, open_process};
pub use outlast::{outlast, started_at};
use remains::Remains;

/// One checkpoint or restore. Dropping it closes the gate, which the proxy takes for an abort.
#[derive(Debug)]
pub(crate) struct Operation {
    kind: Kind,
    name: ContainerName,
    work: PathBuf,
    runc: Runc,
    gate: Option<AsyncFd<Raw<Socket>>>,
    gate_path: PathBuf,
    child: Option<Runner>,
    timings: Timings,
    /// Where the tasks of a dump are.
    cgroup: Option<Cgroup>,
    /// They are frozen there.
    is_frozen: bool,
    /// They stay frozen, whatever fails: the decision is, or may be, that they never run again.
    stays_frozen: bool,
    /// Tasks of a restore that were released are left alone, whatever fails.
    leaves_released: bool,
    /// The restored container's first process.
    pub pid: Option<i32>,
}

/// What a confirmed operation leaves to wait for: runc is still writing down that it is done.
#[derive(Debug)]
pub(crate) struct Settling {
    kind: Kind,
    name: ContainerName,
    work: PathBuf,
    child: Runner,
    stage: String,
}

/// runc, while it works.
#[derive(Debug)]
enum Runner {
    /// We have started it.
    Child(Child),
    /// An agent before us has; nobody tells us its exit status.
    Other(AsyncFd<Raw<OwnedFd>>),
    /// The same, and it is not there any more.
    Gone,
}

impl Runner {
    /// Waits for its end, and says how it ended if that is known.
    async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match self {
            Self::Child(child) => child.wait().await.map(Some),
            Self::Other(pidfd) => pidfd.readable().await.map(|_| None),
            Self::Gone => Ok(None),
        }
    }
}

/// One moment, as the proxy reported it.
struct Moment {
    name: String,
    at: Duration,
    stop: Option<Stop>,
    finished: bool,
}

impl Operation {
    /// Starts runc and waits until the proxy holds its request.
    pub async fn prepare(
        host: &Host,
        kind: Kind,
        name: ContainerName,
        mut command: Command,
        images: &Path,
        work: &Path,
    ) -> Result<Self, Error> {
        make_dir(images)?;
        make_dir(work)?;
        // A log of an earlier attempt must not explain this one.
        let _ = std::fs::remove_file(work.join(kind.log_file()));
        if kind == Kind::Restore {
            // What an earlier one has done is not what this one does.
            marker::clear(work).map_err(|source| Error::file("clear the marker in", work, source))?;
        }
        let cgroup = match kind {
            Kind::Dump => Some(hold::cgroup_of(host, &name)?),
            Kind::PreDump | Kind::Restore => None,
        };
        let path = gate_path(host.state())?;
        let listener = Listener::bind(&path)?;
        let _unlink = Unlink(&path);
        listener.set_nonblocking(true)?;
        let log = work.join(runc_log(kind));
        let output = std::fs::File::create(&log).map_err(|source| Error::file("create", &log, source))?;
        let errors = output
            .try_clone()
            .map_err(|source| Error::file("open", &log, source))?;
        if let Some(cgroup) = &cgroup {
            command.env(CGROUP_VARIABLE, cgroup.to_variable());
        }
        command
            .env(GATE_VARIABLE, &path)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        let child = command
            .spawn()
            .map_err(|source| host.runc().start_error(source))?;
        if let Some(pid) = child.id() {
            note(work, kind, "runc", pid);
        }
        let mut operation = Self {
            kind,
            name,
            work: work.to_owned(),
            runc: host.runc().clone(),
            gate: None,
            gate_path: path.clone(),
            child: Some(Runner::Child(child)),
            timings: Timings::default(),
            cgroup,
            is_frozen: false,
            stays_frozen: false,
            leaves_released: false,
            pid: None,
        };
        operation.accept(listener).await?;
        match operation.next_report().await? {
            Report::Requested { kind: requested } if requested == kind => Ok(operation),
            Report::Finished { reason, .. } => Err(operation.fail(&reason).await),
            other => Err(operation.fail(&format!("the proxy opened with {other:?}")).await),
        }
    }

    /// Takes over a checkpoint that an earlier agent has held ([`Self::hold`]); `held` is its [`Self::held_path`].
    pub async fn take_over(
        host: &Host,
        name: ContainerName,
        work: &Path,
        held: &Path,
    ) -> Result<Self, Error> {
        let socket = Socket::connect(held)?;
        socket.set_nonblocking(true)?;
        let watched = |source| Error::file("watch", work, source);
        let cgroup = hold::cgroup_of(host, &name)?;
        let mut operation = Self {
            kind: Kind::Dump,
            name,
            work: work.to_owned(),
            runc: host.runc().clone(),
            gate: Some(watch(socket).map_err(watched)?),
            gate_path: held.to_owned(),
            child: None,
            timings: Timings::default(),
            cgroup: Some(cgroup),
            is_frozen: true,
            stays_frozen: true,
            leaves_released: false,
            pid: None,
        };
        match operation.next_report().await? {
            Report::Held { runc } => {
                operation.child = Some(match open_process(runc) {
                    // The proxy waits all the same.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Runner::Gone,
                    pidfd => Runner::Other(pidfd.and_then(watch).map_err(watched)?),
                });
                Ok(operation)
            }
            other => Err(operation.fail(&format!("the proxy opened with {other:?}")).await),
        }
    }

    /// Waits for the proxy's connection, or for runc's end.
    async fn accept(&mut self, listener: Listener) -> Result<(), Error> {
        let listener = watch(listener).map_err(|source| Error::file("watch", &self.work, source))?;
        let child = self.child.as_mut().expect("runc was just started");
        let accepted = tokio::select! {
            ready = listener.readable() => ready.map(|_| ()),
            status = child.wait() => {
                let status = match status {
                    Ok(Some(status)) => status.to_string(),
                    Ok(None) => "how is not known".to_owned(),
                    Err(error) => error.to_string(),
                };
                return Err(self.fail(&format!("runc ended ({status}) before it asked CRIU")).await);
            }
        };
        accepted.map_err(|source| Error::file("watch", &self.work, source))?;
        let socket = listener.get_ref().0.accept()?;
        socket.set_nonblocking(true)?;
        note(&self.work, self.kind, "proxy", socket.peer()?.pid.unsigned_abs());
        self.gate = Some(watch(socket).map_err(|source| Error::file("watch", &self.work, source))?);
        Ok(())
    }

    /// Lets the request through and waits until CRIU is at the point where both ways are still open. `cut` is called
    /// on the way there, where the network is to be cut off.
    pub async fn release<E: Display>(&mut self, cut: impl FnOnce() -> Result<(), E>) -> Result<(), Error> {
        self.timings.push("go", crate::gate::monotonic_now());
        self.send(Order::Go).await?;
        let mut cut = Some(cut);
        loop {
            match self.next_moment().await? {
                Moment {
                    stop: Some(Stop::Decision),
                    ..
                } => return Ok(()),
                Moment {
                    stop: Some(Stop::Network),
                    ..
                } => {
                    if let Some(Err(error)) = cut.take().map(|cut| cut()) {
                        let reason = format!("the network cannot be cut off: {error:#}");
                        return Err(self.fail(&reason).await);
                    }
                    self.send(Order::Go).await?;
                }
                Moment { finished: true, .. } => return Err(self.fail("CRIU did not wait").await),
                Moment { .. } => {}
            }
        }
    }

    /// Lets the request through and waits until CRIU and runc are done. For an operation without a decision.
    pub async fn run(mut self) -> Result<Timings, Error> {
        self.timings.push("go", crate::gate::monotonic_now());
        self.send(Order::Go).await?;
        while !self.next_moment().await?.finished {}
        let mut child = self.child.take().expect("runc is waited for once");
        let status = child
            .wait()
            .await
            .map_err(|source| self.runc.start_error(source))?;
        match status {
            Some(status) if !status.success() => {
                let reason = self
                    .runc
                    .with_lack_of_room(&self.work, &format!("runc ended with {status}"));
                Err(failure(self.kind, &self.name, &self.work, self.stage(), &reason))
            }
            _ => Ok(std::mem::take(&mut self.timings)),
        }
    }

    /// Where an agent that comes after this one finds the operation, once it is held.
    pub fn held_path(&self) -> PathBuf {
        crate::gate::held_path(&self.gate_path)
    }

    /// Confirms, and waits until `done` is reached or CRIU has finished. `connect` is called on the way there, where
    /// the network is to be connected.
    ///
    /// When this fails after the order was sent, it is CRIU that failed: the caller must find out what is left.
    pub async fn commit(mut self, done: &str, connect: impl FnOnce()) -> Result<(Timings, Settling), Error> {
        self.stays_frozen = true;
        if let Some(Report::Finished { reason, .. }) = self.pending_report()? {
            return Err(self
                .fail(&format!("CRIU ended while it was waiting: {reason}"))
                .await);
        }
        self.timings.push("commit", crate::gate::monotonic_now());
        self.send(Order::Commit).await?;
        let mut connect = Some(connect);
        loop {
            let moment = self.next_moment().await?;
            if moment.stop == Some(Stop::Network) {
                if let Some(connect) = connect.take() {
                    connect();
                }
                self.send(Order::Go).await?;
            }
            if moment.finished || moment.name == done {
                break;
            }
        }
        let child = self.child.take().expect("runc is waited for once");
        let stage = self.stage();
        let (kind, name, work) = (self.kind, self.name.clone(), self.work.clone());
        Ok((
            std::mem::take(&mut self.timings),
            Settling {
                kind,
                name,
                work,
                child,
                stage,
            },
        ))
    }

    /// From now on no failure kills tasks of a restore that were released.
    pub fn leave_released(&mut self) {
        self.leaves_released = true;
    }

    /// Refuses, and waits until runc and CRIU are gone and, for a restore, nothing is left of the container.
    pub async fn abort(mut self) -> Result<(), Error> {
        self.stays_frozen = false;
        if let Some(gate) = &self.gate {
            // In so many words: after `Hold` a closed gate says nothing. A proxy that is gone has aborted already.
            let _ = gate.get_ref().0.send(&Order::Abort, &[]);
        }
        match self.take_remains() {
            Some(remains) => remains.clean_up().await,
            // An error has said so: runc is gone.
            None => hold::thaw(&self.name, self.cgroup.take()).await,
        }
    }

    /// runc, as the host uses it.
    pub fn runc(&self) -> &Runc {
        &self.runc
    }

    /// The container.
    pub fn name(&self) -> &ContainerName {
        &self.name
    }

    /// When what happened.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// The next moment of a conversation that goes well.
    async fn next_moment(&mut self) -> Result<Moment, Error> {
        let moment = match self.next_report().await? {
            Report::Reached { name, at, pid, stop } => {
                self.pid = pid.or(self.pid);
                Moment {
                    name,
                    at,
                    stop,
                    finished: false,
                }
            }
            Report::Finished {
                success: true, at, ..
            } => Moment {
                name: "finished".to_owned(),
                at,
                stop: None,
                finished: true,
            },
            Report::Finished { reason, .. } => return Err(self.fail(&reason).await),
            Report::Requested { .. } | Report::Held { .. } => {
                return Err(self.fail("the proxy repeated its request").await);
            }
        };
        self.timings.push(&moment.name, moment.at);
        Ok(moment)
    }

    async fn send(&mut self, order: Order) -> Result<(), Error> {
        let gate = self
            .gate
            .as_ref()
            .expect("the gate is open between prepare and the end");
        match gate.get_ref().0.send(&order, &[]) {
            Ok(()) => Ok(()),
            Err(error) => Err(self
                .fail(&format!("the proxy does not take orders: {error}"))
                .await),
        }
    }

    /// The next report; a proxy that ends without one has failed.
    async fn next_report(&mut self) -> Result<Report, Error> {
        loop {
            if let Some(report) = self.pending_report()? {
                return Ok(report);
            }
            let gate = self
                .gate
                .as_ref()
                .expect("the gate is open between prepare and the end");
            let mut ready = gate
                .readable()
                .await
                .map_err(|source| Error::file("watch", &self.work, source))?;
            match gate.get_ref().0.recv::<Report>() {
                Ok(received) => return Ok(received.message),
                Err(verbatim_seqpacket::Error::WouldBlock) => ready.clear_ready(),
                Err(error) => {
                    drop(ready);
                    return Err(self.fail(&format!("the proxy was lost: {error}")).await);
                }
            }
        }
    }

    /// A report that is there already.
    fn pending_report(&self) -> Result<Option<Report>, Error> {
        let gate = self
            .gate
            .as_ref()
            .expect("the gate is open between prepare and the end");
        match gate.get_ref().0.recv::<Report>() {
            Ok(received) => Ok(Some(received.message)),
            Err(verbatim_seqpacket::Error::WouldBlock | verbatim_seqpacket::Error::Closed) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the operation, waits for runc, and makes an error of everything that is known.
    async fn fail(&mut self, reason: &str) -> Error {
        // What is cleaned up makes room.
        let reason = self.runc.with_lack_of_room(&self.work, reason);
        if let Some(remains) = self.take_remains()
            && let Err(error) = remains.clean_up().await
        {
            tracing::warn!(container = %self.name, %error, "a failed operation could not be cleaned up");
        }
        failure(self.kind, &self.name, &self.work, self.stage(), &reason)
    }

    /// What is to be cleaned up when nothing comes of this any more; `None` if somebody has begun.
    fn take_remains(&mut self) -> Option<Remains> {
        Some(Remains {
            runc: self.runc.clone(),
            kind: self.kind,
            name: self.name.clone(),
            work: self.work.clone(),
            child: self.child.take()?,
            gate: self.gate.take().filter(|_| !self.stays_frozen),
            frozen: self.cgroup.clone().filter(|_| !self.stays_frozen),
            leaves_released: self.leaves_released,
        })
    }

    fn stage(&self) -> String {
        self.timings
            .marks
            .last()
            .map_or_else(|| "start".to_owned(), |mark| mark.name.clone())
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Some(remains) = self.take_remains() else {
            return;
        };
        remains.give_up();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let name = self.name.clone();
        runtime.spawn(async move {
            if let Err(error) = remains.clean_up().await {
                tracing::warn!(container = %name, %error, "an abandoned operation could not be cleaned up");
            }
        });
    }
}

impl Settling {
    /// Waits for runc's end, and for the proxy's where runc did not.
    pub async fn settled(mut self) -> Result<(), Error> {
        let failed = match self.child.wait().await {
            Ok(None) => return Ok(()),
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => self.failed(&format!("runc ended with {status}")),
            Err(error) => self.failed(&format!("runc cannot be waited for: {error}")),
        };
        if let Err(error) = outlast(&self.work).await {
            tracing::warn!(work = %self.work.display(), %error, "the end of the proxy is not awaited");
        }
        Err(failed)
    }

    fn failed(&self, reason: &str) -> Error {
        let reason = room::first([self.work.as_path()], reason.to_owned());
        failure(self.kind, &self.name, &self.work, self.stage.clone(), &reason)
    }
}

fn failure(kind: Kind, name: &ContainerName, work: &Path, stage: String, reason: &str) -> Error {
    let said = std::fs::read_to_string(work.join(runc_log(kind))).map(|text| last_lines(&text));
    let reason = match said {
        Ok(said) if !said.is_empty() => format!("{reason}; runc says: {said}"),
        _ => reason.to_owned(),
    };
    let criu_log = criu_complaints(&work.join(kind.log_file()));
    Error::Operation {
        operation: kind.subcommand(),
        container: name.to_string(),
        stage,
        reason,
        criu_log,
    }
}

/// The last errors in a log of CRIU, or else its last warnings.
fn criu_complaints(log: &Path) -> Vec<String> {
    const MOST: usize = 8;
    let text = std::fs::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    for level in ["Error", "Warn"] {
        let lines: Vec<_> = text.lines().filter(|line| line.contains(level)).collect();
        if !lines.is_empty() {
            return lines[lines.len().saturating_sub(MOST)..]
                .iter()
                .map(|line| line.trim().to_owned())
                .collect();
        }
    }
    Vec::new()
}

fn runc_log(kind: Kind) -> String {
    format!("runc-{}.log", kind.subcommand())
}

/// A fresh, short path for a gate: a Unix socket's address holds 107 bytes (`man 7 unix`).
fn gate_path(state: &Path) -> Result<PathBuf, Error> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let gates = state.join("gates");
    make_dir(&gates)?;
    Ok(gates.join(format!(
        "{}.{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )))
}

struct Unlink<'a>(&'a Path);

impl Drop for Unlink<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.0.display(), %error, "a gate could not be removed");
        }
    }
}

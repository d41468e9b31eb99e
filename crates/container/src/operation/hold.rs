//! How the tasks of a dump are held still: by their cgroup's freezer, and no longer by CRIU alone.
//!
//! CRIU holds them by ptrace, and whoever kills it lets them run. From [`Operation::freeze`] on they are still whatever happens
//! to CRIU, the proxy, runc and the agent. Who may thaw them depends on how far the decision is:
//!
//! | | the agent or the proxy is lost | CRIU is lost |
//! | --- | --- | --- |
//! | frozen | the other one thaws them | the proxy thaws them, or the agent |
//! | held: the destination may have been asked | nobody does, but an agent that knows the decision | the same |
//!
//! Where both are lost before it was held, nobody is left who could: the next agent does it ([`Tasks`](crate::Tasks)).

use std::io;

use crate::blocking::blocking;
use crate::cgroup::{Cgroup, LIMIT};
use crate::error::Error;
use crate::gate::Order;
use crate::host::Host;
use crate::name::ContainerName;
use crate::tcp_repair;

use super::Operation;

/// The cgroup of a container that runs.
pub(super) fn cgroup_of(host: &Host, name: &ContainerName) -> Result<Cgroup, Error> {
    let found = Cgroup::of_container(&host.runc().state_file(name));
    let found = found.and_then(|cgroup| {
        cgroup.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "runc does not know the container"))
    });
    found.map_err(|source| tasks_error("find", name, source))
}

/// Lets tasks go on with their connections, if there is a cgroup to thaw. CRIU is gone.
pub(super) async fn thaw(name: &ContainerName, cgroup: Option<Cgroup>) -> Result<(), Error> {
    let Some(cgroup) = cgroup else { return Ok(()) };
    let thawed = blocking(move || go_on(&cgroup)).await;
    thawed.map_err(|source| tasks_error("thaw", name, source))
}

/// Lets the tasks of a dump go on, with their connections. CRIU is gone.
pub(crate) fn go_on(cgroup: &Cgroup) -> io::Result<()> {
    let repaired = tcp_repair::end(cgroup);
    // With a connection that is lost they run all the same.
    cgroup.thaw(LIMIT)?;
    if repaired? > 0 {
        tracing::info!(
            cgroup = %cgroup.path().display(),
            "CRIU was lost in the middle of TCP connections; they are out of its repair mode"
        );
    }
    Ok(())
}

/// Kills tasks, if there is a cgroup to kill.
pub(crate) async fn kill(name: &ContainerName, cgroup: Option<Cgroup>) -> Result<(), Error> {
    let Some(cgroup) = cgroup else { return Ok(()) };
    let killed = blocking(move || cgroup.kill(LIMIT)).await;
    killed.map_err(|source| tasks_error("kill", name, source))
}

impl Operation {
    /// Where the tasks of a dump are.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// Freezes the tasks, which CRIU holds at its decision. If CRIU has let go of one of them by then, it may have run on since
    /// it was written down, and the dump is worth nothing: an error.
    pub async fn freeze(&mut self) -> Result<(), Error> {
        let Some(cgroup) = self.cgroup.clone().filter(|_| !self.is_frozen) else {
            return Ok(());
        };
        let frozen = blocking(move || {
            cgroup.freeze(LIMIT)?;
            are_traced(&cgroup)
        });
        if let Err(error) = frozen.await {
            // It thaws them, too.
            return Err(self.fail(&format!("the tasks cannot be held: {error}")).await);
        }
        self.is_frozen = true;
        self.timings.push("frozen", crate::gate::monotonic_now());
        Ok(())
    }

    /// From now on neither dropping this nor the end of any process lets the tasks go on, which are frozen for that.
    pub async fn hold(&mut self) -> Result<(), Error> {
        self.freeze().await?;
        self.send(Order::Hold).await?;
        self.stays_frozen = true;
        Ok(())
    }
}

/// Whether each task is still stopped by a tracer, that is, has been since CRIU stopped it. To be asked when they are frozen: a
/// task that was let go before shows no tracer any more.
fn are_traced(cgroup: &Cgroup) -> io::Result<()> {
    let mut seen = 0;
    for task in cgroup.tasks()? {
        let status = match std::fs::read_to_string(format!("/proc/{task}/status")) {
            // Somebody has killed it.
            Err(error) if has_ended(&error) => continue,
            status => status?,
        };
        let field = |name: &str| {
            let mut lines = status.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
        };
        if field("State").is_some_and(|state| state.starts_with(['Z', 'X'])) {
            continue;
        }
        if field("TracerPid").is_none_or(|tracer| tracer == "0") {
            return Err(io::Error::other(format!(
                "CRIU was lost before they were frozen, and task {task} may have run on since it was written down"
            )));
        }
        seen += 1;
    }
    match seen {
        0 => Err(io::Error::other("the container has ended")),
        _ => Ok(()),
    }
}

fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn tasks_error(action: &'static str, name: &ContainerName, source: io::Error) -> Error {
    Error::Tasks {
        action,
        container: name.to_string(),
        source,
    }
}

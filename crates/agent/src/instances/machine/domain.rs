//! A domain of libvirt that moves: libvirt starts it at the destination by the description of the source, and
//! owns it from the decision on.
//!
//! ```text
//!  instances/NAME/domain   the description, written at the source when it moves; it goes along
//!  criu/NAME/arriving      at the destination, as long as it is not decided that the guest runs there: which one was started
//! ```
//!
//! The domain's QEMU is counted among the tasks of the instance's container on both hosts, like the QEMU of
//! an attached machine ([`super::attached`]), and the machine is attached at the destination, too. So if an
//! undecided session kills the container's tasks, libvirt sees a domain that has ended. Only if the agent
//! died before it counted QEMU among the tasks must libvirt end the domain ([`end`]).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::fs::OFlags;
use rustix::process::Signal;
use tokio::time::Instant;
use verbatim_container::Tasks;
use verbatim_vm::{Description, Domain, Error, Machine};

use super::attached::Attached;
use crate::beneath;
use crate::instances::home::Paths;
use crate::whole;

/// Limit for libvirt to send QEMU its signal.
const DESTROY: Duration = Duration::from_secs(3);

/// Pause between two looks for the signal, which has no notification.
const LOOK: Duration = Duration::from_millis(2);

/// File of the description, in the runtime folder.
const DESCRIPTION: &str = "domain";

/// Name of the domain that was started to arrive, in the folder of CRIU's logs.
const ARRIVING: &str = "arriving";

/// Writes the description of the domain here, for the destination. Does nothing for a QEMU that is not
/// libvirt's.
pub async fn describe(machine: &Machine, paths: &Paths) -> anyhow::Result<()> {
    let Some(domain) = machine.qmp().domain() else {
        return Ok(());
    };
    let description = serde_json::to_vec(&domain.describe().await?)?;
    let path = paths.folder.join(DESCRIPTION);
    // The description may have the password of a display: only root can read the file.
    whole::write(&path, &description)
}

fn description(paths: &Paths) -> anyhow::Result<Description> {
    let file = beneath::open(&paths.folder, Path::new(DESCRIPTION), OFlags::RDONLY)?;
    let file = file.context("the domain's description has not come")?;
    serde_json::from_reader(io::BufReader::new(file)).context("the domain's description is damaged")
}

/// Has libvirt start a domain that arrives into the container of `tasks`; its QEMU waits when this returns.
/// After an error the domain may still run; [`end`] ends it.
pub async fn start(domain: &Domain, ram: u64, tasks: &Tasks, paths: &Paths) -> anyhow::Result<Arc<Machine>> {
    let description = description(paths)?;
    let path = paths.work.join(ARRIVING);
    whole::write_json(&path, domain)?;
    match domain.start(&description).await {
        Ok(()) => {}
        Err(error @ Error::Libvirt(_)) => {
            // A domain that exists all the same is not ours.
            std::fs::remove_file(&path)?;
            return Err(error).context("libvirt does not start it");
        }
        Err(error) => return Err(error.into()),
    }
    let attached = Attached::of_domain(domain).await?;
    let machine = attached.connect().await?;
    attached.join(tasks, paths).await?;
    ensure!(
        machine.ram().bytes() == ram,
        "its RAM has {} bytes here, and {ram} at its source",
        machine.ram().bytes()
    );
    Ok(machine)
}

/// The domain that was started here for a guest that is not yet decided to run here.
fn arriving(paths: &Paths) -> anyhow::Result<Option<Domain>> {
    whole::read_json(&paths.work.join(ARRIVING), "which domain it is")
}

/// Whether such a domain was started here, or may have been.
pub fn is_arriving(paths: &Paths) -> anyhow::Result<bool> {
    Ok(arriving(paths)?.is_some())
}

/// Ends such a domain, after its tasks were killed.
pub async fn end(paths: &Paths) -> anyhow::Result<()> {
    let Some(domain) = arriving(paths)? else {
        return Ok(());
    };
    domain.end_arrival().await?;
    forget(paths)
}

/// Called once the guest is this host's, and runs if it should: libvirt keeps the domain as the source's
/// libvirt did. An error changes nothing about the guest.
pub async fn settle(paths: &Paths) {
    let settled = async {
        let Some(domain) = arriving(paths)? else {
            return Ok(());
        };
        let defined = domain.define(&description(paths)?).await;
        forget(paths)?;
        defined.context("the domain ends with its QEMU here: libvirt does not keep its definition")
    };
    if let Err(error) = settled.await {
        tracing::error!(
            error = format!("{error:#}"),
            "it is not all as it was at the source"
        );
    }
}

fn forget(paths: &Paths) -> anyhow::Result<()> {
    let path = paths.work.join(ARRIVING);
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Kills the tasks of a machine that has left. If a domain's QEMU ended without libvirt's request, libvirt
/// would report a crash, and might restart it. So libvirt is asked to destroy the domain. The tasks are
/// frozen and do not handle libvirt's signal; they are killed once the signal is pending.
pub async fn kill(tasks: &Tasks, paths: &Paths) -> anyhow::Result<()> {
    // If the note cannot be read the tasks are killed all the same.
    let attached = Attached::of(paths).ok().flatten();
    let Some((domain, pid)) = attached
        .as_ref()
        .and_then(|attached| Some((attached.domain()?, attached.pid())))
    else {
        return Ok(tasks.kill().await?);
    };
    let told = async {
        let asked = Instant::now();
        while !is_told_to_end(pid) && asked.elapsed() < DESTROY {
            tokio::time::sleep(LOOK).await;
        }
        tasks.kill().await
    };
    let (destroyed, killed) = tokio::join!(domain.destroy(), told);
    if let Err(error) = destroyed {
        tracing::warn!(%error, "libvirt was not asked to end the domain that has left: it may say that it has crashed");
    }
    Ok(killed?)
}

/// Whether a process has SIGTERM pending, or is gone.
fn is_told_to_end(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => has_pending(&status, Signal::TERM),
        Err(_) => true,
    }
}

/// [`is_told_to_end`] by the text of a process's `status`.
fn has_pending(status: &str, signal: Signal) -> bool {
    let mut sets = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    sets.any(|set| {
        u64::from_str_radix(set.trim(), 16).is_ok_and(|set| set & (1 << (signal.as_raw() - 1)) != 0)
    })
}

/// Waits until libvirt has seen the end of a domain that has left and has been killed here.
pub async fn left(paths: &Paths) {
    let left = async {
        match Attached::of(paths)?.as_ref().and_then(Attached::domain) {
            Some(domain) => Ok(domain.left().await?),
            None => anyhow::Ok(()),
        }
    };
    if let Err(error) = left.await {
        let error = format!("{error:#}");
        tracing::warn!(
            error,
            "whether libvirt has seen that its domain has left is not known"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_a_frozen_process_has_not_heard_is_found() {
        let status = |thread: &str, all: &str| {
            format!("Name:\tqemu\nSigPnd:\t{thread}\nShdPnd:\t{all}\nSigBlk:\tffffffffffffffff\n")
        };
        let none = "0000000000000000";
        assert!(!has_pending(&status(none, none), Signal::TERM));
        assert!(has_pending(&status(none, "0000000000004000"), Signal::TERM));
        assert!(has_pending(&status("0000000000004000", none), Signal::TERM));
        assert!(!has_pending(&status(none, "0000000000000100"), Signal::TERM));
        assert!(is_told_to_end(u32::MAX) && !is_told_to_end(std::process::id()));
    }
}

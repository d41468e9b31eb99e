//! A domain of libvirt's that moves: libvirt starts it at the destination, as it is described at the source, and has it from the decision on.
//!
//! ```text
//!  instances/NAME/domain   the description, written at the source when it moves; it goes along
//!  criu/NAME/arriving      at the destination, as long as it is not decided that the guest runs there: which one was started
//! ```
//!
//! Its QEMU is counted among the tasks of the instance's container on both hosts, as that of one that was attached ([`super::attached`]), and it is one at the
//! destination, too. So what an undecided session kills with the container is seen by libvirt as a domain that has ended. Only one whose agent has
//! died before it was counted must be ended by libvirt ([`end`]).

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use rustix::fs::OFlags;
use verbatim_container::Tasks;
use verbatim_vm::{Description, Domain, Error, Machine};

use super::attached::Attached;
use crate::instances::home::Paths;
use crate::memory::beneath;

/// The description, in the runtime folder.
const DESCRIPTION: &str = "domain";

/// Which one was started to arrive, in the folder of CRIU's logs.
const ARRIVING: &str = "arriving";

/// Writes down how it is here, for the destination. Does nothing for a QEMU that is not libvirt's.
pub async fn describe(machine: &Machine, paths: &Paths) -> anyhow::Result<()> {
    let Some(domain) = machine.qmp().domain() else {
        return Ok(());
    };
    let description = serde_json::to_vec(&domain.describe().await?)?;
    let path = paths.folder.join(DESCRIPTION);
    let written = std::fs::write(&path, description).and_then(|()| {
        // A password of a display may be in it.
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))
    });
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn description(paths: &Paths) -> anyhow::Result<Description> {
    let file = beneath::open(&paths.folder, Path::new(DESCRIPTION), OFlags::RDONLY)?;
    let file = file.context("the domain's description has not come")?;
    serde_json::from_reader(io::BufReader::new(file)).context("the domain's description is damaged")
}

/// Has libvirt start one that arrives, whose container has `tasks`; its QEMU waits when this returns. After an error there may be one still, which [`end`]
/// ends.
pub async fn start(domain: &Domain, ram: u64, tasks: &Tasks, paths: &Paths) -> anyhow::Result<Arc<Machine>> {
    let description = description(paths)?;
    let path = paths.work.join(ARRIVING);
    std::fs::write(&path, serde_json::to_vec(domain)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    match domain.start(&description).await {
        Ok(()) => {}
        Err(error @ Error::Libvirt(_)) => {
            // What there may be is not ours.
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

/// The one that was started here, and of which it is not decided that its guest runs here.
fn arriving(paths: &Paths) -> anyhow::Result<Option<Domain>> {
    let path = paths.work.join(ARRIVING);
    match std::fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text
            .and_then(|text| Ok(serde_json::from_slice(&text)?))
            .map(Some)
            .with_context(|| format!("{} does not say which domain it is", path.display())),
    }
}

/// Whether there is such a one, or may be.
pub fn is_arriving(paths: &Paths) -> anyhow::Result<bool> {
    Ok(arriving(paths)?.is_some())
}

/// Ends such a one, after its tasks were killed.
pub async fn end(paths: &Paths) -> anyhow::Result<()> {
    let Some(domain) = arriving(paths)? else {
        return Ok(());
    };
    domain.end_arrival().await?;
    forget(paths)
}

/// Its guest is this host's, and runs if it is to: libvirt has it as the source's did. An error changes nothing about that.
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

/// It has left, and its QEMU is killed here: returns when libvirt has seen that.
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

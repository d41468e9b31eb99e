//! QEMU in its container, and the agent's requests to it.
//!
//! Files in the runtime folder are never opened by their path: a guest that has taken over its QEMU can put
//! links there.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{Mode, OFlags};
use verbatim_container::TAP;
use verbatim_vm::{Carried, Error, Machine, Qmp, Ram};

use super::attached::Attached;
use super::guest::Guest;
use super::{QMP, RAM, fits, locks, standing};
use crate::agent::Shared;
use crate::beneath;
use crate::instances::Instance;
use crate::instances::home::Paths;
use crate::instances::record::Record;
use crate::instances::start;
use crate::instances::storage::{images, servers};

/// Connects to the QEMU of an instance. QEMU serves one connection at a time, so no other may be open.
pub async fn connect(paths: &Paths, init_pid: i32) -> anyhow::Result<Arc<Machine>> {
    if let Some(attached) = Attached::of(paths)? {
        return attached.connect().await;
    }
    let folder = &paths.folder;
    let ram = ram(paths)?;
    let root = beneath::folder(folder)?;
    let machine = Machine::started(init_pid.unsigned_abs(), ram, || {
        let socket = beneath::open_any(&root, Path::new(QMP), OFlags::PATH, Mode::empty());
        async move {
            let socket = socket.map_err(|errno| Error::io("open QEMU's QMP socket")(errno.into()))?;
            Qmp::connect(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd()))).await
        }
    });
    match machine.await {
        Ok(machine) => Ok(Arc::new(machine)),
        Err(Error::Gone) => bail!("QEMU has ended: {}", last_words(folder)),
        Err(error) => Err(error.into()),
    }
}

/// The guest's RAM, if it is a file of the runtime folder.
pub fn ram(paths: &Paths) -> anyhow::Result<Ram> {
    let path = paths.folder.join(RAM);
    let file = beneath::open(&paths.folder, Path::new(RAM), OFlags::RDWR)?;
    let file = file.with_context(|| format!("{} is not the guest's RAM any more", path.display()))?;
    Ok(Ram::of(file, &path)?)
}

/// Findings on a virtual machine that is to move.
#[derive(Debug, Default)]
pub struct LookedAt {
    /// All obstacles.
    pub blockers: Vec<String>,
    /// Notes for an operator.
    pub notes: Vec<String>,
    /// Its needs at the next host.
    pub needs: String,
    /// Its present state, if that can be carried over.
    pub carried: Option<Carried>,
}

/// Looks at the QEMU of an instance.
pub async fn looked_at(agent: &Shared, instance: &Instance) -> LookedAt {
    let paths = &instance.home.paths;
    let only = |why: String| LookedAt {
        blockers: vec![why],
        ..LookedAt::default()
    };
    if let Some(why) = standing::why(paths) {
        return only(format!("its guest stands still here: {why}"));
    }
    let machine = match connect(paths, instance.init_pid()).await {
        Ok(machine) => machine,
        Err(error) => return only(format!("{error:#}")),
    };
    let reasons = |error| match error {
        Error::Unmovable(reasons) => reasons,
        error => vec![error.to_string()],
    };
    let mut found = LookedAt {
        blockers: machine.may_move().await.err().map(reasons).unwrap_or_default(),
        ..LookedAt::default()
    };
    // The locks that QEMU was to have count as well, and not only its present ones.
    match locks::obstacles(paths, &machine) {
        Ok(taken) => {
            let unsaid = taken.into_iter().filter(|why| !found.blockers.contains(why));
            let unsaid: Vec<_> = unsaid.collect();
            found.blockers.extend(unsaid);
        }
        Err(error) => found
            .blockers
            .push(format!("locks on its images cannot be looked up: {error:#}")),
    }
    match machine.status().await {
        Ok(status) if status.running => {
            found.notes = locks::unprotected(paths, &machine).unwrap_or_else(|error| {
                vec![format!("its images may not be locked against others: {error:#}")]
            });
        }
        _ => {}
    }
    let record = &instance.home.record;
    let mut reached = Vec::new();
    match carried(&machine, record).await {
        Ok(carried) => {
            let disks = servers::of(machine.pid(), &carried.remotes).await;
            found.blockers.extend(disks.blockers);
            found.notes.extend(disks.notes);
            reached = disks.reached;
            found.carried = Some(carried);
        }
        Err(error) => {
            let unsaid = reasons(error).into_iter();
            let unsaid: Vec<_> = unsaid.filter(|why| !found.blockers.contains(why)).collect();
            found.blockers.extend(unsaid);
        }
    }
    if let Some(guest) = &record.machine {
        match fits::needs(agent, guest, &machine, &reached).await {
            Ok(needs) => found.needs = needs,
            Err(error) => found
                .blockers
                .push(format!("its processor is not known: {error:#}")),
        }
    }
    found
}

/// Present state of the machine, for its next host. The error names the parts that cannot be carried over.
pub async fn carried(machine: &Machine, record: &Record) -> Result<Carried, Error> {
    let arguments = match &record.machine {
        Some(Guest::Qemu(arguments)) => Some(arguments),
        _ => None,
    };
    let carried = machine.carried(arguments, TAP).await?;
    let hidden = images::hidden(machine.pid(), &carried.files);
    match hidden.is_empty() {
        true => Ok(carried),
        false => Err(Error::Unmovable(hidden)),
    }
}

/// QEMU's last output lines, which give the reason for its end.
pub fn last_words(folder: &Path) -> String {
    let printed = start::last_output(folder).unwrap_or_default();
    verbatim_vm::last_words(&printed).unwrap_or_else(|| "it does not say why".to_owned())
}

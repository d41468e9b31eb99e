//! QEMU in its container, and what it is asked.
//!
//! Nothing in the runtime folder is gone to by its path: a guest that has taken over its QEMU can put links there.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{Mode, OFlags};
use verbatim_vm::{Error, Machine, Qmp, Ram};

use super::attached::Attached;
use super::{QMP, RAM};
use super::{domain, leaving};
use crate::instances::Instance;
use crate::instances::home::Paths;
use crate::instances::start;
use crate::memory::beneath;

/// Connects to the QEMU of an instance, of which nobody else has a connection: it serves one.
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

/// Its RAM, where that is a file of the runtime folder.
pub fn ram(paths: &Paths) -> anyhow::Result<Ram> {
    let path = paths.folder.join(RAM);
    let file = beneath::open(&paths.folder, Path::new(RAM), OFlags::RDWR)?;
    let file = file.with_context(|| format!("{} is not the guest's RAM any more", path.display()))?;
    Ok(Ram::of(file, &path)?)
}

/// What stands in the way of moving it, all of it.
pub async fn blockers(instance: &Instance) -> Vec<String> {
    let machine = match connect(&instance.home.paths, instance.init_pid()).await {
        Ok(machine) => machine,
        Err(error) => return vec![format!("{error:#}")],
    };
    match machine.may_move().await {
        Ok(()) => Vec::new(),
        Err(Error::Unmovable(reasons)) => reasons,
        Err(error) => vec![error.to_string()],
    }
}

/// The guest is this host's, and the session's agent may have ended before it told QEMU to let it run.
pub async fn make_run(paths: &Paths, init_pid: i32) -> anyhow::Result<()> {
    if leaving::ran(paths)? == Some(true) {
        let machine = connect(paths, init_pid).await?;
        if !machine.status().await?.running {
            machine.go_on().await?;
            machine.announce().await?;
        }
    }
    domain::settle(paths).await;
    leaving::forget(paths)
}

/// The last line that QEMU has printed.
pub fn last_words(folder: &Path) -> String {
    start::last_line(folder).unwrap_or_else(|| "it does not say why".to_owned())
}

//! A virtual machine that leaves: the counterpart of a checkpoint.
//!
//! ```text
//!  Leaving::begin ─ track ─ (rounds of the RAM) ─ leave ─► Stopped ─ stopped ─ (last round) ─ hand_over ─┬─ commit: QEMU is killed
//!    (guest runs)                                                    (guest stands still)                └─ abort:  the guest goes on
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use verbatim_container::{ContainerName, Host, Runc, Tasks};
use verbatim_vm::{Carried, Machine, Outgoing, Rounds};

use super::guest::Guest;
use super::qemu::{carried, connect};
use super::{domain, fits, locks, settings, standing};
use crate::agent::Shared;
use crate::instances::home::Paths;
use crate::instances::storage::servers::{self, Reached};
use crate::instances::{Instance, State};
use crate::whole;

/// File of the devices' state, in the folder of images.
pub const DEVICES: &str = "devices";

/// File that notes whether the guest ran, in the folder of images and in that of CRIU's logs.
pub(super) const RAN: &str = "ran";

/// Pause before QEMU is asked again that has not let its guest go on: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A machine that leaves, with a running guest.
#[derive(Debug)]
pub struct Leaving {
    machine: Arc<Machine>,
    /// State of the machine when the destination was asked to take it.
    pub carried: Carried,
    /// The servers of its disks.
    servers: Vec<Reached>,
    /// Rounds of its RAM; lent to the round in progress.
    pub rounds: Option<Rounds>,
}

impl Leaving {
    /// An error if it cannot be moved.
    pub async fn begin(instance: &Instance) -> anyhow::Result<Self> {
        let paths = &instance.home.paths;
        standing::may_have_been_mended(paths, instance.init_pid()).await?;
        if ran(paths)?.is_some() {
            bail!(
                "QEMU has not let the guest go on yet after the last attempt to move it; it is asked again until it does: try again then"
            );
        }
        // Finishes the return from the last move, if necessary.
        take_back_once(instance).await?;
        let machine = connect(paths, instance.init_pid()).await?;
        machine.may_move().await?;
        locks::may_leave(paths, &machine)?;
        let carried = carried(&machine, &instance.home.record).await?;
        let disks = servers::of(machine.pid(), &carried.remotes).await;
        if let Some(why) = disks.blockers.first() {
            bail!("{why}");
        }
        Ok(Self {
            machine,
            carried,
            servers: disks.reached,
            rounds: None,
        })
    }

    /// Its needs at the next host, as they are sent.
    pub async fn needs(&self, agent: &Shared, guest: &Guest) -> anyhow::Result<String> {
        let needs = fits::needs(agent, guest, &self.machine, &self.servers).await;
        needs.context("its processor is not known")
    }

    /// Writes the destination's data on the machine to the runtime folder.
    pub async fn describe(&self, instance: &Instance) -> anyhow::Result<()> {
        domain::describe(&self.machine, &instance.home.paths).await
    }

    /// Tracks writes to the RAM from now on.
    pub async fn track(&mut self) -> anyhow::Result<()> {
        let machine = Arc::clone(&self.machine);
        let begun = tokio::task::spawn_blocking(move || Rounds::begin(machine.ram(), machine.pid()));
        self.rounds = Some(begun.await.context("tracking the RAM panicked")??);
        Ok(())
    }

    /// Has QEMU send the state of the devices to the folder of images. The guest runs until [`Stopped::stopped`].
    pub async fn leave(&self, host: &Host, instance: &Instance) -> anyhow::Result<Stopped> {
        let paths = &instance.home.paths;
        if !carried(&self.machine, &instance.home.record)
            .await?
            .is(&self.carried)
        {
            bail!("its disks or devices were changed while it was being moved: try again");
        }
        let runs = self.machine.status().await?.running;
        let noted = self.machine.settings().await?;
        // Noted before any request to QEMU, so that a later agent knows the state from before.
        settings::note(paths, &noted)?;
        note_ran(paths, runs)?;
        let (outgoing, stream) = self.machine.leave_from(noted).await?;
        let name = &instance.home.record.name;
        Ok(Stopped {
            machine: Arc::clone(&self.machine),
            carried: self.carried.clone(),
            outgoing,
            state: Some(tokio::spawn(save(stream, paths.images.join(DEVICES)))),
            tasks: Tasks::of(host, name, &paths.work),
            runc: host.runc().clone(),
            name: name.clone(),
            paths: paths.clone(),
        })
    }
}

/// A machine that leaves, with a guest that is stopping or stands still.
#[derive(Debug)]
pub struct Stopped {
    machine: Arc<Machine>,
    carried: Carried,
    outgoing: Outgoing,
    /// Task that writes the devices' state to its file.
    state: Option<JoinHandle<io::Result<()>>>,
    tasks: Tasks,
    runc: Runc,
    name: ContainerName,
    paths: Paths,
}

impl Stopped {
    /// Waits until the guest stands still and its disks are quiet. The RAM does not change from then on.
    pub async fn stopped(&mut self) -> anyhow::Result<()> {
        self.outgoing.stopped().await?;
        Ok(self.machine.has_still(&self.carried).await?)
    }

    /// Waits until the state of the devices is in its file. An error if another QEMU could not use the
    /// guest's images.
    pub async fn hand_over(&mut self) -> anyhow::Result<()> {
        self.outgoing.hand_over().await?;
        locks::looked_at(|| Ok(self.outgoing.has_let_go()?)).await?;
        locks::send(&self.paths, self.outgoing.held())?;
        let state = self
            .state
            .take()
            .context("the devices' state is written already")?;
        let saved = state.await.context("writing the devices' state panicked")?;
        let path = self.paths.images.join(DEVICES);
        whole::explained(&path, saved).context("the devices' state cannot be written")
    }

    /// Freezes QEMU, too, so that it stands still even if this agent dies.
    pub async fn freeze(&mut self) -> anyhow::Result<()> {
        Ok(self.tasks.freeze().await?)
    }

    /// File that a later agent finds.
    pub fn held_path(&self) -> PathBuf {
        self.paths.work.join(RAN)
    }

    /// Kills QEMU, which does nothing any more; returns when runc has forgotten the container.
    pub async fn commit(self) -> anyhow::Result<()> {
        domain::kill(&self.tasks, &self.paths).await?;
        domain::left(&self.paths).await;
        Ok(self.runc.delete(&self.name, true).await?)
    }

    /// Lets the guest go on as if nothing had happened, if it ran.
    pub async fn abort(self) -> anyhow::Result<()> {
        self.tasks.thaw().await?;
        // This also puts QEMU's settings back.
        let (paths, machine) = (&self.paths, self.machine);
        self.outgoing.take_back().await?;
        settings::put_back(paths, &machine).await?;
        forget_ran(paths)
    }
}

async fn save(mut stream: UnixStream, path: PathBuf) -> io::Result<()> {
    let mut file = tokio::fs::File::create(path).await?;
    tokio::io::copy(&mut stream, &mut file).await?;
    // The last write is still in flight on another thread.
    tokio::io::AsyncWriteExt::flush(&mut file).await
}

/// Notes for this host and for the destination whether the guest runs. After an error neither note is there:
/// QEMU was not asked for anything yet, and the next move is not hindered.
fn note_ran(paths: &Paths, runs: bool) -> anyhow::Result<()> {
    for folder in [&paths.work, &paths.images] {
        if let Err(error) = whole::write_json(&folder.join(RAN), &runs) {
            forget_ran(paths)?;
            return Err(error);
        }
    }
    Ok(())
}

/// Whether the guest ran before it was to leave here, or at its last host. `None`: nothing is to be asked of
/// QEMU.
pub(super) fn ran(paths: &Paths) -> anyhow::Result<Option<bool>> {
    let path = paths.work.join(RAN);
    match std::fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // An agent of an earlier release, which did not write atomically, left this when there was no room.
        // It had not asked QEMU for anything then.
        Ok(text) if serde_json::from_slice::<bool>(&text).is_err() => {
            tracing::warn!(path = %path.display(), "what a move that came to nothing has half written is removed");
            forget_ran(paths)?;
            Ok(None)
        }
        text => read_ran(&path, text).map(Some),
    }
}

pub(super) fn read_ran(path: &Path, text: io::Result<Vec<u8>>) -> anyhow::Result<bool> {
    let ran = text.and_then(|text| Ok(serde_json::from_slice(&text)?));
    ran.with_context(|| format!("{} does not say whether the guest ran", path.display()))
}

/// Removes the note: the guest is as it was before the move, and the next move makes its own.
pub(super) fn forget_ran(paths: &Paths) -> anyhow::Result<()> {
    whole::remove(&paths.work.join(RAN))
}

/// Repeats [`Stopped::abort`] where it failed, or the agent died in it: QEMU is asked again until it lets the
/// guest go on, or ends. Its tasks are not frozen any more. Returns after the first request.
pub async fn take_back(instance: &Arc<Instance>) {
    let paths = &instance.home.paths;
    if standing::why(paths).is_some() {
        // The decision made the guest this host's.
        return standing::make_run(paths, instance.init_pid()).await;
    }
    match take_back_once(instance).await {
        Ok(()) => {}
        Err(error) => {
            tracing::error!(
                instance = instance.name(),
                error = format!("{error:#}"),
                "QEMU does not let the guest go on; it is asked again until it does"
            );
            tokio::spawn(take_back_later(Arc::clone(instance)));
        }
    }
}

async fn take_back_later(instance: Arc<Instance>) {
    let mut state = instance.watch();
    let ended = state.wait_for(|state| !matches!(state, State::Running | State::Moving));
    let asked = async {
        let mut pause = AGAIN.0;
        loop {
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(AGAIN.1);
            match take_back_once(&instance).await {
                Ok(()) => break,
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::debug!(
                        instance = instance.name(),
                        error,
                        "QEMU does not let the guest go on yet"
                    );
                }
            }
        }
    };
    tokio::select! {
        () = asked => tracing::info!(instance = instance.name(), "the guest goes on"),
        _ = ended => {}
    }
}

async fn take_back_once(instance: &Instance) -> anyhow::Result<()> {
    let paths = &instance.home.paths;
    let ran = ran(paths)?;
    if ran.is_none() && settings::noted(paths)?.is_none() {
        return Ok(());
    }
    let machine = connect(paths, instance.init_pid()).await?;
    if let Some(ran) = ran {
        machine.take_back(ran, None).await?;
    }
    settings::put_back(paths, &machine).await?;
    forget_ran(paths)
}

/// Takes QEMU back from an earlier attempt to move it, if necessary; an error if that fails.
pub async fn must_be_taken_back(instance: &Instance) -> anyhow::Result<()> {
    let paths = &instance.home.paths;
    standing::may_have_been_mended(paths, instance.init_pid()).await?;
    take_back_once(instance)
        .await
        .context("QEMU is not yet as it was before the last attempt to move it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_could_not_be_written_stands_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path(), "web");
        std::fs::create_dir_all(&paths.work).unwrap();
        // The images' folder does not exist, which fails like a full one.
        assert!(note_ran(&paths, true).is_err());
        assert_eq!(ran(&paths).unwrap(), None);
        // As agents of earlier releases left it when there was no room.
        std::fs::write(paths.work.join(RAN), b"").unwrap();
        assert_eq!(ran(&paths).unwrap(), None);
        assert!(!paths.work.join(RAN).exists());
        std::fs::create_dir_all(&paths.images).unwrap();
        note_ran(&paths, false).unwrap();
        assert_eq!(ran(&paths).unwrap(), Some(false));
    }
}

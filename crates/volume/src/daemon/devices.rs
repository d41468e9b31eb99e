//! Volumes as block devices of this machine: made, found again, handed over, and let go.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio::time::timeout_at;
use verbatim_mirror::decision::Role;

use super::orders::is_free;
use super::{Daemon, Entry, State};
use crate::device::{self, Device, Label, Left, Places, Wanted};
use crate::faults::{Fault, Point};
use crate::store::{pages, trust};

/// Limit for a daemon that ends to answer the requests that it has taken, for all devices together.
const ANSWERS: Duration = Duration::from_secs(30);

/// Limit for a daemon that ends to wait for flushes, for all volumes together.
const FLUSHES: Duration = Duration::from_secs(10);

/// Limit for a daemon that ends to wait for orders in progress, for all volumes together; and the same if no
/// other daemon follows.
const BUSY: Duration = Duration::from_secs(3);
const BUSY_FOR_GOOD: Duration = Duration::from_secs(10);

impl Daemon {
    fn hands_over(&self) -> bool {
        self.hands_over.load(Ordering::SeqCst)
    }

    fn places(&self, name: &str) -> Places {
        Places::new(&self.config.runtime_dir, name)
    }

    /// Makes the volume a block device, unless it is one.
    pub(super) fn make_device(
        &self,
        entry: &Entry,
        state: &mut State,
        read_only: bool,
        holder: Option<&str>,
    ) -> anyhow::Result<()> {
        self.find_device(entry, state)?;
        let (None, Some(volume)) = (&state.device, &state.volume) else {
            return Ok(());
        };
        ensure!(!self.hands_over(), "this daemon ends: ask the next one");
        let places = self.places(&entry.name);
        // Places of a lost device. A caller that asks for another device has seen that the first is gone.
        places.clear();
        let label = Label {
            volume: state.volume_id(),
            data: state.noted.as_ref().map(|noted| noted.identity.clone()),
            path: Default::default(),
            read_only,
            holder: holder.map(str::to_owned),
            resends: false,
        };
        let wanted = Wanted {
            places: &places,
            label,
            may_resend: (self.config.hook)(Point::Device) != Fault::NoResend,
        };
        state.device = Some(tokio::task::block_in_place(|| Device::new(volume, wanted))?);
        state.lost_device = None;
        Ok(())
    }

    /// A copy that waits for its session keeps the device that an instance was lent here: the device goes on,
    /// too.
    pub(super) fn find_promised_device(&self, entry: &Entry, state: &mut State) -> anyhow::Result<()> {
        let promised = state
            .sidecar
            .as_ref()
            .filter(|here| matches!(here.role, Role::Ready { .. }));
        match promised.map(|sidecar| sidecar.length) {
            Some(length) if self.places(&entry.name).is_any() => {
                self.open(entry, state, length)?;
                self.find_device(entry, state)
            }
            _ => Ok(()),
        }
    }

    /// Takes over the device that an earlier daemon has made, if it is this volume's and the volume is
    /// served.
    pub(super) fn find_device(&self, entry: &Entry, state: &mut State) -> anyhow::Result<()> {
        let (None, Some(volume)) = (&state.device, &state.volume) else {
            return Ok(());
        };
        let places = self.places(&entry.name);
        match tokio::task::block_in_place(|| places.find())? {
            Left::Nothing => {}
            Left::Lost(label) => state.is_lost(entry, label.as_ref()),
            // It is the next one's. Were it taken up now, this process would end with requests that it has read.
            Left::Kept(_) if self.hands_over() => {}
            Left::Kept(found) => {
                let data = state.noted.as_ref().map(|noted| &noted.identity);
                if let Some(why) = found.label.differs(&state.volume_id(), data) {
                    drop(found);
                    self.end_device(entry, state, why);
                    return Ok(());
                }
                let path = found.label.path.clone();
                let holder = found.label.holder.clone();
                let device = tokio::task::block_in_place(|| Device::go_on(volume, &places, found));
                let device =
                    device.with_context(|| format!("{} waits, and does not go on", path.display()))?;
                (state.device, state.lost_device) = (Some(device), None);
                state.holder = holder.or(state.holder.take());
            }
        }
        Ok(())
    }

    /// An error while something on this machine uses the volume's device, also if the device waits to be
    /// served.
    pub(super) fn is_free(&self, entry: &Entry, state: &State) -> anyhow::Result<()> {
        match &state.device {
            Some(_) => is_free(entry, state),
            None => tokio::task::block_in_place(|| waits_for_nobody(&self.places(&entry.name), &entry.name)),
        }
    }

    /// Lets go of a device that waits, if it belongs to this instance.
    pub(super) fn end_waiting_device(&self, entry: &Entry, state: &mut State, holder: Option<&str>) {
        if state.device.is_some() {
            return;
        }
        let is_its = tokio::task::block_in_place(
            || matches!(self.places(&entry.name).find(), Ok(Left::Kept(found)) if found.label.holder.as_deref() == holder),
        );
        if is_its {
            self.end_device(entry, state, "");
        }
    }

    /// Lets go of its device, whether this daemon or an earlier one made it. `why`: the reason why there
    /// should be none.
    pub(super) fn end_device(&self, entry: &Entry, state: &mut State, why: &str) {
        let places = self.places(&entry.name);
        state.lost_device = None;
        tokio::task::block_in_place(|| {
            if let Some(device) = state.device.take() {
                device.let_go();
            } else if let Ok(Left::Kept(found)) = places.find() {
                if !why.is_empty() {
                    tracing::error!(
                        "{} was the block device of {}, and is not any more, since {why}: whoever uses it gets errors",
                        found.label.path.display(),
                        entry.name
                    );
                }
                found.keeper.end();
            }
            places.clear();
        });
    }

    /// The same for a copy that does not serve, if an earlier daemon left it a device.
    pub(super) fn end_strange_device(&self, entry: &Entry, state: &mut State) {
        if state.device.is_some() || !self.places(&entry.name).is_any() {
            return;
        }
        let why = match state.sidecar.as_ref().map(|sidecar| &sidecar.role) {
            Some(Role::Moved { to }) => format!("the volume has moved to {to}"),
            Some(Role::Incoming { from, .. }) => format!("the volume is being filled from {from}"),
            Some(_) => "the copy here was not filled to the end".to_owned(),
            None => "there is no such volume any more".to_owned(),
        };
        // The volumes' folder may have been replaced, or may not be mounted: users of the device wait, and
        // lose nothing.
        if state.sidecar.is_none()
            && let Err(error) = self.is_free(entry, state)
        {
            return tracing::error!(
                "{why}, and {error:#}: put the volume's folder back and start the daemon again, or let go of the device by `verbatim volume stop --force`"
            );
        }
        self.end_device(entry, state, &why);
    }

    /// The same for devices without a volume.
    pub(super) async fn end_strange_devices(&self) {
        for name in Places::names(&self.config.runtime_dir) {
            let is_known = self.entries.lock().await.contains_key(&name);
            if !is_known && let Ok(entry) = self.entry(&name).await {
                self.end_strange_device(&entry, &mut *entry.state.lock().await);
            }
        }
    }

    /// This process ends, and another one follows: no device takes requests any more, and requests that were
    /// taken are answered.
    pub(super) async fn hand_over(&self) {
        // Whoever has a lock now and looks for a device there is waited for; whoever comes later finds none.
        self.hands_over.store(true, Ordering::SeqCst);
        let mut stopped = Vec::new();
        let entries: Vec<_> = self.entries.lock().await.values().cloned().collect();
        let patience = tokio::time::Instant::now() + BUSY;
        for entry in entries {
            let Ok(mut state) = timeout_at(patience, entry.state.lock()).await else {
                tracing::warn!(
                    "something is being done with {}, and is cut off: what its device was asked, the next daemon is asked",
                    entry.name
                );
                continue;
            };
            if let Some(device) = state.device.take() {
                device.stop();
                stopped.push((entry.name.clone(), device));
            }
        }
        let end = Instant::now() + ANSWERS;
        tokio::task::block_in_place(|| {
            for (name, device) in stopped {
                // The keeper belongs to this process until the process has ended: no task of this process may
                // find the device again, and carry out requests in flight a second time.
                let device = ManuallyDrop::new(device);
                let left = device.idle(end);
                if left > 0 {
                    tracing::error!(
                        "{left} requests to {name} have not come back from the disk in {} s: the next daemon is asked for them, or they fail where the kernel \
                         is older than 6.9",
                        ANSWERS.as_secs()
                    );
                }
            }
        });
    }

    /// This process ends: flushes in flight come to their end, and no other begins, so that the next daemon finds none
    /// that was cut off.
    pub(super) async fn rest(&self) {
        let entries: Vec<_> = self.entries.lock().await.values().cloned().collect();
        let patience = tokio::time::Instant::now() + BUSY;
        let end = Instant::now() + FLUSHES;
        for entry in entries {
            if let Ok(state) = timeout_at(patience, entry.state.lock()).await
                && let Some(store) = &state.store
            {
                tokio::task::block_in_place(|| store.rest(end));
            }
        }
        if self.ends_for_good.load(Ordering::SeqCst) {
            // Also those of volumes that were not opened, and of names that are gone.
            tokio::task::block_in_place(|| pages::end_all(&self.config.runtime_dir));
        }
    }

    /// This process ends, and none follows: nothing is left of any device.
    pub(super) async fn end_devices(&self, by_force: bool) -> anyhow::Result<()> {
        let entries: Vec<_> = self.entries.lock().await.values().cloned().collect();
        let mut used = Vec::new();
        let patience = tokio::time::Instant::now() + BUSY_FOR_GOOD;
        for entry in &entries {
            // A disk that hangs holds its volume's lock forever.
            let Ok(state) = timeout_at(patience, entry.state.lock()).await else {
                bail!(is_busy(entry));
            };
            if let Err(why) = self.is_free(entry, &state) {
                used.push(format!("{why:#}"));
            }
            let suspect = state
                .store
                .as_ref()
                .filter(|store| store.is_device() && store.is_suspect());
            if suspect.is_some() {
                used.push(format!(
                    "{0} is suspect, and the pages of its device, which may be the only current data, go with the daemon: `verbatim volume migrate {0} \
                     --to HOST --rescue`, or `accept` it after a repair",
                    entry.name
                ));
            }
        }
        if !used.is_empty() && !by_force {
            bail!("{}; --force lets go of it all the same", used.join("; "));
        }
        for entry in &entries {
            let Ok(mut state) = timeout_at(patience, entry.state.lock()).await else {
                bail!(is_busy(entry));
            };
            self.end_device(entry, &mut state, "");
        }
        // Keepers of pages end last, see `rest`.
        self.ends_for_good.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn is_busy(entry: &Entry) -> String {
    format!(
        "something is being done with {}, or its disk does not answer: try again, or end the daemon by SIGTERM and give this command once more",
        entry.name
    )
}

impl State {
    fn volume_id(&self) -> String {
        let id = self.sidecar.as_ref().map(|sidecar| sidecar.id);
        id.map(String::from).unwrap_or_default()
    }

    fn is_lost(&mut self, entry: &Entry, label: Option<&Label>) {
        let path = label.map(|label| label.path.display().to_string());
        let path = path.unwrap_or_else(|| "its block device".to_owned());
        let why = format!(
            "{path} is lost, since its keeper was killed with the daemon: unmount what is on it, which gets errors, and attach {} again, or start the container again",
            entry.name
        );
        if self.lost_device.as_ref() != Some(&why) {
            tracing::error!("{}: {why}", entry.name);
            self.lost_device = Some(why);
        }
    }
}

/// Where no daemon runs: lets go of the device of this volume, if one waits.
pub fn end_waiting(runtime_dir: &Path, name: &str) {
    Places::new(runtime_dir, name).clear();
}

/// Where no daemon runs: lets go of all devices. An error if one of them is in use; then nothing is done.
pub fn end_all_waiting(runtime_dir: &Path, by_force: bool) -> anyhow::Result<usize> {
    let names = Places::names(runtime_dir);
    for name in names.iter().filter(|_| !by_force) {
        waits_for_nobody(&Places::new(runtime_dir, name), name)
            .context("nothing was done; --force lets go of it all the same")?;
    }
    let at_stake = trust::at_stake(runtime_dir);
    if !by_force && !at_stake.is_empty() {
        bail!(
            "nothing was done: the pages of devices, which may be the only current data of {}, would go; start the daemon, and give this command once more: it \
             says what can be done; --force lets go of them all the same",
            at_stake.join(", ")
        );
    }
    names.iter().for_each(|name| end_waiting(runtime_dir, name));
    pages::end_all(runtime_dir);
    Ok(names.len())
}

/// An error while something uses a device that waits for a daemon.
fn waits_for_nobody(places: &Places, name: &str) -> anyhow::Result<()> {
    if let Left::Kept(found) = places.find()?
        && let Some(user) = device::user(&found.label.path)
    {
        bail!(
            "{name} is in use as {}, {user}, which waits for a daemon",
            found.label.path.display()
        );
    }
    Ok(())
}

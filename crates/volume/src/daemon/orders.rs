//! Orders of commands.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio::sync::oneshot;
use verbatim_mirror::decision::{Role, Sidecar, VolumeId};
use verbatim_mirror::resize::{self, Lengths};
use verbatim_mirror::{Event, Extent, Failure, Standing};

use super::data::{HowMade, undo};
use super::places::has_room;
use super::{Daemon, Entry, State};
use crate::control::{Order, Outcome, Row};
use crate::device::has_sectors;
use crate::faults::Point;
use crate::folder::{Place, Settings};
use crate::store::Making;
use crate::volume::{Volume, Wanted};
use crate::words;

/// Limit for a detach to wait for requests in flight.
const CLOSE: Duration = Duration::from_secs(30);

/// Limit for a volume that grows to become idle, and the pause between two looks.
const RESIZE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_millis(1);

/// The largest volume; offsets of files are signed.
const MAX_LENGTH: u64 = 1 << 62;

impl Daemon {
    /// Carries out one order.
    pub async fn carry_out(self: &Arc<Self>, order: Order) -> anyhow::Result<Outcome> {
        match order {
            Order::List => Ok(Outcome::Volumes(self.rows().await)),
            Order::StateFolder => Ok(self.state_folder()),
            Order::Stop { force } => {
                self.end_devices(force).await?;
                Ok(Outcome::Volumes(Vec::new()))
            }
            Order::Create {
                name,
                length,
                data,
                adopt,
                preallocate,
                unnamed,
            } => {
                if let Some(data) = &data {
                    self.is_no_others(&name, data).await?;
                }
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                let how = HowMade {
                    making: if adopt { Making::Adopted } else { Making::New },
                    preallocate,
                    is_unnamed: unnamed,
                };
                self.create(&entry, &mut state, length, data, how)?;
                self.done(&entry, &state)
            }
            Order::Accept { name } => {
                let entry = self.entry(&name).await?;
                self.accept(&entry).await?;
                self.done(&entry, &*entry.state.lock().await)
            }
            Order::Place { name, data, unnamed } => {
                self.is_no_others(&name, &data).await?;
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                let place = Place {
                    data,
                    is_unnamed: unnamed,
                };
                self.place(&entry, &mut state, place)?;
                self.done(&entry, &state)
            }
            Order::Attach {
                name,
                holder: Some(holder),
                by,
                socket: Some(socket),
                read_only,
                ..
            } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.lend_socket(&entry, &mut state, holder, (socket, read_only), by)?;
                self.done(&entry, &state)
            }
            Order::Attach {
                name,
                holder: Some(holder),
                by,
                read_only,
                ..
            } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.lend(&entry, &mut state, holder, by, read_only)?;
                self.done(&entry, &state)
            }
            Order::Attach {
                name,
                device,
                vhost_user,
                ..
            } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                known(&entry, &state)?;
                serving(&entry, &state)?;
                is_nobodys(&entry, &state)?;
                if vhost_user {
                    has_whole_sectors(&entry, &state)?;
                }
                let settings = Settings {
                    attached: true,
                    vhost_user: vhost_user || state.settings.vhost_user,
                    ..state.settings.clone()
                };
                entry.folder.write_settings(&settings)?;
                state.settings = settings;
                self.note_more(&entry, &mut state, |noted| noted.used = true);
                self.serve_or_try_again(&entry, &mut state);
                if let Some(why) = &state.unserved {
                    bail!("{name} cannot be served now: {why}; it will be when that ends");
                }
                if device {
                    self.make_device(&entry, &mut state, false, None)
                        .with_context(|| {
                            format!("{name} is attached, but cannot be a block device of this machine")
                        })?;
                }
                self.done(&entry, &state)
            }
            Order::Detach { name, holder } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                if holder.is_some() && holder != state.holder {
                    // The instance no longer has any part of it: this daemon did not lend it, or did not take
                    // it over.
                    self.end_waiting_device(&entry, &mut state, holder.as_deref());
                    return self.done(&entry, &state);
                }
                known(&entry, &state)?;
                self.is_free(&entry, &state)?;
                if holder.is_none() && state.lent.is_some() {
                    is_nobodys(&entry, &state)?;
                }
                if state
                    .volume
                    .as_ref()
                    .is_some_and(|volume| volume.migration().is_some())
                {
                    bail!("{name} is being moved; `verbatim volume cancel {name}` ends that");
                }
                let settings = Settings {
                    attached: false,
                    vhost_user: false,
                    ..state.settings.clone()
                };
                entry.folder.write_settings(&settings)?;
                state.settings = settings;
                if holder.is_some() {
                    self.note_more(&entry, &mut state, |noted| noted.used = true);
                }
                self.close(&entry, &mut state).await?;
                self.serve_or_try_again(&entry, &mut state);
                self.done(&entry, &state)
            }
            Order::Sync { name } => {
                let entry = self.entry(&name).await?;
                let volume = entry.state.lock().await.volume.clone();
                if let Some(volume) = volume {
                    flush(&volume)
                        .await
                        .with_context(|| format!("{name} cannot be flushed"))?;
                }
                self.done(&entry, &*entry.state.lock().await)
            }
            Order::Resize { name, length } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.resize(&entry, &mut state, length).await?;
                self.done(&entry, &state)
            }
            Order::Delete { name, force } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.delete(&entry, &mut state, force).await?;
                Ok(Outcome::Volumes(Vec::new()))
            }
            Order::Migrate {
                name,
                to,
                bytes_per_second,
                transport,
                rescue,
            } => {
                let entry = self.entry(&name).await?;
                {
                    // A file system on the device would lose its disk at the end of the move.
                    let mut state = entry.state.lock().await;
                    self.is_free(&entry, &state)?;
                    is_nobodys(&entry, &state)?;
                    self.may_move(&entry, &state, rescue)?;
                    self.end_device(&entry, &mut state, "");
                }
                // The move goes on if the command is ended.
                let daemon = self.clone();
                let moving = tokio::spawn(async move {
                    daemon
                        .migrate(&entry, to, (bytes_per_second, transport), rescue)
                        .await
                });
                Ok(Outcome::Moved(moving.await??))
            }
            Order::Check { name, to } => {
                let entry = self.entry(&name).await?;
                let said = self.check(&entry, &to).await?;
                let state = entry.state.lock().await;
                let row = self.row(&entry, &state).map(|row| Row {
                    trouble: said.err(),
                    ..row
                });
                Ok(Outcome::Volumes(row.into_iter().collect()))
            }
            Order::Cancel { name } => {
                let entry = self.entry(&name).await?;
                let state = entry.state.lock().await;
                let sidecar = known(&entry, &state)?;
                let Some(volume) = state
                    .volume
                    .as_ref()
                    .filter(|volume| volume.migration().is_some())
                else {
                    bail!("{name} is not being moved from here");
                };
                if !sidecar.may_serve() || volume.standing() == Standing::Held {
                    bail!("it is too late: the destination has been asked, or is about to be");
                }
                volume.event(Event::Cancel);
                self.done(&entry, &state)
            }
            Order::Resolve { name, keep, force } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.resolve_by_force(&entry, &mut state, keep, force).await?;
                self.done(&entry, &state)
            }
            Order::Revive { name, force } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.revive(&entry, &mut state, force)?;
                self.done(&entry, &state)
            }
            Order::Follow {
                name,
                to,
                by,
                bytes_per_second,
            } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.follow(&entry, &mut state, to, by, bytes_per_second)?;
                self.done(&entry, &state)
            }
            Order::Mirrored { name, by } => {
                let entry = self.entry(&name).await?;
                self.mirrored(&entry, by).await?;
                self.done(&entry, &*entry.state.lock().await)
            }
            Order::Hold { name, by } => {
                let entry = self.entry(&name).await?;
                self.hold(&entry, by).await?;
                self.done(&entry, &*entry.state.lock().await)
            }
            Order::Settle {
                name,
                by,
                is_committed,
            } => {
                let entry = self.entry(&name).await?;
                let mut state = entry.state.lock().await;
                self.settle(&entry, &mut state, by, is_committed).await?;
                let row = match self.row(&entry, &state) {
                    // A place is for a copy that is not here yet.
                    Some(row) if row.role != "placed" => row,
                    _ => self.without_copy(&entry)?,
                };
                Ok(Outcome::Volumes(vec![row]))
            }
        }
    }

    /// Which state folder this is.
    fn state_folder(&self) -> Outcome {
        Outcome::Volumes(vec![Row {
            state_folder: self.state_folder.clone(),
            ..Row::default()
        }])
    }

    /// The answer about a copy that is not here: it was, and was deleted; or the folder has never had it, and another folder may have it.
    fn without_copy(&self, entry: &Entry) -> anyhow::Result<Row> {
        let was_here = !tokio::task::block_in_place(|| entry.folder.left())?.is_empty();
        let none = format!(
            "there never was one in {}: is its file system not mounted?",
            self.config.state_dir.display()
        );
        Ok(Row {
            name: entry.name.clone(),
            role: if was_here { "gone" } else { "none" }.to_owned(),
            trouble: (!was_here).then_some(none),
            state_folder: self.state_folder.clone(),
            ..Row::default()
        })
    }

    pub(super) fn done(&self, entry: &Entry, state: &State) -> anyhow::Result<Outcome> {
        Ok(Outcome::Volumes(self.row(entry, state).into_iter().collect()))
    }

    fn create(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        length: u64,
        data: Option<std::path::PathBuf>,
        how: HowMade,
    ) -> anyhow::Result<()> {
        state.is_known(entry)?;
        if state.sidecar.is_some() || entry.folder.sidecar()?.is_some() {
            bail!("there is a volume {} already", entry.name);
        }
        if let Some(place) = &state.place {
            bail!(
                "{} is expected from another host, at {}; `verbatim volume delete {0}` ends that",
                entry.name,
                place.data.display()
            );
        }
        if !(1..=MAX_LENGTH).contains(&length) {
            bail!("a volume has between 1 and {MAX_LENGTH} bytes");
        }
        if let Some(data) = &data {
            tokio::task::block_in_place(|| has_room(data, length, how.is_unnamed))?;
        }
        entry.folder.make()?;
        let settings = Settings {
            data,
            unnamed: how.is_unnamed,
            ..Settings::default()
        };
        entry.folder.write_settings(&settings)?;
        state.settings = settings;
        let sidecar = Sidecar::new(VolumeId(rand::random()), length);
        let path = entry.folder.data(&state.settings);
        let made = self.make_data(entry, state, length, how);
        let made = made.and_then(|store| {
            // The last: without it there is no volume.
            let written = self.write(entry, state, sidecar);
            if written.is_err() && state.unknown.is_none() {
                undo(&store, &path);
            }
            written
        });
        if let Err(error) = made {
            if state.unknown.is_none() {
                *state = State::default();
            }
            return Err(error);
        }
        self.serve(entry, state)
    }

    async fn resize(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        length: u64,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let sidecar = known(entry, state)?.clone();
        serving(entry, state)?;
        if state.settings.vhost_user && !length.is_multiple_of(512) {
            bail!(
                "a disk has whole sectors of 512 bytes, and {length} bytes are not: {name} is the disk of virtual machines"
            );
        }
        if state.device.is_some() {
            has_sectors(length)?;
        }
        if length < sidecar.length || length > MAX_LENGTH {
            bail!("{name} has {} bytes; a volume only grows", sidecar.length);
        }
        let volume = state.volume.clone().context("it is not served")?;
        if volume.in_flight() > 0 || volume.migration().is_some() {
            bail!("{name} is in use or being moved; try again when it is idle");
        }
        let store = state.store.clone().context("it is not open")?;
        let mut now = Lengths {
            // The data may be longer; they are never shorter.
            data: sidecar.length,
            sidecar: sidecar.length,
            told: volume.length(),
        };
        loop {
            match resize::next(now, length) {
                resize::Step::GrowData => {
                    tokio::task::block_in_place(|| store.reach(length)).context("the data cannot grow")?;
                    now.data = length;
                }
                resize::Step::WriteSidecar => {
                    let grown = Sidecar {
                        length,
                        ..sidecar.clone()
                    };
                    self.write(entry, state, grown)?;
                    now.sidecar = length;
                    (self.config.hook)(Point::Grown);
                }
                resize::Step::Announce => {
                    self.announce(entry, &volume, length).await?;
                    now.told = length;
                }
                resize::Step::Done => break,
            }
        }
        volume.has_grown();
        match &state.device {
            Some(device) => tokio::task::block_in_place(|| device.grow(length)).with_context(|| {
                format!(
                    "{name} has {length} bytes now, but {} has not: resize it again",
                    device.path().display()
                )
            }),
            None => Ok(()),
        }
    }

    /// The engine gets the length, when no request is in flight.
    async fn announce(&self, entry: &Entry, volume: &Volume, length: u64) -> anyhow::Result<()> {
        let end = Instant::now() + RESIZE;
        while !volume.resize(length) {
            ensure!(
                Instant::now() <= end,
                "{} has {length} bytes now, but it is never idle, so that clients are not told of it: resize it \
                 again when it is, or detach and attach it",
                entry.name
            );
            tokio::time::sleep(IDLE).await;
        }
        Ok(())
    }

    /// Ends the connections of clients. The volume is not served afterwards.
    pub(super) async fn close(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) -> anyhow::Result<()> {
        *entry.served.lock().expect("no panic under this lock") = None;
        if let Some(listener) = state.listener.take() {
            listener.abort();
            // The file may be gone, if another program has removed it.
            let _ = std::fs::remove_file(self.config.nbd_socket(&entry.name));
        }
        state.vhost_user = None;
        self.end_lent(entry, state);
        // The kernel now writes the data that it still has for the device.
        self.end_device(entry, state, "");
        state.holder = None;
        if let Some(volume) = state.volume.take()
            && tokio::time::timeout(CLOSE, volume.close()).await.is_err()
        {
            let in_flight = volume.in_flight();
            state.closing = Some(volume.clone());
            let (daemon, of) = (self.clone(), entry.clone());
            tokio::spawn(async move {
                volume.close().await;
                let mut state = of.state.lock().await;
                state.closing.take_if(|closing| Arc::ptr_eq(closing, &volume));
                daemon.serve_or_try_again(&of, &mut state);
            });
            bail!(
                "{in_flight} requests that are under way have not come back from the disk in {} s; nobody is served, and {} goes on when they have",
                CLOSE.as_secs(),
                entry.name
            );
        }
        Ok(())
    }
}

/// An error while requests from before the close are still at the disk.
pub(super) fn has_ended(entry: &Entry, state: &State) -> anyhow::Result<()> {
    let left = state.closing.as_ref().map_or(0, |closing| closing.in_flight());
    ensure!(
        left == 0,
        "{left} requests that were under way when {} was detached have not come back from the disk; try again when they have",
        entry.name
    );
    Ok(())
}

pub(super) fn known<'a>(entry: &Entry, state: &'a State) -> anyhow::Result<&'a Sidecar> {
    state.is_known(entry)?;
    let sidecar = state.sidecar.as_ref();
    sidecar.with_context(|| {
        format!(
            "there is no volume {} here; `verbatim volume list` shows all",
            entry.name
        )
    })
}

async fn flush(volume: &Arc<Volume>) -> anyhow::Result<()> {
    let (sender, flushed) = oneshot::channel();
    let reply = Box::new(move |result: Result<Vec<u8>, Failure>| {
        // The receiver may have gone.
        let _ = sender.send(result.map(drop));
    });
    volume.request(Wanted::Flush, Extent { offset: 0, length: 1 }, false, reply);
    match flushed.await? {
        Ok(()) => Ok(()),
        Err(failure) => bail!("{}", words::failure(&failure)),
    }
}

/// An error unless the volume has whole sectors, as a disk of a virtual machine must.
pub(super) fn has_whole_sectors(entry: &Entry, state: &State) -> anyhow::Result<()> {
    let length = known(entry, state)?.length;
    ensure!(
        length.is_multiple_of(512),
        "a disk has whole sectors of 512 bytes, and {} has {length} bytes: resize it",
        entry.name
    );
    Ok(())
}

/// A volume moves with the size that its sidecar has. It has another one when clients were not told of a resize, since it was never idle.
pub(super) fn has_its_size(entry: &Entry, state: &State, volume: &Volume) -> anyhow::Result<()> {
    let length = known(entry, state)?.length;
    if volume.length() == length {
        return Ok(());
    }
    ensure!(
        volume.resize(length),
        "{0} was resized to {length} bytes, and its clients have not been told, since it is never idle: `verbatim volume resize {0} --size {length}` \
         when it is, or detach and attach it; then it can move",
        entry.name
    );
    volume.has_grown();
    Ok(())
}

/// No instance has it for itself.
pub(super) fn is_nobodys(entry: &Entry, state: &State) -> anyhow::Result<()> {
    match &state.holder {
        Some(holder) => bail!("{} is in use by the instance {holder}", entry.name),
        None => Ok(()),
    }
}

/// An error while its block device is in use on this machine: mounted, or the base of another device.
pub(super) fn is_free(entry: &Entry, state: &State) -> anyhow::Result<()> {
    let Some(device) = &state.device else {
        return Ok(());
    };
    match tokio::task::block_in_place(|| device.user()) {
        Some(user) => bail!(
            "{} is in use as {}, {user}: unmount it, or stop the container that has it",
            entry.name,
            device.path().display()
        ),
        None => Ok(()),
    }
}

pub(super) fn serving(entry: &Entry, state: &State) -> anyhow::Result<()> {
    let name = &entry.name;
    match &known(entry, state)?.role {
        Role::Serving => match &state.unserved {
            Some(why) => bail!("{name} is not served: {why}; it is waited for"),
            None => Ok(()),
        },
        Role::Deciding { to, .. } => bail!("{name} waits for {to} to say whether it has moved there"),
        Role::Moved { to } => bail!("{name} has moved to {to}"),
        Role::Incoming { from, .. } => bail!("{name} is being filled from {from}"),
        Role::Incomplete => bail!("{name} was not filled to the end; it is on another host"),
        Role::Held { to, .. } => {
            bail!("{name} waits for the agent here to say whether its instance has moved to {to}")
        }
        Role::Ready { from, .. } => {
            bail!("{name} waits for the agent here to say whether its instance has come from {from}")
        }
    }
}

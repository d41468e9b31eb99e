//! The sidecar of the copy here: read, made durable and replaced; and retries after failures.
//!
//! A copy is *unknown* if its sidecar cannot be read, cannot be made durable, or may be one of two. An
//! unknown copy takes no order, gives no answer, and is tried again until it is known. A copy that should
//! serve but cannot, for example since its data are missing, is tried again, too. The lock is free between
//! the tries.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::{Instant, timeout_at};
use verbatim_mirror::decision::{Here, Role, Sidecar, Tombstone, VolumeId};
use verbatim_mirror::opening::{Age, age};
use verbatim_mirror::{Event, Standing};

use super::data::needs_data;
use super::{Daemon, Entry, State};
use crate::control::Row;
use crate::folder::Written;
use crate::store::{Store, seen_at};

/// Pause between two tries: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Limit for an order about all volumes to wait for busy ones, all together.
pub(super) const GLANCE: Duration = Duration::from_secs(1);

/// Limit for a disk to tell which sidecar the data have seen, before the copy becomes known. A disk that
/// hangs keeps no other host waiting for an answer.
const SLOW: Duration = Duration::from_secs(10);

impl State {
    /// An error while the state of the copy here is unknown.
    pub(super) fn is_known(&self, entry: &Entry) -> anyhow::Result<()> {
        match &self.unknown {
            Some(why) => bail!(
                "it is not known what the copy of {} here is, and nothing is done with it until it is ({why}); that is tried again by itself",
                entry.name
            ),
            None => Ok(()),
        }
    }

    /// Logs a failure of its folder, once a minute as long as it is the same.
    fn say_failure(&mut self, what: String) {
        if self.failures.is_due(&what) {
            tracing::error!("{what} (this is said once a minute)");
        }
    }

    /// The tombstone of a deleted copy of that volume here. There may be another volume of that name now.
    pub(super) fn gone(&self, entry: &Entry, id: VolumeId) -> anyhow::Result<Option<Tombstone>> {
        self.is_known(entry)?;
        if self.sidecar.as_ref().is_some_and(|here| here.id == id) {
            return Ok(None);
        }
        let gone = entry.folder.tombstone(id);
        gone.with_context(|| format!("what was said of {} here before is not known", entry.name))
    }

    /// The state of the copy here, as the rules take it.
    pub(super) fn here<'a>(&'a self, gone: Option<&'a Tombstone>) -> Here<'a> {
        match (&self.unknown, &self.sidecar, gone) {
            (Some(_), ..) => Here::Unknown,
            (None, Some(sidecar), _) => Here::Copy(sidecar),
            (None, None, Some(gone)) => Here::Gone(gone),
            (None, None, None) => Here::Nothing,
        }
    }
}

impl Daemon {
    /// Reads the state of the volume here, makes it durable, and acts on it. Failures are tried again.
    pub(super) fn take_up(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        match tokio::task::block_in_place(|| read(entry, state)) {
            Ok(()) => {
                self.recall_failure(entry, state);
                self.go_on(entry, state);
            }
            Err(error) => self.lose(entry, state, &format!("{error:#}")),
        }
    }

    /// The copy becomes unknown. Its clients stay connected: only a copy that serves has any.
    pub(super) fn lose(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State, why: &str) {
        state.sidecar = None;
        state.say_failure(format!(
            "it is not known what the copy of {} here is: {why}; it is tried again",
            entry.name
        ));
        state.unknown = Some(why.to_owned());
        self.try_again(entry, state);
    }

    /// The copy is known: acts on its role.
    fn go_on(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        state.restored = None;
        if state.unknown.take().is_some() {
            let known = format!("it is known again what the copy of {} here is", entry.name);
            if state.failures.is_due(&known) {
                tracing::info!("{known}");
            }
        }
        if state.lent.is_none()
            && let Err(error) = self.lend_again(entry, state)
        {
            tracing::error!("volume {} is not lent again: {error:#}", entry.name);
        }
        if !state.sidecar.as_ref().is_some_and(|here| needs_data(&here.role)) {
            self.end_strange_device(entry, state);
        }
        match state.sidecar.as_ref().map(|sidecar| sidecar.role.clone()) {
            Some(Role::Serving) => {
                // The volume was held for a decision that was not written.
                if let Some(volume) = &state.volume
                    && volume.standing() == Standing::Held
                {
                    volume.event(Event::Release);
                }
                self.serve_or_try_again(entry, state);
            }
            Some(Role::Held { .. } | Role::Ready { .. }) => self.serve_or_try_again(entry, state),
            Some(Role::Deciding { .. }) => {
                self.serve_or_try_again(entry, state);
                let (daemon, entry) = (self.clone(), entry.clone());
                tokio::spawn(async move { daemon.resolve(&entry).await });
            }
            Some(Role::Moved { .. }) => {
                let (daemon, entry) = (self.clone(), entry.clone());
                if let Some(volume) = &state.volume {
                    volume.event(Event::Moved);
                    tokio::spawn(async move {
                        let mut state = entry.state.lock().await;
                        let is_gone =
                            matches!(&state.sidecar, Some(here) if matches!(here.role, Role::Moved { .. }));
                        if is_gone && let Err(error) = daemon.close(&entry, &mut state).await {
                            tracing::warn!("{}: {error:#}", entry.name);
                        }
                    });
                }
            }
            Some(Role::Incoming { .. } | Role::Incomplete) => self.watch_rest(entry, state),
            None => {}
        }
        self.ask_on(entry, state);
    }

    /// Serves it if its sidecar says so. A failure is logged, and tried again.
    pub(super) fn serve_or_try_again(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        match self.serve(entry, state) {
            Ok(()) => {
                if state.unserved.take().is_some() {
                    tracing::info!("volume {} is served again", entry.name);
                }
            }
            Err(error) => {
                let why = format!("{error:#}");
                if state.unserved.as_ref() != Some(&why) {
                    tracing::error!("volume {} is not served: {why}; it is tried again", entry.name);
                    state.unserved = Some(why);
                }
                self.try_again(entry, state);
            }
        }
    }

    /// Tries again until the copy is known, and served if it should be.
    fn try_again(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        if std::mem::replace(&mut state.is_tried_again, true) {
            return;
        }
        let (daemon, entry) = (self.clone(), entry.clone());
        tokio::spawn(async move {
            let mut pause = PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
                let mut state = entry.state.lock().await;
                if state.unknown.is_some() {
                    daemon.take_up(&entry, &mut state);
                } else if state.unserved.is_some() {
                    match state.sidecar.as_ref().is_some_and(|here| needs_data(&here.role)) {
                        // Data that have come may show that the sidecar is an old one.
                        true if has_seen_later(&entry, &state).is_some() => {
                            daemon.take_up(&entry, &mut state);
                        }
                        true => daemon.serve_or_try_again(&entry, &mut state),
                        false => state.unserved = None,
                    }
                }
                if state.unknown.is_none() && state.unserved.is_none() {
                    state.is_tried_again = false;
                    return;
                }
            }
        });
    }

    /// Replaces the sidecar. After an error the copy is unchanged, or unknown.
    pub(super) fn write(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        sidecar: Sidecar,
    ) -> anyhow::Result<()> {
        let written = Written {
            number: next_number(entry, state, &sidecar),
            sidecar,
        };
        let done = tokio::task::block_in_place(|| entry.folder.write_sidecar(&written));
        let Written { number, sidecar } = written;
        match done {
            Ok(()) => {
                state.written = number;
                if let Some(store) = &state.store {
                    shows(store, sidecar.id, number);
                }
                if !sidecar.may_serve() {
                    state.alarm = None;
                }
                state.sidecar = Some(sidecar);
                state.let_go();
                Ok(())
            }
            Err(failed) => {
                if failed.is_unsure {
                    self.lose(entry, state, &format!("{:#}", failed.why));
                } else {
                    state.say_failure(format!("volume {}: {:#}", entry.name, failed.why));
                }
                Err(failed.why)
            }
        }
    }

    /// All volumes; a busy one is only listed as busy.
    pub(super) async fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        self.glance(|entry, state| {
            rows.extend(match state {
                Some(state) => self.row(entry, state),
                None => Some(Row {
                    name: entry.name.clone(),
                    role: "busy".to_owned(),
                    trouble: Some("something is being done with it, and has not ended yet".to_owned()),
                    ..Row::default()
                }),
            });
        })
        .await;
        rows
    }

    /// Looks at all volumes whose locks are free, or soon are. A volume that is stuck does not delay the
    /// caller.
    pub(super) async fn glance(&self, mut look: impl FnMut(&Arc<Entry>, Option<&State>)) {
        let entries: Vec<_> = self.entries.lock().await.values().cloned().collect();
        let end = Instant::now() + GLANCE;
        for entry in entries {
            let state = match entry.state.try_lock() {
                Ok(state) => Some(state),
                Err(_) => timeout_at(end, entry.state.lock()).await.ok(),
            };
            look(&entry, state.as_deref());
        }
    }
}

/// A number that neither the folder nor the data have seen. Open data have seen no higher number than the
/// sidecar here: otherwise they would not have been opened.
fn next_number(entry: &Entry, state: &State, sidecar: &Sidecar) -> u64 {
    let with_data = match &state.store {
        Some(_) => None,
        None => seen_within(GLANCE, entry, state, sidecar.id),
    };
    state.written.max(with_data.unwrap_or_default()) + 1
}

/// Has a thread of its own do that. `None` where it takes longer: a disk that hangs holds up no decision.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    what: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, done) = std::sync::mpsc::channel();
    let run = move || {
        let result = what();
        // The receiver may have given up.
        let _ = sender.send(result);
    };
    std::thread::Builder::new().name("age".into()).spawn(run).ok()?;
    tokio::task::block_in_place(|| done.recv_timeout(limit).ok())
}

/// Shows this number to the data. If their disk hangs, the number is shown to them again when they are
/// opened.
fn shows(store: &Arc<Store>, id: VolumeId, number: u64) {
    let store = store.clone();
    within(GLANCE, move || {
        store.sees(id, number);
        drop(store);
    });
}

/// The number of this volume's sidecar that the data have seen, if their disk answers within the limit.
fn seen_within(limit: Duration, entry: &Entry, state: &State, id: VolumeId) -> Option<u64> {
    let path = entry.folder.data(&state.settings);
    within(limit, move || seen_at(&path, id)).flatten()
}

/// The number of writes of the sidecar that the data have seen, if it is higher than the one here.
fn has_seen_later(entry: &Entry, state: &State) -> Option<u64> {
    let here = state.sidecar.as_ref()?;
    let with_data = seen_within(GLANCE, entry, state, here.id);
    match age(state.written, with_data) {
        Age::Old => with_data,
        Age::Current => None,
    }
}

fn read(entry: &Entry, state: &mut State) -> anyhow::Result<()> {
    state.restored = None;
    state.settings = entry.folder.settings()?;
    state.noted = entry.folder.noted()?;
    let (sidecar, number) = match entry.folder.sidecar()? {
        Some(written) => (Some(written.sidecar), written.number),
        None => (None, 0),
    };
    if let Some(sidecar) = &sidecar {
        // The data of a copy that serves are asked again when they are opened.
        let with_data = seen_within(SLOW, entry, state, sidecar.id);
        if let (Age::Old, Some(seen)) = (age(number, with_data), with_data) {
            state.restored = Some((sidecar.clone(), seen));
            bail!(
                "its sidecar was written {number} times, and its data have seen it written {seen} times: the state folder comes from a backup, and what happened since is not \
                 in it. Put the newer {} back; or, if no other host has a copy of {1} that serves, or did since (`verbatim volume list` there), `verbatim volume accept {1}` \
                 takes this one as it is",
                entry.folder.path().join("sidecar.json").display(),
                entry.name
            );
        }
        // The process before this one may have been ended between a rename and its sync.
        entry.folder.make_durable()?;
        // The tombstone of an earlier copy knows less.
        entry.folder.forget(sidecar.id)?;
    }
    state.place = match sidecar {
        Some(_) => None,
        None => entry.folder.place()?,
    };
    (state.sidecar, state.written) = (sidecar, number);
    Ok(())
}

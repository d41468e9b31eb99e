//! What the copy here is: read, made durable, and replaced; and what follows where that fails.
//!
//! A copy is *unknown* if its sidecar cannot be read, cannot be made durable, or may be one of two. It is none of the others then: it takes no order, gives no
//! answer, and is tried again until it is known. One that is known to serve and cannot be served, for its data are not there, is tried again, too. Nobody waits for
//! that: the lock is free in between.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::{Instant, timeout_at};
use verbatim_mirror::decision::{Here, Role, Sidecar, Tombstone, VolumeId};
use verbatim_mirror::{Event, Standing};

use super::data::needs_data;
use super::{Daemon, Entry, State};
use crate::control::Row;

/// Between two tries, the first time and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// So long an order about all volumes waits for those that are busy, all together.
const GLANCE: Duration = Duration::from_secs(1);

impl State {
    /// Whether it is known what is here.
    pub(super) fn is_known(&self, entry: &Entry) -> anyhow::Result<()> {
        match &self.unknown {
            Some(why) => bail!(
                "it is not known what the copy of {} here is, and nothing is done with it until it is ({why}); that is tried again by itself",
                entry.name
            ),
            None => Ok(()),
        }
    }

    /// What is left here of a copy of that volume that is gone.
    pub(super) fn gone(&self, entry: &Entry, id: VolumeId) -> anyhow::Result<Option<Tombstone>> {
        self.is_known(entry)?;
        if self.sidecar.is_some() {
            return Ok(None);
        }
        let gone = entry.folder.tombstone(id);
        gone.with_context(|| format!("what was said of {} here before is not known", entry.name))
    }

    /// What there is here, as the rules want it.
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
    /// Reads what there is here of that volume, makes it durable, and goes on with it. What fails is tried again.
    pub(super) fn take_up(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        match tokio::task::block_in_place(|| read(entry, state)) {
            Ok(()) => {
                self.recall_failure(entry, state);
                self.go_on(entry, state);
            }
            Err(error) => self.lose(entry, state, &format!("{error:#}")),
        }
    }

    /// It is not known any more what the copy is. Clients that are served stay so: only a copy that serves has any.
    fn lose(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State, why: &str) {
        state.sidecar = None;
        if state.unknown.as_deref() != Some(why) {
            tracing::error!(
                "it is not known what the copy of {} here is: {why}; it is tried again",
                entry.name
            );
            state.unknown = Some(why.to_owned());
        }
        self.try_again(entry, state);
    }

    /// It is known.
    fn go_on(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        if state.unknown.take().is_some() {
            tracing::info!("it is known again what the copy of {} here is", entry.name);
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
                // It was held for a decision that was not written down.
                if let Some(volume) = &state.volume
                    && volume.standing() == Standing::Held
                {
                    volume.event(Event::Release);
                }
                self.serve_or_try_again(entry, state);
                self.ask_on(entry, state);
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
            _ => {}
        }
    }

    /// Serves it if its sidecar says so. Where that fails it is said, and tried again.
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

    /// Until it is known, and served if it is to be.
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

    /// Replaces the sidecar. After an error the copy is as it was, or not known.
    pub(super) fn write(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        sidecar: Sidecar,
    ) -> anyhow::Result<()> {
        match tokio::task::block_in_place(|| entry.folder.write_sidecar(&sidecar)) {
            Ok(()) => {
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
                    tracing::error!("volume {}: {:#}", entry.name, failed.why);
                }
                Err(failed.why)
            }
        }
    }

    /// All volumes, those that are busy as no more than that.
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

    /// Looks at all volumes: at what is known of those whose locks are free, or soon are. One that is stuck holds nobody up who asks for all.
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

fn read(entry: &Entry, state: &mut State) -> anyhow::Result<()> {
    state.settings = entry.folder.settings()?;
    state.noted = entry.folder.noted()?;
    let sidecar = entry.folder.sidecar()?;
    if let Some(sidecar) = &sidecar {
        // The process before this one may have been ended between a rename and its sync.
        entry.folder.make_durable()?;
        // What is left of an earlier copy says less.
        entry.folder.forget(sidecar.id)?;
    }
    state.place = match sidecar {
        Some(_) => None,
        None => entry.folder.place()?,
    };
    state.sidecar = sidecar;
    Ok(())
}

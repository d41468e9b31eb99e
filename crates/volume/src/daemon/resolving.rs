//! A source that has held its tenant waits until the destination says whether the volume has moved there.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use verbatim_mirror::decision::{
    Answer, Ask, Heard, Keep, Role, Sidecar, all_overruled, decided, forced, heard,
};
use verbatim_mirror::{Event, together};

use super::orders::known;
use super::{AGAIN, Daemon, Entry, State, waits_for};
use crate::faults::Point;
use crate::wire::Purpose;

/// Longest pause between two questions to a destination after an operator has decided in its place.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl Daemon {
    /// Asks the destination until it says which of the two copies is the volume, or an operator decides.
    /// Returns the sidecar after that.
    pub(super) async fn resolve(self: &Arc<Self>, entry: &Arc<Entry>) -> Option<Sidecar> {
        let hook = self.config.hook;
        let mut said = String::new();
        loop {
            let sidecar = entry.state.lock().await.sidecar.clone()?;
            let Role::Deciding { session, to } = &sidecar.role else {
                return Some(sidecar);
            };
            let purpose = Purpose::Decide { gives_up: false };
            let asked = match self.call(entry, &sidecar, *session, to, purpose, None) {
                Ok(call) => {
                    hook(Point::Asked);
                    call.ask().await
                }
                Err(error) => Err(error),
            };
            let next = asked.and_then(|answer| {
                decided(&sidecar, answer).with_context(|| {
                    format!("there is no copy of it there; was one deleted? (`verbatim volume resolve {} --help`)", entry.name)
                })
            });
            let next = match next {
                Ok(next) => next,
                Err(error) => {
                    // An equal message is logged once.
                    let why = format!("{error:#}");
                    if why != said {
                        tracing::warn!("{} waits for {to}: {why}", entry.name);
                        said = why;
                    }
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            };
            hook(Point::Answered);
            let mut state = entry.state.lock().await;
            if state.sidecar.as_ref() == Some(&sidecar) {
                if self.become_decided(entry, &mut state, next).await.is_err() {
                    // The failure was logged. The answer stays the same: ask again.
                    drop(state);
                    tokio::time::sleep(AGAIN).await;
                }
            } else if let (Some(here), Some(answer)) = (&state.sidecar, said_by(&next))
                && heard(here, *session, answer) == Heard::Contradiction
            {
                // An operator decided before the answer came.
                shout(entry, &mut state, to);
            }
        }
    }

    /// Called when an operator has decided that the copy here stays. The destinations are asked until they
    /// answer whether they had committed before.
    pub(super) fn ask_on(self: &Arc<Self>, entry: &Arc<Entry>, state: &State) {
        let Some(before) = &state.sidecar else {
            return;
        };
        for (ask, to) in all_overruled(before) {
            let (daemon, entry, before, to) = (self.clone(), entry.clone(), before.clone(), to.to_owned());
            tokio::spawn(async move { daemon.hear_late(&entry, &before, ask, &to).await });
        }
    }

    async fn hear_late(self: &Arc<Self>, entry: &Arc<Entry>, before: &Sidecar, ask: Ask, to: &str) {
        let asking = Sidecar {
            generation: ask.base,
            ..before.clone()
        };
        let mut pause = AGAIN;
        loop {
            // This question never makes the destination commit.
            let purpose = Purpose::Decide { gives_up: true };
            let answer = match self.call(entry, &asking, ask.session, to, purpose, None) {
                Ok(call) => call.ask().await,
                Err(error) => Err(error),
            };
            let mut state = entry.state.lock().await;
            let Some(here) = state.sidecar.clone() else {
                // The copy is unknown: asking resumes when it is known.
                return;
            };
            if all_overruled(&here).all(|(other, _)| other.session != ask.session) {
                return;
            }
            match answer.map(|answer| heard(&here, ask.session, answer)) {
                Ok(Heard::Contradiction) => return shout(entry, &mut state, to),
                Ok(Heard::Confirmed(next)) => {
                    if self.write(entry, &mut state, next).is_ok() {
                        tracing::info!("{}: {to} has not committed, and never will", entry.name);
                        return;
                    }
                }
                Ok(Heard::Nothing) => return,
                Err(_) => {}
            }
            drop(state);
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Decides in the place of the destination.
    pub(super) async fn resolve_by_force(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        keep: Keep,
        is_forced: bool,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let sidecar = known(entry, state)?.clone();
        let by = waits_for(&sidecar);
        let next = match by {
            Some(_) => together::forced(&sidecar, keep),
            None => forced(&sidecar, keep),
        };
        let next = next.with_context(|| {
            format!("{name} does not wait for another host; `verbatim volume status {name}` says what it is")
        })?;
        if !is_forced {
            match &sidecar.role {
                Role::Held { by, .. } | Role::Ready { by, .. } => bail!(
                    "{name} moves with its instance, and waits for the session {by:016x} of the agents, which decides \
                     about both (`verbatim session show {by:016x}`, `verbatim session resolve`); only if no agent knows that \
                     session any more, `--force` decides without it (`verbatim volume resolve --help` says how to be sure)"
                ),
                _ => bail!(
                    "{} has not said whether {name} has moved there, and is asked until it does; if it never will, `--force` decides without it \
                     (`verbatim volume resolve --help`)",
                    other(&sidecar.role)
                ),
            }
        }
        tracing::warn!(
            "{name}: an operator decides in the place of {}: {keep:?} is kept",
            other(&sidecar.role)
        );
        if let Some(by) = by {
            self.become_settled(entry, state, by, next).await?;
            // The session may have been committed all the same.
            self.ask_on(entry, state);
            return Ok(());
        }
        // Before anything is acknowledged: a later process would ask again, and the operator may be wrong.
        self.write(entry, state, next.clone())?;
        self.become_decided(entry, state, next).await?;
        self.ask_on(entry, state);
        Ok(())
    }

    async fn become_decided(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        next: Sidecar,
    ) -> anyhow::Result<()> {
        if next.may_serve() {
            // After this answer the destination never commits: a waiting tenant need not wait for the disk.
            if let Some(volume) = &state.volume {
                volume.event(Event::Release);
            }
            self.write(entry, state, next)?;
            self.serve_or_try_again(entry, state);
        } else {
            if let Some(volume) = &state.volume {
                volume.event(Event::Moved);
            }
            self.write(entry, state, next)?;
            (self.config.hook)(Point::Moved);
            if let Err(error) = self.close(entry, state).await {
                tracing::warn!("{}: {error:#}", entry.name);
            }
        }
        Ok(())
    }
}

/// The name of the other host.
fn other(role: &Role) -> &str {
    match role {
        Role::Deciding { to, .. } | Role::Held { to, .. } | Role::Moved { to } => to,
        Role::Incoming { from, .. } | Role::Ready { from, .. } => from,
        Role::Serving | Role::Incomplete => "another host",
    }
}

/// The answer that has led to this sidecar of a source.
fn said_by(next: &Sidecar) -> Option<Answer> {
    match next.role {
        Role::Moved { .. } => Some(Answer::Committed),
        Role::Serving => Some(Answer::NotCommitted),
        _ => None,
    }
}

/// An error if an operator has decided in the place of this host, and it has not answered yet. Until then it
/// gets no offer: its copy may serve.
pub(super) fn is_answered(state: &State, to: &str) -> anyhow::Result<()> {
    let mut asked = state.sidecar.iter().flat_map(all_overruled);
    ensure!(
        state.alarm.is_some() || asked.all(|(_, asked)| asked != to),
        "an operator has decided in the place of {to}, which has not said yet that this was right; it is asked until it does"
    );
    Ok(())
}

/// Reports that two copies serve, or have served, by an operator's decision.
fn shout(entry: &Entry, state: &mut State, to: &str) {
    let why = format!(
        "{to} says that {0} has moved there, and an operator has said that the copy here stays: there are two. Let \
         clients use one of them only, and have the other detached and deleted (`verbatim volume detach {0}`, `verbatim volume delete {0}`)",
        entry.name
    );
    tracing::error!("volume {}: {why}", entry.name);
    state.alarm = Some(why);
}

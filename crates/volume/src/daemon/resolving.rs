//! A source that has held its tenant waits until the destination says whether the volume has moved there.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use verbatim_mirror::decision::{
    Answer, Heard, Keep, Overruled, Role, SessionId, Sidecar, all_overruled, decided, forced, heard, revived,
    serves_by_word,
};
use verbatim_mirror::{Event, together};

use super::orders::known;
use super::{AGAIN, Daemon, Entry, State, waits_for};
use crate::callers::Repeated;
use crate::faults::Point;
use crate::wire::Purpose;

/// Longest pause between two questions to a destination after an operator has decided in its place.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl Daemon {
    /// Asks the destination until it says which of the two copies is the volume, or an operator decides.
    /// Returns the sidecar after that.
    pub(super) async fn resolve(self: &Arc<Self>, entry: &Arc<Entry>) -> Option<Sidecar> {
        let hook = self.config.hook;
        let mut said = Repeated::default();
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
                    let waits = format!("{} waits for {to}: {error:#}", entry.name);
                    if said.is_due(&waits) {
                        tracing::warn!("{waits} (this is said once a minute)");
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
                && heard(here, *session, answer, false) == Heard::Contradiction
            {
                // An operator decided before the answer came.
                shout(entry, &mut state, to, *session);
            }
        }
    }

    /// Called when an operator has decided in the place of other hosts. They are asked until they answer whether that was right.
    pub(super) fn ask_on(self: &Arc<Self>, entry: &Arc<Entry>, state: &State) {
        let Some(before) = &state.sidecar else {
            return;
        };
        for (_, question) in all_overruled(before) {
            let (daemon, entry, before, question) =
                (self.clone(), entry.clone(), before.clone(), question.clone());
            tokio::spawn(async move { daemon.hear_late(&entry, &before, &question).await });
        }
    }

    /// Asks once; also whether a host that knows nothing would take an offer of the copy here.
    async fn answered(
        &self,
        entry: &Entry,
        here: &Sidecar,
        question: &Overruled,
    ) -> anyhow::Result<(Answer, bool)> {
        let asking = Sidecar {
            generation: question.base,
            ..here.clone()
        };
        // This question makes a destination commit nothing.
        let purpose = match question.was_destination {
            true => Purpose::HasLeft,
            false => Purpose::Decide { gives_up: true },
        };
        let call = self.call(entry, &asking, question.session, &question.to, purpose, None)?;
        let answer = call.ask().await?;
        if answer != Answer::NotKnown || question.was_destination || !here.may_serve() {
            return Ok((answer, false));
        }
        let offer = Purpose::Fill {
            length: here.length,
            from: self.config.name.clone(),
            attached: false,
            rdma: None,
            link: 0,
        };
        let session = SessionId(rand::random());
        let offering = self.call(entry, here, session, &question.to, offer, None)?;
        let takes = offering.ask_for_room(0).await?.is_ok();
        // A second question: a promise of that host may have been decided between the two calls.
        Ok((call.ask().await?, takes))
    }

    async fn hear_late(self: &Arc<Self>, entry: &Arc<Entry>, before: &Sidecar, question: &Overruled) {
        let to = question.to.as_str();
        let mut pause = AGAIN;
        loop {
            let answer = self.answered(entry, before, question).await;
            let mut state = entry.state.lock().await;
            let Some(here) = state.sidecar.clone() else {
                // The copy is unknown: asking resumes when it is known.
                return;
            };
            if here
                .overruled
                .iter()
                .all(|other| other.session != question.session)
            {
                return;
            }
            match answer.map(|(answer, takes)| heard(&here, question.session, answer, takes)) {
                Ok(Heard::Contradiction) => return shout(entry, &mut state, to, question.session),
                Ok(Heard::Confirmed(next)) => {
                    if self.write(entry, &mut state, next).is_ok() {
                        tracing::info!("{}: {to} confirms what an operator has said", entry.name);
                        return;
                    }
                }
                Ok(Heard::Nothing) | Err(_) => {}
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
        if state.alarm.is_some() && sidecar.role == Role::Serving {
            return self.end_alarm(entry, state, sidecar, keep, is_forced);
        }
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
            "{name}: an operator decides in the place of {}: the {} is kept",
            other(&sidecar.role),
            match keep {
                Keep::Source => "source",
                Keep::Destination => "destination",
            }
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

    /// Two copies served, and the other one is gone by an operator's word. That host goes on to say what it has committed, so it is not asked
    /// any more.
    fn end_alarm(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        sidecar: Sidecar,
        keep: Keep,
        is_forced: bool,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let was_destination =
            |asked: &Overruled| asked.was_destination && state.contradicted.contains(&asked.session);
        let here = match sidecar.overruled.iter().any(was_destination) {
            true => Keep::Destination,
            false => Keep::Source,
        };
        ensure!(
            keep == here,
            "the copy of {name} here serves, and another one did: to keep that one, detach and delete the one here"
        );
        ensure!(
            is_forced,
            "another host says that it has {name}, or had it. Only if no copy serves but the one here (`verbatim volume list` there, and on each host to which \
             it went from there), `--force` ends that message (`verbatim volume resolve --help`)"
        );
        tracing::warn!("{name}: an operator says that the other copy is gone");
        let mut next = sidecar;
        next.overruled
            .retain(|asked| !state.contradicted.contains(&asked.session));
        self.write(entry, state, next)?;
        state.alarm = None;
        state.contradicted.clear();
        Ok(())
    }

    /// Serves a copy again that has moved away, by an operator's word that all later ones are lost.
    pub(super) fn revive(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        is_forced: bool,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let sidecar = known(entry, state)?.clone();
        let next = revived(&sidecar, SessionId(rand::random())).with_context(|| {
            format!(
                "the copy of {name} here is none that was complete and has moved away; `verbatim volume status {name}` says what it is"
            )
        })?;
        ensure!(
            is_forced,
            "{name} has moved to {to}, and the copy here is as it was then: what was written since is lacking. Only if {to}, and each host that had it \
             after that, has lost it for good, `--force` serves the one here (`verbatim volume revive --help`)",
            to = other(&sidecar.role)
        );
        tracing::warn!(
            "{name}: an operator has the copy here served again, which had moved to {}",
            other(&sidecar.role)
        );
        self.write(entry, state, next)?;
        state.alarm = None;
        self.serve_or_try_again(entry, state);
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
        state.alarm.is_some() || asked.all(|(_, asked)| asked.to != to || asked.was_destination),
        "an operator has decided in the place of {to}, which has not said yet that this was right; it is asked until it does"
    );
    Ok(())
}

/// Reports that two copies serve, or have served, or that none does, by an operator's decision.
fn shout(entry: &Entry, state: &mut State, to: &str, session: SessionId) {
    let Some(here) = &state.sidecar else {
        return;
    };
    if !state.contradicted.contains(&session) {
        state.contradicted.push(session);
    }
    let name = &entry.name;
    let was_destination = here.overruled.iter().any(|it| it.to == to && it.was_destination);
    let why = match (serves_by_word(here), was_destination) {
        (true, false) => format!(
            "{to} says that {name} has moved there, and an operator has said that the copy here stays: there are two. Let \
             clients use one of them only, and have the other detached and deleted (`verbatim volume detach {name}`, `verbatim volume delete {name}`). When the other \
             is gone, `verbatim volume resolve {name} --keep source --force` here ends this message"
        ),
        (true, true) => format!(
            "{to} says that {name} has not moved here, and an operator has said that it has: there are two, here and at {to}, or where it went from there. Let \
             clients use one of them only, and have the other detached and deleted (`verbatim volume detach {name}`, `verbatim volume delete {name}`). When the other \
             is gone, `verbatim volume resolve {name} --keep destination --force` here ends this message"
        ),
        (false, false) => format!(
            "{to} says that {name} has not moved there, and an operator has said that it has: no copy serves. \
             The one here has all that was acknowledged: `verbatim volume revive {name} --force` here serves it again"
        ),
        (false, true) => format!(
            "{to} says that {name} has moved here, and an operator has said that it has not: no copy serves. The one at {to} has all that was \
             acknowledged until then: `verbatim volume revive {name} --force` there serves it again"
        ),
    };
    tracing::error!("volume {}: {why}", entry.name);
    state.alarm = Some(why);
}

//! A source that has held its tenant, and waits for the destination to say whether the volume has moved there.

use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_mirror::Event;
use verbatim_mirror::decision::{Keep, Role, Sidecar, decided, forced};

use super::orders::known;
use super::{AGAIN, Daemon, Entry, State};
use crate::faults::Point;
use crate::wire::Purpose;

impl Daemon {
    /// Asks the destination until it says which of the two copies it is, or an operator does. What the copy here is then.
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
                    // Once, as long as it is the same.
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
            // Otherwise an operator was faster than the answer.
            if state.sidecar.as_ref() == Some(&sidecar) {
                self.become_decided(entry, &mut state, next).await;
            }
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
        let sidecar = known(entry, state)?;
        let (to, next) = match &sidecar.role {
            Role::Deciding { to, .. } => (to.clone(), forced(sidecar, keep).context("it waits")?),
            Role::Held { .. } | Role::Ready { .. } => {
                bail!("{name} moves with its instance; `verbatim session resolve` decides about both")
            }
            _ => bail!(
                "{name} does not wait for another host; `verbatim volume status {name}` says what it is"
            ),
        };
        if !is_forced {
            bail!(
                "{to} has not said whether {name} has moved there, and is asked until it does; if it never will, `--force` decides without it \
                 (`verbatim volume resolve --help`)"
            );
        }
        tracing::warn!("{name}: an operator decides in the place of {to}: {keep:?} is kept");
        // Before anything is acknowledged: a process that came later would ask, and what the operator says may be wrong.
        self.write(entry, state, next.clone()).await;
        self.become_decided(entry, state, next).await;
        Ok(())
    }

    async fn become_decided(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State, next: Sidecar) {
        if next.may_serve() {
            // By that word it is never committed: a tenant that waits here need not wait for the disk.
            if let Some(volume) = &state.volume {
                volume.event(Event::Release);
            }
            self.write(entry, state, next).await;
            if let Err(error) = self.serve(entry, state) {
                tracing::error!("volume {} is not served: {error:#}", entry.name);
            }
        } else {
            if let Some(volume) = &state.volume {
                volume.event(Event::Moved);
            }
            self.write(entry, state, next).await;
            (self.config.hook)(Point::Moved);
            if let Err(error) = self.close(entry, state).await {
                tracing::warn!("{}: {error:#}", entry.name);
            }
        }
    }
}

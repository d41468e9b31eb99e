//! What an operator can do to a migration while its source drives it: cancel it up to the decision, and decide in its
//! place when the hosts have lost each other at the commit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::bail;
use tokio::sync::watch;
use verbatim_session::decision::Keep;

/// How far the decision is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It can be cancelled.
    Open,
    /// It has been, and is rolled back.
    Cancelled,
    /// The destination is asked to commit.
    Deciding,
    /// It was asked, and nobody knows what it did.
    InDoubt,
    /// The instance is the destination's.
    Committed,
}

/// One migration, as its source and whoever gives orders about it share it.
#[derive(Debug)]
pub struct Control {
    /// The instance.
    pub instance: String,
    /// Where it goes.
    pub destination: String,
    /// The session of the present attempt.
    session: AtomicU64,
    stage: watch::Sender<Stage>,
    decision: watch::Sender<Option<Keep>>,
    ended: watch::Sender<bool>,
    /// The instance that is here is this session's.
    has_the_instance: bool,
}

impl Control {
    /// The session of the present attempt.
    pub fn session(&self) -> u64 {
        self.session.load(Ordering::SeqCst)
    }

    /// Another attempt begins.
    pub fn set_session(&self, session: u64) {
        self.session.store(session, Ordering::SeqCst);
    }

    /// How far the decision is.
    pub fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Rolls the migration back, if nobody was asked to commit yet.
    pub fn cancel(&self) -> anyhow::Result<()> {
        self.stage.send_if_modified(|stage| {
            let open = *stage == Stage::Open;
            if open {
                *stage = Stage::Cancelled;
            }
            open
        });
        let (instance, to) = (&self.instance, &self.destination);
        match self.stage() {
            Stage::Open | Stage::Cancelled => Ok(()),
            Stage::Committed => bail!("too late: the decision was taken, and {instance} is {to}'s"),
            Stage::Deciding => bail!("too late: {to} has been asked to let {instance} run"),
            Stage::InDoubt => bail!(
                "too late: {to} has been asked to let {instance} run, and does not answer; if it stays so, see \
                 `verbatim session resolve --help`"
            ),
        }
    }

    /// Waits until it is cancelled.
    pub async fn cancelled(&self) {
        // The sender is part of self.
        let _ = self
            .stage
            .subscribe()
            .wait_for(|stage| *stage == Stage::Cancelled)
            .await;
    }

    /// The destination is about to be asked; false if the migration was cancelled first.
    pub fn decide(&self) -> bool {
        self.stage.send_if_modified(|stage| {
            let open = *stage == Stage::Open;
            if open {
                *stage = Stage::Deciding;
            }
            open
        })
    }

    /// The destination does not answer.
    pub fn doubt(&self) {
        self.stage.send_replace(Stage::InDoubt);
    }

    /// The decision is known: the instance is the destination's.
    pub fn committed(&self) {
        self.stage.send_replace(Stage::Committed);
    }

    /// An operator decides in the place of the hosts.
    pub fn resolve(&self, keep: Keep) {
        self.decision.send_replace(Some(keep));
    }

    /// Waits for an operator's decision, and takes it.
    pub async fn resolved(&self) -> Keep {
        let mut decision = self.decision.subscribe();
        loop {
            let known = *decision.borrow_and_update();
            if let Some(keep) = known {
                self.decision.send_replace(None);
                return keep;
            }
            // The sender is part of self.
            let _ = decision.changed().await;
        }
    }

    /// Waits until the migration is over, one way or the other.
    pub async fn ended(&self) {
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }
}

/// The migrations that this host drives.
#[derive(Debug, Default)]
pub struct Controls(Arc<Mutex<Vec<Arc<Control>>>>);

/// A migration that is known to [`Controls`] until this is dropped.
#[derive(Debug)]
pub struct Driven {
    /// Its control.
    pub control: Arc<Control>,
    all: Arc<Mutex<Vec<Arc<Control>>>>,
}

impl Drop for Driven {
    fn drop(&mut self) {
        let mut all = self.all.lock().expect("no panic under this lock");
        all.retain(|control| !Arc::ptr_eq(control, &self.control));
        self.control.ended.send_replace(true);
    }
}

impl Controls {
    /// A migration begins; at most one for each instance does, see [`crate::instances::Instance::begin_move`].
    pub fn begin(&self, instance: &str, destination: &str, stage: Stage) -> Driven {
        self.add(instance, destination, stage, true)
    }

    /// A migration of an earlier agent is brought to its end, and the instance of that name, if one is here, is another session's.
    pub fn begin_without(&self, instance: &str, destination: &str, stage: Stage) -> Driven {
        self.add(instance, destination, stage, false)
    }

    fn add(&self, instance: &str, destination: &str, stage: Stage, has_the_instance: bool) -> Driven {
        let control = Arc::new(Control {
            instance: instance.to_owned(),
            destination: destination.to_owned(),
            session: AtomicU64::new(0),
            stage: watch::Sender::new(stage),
            decision: watch::Sender::new(None),
            ended: watch::Sender::new(false),
            has_the_instance,
        });
        let all = Arc::clone(&self.0);
        all.lock()
            .expect("no panic under this lock")
            .push(Arc::clone(&control));
        Driven { control, all }
    }

    /// That of an instance.
    pub fn of_instance(&self, instance: &str) -> Option<Arc<Control>> {
        let all = self.0.lock().expect("no panic under this lock");
        let mut of_instance = all.iter().filter(|control| control.has_the_instance);
        of_instance.find(|control| control.instance == instance).cloned()
    }

    /// That of a session.
    pub fn of_session(&self, session: u64) -> Option<Arc<Control>> {
        let all = self.0.lock().expect("no panic under this lock");
        all.iter().find(|control| control.session() == session).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_is_only_finished_is_not_the_instances() {
        let controls = Controls::default();
        let earlier = controls.begin_without("web", "b", Stage::Committed);
        earlier.control.set_session(1);
        assert!(controls.of_instance("web").is_none());
        let present = controls.begin("web", "c", Stage::Open);
        present.control.set_session(2);
        drop(earlier);
        assert!(controls.of_session(1).is_none());
        assert_eq!(controls.of_instance("web").unwrap().session(), 2);
        drop(present);
        assert!(controls.of_instance("web").is_none());
    }

    #[tokio::test]
    async fn cancelling_and_deciding_exclude_each_other() {
        let controls = Controls::default();
        let driven = controls.begin("web", "b", Stage::Open);
        let control = controls.of_instance("web").unwrap();
        control.cancel().unwrap();
        control.cancelled().await;
        assert!(!control.decide(), "it was cancelled before anybody was asked");
        drop(driven);
        control.ended().await;
        assert!(controls.of_instance("web").is_none());

        let driven = controls.begin("web", "b", Stage::Open);
        assert!(driven.control.decide());
        let late = driven.control.cancel().unwrap_err().to_string();
        assert!(
            late.contains("too late") && late.contains("b has been asked"),
            "{late}"
        );
        driven.control.doubt();
        let late = driven.control.cancel().unwrap_err().to_string();
        assert!(late.contains("session resolve"), "{late}");
        driven.control.resolve(Keep::Source);
        assert_eq!(driven.control.resolved().await, Keep::Source);
    }
}

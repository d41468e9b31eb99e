//! Whose turn it is, where moves meet: waiting for it. The rules are [`verbatim_session::turns`].

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use verbatim_session::turns::{self, Joined};

use crate::session::watched::Watched;

type State = turns::Turns<String>;

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

/// All turns on one host.
#[derive(Debug, Clone)]
pub struct Turns(Arc<Inner>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Inner {
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        }))
    }
}

/// A session has an instance until this is dropped.
#[derive(Debug)]
pub struct Turn {
    instance: String,
    session: u64,
    turns: Turns,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().give_back(&self.instance, self.session);
        self.turns.0.changed.send_replace(());
    }
}

impl Turns {
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let found = look(&mut self.0.lock());
            if let Some(found) = found {
                self.0.changed.send_replace(());
                return found;
            }
            // The sender is part of self.
            let _ = changed.changed().await;
        }
    }

    /// Waits until no session has joined `instance`, and has it from then on.
    pub async fn take(&self, instance: &str, session: u64) -> Turn {
        let name = instance.to_owned();
        self.until(|state| state.take(&name, session).then_some(())).await;
        self.turn(instance, session)
    }

    /// Has an instance that nobody can have joined: it is just arriving here, or an earlier agent had begun to move it.
    pub fn have(&self, instance: &str, session: u64) -> Turn {
        self.0.lock().have(&instance.to_owned(), session);
        self.turn(instance, session)
    }

    fn turn(&self, instance: &str, session: u64) -> Turn {
        Turn {
            instance: instance.to_owned(),
            session,
            turns: self.clone(),
        }
    }

    /// Joins `instances` on behalf of a session that moves `moving`; fails if its source is gone.
    pub fn join(
        &self,
        watched: &Watched,
        session: u64,
        moving: &str,
        instances: BTreeSet<String>,
    ) -> anyhow::Result<Joined<String>> {
        let mut state = self.0.lock();
        watched.ensure(session)?;
        Ok(state.join(session, &moving.to_owned(), instances))
    }

    /// The same for a session of an earlier agent, which had joined them.
    pub fn join_again(&self, session: u64, moving: &str, instances: BTreeSet<String>) {
        self.0.lock().join_again(session, &moving.to_owned(), instances);
    }

    /// The instance whose move has joined `instance`, or one of several.
    pub fn joined_by(&self, instance: &str) -> Option<String> {
        self.0.lock().joined_by(&instance.to_owned()).cloned()
    }

    /// A session has ended here, or lets go.
    pub fn leave(&self, session: u64) {
        self.0.lock().leave(session);
        self.0.changed.send_replace(());
    }

    /// Waits until earlier sessions that moved `moving` have ended here.
    pub async fn earlier_ended(&self, session: u64, moving: &str) {
        let moving = moving.to_owned();
        self.until(|state| state.earlier(session, &moving).is_none().then_some(()))
            .await;
    }

    /// An earlier session that moved `moving` and has not ended here.
    pub fn earlier(&self, session: u64, moving: &str) -> Option<u64> {
        self.0.lock().earlier(session, &moving.to_owned())
    }

    /// Waits until no session has `instance` here.
    pub async fn let_go(&self, instance: &str) {
        let instance = instance.to_owned();
        self.until(|state| (!state.is_had(&instance)).then_some(())).await;
    }

    /// An instance of this host that another session has.
    pub fn anyone(&self, session: u64) -> Option<String> {
        self.0.lock().anyone(session).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use verbatim_session::turns::keeps;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[tokio::test]
    async fn an_instance_is_moved_or_joined_but_not_both() {
        let (turns, watched) = (Turns::default(), Watched::default());
        let join =
            |session, moving, instances: &[&str]| turns.join(&watched, session, moving, names(instances));
        assert!(join(1, "a", &["b"]).is_err());
        for session in [1, 2, 3] {
            watched.begin(session, "a").unwrap();
        }
        assert_eq!(join(1, "a", &["b", "c"]).unwrap(), Joined::Yes);
        // Two partners' sessions do not disturb each other.
        assert_eq!(join(2, "d", &["b"]).unwrap(), Joined::Yes);
        let mut having = Box::pin(turns.take("b", 3));
        assert!((&mut having).now_or_never().is_none(), "it is joined");
        assert!(turns.joined_by("b").is_some() && turns.joined_by("a").is_none());
        turns.leave(1);
        assert!((&mut having).now_or_never().is_none(), "by two sessions");
        assert_eq!(turns.joined_by("b").as_deref(), Some("d"));
        turns.leave(2);
        let turn = having.await;
        assert_eq!(join(1, "a", &["b", "c"]).unwrap(), Joined::Moving("b".to_owned()));
        assert_eq!(join(3, "b", &["b"]).unwrap(), Joined::Yes, "its own");
        turns.leave(3);
        assert_eq!(turns.anyone(1).as_deref(), Some("b"));
        assert_eq!(turns.anyone(3), None);
        let mut free = Box::pin(turns.let_go("b"));
        assert!((&mut free).now_or_never().is_none());
        drop(turn);
        free.await;
        watched.end(1);
        assert!(join(1, "a", &["b"]).is_err());
        assert!(turns.0.lock().is_empty());
    }

    #[tokio::test]
    async fn the_next_move_of_an_instance_waits_for_the_one_before() {
        let turns = Turns::default();
        turns.join_again(1, "a", names(&["b"]));
        let mut ended = Box::pin(turns.earlier_ended(2, "a"));
        assert!((&mut ended).now_or_never().is_none());
        turns.earlier_ended(2, "x").await;
        turns.leave(1);
        ended.await;
    }

    /// Sessions that each move one instance of a ring in which everybody is connected with everybody: whatever the order
    /// of their steps, all come to their turn.
    #[tokio::test]
    async fn no_ring_of_sessions_waits_for_itself() {
        const INSTANCES: u64 = 6;
        let (turns, watched) = (Turns::default(), Arc::new(Watched::default()));
        let name = |number: u64| format!("i{number}");
        let mut sessions = tokio::task::JoinSet::new();
        for number in 0..INSTANCES {
            let (turns, watched) = (turns.clone(), Arc::clone(&watched));
            sessions.spawn(async move {
                for round in 0..50 {
                    let session = round * INSTANCES + number;
                    watched.begin(session, "a").unwrap();
                    let others: Vec<u64> = (0..INSTANCES).filter(|other| *other != number).collect();
                    'again: loop {
                        let turn = turns.take(&name(number), session).await;
                        let mut so_far = BTreeSet::new();
                        for other in &others {
                            tokio::task::yield_now().await;
                            // One host each: what was joined before stays joined.
                            let mut joined = BTreeSet::from([name(*other)]);
                            joined.extend(so_far.iter().cloned());
                            while let Ok(Joined::Moving(other)) =
                                turns.join(&watched, session, &name(number), joined.clone())
                            {
                                if !keeps(&name(number), &other) {
                                    turns.leave(session);
                                    drop(turn);
                                    turns.let_go(&other).await;
                                    continue 'again;
                                }
                                turns.let_go(&other).await;
                            }
                            so_far = joined;
                        }
                        tokio::task::yield_now().await;
                        turns.leave(session);
                        drop(turn);
                        break;
                    }
                    watched.end(session);
                }
            });
        }
        let all = async { while sessions.join_next().await.is_some() {} };
        tokio::time::timeout(std::time::Duration::from_secs(30), all)
            .await
            .expect("all come to their turn");
        assert!(turns.0.lock().is_empty());
    }
}

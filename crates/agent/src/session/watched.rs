//! Sessions whose source is there.
//!
//! A source watches a session before it asks for anything. What it asked for may be late: it is begun only if the source
//! has neither gone nor undone the session meanwhile, for then nobody would ever end it.
//!
//! Who watches a session first is its source, and nobody else may ask for anything in it ([`crate::authority`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard};

use anyhow::bail;

use crate::quotas;

/// Those at this host, and who watches each.
#[derive(Default)]
pub struct Watched(Mutex<HashMap<u64, String>>);

impl Watched {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, String>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The host `source` watches it; an error if another one does, or this one too many.
    pub fn begin(&self, session: u64, source: &str) -> anyhow::Result<()> {
        let mut watched = self.lock();
        let has = watched.values().filter(|by| *by == source).count();
        match watched.entry(session) {
            Entry::Occupied(other) if other.get() != source => bail!("the session is another host's"),
            Entry::Occupied(_) => {}
            Entry::Vacant(_) if has >= quotas::WATCHED_BY_HOST => {
                bail!("{source} watches {has} sessions here, and gets no more")
            }
            Entry::Vacant(free) => _ = free.insert(source.to_owned()),
        }
        Ok(())
    }

    /// The host that watches it.
    pub fn by(&self, session: u64) -> Option<String> {
        self.lock().get(&session).cloned()
    }

    /// The source is gone, or wants no more of it. To be told before what was begun is looked for and undone.
    pub fn end(&self, session: u64) {
        self.lock().remove(&session);
    }

    /// May something be begun? To be asked under the lock under which what was begun is looked for.
    pub fn ensure(&self, session: u64) -> anyhow::Result<()> {
        if !self.lock().contains_key(&session) {
            bail!("the source has gone or undone the session meanwhile");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_begun_for_a_source_that_is_gone() {
        let watched = Watched::default();
        assert!(watched.ensure(1).is_err());
        watched.begin(1, "a").unwrap();
        watched.begin(2, "a").unwrap();
        assert!(watched.ensure(1).is_ok());
        watched.end(1);
        assert!(watched.ensure(1).is_err());
        assert!(watched.ensure(2).is_ok());
    }

    #[test]
    fn a_session_is_watched_by_one_host() {
        let watched = Watched::default();
        watched.begin(1, "a").unwrap();
        assert!(watched.begin(1, "b").is_err());
        assert_eq!(watched.by(1).as_deref(), Some("a"));
        watched.end(1);
        assert_eq!(watched.by(1), None);
        watched.begin(1, "b").unwrap();
    }

    #[test]
    fn sessions_without_end_are_their_source_s_affair() {
        let watched = Watched::default();
        for session in 0..quotas::WATCHED_BY_HOST as u64 {
            watched.begin(session, "a").unwrap();
        }
        assert!(watched.begin(1 << 40, "a").is_err());
        watched.begin(1 << 40, "b").unwrap();
        watched.begin(0, "a").unwrap();
    }
}

//! Sessions whose source is there.
//!
//! A source watches a session before it asks for anything. What it asked for may be late: it is begun only if the source
//! has neither gone nor undone the session meanwhile, for then nobody would ever end it.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard};

use anyhow::bail;

/// Those at this host.
#[derive(Default)]
pub struct Watched(Mutex<HashSet<u64>>);

impl Watched {
    fn lock(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The source watches it.
    pub fn begin(&self, session: u64) {
        self.lock().insert(session);
    }

    /// The source is gone, or wants no more of it. To be told before what was begun is looked for and undone.
    pub fn end(&self, session: u64) {
        self.lock().remove(&session);
    }

    /// May something be begun? To be asked under the lock under which what was begun is looked for.
    pub fn ensure(&self, session: u64) -> anyhow::Result<()> {
        if !self.lock().contains(&session) {
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
        watched.begin(1);
        watched.begin(2);
        assert!(watched.ensure(1).is_ok());
        watched.end(1);
        assert!(watched.ensure(1).is_err());
        assert!(watched.ensure(2).is_ok());
    }
}

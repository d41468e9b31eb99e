//! Deep checks, that is dumps that were tried without memory ([`super::source`]): which are known to have gone well, and how long one is
//! expected to take.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use verbatim_container::Size;

use crate::agent::Shared;
use crate::instances::Instance;
use crate::memory::convergence::time_of_shared;
use crate::memory::{private, shared};

/// The limit of the blackout that an operator is taken to have in mind who gives none.
const USUAL_BLACKOUT: Duration = Duration::from_millis(50);

/// A migration tries the dump by itself only if that takes at most this part of the blackout.
const PART: u32 = 4;

/// A small program stands still so long for CRIU's dump, and until it runs again (`bench/run blackout`).
const SMALL: Duration = Duration::from_millis(20);

/// So much longer for each further process, and each further thread.
const EACH_PROCESS: Duration = Duration::from_millis(8);
const EACH_THREAD: Duration = Duration::from_millis(2);

/// Private memory is not written down, but CRIU looks at each page's place in the page table and puts it into a pipe.
const PRIVATE_BYTES_PER_SECOND: f64 = 5e9;

/// One that went well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// What it was of.
    pub fingerprint: u64,
    /// For a move to that host.
    pub destination: String,
    /// How long no task ran.
    pub stood: Duration,
    /// How long of that was expected for memory.
    pub memory: Duration,
}

/// Those that went well, by instance. They are forgotten when the agent ends.
#[derive(Debug, Default)]
pub struct DeepChecks(Mutex<HashMap<String, Known>>);

impl DeepChecks {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One has gone well. `here`: the instances of this host; others are forgotten.
    pub fn note(&self, instance: &str, known: Known, here: &[String]) {
        let mut all = self.lock();
        all.retain(|name, _| here.contains(name));
        all.insert(instance.to_owned(), known);
    }

    /// An instance cannot move as it is, or it is not known.
    pub fn forget(&self, instance: &str) {
        self.lock().remove(instance);
    }

    /// The last one of an instance.
    pub fn get(&self, instance: &str) -> Option<Known> {
        self.lock().get(instance).cloned()
    }
}

/// What one would be of.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Of what its processes have open and mapped.
    pub fingerprint: u64,
    size: Size,
    private_bytes: u64,
    shared_bytes: u64,
}

impl Look {
    /// Looks at an instance.
    pub async fn at(instance: &Instance) -> anyhow::Result<Self> {
        let init = instance.init_pid();
        let looked = tokio::task::spawn_blocking(move || {
            let (fingerprint, size) = verbatim_container::fingerprint(init)?;
            std::io::Result::Ok(Self {
                fingerprint,
                size,
                private_bytes: private::bytes_of_tree(init),
                shared_bytes: shared::bytes_of_tree(init),
            })
        });
        let looked = looked.await.context("looking at an instance panicked")?;
        looked.context("the container's processes cannot be looked at")
    }

    /// How long the instance is expected to stand still. What was measured with the same says it best, but for memory that it has got since.
    fn expected(&self, known: Option<&Known>) -> Duration {
        if let Some(known) = known.filter(|known| known.fingerprint == self.fingerprint) {
            return known.stood + self.memory().saturating_sub(known.memory);
        }
        let further = |count: usize| u32::try_from(count.saturating_sub(1)).unwrap_or(u32::MAX);
        let Size { processes, threads } = self.size;
        SMALL
            + EACH_PROCESS.saturating_mul(further(processes))
            + EACH_THREAD.saturating_mul(further(threads).saturating_sub(further(processes)))
            + self.memory()
    }

    /// How long that is for memory.
    pub fn memory(&self) -> Duration {
        let private = Duration::from_secs_f64(self.private_bytes as f64 / PRIVATE_BYTES_PER_SECOND);
        private + time_of_shared(self.shared_bytes)
    }
}

/// How long an instance would stand still for a deep check, as expected; `None` for a virtual machine, or one that cannot be looked at.
pub async fn expected_pause(agent: &Shared, instance: &Instance) -> Option<Duration> {
    if instance.home.record.machine.is_some() {
        return None;
    }
    let look = Look::at(instance).await.ok()?;
    Some(look.expected(agent.deep_checks.get(instance.name()).as_ref()))
}

/// Whether a migration that may stand still for `max_blackout` tries the dump first.
pub fn is_worth_it(look: Look, known: Option<&Known>, to: &str, max_blackout: Option<Duration>) -> bool {
    let is_known =
        known.is_some_and(|known| known.fingerprint == look.fingerprint && known.destination == to);
    !is_known && look.expected(known) <= max_blackout.unwrap_or(USUAL_BLACKOUT) / PART
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(processes: usize, threads: usize, private_bytes: u64, shared_bytes: u64) -> Look {
        Look {
            fingerprint: 7,
            size: Size { processes, threads },
            private_bytes,
            shared_bytes,
        }
    }

    fn known(fingerprint: u64, ms: u64) -> Known {
        Known {
            fingerprint,
            destination: "dst".to_owned(),
            stood: Duration::from_millis(ms),
            memory: Duration::ZERO,
        }
    }

    #[test]
    fn processes_threads_and_memory_take_longer() {
        let small = look(1, 1, 0, 0).expected(None);
        assert_eq!(small, SMALL);
        assert_eq!(look(3, 3, 0, 0).expected(None), SMALL + 2 * EACH_PROCESS);
        assert_eq!(look(1, 11, 0, 0).expected(None), SMALL + 10 * EACH_THREAD);
        assert!(look(1, 1, 8 << 30, 0).expected(None) > SMALL + Duration::from_secs(1));
        assert!(look(1, 1, 0, 256 << 20).expected(None) > Duration::from_secs(1));
        // Measured with the same descriptors and mappings, or with others.
        assert_eq!(
            look(1, 1, 0, 0).expected(Some(&known(7, 33))),
            Duration::from_millis(33)
        );
        assert_eq!(look(1, 1, 0, 0).expected(Some(&known(8, 33))), SMALL);
    }

    #[test]
    fn memory_that_was_added_since_takes_longer() {
        let before = look(1, 1, 0, 64 << 20);
        let known = Known {
            memory: before.memory(),
            ..known(7, 500)
        };
        assert_eq!(before.expected(Some(&known)), Duration::from_millis(500));
        let after = look(1, 1, 0, 128 << 20).expected(Some(&known));
        assert!(after > Duration::from_millis(800), "{after:?}");
        assert_eq!(
            look(1, 1, 0, 0).expected(Some(&known)),
            Duration::from_millis(500)
        );
    }

    #[test]
    fn a_migration_tries_it_if_it_is_short_and_not_known() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let small = look(1, 1, 0, 0);
        assert!(is_worth_it(small, None, "dst", ms(80)));
        assert!(!is_worth_it(small, None, "dst", ms(79)));
        assert!(!is_worth_it(small, None, "dst", None), "50 ms are meant");
        assert!(!is_worth_it(small, Some(&known(7, 1)), "dst", ms(1000)));
        assert!(is_worth_it(small, Some(&known(7, 1)), "peer", ms(1000)));
        assert!(is_worth_it(small, Some(&known(8, 1)), "dst", ms(1000)));
        // Quick enough for the usual limit, by what was measured with the same.
        assert!(is_worth_it(small, Some(&known(7, 12)), "peer", None));
    }

    #[test]
    fn instances_that_are_gone_are_forgotten() {
        let all = DeepChecks::default();
        all.note("a", known(1, 1), &["a".to_owned()]);
        all.note("b", known(2, 2), &["a".to_owned(), "b".to_owned()]);
        assert_eq!(all.get("a"), Some(known(1, 1)));
        all.note("b", known(3, 3), &["b".to_owned()]);
        assert_eq!((all.get("a"), all.get("b")), (None, Some(known(3, 3))));
        all.forget("b");
        assert_eq!(all.get("b"), None);
    }
}

//! What is known of private memory that was sent ahead, by whichever way ([`super::track`], [`super::pre_dump`]).

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use tokio::task::JoinHandle;
use verbatim_container::{Dumped, PreDumped};

use super::pre_dump::PRE_DUMPS;
use crate::instances::home::Paths;
use crate::memory::moves::Moves;
use crate::memory::pre_dump::{Chain, PreDump};
use crate::memory::tracked::{By, Tracked};
use crate::report::PrivateTracked;

/// Private memory that was sent ahead, in one attempt.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Rounds: looks of the trackers, or pre-dumps.
    pub(super) chain: Chain,
    /// When the last one was complete.
    pub(super) last: Option<Instant>,
    /// The images lack private memory, and the destination gives it to the tasks.
    fills: bool,
    /// What was sent of it and is still right.
    pub(super) tracked: Tracked,
    /// Why it is not tracked from outside, if it is not.
    pub(super) why_not_tracked: Option<String>,
    /// It is compared with what was sent instead.
    compares: bool,
    /// What was sent of it while the tasks stood still.
    pub(super) last_bytes: u64,
    /// Why private memory goes in one piece, if it does.
    pub(super) why_not: Option<String>,
    /// What makes it useless.
    pub(super) moves: Option<Moves>,
    /// One that has begun and is not cut off.
    pub(super) running: Option<JoinHandle<Result<PreDumped, verbatim_container::Error>>>,
    /// A dump that relied on them failed.
    to_blame: bool,
    /// A test has ordered that they fail.
    pub(super) damaged: bool,
}

impl Ahead {
    /// The images are to lack private memory.
    pub(super) fn fill(&mut self) {
        self.fills = true;
    }

    /// The images are to lack private memory, which is compared with what was sent.
    pub(super) fn compare(&mut self) {
        self.fills = true;
        self.compares = true;
        // It does not go in one piece: what stood in the way of all else is in the way of tracking.
        let reasons = self.why_not_tracked.take().into_iter().chain(self.why_not.take());
        self.why_not_tracked = Some(reasons.collect::<Vec<_>>().join("; "));
        self.chain = Chain::default();
        self.tracked = Tracked::new(By::Content);
    }

    /// Whether rounds of it go beside the images.
    pub(super) fn has_rounds(&self) -> bool {
        self.fills && (self.compares || self.why_not_tracked.is_none())
    }

    /// It is neither tracked nor compared any more.
    pub(super) fn gives_up(&mut self, why: String) {
        self.compares = false;
        self.why_not_tracked = Some(why);
    }

    /// Whether they do.
    pub(super) fn fills(&self) -> bool {
        self.fills
    }

    /// Nothing is to be sent ahead, and all of it goes with the images.
    pub(super) fn in_one_piece(why: String) -> Self {
        Self {
            why_not: Some(why),
            ..Self::default()
        }
    }

    /// For another attempt.
    pub(super) fn again(&self) -> Self {
        Self {
            why_not: self.why_not.clone(),
            ..Self::default()
        }
    }

    /// How much of `private_bytes` is left for the dump, by prediction.
    pub(super) fn left(&self, private_bytes: u64) -> u64 {
        match self.why_not {
            None => self.chain.left(private_bytes),
            Some(_) => private_bytes,
        }
    }

    /// The images that a dump relies on, relative to its own.
    pub(super) fn parent(&self) -> Option<PathBuf> {
        let usable = !self.fills && self.why_not.is_none() && !self.chain.all().is_empty();
        usable.then(|| Path::new(PRE_DUMPS).join(self.chain.all().len().to_string()))
    }

    /// All pre-dumps.
    pub(super) fn pre_dumps(&self) -> &[PreDump] {
        match self.is_tracked() {
            true => &[],
            false => self.chain.all(),
        }
    }

    /// Whether the rounds are those of trackers; else they are pre-dumps, whatever became of those.
    fn is_tracked(&self) -> bool {
        self.fills && self.why_not.is_none()
    }

    /// How it went beside the images, if it did.
    pub(super) fn report(&self) -> Option<PrivateTracked> {
        self.fills.then(|| PrivateTracked {
            rounds: match self.is_tracked() {
                true => self.chain.all().to_vec(),
                false => Vec::new(),
            },
            compared: self.compares,
            last_bytes: self.last_bytes,
        })
    }

    /// Why it was not tracked, if it was not.
    pub(super) fn why_not_tracked(&self) -> Option<&str> {
        self.why_not_tracked.as_deref()
    }

    /// Why private memory goes in one piece, if it does.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Whether the attempt failed because of them, and one without them is worth it.
    pub(super) fn is_to_blame(&self) -> bool {
        self.to_blame
    }

    /// The instance is frozen and written down, or that failed: whether what was sent ahead is still right.
    pub(super) fn judge<E>(&mut self, dumped: &Result<Dumped, E>) -> anyhow::Result<()> {
        if self.fills {
            self.to_blame = dumped.is_err();
        }
        if self.parent().is_none() {
            return Ok(());
        }
        self.to_blame = dumped.is_err();
        self.nothing_has_moved().inspect_err(|_| self.to_blame = true)
    }

    /// An error if the program has moved pages since the first one.
    pub(super) fn nothing_has_moved(&self) -> anyhow::Result<()> {
        let moves = self.moves.as_ref().context("nobody has watched for moves")?;
        let count = moves.count().context("the kernel does not tell the moves")?;
        ensure!(
            count == 0,
            "the program has moved memory ({count} × mremap), which the kernel does not track"
        );
        Ok(())
    }

    /// Waits for one that has begun, and removes all images here.
    pub(super) async fn clear(&mut self, paths: &Paths) {
        if let Some(running) = self.running.take() {
            let _ = running.await;
        }
        self.moves = None;
        self.tracked = Tracked::default();
        let paths = paths.clone();
        let cleared = tokio::task::spawn_blocking(move || paths.clear_images()).await;
        if let Ok(Err(error)) = cleared {
            tracing::warn!(%error, "images are left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn one() -> PreDump {
        PreDump {
            bytes: 4096,
            time: Duration::from_millis(100),
            frozen: None,
        }
    }

    #[test]
    fn a_dump_relies_on_the_last_one_unless_something_stood_in_the_way() {
        let mut ahead = Ahead::default();
        assert_eq!(ahead.parent(), None);
        assert_eq!(ahead.left(1 << 20), 1 << 20);
        ahead.chain.note(one());
        ahead.chain.note(one());
        assert_eq!(ahead.parent(), Some("pre-dump/2".into()));
        assert_eq!(ahead.left(1 << 20), 4096);
        ahead.why_not = Some("x".into());
        assert_eq!((ahead.parent(), ahead.left(1 << 20)), (None, 1 << 20));
        assert_eq!(
            ahead.pre_dumps().len(),
            2,
            "what was done is reported all the same"
        );
        let again = ahead.again();
        assert_eq!((again.why_not(), again.pre_dumps().len()), (Some("x"), 0));
    }

    #[test]
    fn only_a_failure_on_top_of_pre_dumps_is_theirs() {
        let failed: Result<Dumped, &str> = Err("no");
        let mut ahead = Ahead::default();
        assert!(ahead.judge(&failed).is_ok() && !ahead.is_to_blame());
        ahead.chain.note(one());
        // What nobody has watched is not relied on.
        assert!(ahead.judge(&failed).is_err() && ahead.is_to_blame());
        let mut ahead = Ahead::in_one_piece("the kernel".into());
        ahead.chain.note(one());
        assert!(ahead.judge(&failed).is_ok() && !ahead.is_to_blame());
    }

    #[test]
    fn a_dump_that_leaves_memory_out_relies_on_no_images() {
        let mut ahead = Ahead::default();
        ahead.fill();
        ahead.chain.note(one());
        assert_eq!((ahead.parent(), ahead.pre_dumps().len()), (None, 0));
        assert_eq!(ahead.left(1 << 20), 4096);
        assert_eq!(ahead.report().unwrap().rounds.len(), 1);
        assert!(ahead.judge(&Err::<Dumped, _>("no")).is_ok() && ahead.is_to_blame());
        assert!(!ahead.again().fills());
        // Compared, after pre-dumps that have failed.
        let mut compared = Ahead::in_one_piece("x".into());
        compared.chain.note(one());
        compared.why_not_tracked = Some("y".into());
        compared.compare();
        assert!(compared.has_rounds() && compared.report().unwrap().rounds.is_empty());
        assert_eq!(
            (compared.why_not(), compared.why_not_tracked()),
            (None, Some("y; x"))
        );
        compared.chain.note(one());
        let report = compared.report().unwrap();
        assert_eq!(
            (report.rounds.len(), report.compared, compared.parent()),
            (1, true, None)
        );
        compared.gives_up("z".into());
        assert!(compared.fills() && !compared.has_rounds());
        // Pre-dumps that have failed, and what follows them.
        ahead.why_not = Some("x".into());
        assert_eq!((ahead.pre_dumps().len(), ahead.left(1 << 20)), (1, 1 << 20));
        assert!(ahead.report().unwrap().rounds.is_empty());
    }
}

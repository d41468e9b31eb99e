//! Private memory is sent ahead by tracking it from outside, and left out of CRIU's images: what the tasks have written since is
//! little, and the destination gives them their memory while they run (`crate::instances::filling`).
//!
//! The ways, best first; each is taken where those before it cannot be, and the report says why:
//!
//! 1. tracked from outside, sent in rounds, left out of the images (here);
//! 2. by CRIU's pre-dumps, where the kernel has soft-dirty ([`super::pre_dump`]);
//! 3. compared with what was sent, sent in rounds, left out of the images (here): all of it is read while the tasks stand still, little
//!    of it is sent;
//! 4. all of it while the tasks stand still, but left out of the images (here, without rounds): CRIU neither writes nor reads it;
//! 5. all of it with the images, in one piece.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Source;
use super::pre_copy::private_round;
use crate::faults::Point;
use crate::memory::convergence::Verdict;
use crate::memory::pre_dump::{PreDump, WORTH_BYTES};
use crate::memory::private;
use crate::memory::tracked::{self, Tracked, Untrackable, Untracked, Way};
use crate::protocol::FILL;

/// How often a round that takes long is told of.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// What is in the way of the ways.
pub(super) struct Ways {
    /// Of leaving private memory out of the images.
    pub images: Option<String>,
    /// Of tracking it from outside, if it can be left out.
    pub tracking: Option<Untrackable>,
}

/// Looks which ways there are for the private memory of an instance whose first process is `root`; `can_fill`: the
/// destination can give it to the tasks while they run.
pub(super) fn ways(root: i32, to: &str, can_fill: bool) -> Ways {
    let bytes = private::bytes_of_tree(root);
    let images = if bytes < WORTH_BYTES {
        Some(format!(
            "it is {} KiB, and less than {} KiB are not worth it",
            bytes >> 10,
            WORTH_BYTES >> 10
        ))
    } else if !can_fill {
        Some(format!(
            "the agent of {to} is of a release that cannot give tasks their memory while they run"
        ))
    } else {
        tracked::must_go_in_images(root, bytes)
    };
    let tracking = match images {
        None => tracked::cannot_be_tracked(root),
        Some(_) => None,
    };
    Ways { images, tracking }
}

/// Whether private memory will be left out of CRIU's images, as far as can be known before it is tried.
pub fn goes_beside_images(root: i32, to: &str, can_fill: bool, has_soft_dirty: bool) -> bool {
    let Ways { images, tracking } = ways(root, to, can_fill);
    images.is_none() && (tracking.is_none() || !has_soft_dirty)
}

/// How private memory would go, in words for an operator; `has_soft_dirty`: the kernel tells CRIU what is written to it.
pub fn private_note(root: i32, to: &str, can_fill: bool, has_soft_dirty: bool) -> String {
    let Ways { images, tracking } = ways(root, to, can_fill);
    match (images, tracking, has_soft_dirty) {
        (None, None, _) => "private memory goes ahead, tracked from outside (userfaultfd)".to_owned(),
        (Some(why), _, _) if private::bytes_of_tree(root) < WORTH_BYTES => {
            format!("private memory goes with CRIU's images: {why}")
        }
        (Some(why), _, true) => by_pre_dumps(&why),
        (None, Some(untrackable), true) if private::untracked(root).is_none() => {
            by_pre_dumps(&untrackable.why)
        }
        (Some(why), _, false) => format!(
            "private memory goes with CRIU's images, in one piece, while the program stands still: {why}"
        ),
        (None, Some(Untrackable { why, incomparable }), _) => match incomparable {
            None => format!(
                "private memory goes ahead, and all of it is read and compared with what was sent while the program stands still: {why}"
            ),
            Some(_) => {
                format!("private memory goes while the program stands still, beside CRIU's images: {why}")
            }
        },
    }
}

fn by_pre_dumps(why: &str) -> String {
    format!("private memory goes ahead by CRIU's pre-dumps, and is not tracked from outside: {why}")
}

impl Source {
    /// Whether it will be left out of the images, as far as can be known before it is tried.
    pub(super) async fn goes_beside_images(&self, to: &str) -> anyhow::Result<bool> {
        let (root, to) = (self.instance.init_pid(), to.to_owned());
        let can_fill = self.agent.peers.can(&to, FILL);
        let has_soft_dirty = self.agent.tools.tracks_memory().await.is_ok();
        let found =
            tokio::task::spawn_blocking(move || goes_beside_images(root, &to, can_fill, has_soft_dirty));
        found.await.context("looking at private memory panicked")
    }

    /// Private memory goes ahead in the best way that there is. An error is one of the migration.
    pub(super) async fn private_rounds(&mut self, begun: Instant) -> anyhow::Result<()> {
        let paths = self.instance.home.paths.clone();
        // Those of an earlier attempt, or of the instance's arrival: CRIU and the destination must not take them for new ones.
        tokio::task::spawn_blocking(move || paths.clear_images())
            .await
            .context("removing images panicked")?
            .context("old images cannot be removed")?;
        let is_damaged = self.pass(Point::SourceTrack).await?;
        if self.ahead.why_not.is_some() {
            return Ok(());
        }
        let (root, to) = (self.instance.init_pid(), self.request.destination.clone());
        let can_fill = self.agent.peers.can(&to, FILL);
        let found = tokio::task::spawn_blocking(move || ways(root, &to, can_fill));
        let Ways { images, mut tracking } = found.await.context("looking at private memory panicked")?;
        if is_damaged && images.is_none() {
            tracking = Some(Untrackable {
                why: "a test has ordered that it is not tracked".to_owned(),
                incomparable: None,
            });
        }
        if images.is_none() && tracking.is_none() {
            self.ahead.fill();
            return self.tracked_rounds(begun).await;
        }
        let why = tracking.as_ref().map(|untrackable| untrackable.why.clone());
        self.ahead.why_not_tracked = images.clone().or(why);
        if private::bytes_of_tree(root) < WORTH_BYTES {
            self.ahead.why_not = images;
            return Ok(());
        }
        self.pre_dump_rounds(begun).await?;
        if images.is_some() || self.ahead.why_not().is_none() {
            return Ok(());
        }
        match tracking.and_then(|untrackable| untrackable.incomparable) {
            None => {
                self.ahead.compare();
                self.tracked_rounds(begun).await
            }
            // All of it while the tasks stand still, which CRIU would do, too, and take longer.
            Some(_) => {
                self.ahead.fill();
                Ok(())
            }
        }
    }

    /// Rounds until more of them gain nothing, or the limits are reached.
    async fn tracked_rounds(&mut self, begun: Instant) -> anyhow::Result<()> {
        while self.tracked_round().await? {
            match self.ahead.chain.verdict(&self.request.limits, begun.elapsed()) {
                Verdict::Again => {}
                Verdict::Converged | Verdict::DoesNotConverge => break,
            }
        }
        Ok(())
    }

    /// One more, where much may have been written since the last.
    pub(super) async fn private_round_again(&mut self) -> anyhow::Result<()> {
        if !self.ahead.fills() {
            self.pre_dump_again().await;
        } else if let Some(last) = self.ahead.last.filter(|_| self.ahead.has_rounds())
            && self.ahead.chain.is_stale(last.elapsed())
        {
            self.tracked_round().await?;
        }
        Ok(())
    }

    /// One round. False if memory is not tracked any more, and all of it is sent while the tasks stand still.
    async fn tracked_round(&mut self) -> anyhow::Result<bool> {
        let begun = Instant::now();
        let waited = self.route.pace.waited();
        let all = self.ahead.chain.all();
        let (round, dirty_bytes) = (all.len() as u32 + 1, all.last().map_or(0, |last| last.bytes));
        self.route.pace.begin(round);
        let told = |sent, dirty, complete| private_round(round, begun, sent, dirty, complete);
        let way = self.way();
        let (root, mut destination) = (self.instance.init_pid(), self.destination());
        let mut ticks = tokio::time::interval_at((begun + TELL_EVERY).into(), TELL_EVERY);
        let sent = {
            let sending = way.round(&mut self.ahead.tracked, root, &mut destination);
            tokio::pin!(sending);
            loop {
                tokio::select! {
                    sent = &mut sending => break sent?,
                    _ = ticks.tick() => {
                        let sent = way.sent.load(Ordering::Relaxed);
                        let _ = self.progress.try_send(told(sent, dirty_bytes, false));
                    }
                }
            }
        };
        match sent {
            Ok(bytes) => {
                self.bytes.pre_copy += bytes;
                self.ahead.last = Some(Instant::now());
                let time = begun.elapsed().saturating_sub(self.route.pace.waited() - waited);
                self.ahead.chain.note(PreDump {
                    bytes,
                    time,
                    frozen: None,
                });
                let _ = self.progress.try_send(told(bytes, bytes, true));
                Ok(true)
            }
            Err(Untracked(why)) => {
                self.note(&format!(
                    "what is written to private memory is not known any more, and it goes while the program stands still: {why}"
                ));
                self.ahead.gives_up(why);
                Ok(false)
            }
        }
    }

    /// The way to the destination while the program runs.
    pub(super) fn way(&self) -> Way {
        Way {
            session: self.session,
            route: self.route.clone(),
            sent: Arc::default(),
        }
    }

    /// The way to the destination while the tasks stand still.
    pub(super) fn in_a_hurry(&self) -> Way {
        Way {
            session: self.session,
            route: self.route.in_a_hurry(),
            sent: Arc::default(),
        }
    }

    /// The images are complete: sends the private memory that they lack and the destination has not. After it the destination
    /// has every page.
    pub(super) async fn send_the_rest(&mut self) -> anyhow::Result<()> {
        if !self.ahead.fills() {
            return Ok(());
        }
        let (way, root) = (self.in_a_hurry(), self.instance.init_pid());
        let (images, mut destination) = (self.instance.home.paths.images.clone(), self.destination());
        let tracked: &mut Tracked = &mut self.ahead.tracked;
        let rest = way.rest(tracked, root, &images, &mut destination).await;
        let rest = rest.context("private memory that the images lack")?;
        self.ahead.last_bytes += rest;
        self.bytes.stop_and_copy += rest;
        Ok(())
    }
}

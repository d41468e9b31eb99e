//! Pre-copy: private memory ([`super::track`]), then the runtime folder, adopted memory included, is sent in rounds while
//! the program runs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::post_copy::leave_some_behind;
use super::{Progress, Source};
use crate::instances::machine::RAM;
use crate::instances::machine::leaving::Leaving;
use crate::memory::convergence::{Round, Verdict};
use crate::memory::ram::Which;
use crate::memory::{private, shared};
use crate::proto::PreCopyRound;

/// How often a round that takes long is told of.
const TELL_EVERY: Duration = Duration::from_millis(200);

impl Source {
    /// Sends rounds until more of them gain nothing, or the limits are reached.
    pub(super) async fn pre_copy(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let limits = self.request.limits;
        match self.is_machine() {
            true => self.await_machine().await?,
            false => self.private_rounds(begun).await?,
        }
        loop {
            self.round().await?;
            match self.convergence.verdict(&limits, begun.elapsed()) {
                Verdict::Again => {}
                Verdict::Converged => {
                    self.converged = true;
                    return Ok(());
                }
                Verdict::DoesNotConverge => break,
            }
        }
        if self.request.post_copy {
            self.begin_to_leave_behind();
            return self.round().await;
        }
        self.keeps_the_limit()?;
        self.note(&format!(
            "pre-copy does not converge: {}; going on all the same",
            self.state_of_pre_copy()
        ));
        Ok(())
    }

    /// An error if it was asked for not to go on with a longer blackout than the limit.
    pub(super) fn keeps_the_limit(&self) -> anyhow::Result<()> {
        let limits = &self.request.limits;
        if let Some(max) = limits.max_blackout.filter(|_| limits.strict)
            && self.convergence.exceeds(limits).is_some()
        {
            bail!(
                "the blackout would be longer than {} ms: {}; allow a longer one, or try again when the program writes \
                 less",
                max.as_millis(),
                self.state_of_pre_copy()
            );
        }
        Ok(())
    }

    fn state_of_pre_copy(&self) -> String {
        let convergence = &self.convergence;
        format!(
            "{} KiB were written during the last of {} rounds, {} KiB of private memory are left, {} KiB of shared memory \
             without a file go with CRIU's images, {:.0} MiB/s are sent, and the predicted blackout is {} ms",
            convergence.dirty_bytes() >> 10,
            convergence.rounds().len(),
            convergence.private_bytes() >> 10,
            convergence.shared_bytes() >> 10,
            convergence.bytes_per_second() / f64::from(1 << 20),
            convergence.predicted_blackout().unwrap_or_default().as_millis()
        )
    }

    /// One round; told of while it runs and when it has ended.
    pub(super) async fn round(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let number = self.convergence.rounds().len() as u32 + 1;
        let (mut destination, progress) = (self.destination(), self.progress.clone());
        let (sent, before) = (self.files.sent(), self.convergence.clone());
        self.route.pace.begin(number);
        let waited = self.route.pace.waited();
        let mut ticks = tokio::time::interval_at((begun + TELL_EVERY).into(), TELL_EVERY);
        let bytes = {
            let way = self.way();
            let sent_ram = Arc::clone(&way.sent);
            let (session, to) = (self.session, &self.request.destination);
            let (files, machine, left) = (&mut self.files, &mut self.machine, &mut self.left_behind);
            let round = async {
                let ram = match machine {
                    Some(Leaving { rounds, .. }) => match left {
                        Some(left) => {
                            leave_some_behind((session, to), rounds, left, &mut destination).await?;
                            0
                        }
                        None => {
                            way.ram(Path::new(RAM), rounds, Which::Another, &mut destination)
                                .await?
                        }
                    },
                    None => 0,
                };
                anyhow::Ok(ram + files.round(&mut destination).await?)
            };
            let mut round = std::pin::pin!(round);
            loop {
                tokio::select! {
                    bytes = &mut round => break bytes?,
                    _ = ticks.tick() => {
                        let sent = sent.load(Ordering::Relaxed) + sent_ram.load(Ordering::Relaxed);
                        let _ = progress.try_send(Progress::PreCopy(PreCopyRound {
                            round: number,
                            sent_bytes: sent,
                            dirty_bytes: before.dirty_bytes(),
                            bytes_per_second: (sent as f64 / begun.elapsed().as_secs_f64()) as u64,
                            predicted_blackout_ms: before.predicted_blackout().map(in_milliseconds),
                            complete: false,
                            private: false,
                        }));
                    }
                }
            }
        };
        // The last round is not held up.
        let time = begun.elapsed().saturating_sub(self.route.pace.waited() - waited);
        let init = self.instance.init_pid();
        let (private_bytes, shared_bytes) = match self.machine {
            Some(_) => (0, 0),
            None => (
                self.ahead.left(private::bytes_of_tree(init)),
                shared::bytes_of_tree(init),
            ),
        };
        self.convergence.shares(shared_bytes);
        self.bytes.pre_copy += bytes;
        self.convergence.note(Round { bytes, time }, private_bytes);
        self.convergence.looks_for(self.ahead.tracked.look_time());
        let _ = self.progress.try_send(Progress::PreCopy(PreCopyRound {
            round: number,
            sent_bytes: bytes,
            dirty_bytes: bytes,
            bytes_per_second: (bytes as f64 / begun.elapsed().as_secs_f64().max(1e-6)) as u64,
            predicted_blackout_ms: self.convergence.predicted_blackout().map(in_milliseconds),
            complete: true,
            private: false,
        }));
        Ok(())
    }
}

/// How round `round` of private memory goes, which began at `begun`.
pub(super) fn private_round(
    round: u32,
    begun: Instant,
    sent_bytes: u64,
    dirty_bytes: u64,
    complete: bool,
) -> Progress {
    Progress::PreCopy(PreCopyRound {
        round,
        sent_bytes,
        dirty_bytes,
        bytes_per_second: (sent_bytes as f64 / begun.elapsed().as_secs_f64().max(1e-6)) as u64,
        predicted_blackout_ms: None,
        complete,
        private: true,
    })
}

fn in_milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

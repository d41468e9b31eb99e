//! The source of missing RAM, and its transport: one-sided RDMA if the session's memory went by RDMA and the
//! range is described, else answers over TLS. A range that RDMA does not bring comes over TLS at once.

use std::convert::Infallible;
use std::future::pending;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::sync::{Notify, watch};

use super::Origin;
use super::borrowing::Borrowing;
use crate::agent::Shared;
use crate::faults::Point;
use crate::proto::{RamRun, ReadBehindRequest};

/// Limit for a source's answer.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// Pause before RDMA is tried again after a failure: the first, and the longest.
const PAUSE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The host that a guest has left, which provides its missing RAM.
pub(super) struct Giving<'a> {
    agent: &'a Shared,
    origin: &'a Origin,
    borrowing: Mutex<Option<Arc<Borrowing>>>,
    /// The borrowing has failed, and was dropped.
    has_failed: Notify,
    rdma_bytes: AtomicU64,
    tls_bytes: AtomicU64,
}

impl<'a> Giving<'a> {
    pub(super) fn new(agent: &'a Shared, origin: &'a Origin) -> Self {
        Self {
            agent,
            origin,
            borrowing: Mutex::default(),
            has_failed: Notify::new(),
            rdma_bytes: AtomicU64::new(0),
            tls_bytes: AtomicU64::new(0),
        }
    }

    /// Content of a range at that host; `None` if the host keeps nothing. `is_ahead`: no thread waits for the
    /// range yet.
    pub(super) async fn give(
        &self,
        range: Range<u64>,
        is_ahead: bool,
    ) -> anyhow::Result<Option<Vec<RamRun>>> {
        let is_to_damage = self.agent.faults.pass(Point::DestinationBring).await?;
        let borrowing = self.borrowing().clone();
        if let Some(borrowing) = borrowing {
            match borrowing.read(&range, is_ahead, is_to_damage).await {
                Ok(Some(runs)) => {
                    self.rdma_bytes.fetch_add(data_bytes(&runs), Relaxed);
                    return Ok(Some(runs));
                }
                // The range is not described yet.
                Ok(None) => {}
                Err(error) => self.give_up(&borrowing, &error),
            }
        }
        let runs = ask(self.agent, self.origin, &range, false).await?;
        self.tls_bytes
            .fetch_add(runs.as_deref().map_or(0, data_bytes), Relaxed);
        Ok(runs)
    }

    /// Borrows the RAM once the rest of it may come, and again after a failure. `bytes`: size of the RAM.
    pub(super) async fn connect(&self, mut the_rest: watch::Receiver<bool>, bytes: u64) -> Infallible {
        let may_begin = the_rest.wait_for(|may_begin| *may_begin).await.is_ok();
        if !may_begin || !self.origin.by_rdma {
            return pending().await;
        }
        let mut pause = PAUSE[0];
        loop {
            match Borrowing::open(self.agent, self.origin, bytes).await {
                Ok(borrowing) => {
                    tracing::info!(
                        source = self.origin.source,
                        "RAM that was left behind is read by RDMA from now on"
                    );
                    *self.borrowing() = Some(Arc::new(borrowing));
                    self.has_failed.notified().await;
                }
                Err(error) => tracing::warn!(
                    source = self.origin.source,
                    error = format!("{error:#}"),
                    "RAM that was left behind cannot be read by RDMA; it comes over TLS"
                ),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE[1]);
        }
    }

    fn borrowing(&self) -> MutexGuard<'_, Option<Arc<Borrowing>>> {
        self.borrowing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_up(&self, failed: &Arc<Borrowing>, error: &anyhow::Error) {
        let mut borrowing = self.borrowing();
        // The other requests in flight fail, too.
        if borrowing
            .take_if(|borrowing| Arc::ptr_eq(borrowing, failed))
            .is_some()
        {
            tracing::warn!(
                source = self.origin.source,
                error = format!("{error:#}"),
                "RAM that was left behind comes by RDMA no more; it comes over TLS, and RDMA is tried again later"
            );
            self.has_failed.notify_one();
        }
    }

    /// Logs that all RAM has come.
    pub(super) fn tell_what_came(&self) {
        tracing::info!(
            source = self.origin.source,
            session = format!("{:016x}", self.origin.session),
            by_rdma_kib = self.rdma_bytes.load(Relaxed) >> 10,
            over_tls_kib = self.tls_bytes.load(Relaxed) >> 10,
            "all of the RAM that was left behind has come"
        );
    }
}

fn data_bytes(runs: &[RamRun]) -> u64 {
    runs.iter().map(|run| run.data.len() as u64).sum()
}

/// Content of a range at that host, or, with `described`, its fingerprints; `None` if the host keeps nothing.
pub(super) async fn ask(
    agent: &Shared,
    origin: &Origin,
    range: &Range<u64>,
    described: bool,
) -> anyhow::Result<Option<Vec<RamRun>>> {
    let request = ReadBehindRequest {
        session: origin.session,
        start: range.start,
        length: range.end - range.start,
        described,
    };
    let asked = async {
        let mut source = agent.peers.connect(&origin.source).await?;
        anyhow::Ok(source.read_behind(request).await?.into_inner())
    };
    let reply = tokio::time::timeout(ANSWER, asked).await;
    let reply = reply.with_context(|| format!("{} does not answer", origin.source))??;
    if !reply.kept {
        return Ok(None);
    }
    must_cover(range, &reply.runs).with_context(|| format!("{} gives something else", origin.source))?;
    Ok(Some(reply.runs))
}

/// An error unless the runs cover a range once and whole: a thread would wait forever for a page that no run
/// has.
fn must_cover(range: &Range<u64>, runs: &[RamRun]) -> anyhow::Result<()> {
    let mut at = range.start;
    let mut runs: Vec<&RamRun> = runs.iter().collect();
    runs.sort_unstable_by_key(|run| run.start);
    for run in runs {
        ensure!(
            run.start == at,
            "what begins at {:#x} where {at:#x} was asked for",
            run.start
        );
        ensure!(
            run.data.is_empty() || run.data.len() as u64 == run.length,
            "{} bytes at {at:#x}, where it says {}",
            run.data.len(),
            run.length
        );
        at = at.checked_add(run.length).context("a run beyond all memory")?;
    }
    ensure!(
        at >= range.end,
        "{} bytes where {} were asked for",
        at - range.start,
        range.end - range.start
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, length: u64, data: usize) -> RamRun {
        let data = vec![1; data];
        RamRun {
            start,
            length,
            data,
            ..RamRun::default()
        }
    }

    #[test]
    fn an_answer_is_what_was_asked_for_or_none() {
        let asked = 4096..16384;
        // Zeros come last.
        let whole = [run(12288, 4096, 4096), run(4096, 8192, 0)];
        must_cover(&asked, &whole).unwrap();
        must_cover(&asked, &[run(4096, 1 << 20, 0)]).unwrap();
        for wrong in [
            &[][..],
            &[run(0, 16384, 0)],
            &[run(4096, 8192, 0)],
            &[run(4096, 8192, 0), run(8192, 8192, 0)],
            &[run(4096, 4096, 0), run(12288, 4096, 0)],
            &[run(4096, 12288, 4096)],
            &[run(4096, u64::MAX, 0)],
        ] {
            assert!(must_cover(&asked, wrong).is_err(), "{wrong:?}");
        }
    }
}

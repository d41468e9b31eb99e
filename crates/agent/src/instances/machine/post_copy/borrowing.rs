//! RAM by one-sided RDMA: the source lends its RAM, and its RNIC answers.
//!
//! ```text
//!  Borrowing                                              the source's agent
//!   open ─────────────── LendBehind ────────────────────► lends the file, by two connections
//!   a piece, once ────── ReadBehind (described) ────────► where there is memory, and its fingerprints
//!   read ─── READ ──────────────────────────────────────► (its RNIC)
//! ```
//!
//! Ranges that no thread waits for are read ahead, by a connection of their own: so a fault does not wait
//! behind them. Each page is compared with its fingerprint, which has come over TLS. So a range can be read
//! only when its *pieces* are described. A fault never waits for a description: its range comes over TLS
//! then. A range that is read ahead does wait, and has the next piece described meanwhile.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use tokio::sync::{OnceCell, oneshot};
use verbatim_bulk::fingerprint::{FINGERPRINT_BYTES, Key, PAGE_BYTES};
use verbatim_bulk::{Borrower, Canceller, Loan, QpClass, Wish};
use verbatim_vm::AHEAD;

use super::Origin;
use super::giving::{ANSWER, ask};
use crate::agent::Shared;
use crate::proto::{LendBehindRequest, RamRun};
use crate::protocol::POST_COPY_RDMA;

/// Length of a piece in bytes. Its description has at most 64 KiB.
const PIECE: u64 = 8 << 20;

/// Limit of ranges in flight on each connection.
const ROOMS: u64 = 8;

/// Limit for one READ, so that the guest waits no longer than for a source that does not answer.
const PATIENCE: Duration = Duration::from_secs(2);

const PAGE: u64 = PAGE_BYTES as u64;

/// RAM that another host lends.
pub(super) struct Borrowing {
    agent: Shared,
    origin: Origin,
    bytes: u64,
    pieces: Vec<Piece>,
    /// For faults.
    urgent: Reader,
    ahead: Reader,
}

/// Description of a part of the RAM.
#[derive(Debug, Default)]
struct Piece {
    is_asked_for: AtomicBool,
    /// Sorted.
    runs: OnceCell<Vec<RamRun>>,
}

impl Borrowing {
    /// Has the source lend `bytes` of RAM.
    pub(super) async fn open(agent: &Shared, origin: &Origin, bytes: u64) -> anyhow::Result<Self> {
        let rnic = Arc::clone(&agent.rnic);
        let made = tokio::task::spawn_blocking(move || {
            let device = rnic.device()?;
            let open = |class| Borrower::open(&device, class, (ROOMS, AHEAD), PATIENCE);
            anyhow::Ok([open(QpClass::User)?, open(QpClass::Background)?])
        });
        let borrowers = made.await.context("making connections panicked")??;
        let (loans, key) = lend(agent, origin, borrowers.each_ref().map(|(_, wish)| *wish)).await?;
        ensure!(
            loans.iter().all(|loan| loan.length() == bytes),
            "{} lends RAM of another size",
            origin.source
        );
        let connecting = tokio::task::spawn_blocking(move || {
            let [urgent, ahead] = borrowers.map(|(borrower, _)| borrower);
            let urgent = Reader::begin(urgent, &loans[0], &key)?;
            anyhow::Ok((urgent, Reader::begin(ahead, &loans[1], &key)?))
        });
        let (urgent, ahead) = connecting.await.context("connecting panicked")??;
        let pieces = bytes.div_ceil(PIECE);
        Ok(Self {
            agent: Arc::clone(agent),
            origin: origin.clone(),
            bytes,
            pieces: (0..pieces).map(|_| Piece::default()).collect(),
            urgent,
            ahead,
        })
    }

    /// Content of a range; `None` if a piece of it is not described yet, so that the range must come in
    /// another way.
    pub(super) async fn read(
        self: &Arc<Self>,
        range: &Range<u64>,
        is_ahead: bool,
        is_to_damage: bool,
    ) -> anyhow::Result<Option<Vec<RamRun>>> {
        let pieces = range.start / PIECE..range.end.div_ceil(PIECE);
        if is_ahead {
            for piece in pieces.clone() {
                self.describe(piece).await?;
            }
            self.describe_soon(pieces.end);
        }
        let known = pieces.map(|piece| self.pieces.get(piece as usize)?.runs.get());
        let Some(known) = known.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let reader = match is_ahead {
            true => &self.ahead,
            false => &self.urgent,
        };
        let wanted = known.into_iter().flatten().filter_map(|run| part(run, range));
        let read = try_join_all(wanted.map(|run| reader.read(run, is_to_damage)));
        read.await.map(Some)
    }

    /// Has a piece described, unless it is described already.
    async fn describe(&self, piece: u64) -> anyhow::Result<()> {
        let there = self
            .pieces
            .get(piece as usize)
            .context("a range beyond the RAM")?;
        there.is_asked_for.store(true, Relaxed);
        let described = there.runs.get_or_try_init(async || {
            let range = piece * PIECE..((piece + 1) * PIECE).min(self.bytes);
            let runs = ask(&self.agent, &self.origin, &range, true).await?;
            let mut runs = runs.with_context(|| format!("{} keeps nothing", self.origin.source))?;
            runs.iter().try_for_each(must_be_described)?;
            runs.sort_unstable_by_key(|run| run.start);
            anyhow::Ok(runs)
        });
        described.await.map(drop)
    }

    /// Has a piece described in the background. After a failure the piece is described when it is needed.
    fn describe_soon(self: &Arc<Self>, piece: u64) {
        let there = self.pieces.get(piece as usize);
        if there.is_some_and(|there| !there.is_asked_for.swap(true, Relaxed)) {
            let this = Arc::clone(self);
            tokio::spawn(async move { this.describe(piece).await });
        }
    }
}

/// Asks the source for its RAM. Returns a loan for each wish, and the key of the fingerprints.
async fn lend(agent: &Shared, origin: &Origin, wishes: [Wish; 2]) -> anyhow::Result<(Vec<Loan>, Arc<Key>)> {
    let wishes = wishes.iter().map(postcard::to_allocvec);
    let request = LendBehindRequest {
        session: origin.session,
        wishes: wishes.collect::<Result<_, _>>()?,
    };
    let source = &origin.source;
    let asked = async {
        let mut client = agent.peers.connect(source).await?;
        ensure!(
            agent.peers.can(source, POST_COPY_RDMA),
            "the agent of {source} lends no RAM; upgrade it to this release"
        );
        anyhow::Ok(client.lend_behind(request).await?.into_inner())
    };
    let reply = tokio::time::timeout(ANSWER, asked).await;
    let reply = reply.with_context(|| format!("{source} does not answer"))??;
    ensure!(reply.kept, "{source} keeps nothing");
    let loans = reply.loans.iter().map(|loan| verbatim_bounded::decode(loan));
    let loans: Vec<Loan> = loans.collect::<Result<_, _>>().context("a malformed loan")?;
    ensure!(loans.len() == 2, "{} loans for two wishes", loans.len());
    let key = Key::from_bytes(&reply.key).context("its key is not as long as a key")?;
    Ok((loans, Arc::new(key)))
}

/// An error unless the run can be read: whole pages, with a fingerprint for each or none at all.
fn must_be_described(run: &RamRun) -> anyhow::Result<()> {
    let is_whole = run.start.is_multiple_of(PAGE) && run.length.is_multiple_of(PAGE);
    let fingerprints = run.length / PAGE * FINGERPRINT_BYTES as u64;
    ensure!(
        is_whole && run.data.is_empty(),
        "{} bytes at {:#x} are not described",
        run.length,
        run.start
    );
    ensure!(
        run.fingerprints.is_empty() || run.fingerprints.len() as u64 == fingerprints,
        "{} bytes of fingerprints for {} of RAM",
        run.fingerprints.len(),
        run.length
    );
    Ok(())
}

/// The part of a described run that is in a range.
fn part(run: &RamRun, range: &Range<u64>) -> Option<RamRun> {
    let start = run.start.max(range.start);
    let end = (run.start + run.length).min(range.end);
    let pages = |bytes: u64| (bytes / PAGE) as usize * FINGERPRINT_BYTES;
    (start < end).then(|| RamRun {
        start,
        length: end - start,
        fingerprints: match run.fingerprints.is_empty() {
            true => Vec::new(),
            false => run.fingerprints[pages(start - run.start)..pages(end - run.start)].to_vec(),
        },
        ..RamRun::default()
    })
}

/// Hands READs to a thread. On drop the READs in flight are abandoned.
struct Reader {
    jobs: mpsc::Sender<Job>,
    canceller: Canceller,
}

/// A run to be read.
struct Job {
    run: RamRun,
    is_to_damage: bool,
    answer: oneshot::Sender<Result<Vec<u8>, String>>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.canceller.cancel();
    }
}

impl Reader {
    fn begin(mut borrower: Borrower, loan: &Loan, key: &Arc<Key>) -> anyhow::Result<Self> {
        borrower.accept(loan)?;
        let (canceller, key) = (borrower.canceller(), Arc::clone(key));
        let (jobs, given) = mpsc::channel();
        std::thread::Builder::new()
            .name("borrow".to_owned())
            .spawn(move || serve(borrower, &key, &given))
            .context("no thread can be started")?;
        Ok(Self { jobs, canceller })
    }

    /// The run with its bytes. A run of zeros is not read.
    async fn read(&self, mut run: RamRun, is_to_damage: bool) -> anyhow::Result<RamRun> {
        if run.fingerprints.is_empty() {
            return Ok(run);
        }
        let (answer, read) = oneshot::channel();
        let (start, length) = (run.start, run.length);
        let job = Job {
            run,
            is_to_damage,
            answer,
        };
        self.jobs.send(job).ok().context("the connection has ended")?;
        let read = read.await.context("the connection has ended")?;
        let data = read.map_err(anyhow::Error::msg)?;
        run = RamRun {
            start,
            length,
            data,
            ..RamRun::default()
        };
        Ok(run)
    }
}

/// Serves READs, until one fails or the reader is dropped.
fn serve(borrower: Borrower, key: &Key, jobs: &mpsc::Receiver<Job>) {
    let mut posted = VecDeque::new();
    let why = match read_all(borrower, key, jobs, &mut posted) {
        Ok(()) => return,
        Err(error) => error.to_string(),
    };
    // The connection and its memory are gone. Later callers get the error from the channel, which is closed
    // with this thread.
    for job in posted.into_iter().chain(jobs.try_iter()) {
        let _ = job.answer.send(Err(why.clone()));
    }
}

fn read_all(
    mut borrower: Borrower,
    key: &Key,
    jobs: &mpsc::Receiver<Job>,
    posted: &mut VecDeque<Job>,
) -> Result<(), verbatim_bulk::Error> {
    loop {
        while borrower.has_room() {
            let next = match posted.is_empty() {
                true => jobs.recv().ok(),
                false => jobs.try_recv().ok(),
            };
            let Some(job) = next else { break };
            let range = job.run.start..job.run.start + job.run.length;
            posted.push_back(job);
            borrower.fetch(range)?;
        }
        let Some(job) = posted.front() else {
            return Ok(());
        };
        if job.is_to_damage {
            borrower.damage()?;
        }
        let bytes = borrower.take(key, &job.run.fingerprints)?;
        // The caller may be gone.
        if let Some(job) = posted.pop_front() {
            let _ = job.answer.send(Ok(bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(start: u64, pages: u64, is_zero: bool) -> RamRun {
        let fingerprints = (0..pages).flat_map(|page| [page as u8; FINGERPRINT_BYTES]);
        RamRun {
            start,
            length: pages * PAGE,
            fingerprints: match is_zero {
                true => Vec::new(),
                false => fingerprints.collect(),
            },
            ..RamRun::default()
        }
    }

    #[test]
    fn a_part_has_its_own_fingerprints() {
        let run = described(8 * PAGE, 4, false);
        let of = |range: Range<u64>| part(&run, &(range.start * PAGE..range.end * PAGE));
        assert_eq!(of(0..8), None);
        assert_eq!(of(12..13), None);
        assert_eq!(of(0..20), Some(run.clone()));
        let middle = of(9..11).unwrap();
        assert_eq!((middle.start, middle.length), (9 * PAGE, 2 * PAGE));
        assert_eq!(middle.fingerprints[..FINGERPRINT_BYTES], [1; FINGERPRINT_BYTES]);
        assert_eq!(middle.fingerprints[FINGERPRINT_BYTES..], [2; FINGERPRINT_BYTES]);
        let zero = part(&described(0, 4, true), &(PAGE..2 * PAGE)).unwrap();
        assert_eq!((zero.start, zero.length), (PAGE, PAGE));
        assert!(zero.fingerprints.is_empty());
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        must_be_described(&described(PAGE, 3, false)).unwrap();
        must_be_described(&described(PAGE, 3, true)).unwrap();
        let mut short = described(PAGE, 3, false);
        short.fingerprints.pop();
        let mut odd = described(PAGE, 3, true);
        odd.length += 1;
        let mut told = described(PAGE, 3, true);
        told.data = vec![0; 3 * PAGE_BYTES];
        for wrong in [short, odd, told, described(1, 3, false)] {
            assert!(must_be_described(&wrong).is_err(), "{wrong:?}");
        }
    }
}

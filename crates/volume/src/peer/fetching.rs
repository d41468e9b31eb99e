//! The destination's ring, into which it reads the source's chunks by RDMA, for one connection.
//!
//! One thread posts READs, waits for them in their order, copies each chunk out to memory that no other host
//! can reach, and compares the copy with the fingerprints that came over TLS. Every chunk that was given to
//! the thread comes back, with its bytes or with a reason. After the first failure the queue pair and the
//! ring go, and all other chunks fail.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use verbatim_bulk::{Accepted, Canceller, Incoming, Landed, Offer, Operation, PAGE_BYTES, Ticket};

use crate::background;
use crate::faults::{Fault, Hook, Point};
use crate::transport::Rnic;
use crate::wire::Landing;

/// Limit for one chunk. It keeps the source's tenant waiting no longer than a silent destination does.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most chunks that are requested at a time; the window bounds their bytes.
const AHEAD: usize = 32;

/// A chunk's bytes, and the position before which all chunks were copied out; or the reason why it was not
/// fetched.
pub type Fetched = Result<(Vec<u8>, u64), String>;

/// A chunk to fetch.
pub struct Job {
    /// Its place in the ring.
    pub landing: Landing,
    /// A fingerprint for each page of the chunk.
    pub fingerprints: Vec<u8>,
    /// Called once.
    pub then: Box<dyn FnOnce(Fetched) + Send>,
}

/// Hands chunks to the thread. When this is dropped, chunks that were not fetched fail.
pub struct Fetching {
    jobs: Sender<Job>,
    canceller: Canceller,
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.canceller.cancel();
    }
}

impl Fetching {
    /// Accepts the source's offer, and returns the answer for the source. It takes a moment.
    pub fn accept(
        rnic: &Rnic,
        offer: &Offer,
        hook: Hook,
    ) -> Result<(Self, Accepted), Box<dyn std::error::Error + Send + Sync>> {
        let device = rnic.open()?;
        let (mut incoming, accepted) = Incoming::accept_locked(&device, offer)?;
        incoming.set_patience(PATIENCE);
        let canceller = incoming.canceller();
        let (jobs, given) = channel();
        std::thread::Builder::new()
            .name("fetch".to_owned())
            .spawn(move || {
                background::enter_with_locks();
                run(incoming, &given, hook);
            })?;
        Ok((Self { jobs, canceller }, accepted))
    }

    /// Gives a chunk to the thread. False if the thread has ended; then `then` is not called.
    #[must_use]
    pub fn fetch(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }

    /// Fails all chunks that were not fetched yet.
    pub fn stop(&self) {
        self.canceller.cancel();
    }
}

/// Posted READs, oldest first.
type Posted = VecDeque<(Job, Landed, Option<Ticket>)>;

fn run(mut incoming: Incoming, jobs: &Receiver<Job>, hook: Hook) {
    let mut posted = Posted::new();
    let why = fetch_all(&mut incoming, jobs, &mut posted, hook);
    // A hanging RNIC releases them late, or never. Until then data land only in the ring, which is no longer
    // read.
    let gone = std::thread::Builder::new().name("fetch-end".to_owned());
    if let Err(error) = gone.spawn(move || drop(incoming)) {
        tracing::warn!("no thread to let go of a ring: {error}");
    }
    for (job, ..) in posted {
        (job.then)(Err(why.clone()));
    }
    while let Ok(job) = jobs.recv() {
        (job.then)(Err(why.clone()));
    }
}

/// Fetches until a chunk fails, and returns the reason; or until there are no more jobs.
fn fetch_all(incoming: &mut Incoming, jobs: &Receiver<Job>, posted: &mut Posted, hook: Hook) -> String {
    loop {
        while posted.len() < AHEAD {
            let next = match posted.is_empty() {
                true => jobs.recv().ok(),
                false => jobs.try_recv().ok(),
            };
            let Some(mut job) = next else { break };
            let landed = Landed {
                position: job.landing.position,
                length: job.landing.length.next_multiple_of(PAGE_BYTES as u64),
                fingerprints: std::mem::take(&mut job.fingerprints),
                operation: Operation::Read,
            };
            let ticket = incoming.fetch(&landed);
            let failed = ticket.as_ref().err().map(ToString::to_string);
            posted.push_back((job, landed, ticket.unwrap_or(None)));
            if let Some(why) = failed {
                return why;
            }
        }
        let Some((_, landed, ticket)) = posted.front() else {
            return "the connection has ended".to_owned();
        };
        let mut bytes = Vec::new();
        let mut taken = incoming.take(landed, *ticket, &mut bytes);
        if hook(Point::Fetched) == Fault::Damage {
            // The damaged bytes stay in the ring only until their room is given back.
            taken = incoming
                .damage(landed)
                .and_then(|()| incoming.take(landed, None, &mut bytes));
        }
        if let Err(error) = taken {
            return error.to_string();
        }
        let (job, landed, _) = posted.pop_front().expect("it is the first");
        bytes.truncate(job.landing.length as usize);
        (job.then)(Ok((bytes, landed.end())));
        background::look();
    }
}

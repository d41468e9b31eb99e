//! The destination's ring, into which it reads the source's chunks by RDMA, for one connection.
//!
//! One thread posts READs, waits for them in their order, copies each chunk out to where nobody can reach it, and compares the copy with the
//! fingerprints that came over TLS. Whatever becomes of it, each chunk that was given to it comes back, with its bytes or with a
//! reason. After the first that fails its queue pair and its ring go, and all others fail.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use verbatim_bulk::{Accepted, Canceller, Incoming, Landed, Offer, Operation, PAGE_BYTES, Ticket};

use crate::background;
use crate::faults::{Fault, Hook, Point};
use crate::transport::Rnic;
use crate::wire::Landing;

/// So long one chunk may take. The source's tenant waits for it no longer than for a destination that is silent.
const PATIENCE: Duration = Duration::from_secs(2);

/// So many are asked for at a time; the window bounds the bytes.
const AHEAD: usize = 32;

/// A chunk's bytes, and the position before which all was copied out; or the reason why it was not fetched.
pub type Fetched = Result<(Vec<u8>, u64), String>;

/// A chunk, and what is to be done with it.
pub struct Job {
    /// Where it lies.
    pub landing: Landing,
    /// For each page of it.
    pub fingerprints: Vec<u8>,
    /// Called once.
    pub then: Box<dyn FnOnce(Fetched) + Send>,
}

/// Hands chunks to the thread. When it is dropped, what was not fetched fails.
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
    /// Takes the source's offer, and says what that must know. It takes a moment.
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

    /// Has it fetched. False if nobody is there to do it, and `then` is not called.
    #[must_use]
    pub fn fetch(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }

    /// What was not fetched yet fails.
    pub fn stop(&self) {
        self.canceller.cancel();
    }
}

/// What is posted, oldest first.
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

/// Until one fails, and why; or until nobody gives any more.
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
            // It lies in the ring no longer than until its room is given back.
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

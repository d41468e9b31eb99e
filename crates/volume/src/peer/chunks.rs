//! The source's thread for chunks: on a connection of its own by TLS, or through the ring from which the
//! destination reads by RDMA.
//!
//! On one connection, a change of the tenant would wait behind all chunks that left before it: as long as the
//! destination takes for megabytes. And a thread that copies and encrypts a chunk has no time for a change
//! meanwhile. So a thread of a lower priority does this ([`crate::background`]), at both ends.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::background;
use crate::outlet::Outgoing;
use crate::own_thread::OwnThread;
use crate::peer::lending::Lending;
use crate::wire::{self, Tag, ToDestination};

/// Interval of the checks of the RNIC: it serves the other host without any action of this one.
const LOOK: Duration = Duration::from_millis(100);

/// Bytes of a chunk that are encrypted and sent in one call: one record of TLS. Many kernels do not preempt a
/// thread within a call, however urgent others are.
const PIECE: usize = 16 << 10;

/// An order to the thread.
pub enum Job {
    /// A chunk leaves.
    Put {
        /// Its name in the answer.
        tag: Tag,
        /// Its first byte in the volume.
        offset: u64,
        /// Its bytes.
        data: Arc<Vec<u8>>,
    },
    /// The destination has copied out all chunks before this position of the ring.
    Taken(u64),
    /// The destination will take neither this chunk nor any other from the ring.
    Again(Tag),
}

/// The thread. When this is dropped, chunks that have not left are not sent.
pub struct Chunks {
    working: Option<JoinHandle<io::Result<()>>>,
    jobs: UnboundedSender<Job>,
}

impl Drop for Chunks {
    fn drop(&mut self) {
        if let Some(working) = &self.working {
            working.abort();
        }
    }
}

impl Chunks {
    /// Sends chunks on the connection that `connect` makes.
    pub async fn beside<S>(
        connect: impl Future<Output = anyhow::Result<S>> + Send + 'static,
    ) -> anyhow::Result<Self>
    where
        S: AsyncWrite + Unpin + Send + 'static,
    {
        let (jobs, given) = unbounded_channel();
        let (connected, is_connected) = oneshot::channel();
        let working = OwnThread::start("copy")?.spawn(async move {
            background::enter();
            let stream = match connect.await {
                Ok(stream) => stream,
                Err(error) => {
                    // Without a receiver, the call is no longer wanted.
                    let _ = connected.send(Err(error));
                    return Ok(());
                }
            };
            let _ = connected.send(Ok(()));
            write(stream, given).await
        });
        let chunks = Self {
            working: Some(working),
            jobs,
        };
        is_connected.await??;
        Ok(chunks)
    }

    /// Puts chunks into this ring. Messages about them go to `more`, which does not keep the connection open.
    pub fn by_ring(lending: Lending, more: WeakUnboundedSender<Outgoing>) -> io::Result<Self> {
        let (jobs, given) = unbounded_channel();
        let working = OwnThread::start("copy")?.spawn(async move {
            background::enter();
            lend(lending, given, &more).await
        });
        Ok(Self {
            working: Some(working),
            jobs,
        })
    }

    /// The queue of chunks. Chunks that are no longer taken are lost with the connection, whose end is
    /// reported.
    pub fn jobs(&self) -> UnboundedSender<Job> {
        self.jobs.clone()
    }

    /// Waits until chunks can no longer leave, and returns the reason.
    pub async fn ended(&mut self) -> io::Result<()> {
        let Some(working) = &mut self.working else {
            return std::future::pending().await;
        };
        let ended = working.await;
        self.working = None;
        ended.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Ends the thread. Afterwards the ring is gone with its queue pair: nothing of it can be read any more.
    pub async fn end(mut self) {
        if let Some(working) = self.working.take() {
            working.abort();
            // The task was aborted, or has ended before.
            let _ = working.await;
        }
    }
}

async fn write(stream: impl AsyncWrite + Unpin, mut jobs: UnboundedReceiver<Job>) -> io::Result<()> {
    let mut writer = BufWriter::new(stream);
    while let Some(job) = jobs.recv().await {
        let Job::Put { tag, offset, data } = job else {
            return Err(no_ring());
        };
        let frame = wire::frame(&ToDestination::Put { tag, offset }, data.len());
        writer.write_all(&frame).await?;
        for piece in data.chunks(PIECE) {
            writer.write_all(piece).await?;
            writer.flush().await?;
        }
        background::look();
    }
    writer.shutdown().await
}

fn no_ring() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it answers as if there were a ring")
}

async fn lend(
    mut lending: Lending,
    mut jobs: UnboundedReceiver<Job>,
    more: &WeakUnboundedSender<Outgoing>,
) -> io::Result<()> {
    let say = |outgoing| {
        // Without a receiver, the connection's end is reported soon.
        if let Some(more) = more.upgrade() {
            let _ = more.send(outgoing);
        }
    };
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        let job = tokio::select! {
            job = jobs.recv() => job,
            _ = looks.tick() => {
                if lending.has_gone() {
                    say(Outgoing::FellBack("the RNIC of this host is gone".to_owned()));
                    say(Outgoing::Frame(wire::frame(&ToDestination::StopFetching, 0), None));
                }
                continue;
            }
        };
        match job {
            Some(Job::Put { tag, offset, data }) => {
                let (frame, data) = lending.put(tag, offset, data);
                say(Outgoing::Frame(frame, data));
            }
            Some(Job::Taken(position)) => say(Outgoing::Carried(lending.taken(position)?)),
            Some(Job::Again(tag)) => {
                if let Some((frame, data)) = lending.again(tag) {
                    say(Outgoing::Frame(frame, data));
                }
            }
            None => return Ok(()),
        }
        background::look();
    }
}

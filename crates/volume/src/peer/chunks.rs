//! The source's thread for chunks: by a connection of their own where they go by TLS, or through the ring from which the destination reads them.
//!
//! On one connection a change of the tenant would wait behind all chunks that left before it: for as long as the destination takes for megabytes. And
//! whoever copies and encrypts a chunk has no time for a change meanwhile: so that is done by a thread of a lower priority
//! ([`crate::background`]), at both ends.

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

/// How often the RNIC is looked after: it serves the other host without a word of this one's.
const LOOK: Duration = Duration::from_millis(100);

/// So much of a chunk is encrypted and sent in one call, in which many kernels take no processor from a thread however urgent others are. It is one record of TLS.
const PIECE: usize = 16 << 10;

/// What the thread is given.
pub enum Job {
    /// A chunk leaves.
    Put {
        /// How it is called in the answer.
        tag: Tag,
        /// Where.
        offset: u64,
        /// What.
        data: Arc<Vec<u8>>,
    },
    /// The destination has copied out what is before that position of the ring.
    Taken(u64),
    /// It will not take that chunk from the ring, nor any other.
    Again(Tag),
}

/// The thread. When this is dropped, what has not left does not leave.
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
                    // If nobody waits for it, nobody wants it any more.
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

    /// Puts chunks into that ring. What is to be said of them goes to `more`, which is no reason to keep the connection.
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

    /// By which chunks are given. What nobody takes any more is lost with the connection, whose end is told.
    pub fn jobs(&self) -> UnboundedSender<Job> {
        self.jobs.clone()
    }

    /// Why chunks cannot leave any more; that does not come by itself while this lives.
    pub async fn ended(&mut self) -> io::Result<()> {
        let Some(working) = &mut self.working else {
            return std::future::pending().await;
        };
        let ended = working.await;
        self.working = None;
        ended.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Ends it. After that a ring is gone, with its queue pair: nothing of it can be read any more.
    pub async fn end(mut self) {
        if let Some(working) = self.working.take() {
            working.abort();
            // It was aborted, or has ended before.
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
        // If nobody takes it, the connection's end is told soon.
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

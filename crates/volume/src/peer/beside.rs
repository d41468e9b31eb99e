//! The connection that chunks have of their own, where they go by TLS.
//!
//! On one connection a change of the tenant would wait behind all chunks that left before it: for as long as the destination takes for megabytes. It is also
//! served by threads of a lower priority ([`crate::background`]), at both ends.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use crate::background;
use crate::wire::{self, Tag, ToDestination};

/// A chunk that leaves.
pub struct Put {
    /// How it is called in the answer.
    pub tag: Tag,
    /// Where.
    pub offset: u64,
    /// What.
    pub data: Arc<Vec<u8>>,
}

/// The end of the source. When it is dropped, what has not left does not leave.
pub struct Beside {
    writing: JoinSet<io::Result<()>>,
    chunks: UnboundedSender<Put>,
}

impl Beside {
    /// Sends chunks on that stream.
    pub fn begin(stream: impl AsyncWrite + Unpin + Send + 'static) -> Self {
        let (chunks, given) = unbounded_channel();
        let mut writing = JoinSet::new();
        writing.spawn_on(write(stream, given), background::runtime());
        Self { writing, chunks }
    }

    /// By which chunks are given. What nobody takes any more is lost with the connection, whose end is told.
    pub fn chunks(&self) -> UnboundedSender<Put> {
        self.chunks.clone()
    }

    /// Why it has ended; it does not end by itself while this lives.
    pub async fn ended(&mut self) -> io::Result<()> {
        match self.writing.join_next().await {
            Some(Ok(result)) => result,
            Some(Err(error)) => Err(io::Error::other(error)),
            None => std::future::pending().await,
        }
    }
}

async fn write(stream: impl AsyncWrite + Unpin, mut chunks: UnboundedReceiver<Put>) -> io::Result<()> {
    let mut writer = BufWriter::new(stream);
    while let Some(Put { tag, offset, data }) = chunks.recv().await {
        let frame = wire::frame(&ToDestination::Put { tag, offset }, data.len());
        writer.write_all(&frame).await?;
        writer.write_all(&data).await?;
        if chunks.is_empty() {
            writer.flush().await?;
        }
    }
    writer.shutdown().await
}

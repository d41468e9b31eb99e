//! Messages, and their frames: two lengths, the message, and the data that belong to it.
//!
//! ```text
//!  0         4         8
//! ┌─────────┬─────────┬─────────┬──────
//! │ message │ data    │ message │ data
//! │ length  │ length  │         │
//! └─────────┴─────────┴─────────┴──────
//! ```
//!
//! Lengths are little-endian; the message is postcard.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use verbatim_bulk::{Accepted, Offer};
use verbatim_mirror::decision::{AgentSession, Answer, Generation, SessionId, VolumeId};

use crate::store::identity::Identity;

/// The version of these messages. Version 3 lacks [`ToDestination::Allocate`].
pub const VERSION: u32 = 4;

/// The oldest version that is still spoken: hosts are upgraded one after the other.
pub const OLDEST: u32 = 3;

/// The longest message without its data: a Hello has the key of fingerprints.
pub const MAX_MESSAGE: usize = 8 << 10;

/// The longest data.
pub const MAX_DATA: usize = 32 << 20;

/// The first message on a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// The volume's name on both hosts.
    pub name: String,
    /// The volume's identity.
    pub id: VolumeId,
    /// The attempt.
    pub session: SessionId,
    /// The source's generation.
    pub base: Generation,
    /// The purpose of the connection.
    pub purpose: Purpose,
}

/// A source's data, for a destination that may see the same disk. JSON, in the data of the frame of a [`Hello`] with
/// [`Purpose::Fill`] or [`Purpose::WouldTake`]: a daemon of an earlier release does not read them. New fields get
/// defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Their path at the source, for messages.
    pub path: String,
    /// Their identity.
    pub identity: Identity,
}

/// The longest [`About`]: a refusal names its path.
const MAX_ABOUT: usize = 2 << 10;

impl About {
    /// The data of the frame; none if it is too long.
    pub fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_vec(self).unwrap_or_default();
        if text.len() <= MAX_ABOUT { text } else { Vec::new() }
    }

    /// What a source has said; `None` if it is of an earlier release.
    pub fn decode(data: &[u8]) -> Option<Self> {
        let is_short = data.len() <= MAX_ABOUT;
        is_short.then(|| serde_json::from_slice(data).ok()).flatten()
    }
}

/// The purpose of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Changes and chunks.
    Fill {
        /// The size of the volume.
        length: u64,
        /// The source.
        from: String,
        /// Whether clients may connect when it has moved.
        attached: bool,
        /// A ring from which chunks may be read by RDMA.
        rdma: Option<Box<Offer>>,
        /// Names this connection for [`Purpose::Chunks`].
        link: u128,
    },
    /// Chunks of another connection that was welcomed. They count as if they came there, and all answers go
    /// there: a change of the tenant waits behind no chunk.
    Chunks {
        /// The `link` of the other connection.
        link: u128,
    },
    /// One question, one answer.
    Decide {
        /// The source no longer wants the copy committed.
        gives_up: bool,
    },
    /// The same, but for a promise: the session of the agents decides.
    Promise {
        /// The session.
        by: AgentSession,
    },
    /// Whether [`Purpose::Fill`] would be refused. Nothing is changed. (A daemon of an earlier release does
    /// not know this purpose, and closes the connection.)
    WouldTake {
        /// The size of the volume.
        length: u64,
        /// Its allocated bytes at the source.
        allocated: u64,
        /// The source.
        from: String,
    },
    /// A destination asks its source: has the copy there left for it, by that session? One question, one answer. (A daemon of an earlier
    /// release closes the connection.)
    HasLeft,
}

/// A message of the source after its Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDestination {
    /// Write the frame's data.
    Put {
        /// The name in the answer.
        tag: Tag,
        /// The first byte in the volume.
        offset: u64,
    },
    /// Write zeros.
    Zero {
        /// The name in the answer.
        tag: Tag,
        /// The first byte in the volume.
        offset: u64,
        /// The number of bytes.
        length: u64,
    },
    /// Tell whether the copy has the same data already.
    Compare {
        /// The name in the answer.
        tag: Tag,
        /// The first byte in the volume.
        offset: u64,
        /// The number of bytes.
        length: u64,
        /// BLAKE3 of the bytes.
        hash: [u8; 32],
    },
    /// Flush acknowledged writes.
    Flush {
        /// The name in the answer.
        tag: Tag,
    },
    /// Read the chunk from the source's ring, compare it with the frame's fingerprints, and write it.
    Fetch {
        /// The name in the answer.
        tag: Tag,
        /// The first byte in the volume.
        offset: u64,
        /// The place in the ring.
        landing: Landing,
    },
    /// The source's RNIC is gone: chunks that were not read from its ring never will be.
    StopFetching,
    /// Write zeros that stay allocated. Not for a daemon of version 3.
    Allocate {
        /// The name in the answer.
        tag: Tag,
        /// The first byte in the volume.
        offset: u64,
        /// The number of bytes.
        length: u64,
    },
}

/// The place of a chunk in the source's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landing {
    /// Bytes that were in the ring before the chunk.
    pub position: u64,
    /// Bytes of the chunk; in the ring it takes whole pages.
    pub length: u64,
}

/// Whether chunks can be read by RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rings {
    /// No ring was offered.
    None,
    /// They can.
    Ready(Accepted),
    /// They cannot, for this reason.
    Refused(String),
}

/// The source's name of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tag {
    /// A change of the tenant.
    Change(u64),
    /// A chunk.
    Chunk(u64),
    /// A flush.
    Flush(u64),
}

/// A message of the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSource {
    /// No write of an earlier connection is in flight any more.
    Welcome {
        /// The number of the attempt at the destination, in its process: another one has nothing of what was acknowledged.
        incarnation: u128,
        /// There was a copy before: comparing may be worth it.
        has_old: bool,
        /// The answer to the offered ring.
        rings: Rings,
    },
    /// The destination refuses the volume, for this reason.
    Refused(String),
    /// The write or flush has ended, with this errno or 0.
    Done(Tag, i32),
    /// The compared data differ: the source has to send them.
    Differs(Tag),
    /// To [`Purpose::Decide`] and [`Purpose::HasLeft`].
    Answer(Answer),
    /// The answer to [`Purpose::Promise`]: the copy is promised.
    Promised,
    /// All chunks before this position of the source's ring were copied out and verified: their room is free.
    Taken(u64),
    /// The chunk will not be taken from the ring, for this reason: the source has to send it here.
    Again(Tag, String),
    /// The answer to [`Purpose::WouldTake`]: yes.
    WouldTake,
}

/// A frame in one piece, without its data.
pub fn frame(message: &impl Serialize, data: usize) -> Vec<u8> {
    let mut frame = vec![0; 8];
    frame = postcard::to_extend(message, frame).expect("it can be encoded");
    let length = frame.len() - 8;
    debug_assert!(length <= MAX_MESSAGE && data <= MAX_DATA);
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    frame[4..8].copy_from_slice(&(data as u32).to_le_bytes());
    frame
}

/// Sends a message without data.
pub async fn send(stream: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    stream.write_all(&frame(message, 0)).await?;
    stream.flush().await
}

/// Sends a message with its data.
pub async fn send_with(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
    data: &[u8],
) -> io::Result<()> {
    stream.write_all(&frame(message, data.len())).await?;
    stream.write_all(data).await?;
    stream.flush().await
}

/// Takes the next message and its data.
pub async fn receive<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(T, Vec<u8>)> {
    let mut lengths = [0; 8];
    stream.read_exact(&mut lengths).await?;
    let (message, data) = lengths_of(lengths)?;
    let mut bytes = vec![0; message];
    stream.read_exact(&mut bytes).await?;
    let message = decode(&bytes)?;
    let mut bytes = vec![0; data];
    stream.read_exact(&mut bytes).await?;
    Ok((message, bytes))
}

/// The two lengths of a frame, if they are within the limits.
pub fn lengths_of(bytes: [u8; 8]) -> io::Result<(usize, usize)> {
    let message = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")) as usize;
    let data = u32::from_le_bytes(bytes[4..].try_into().expect("four bytes")) as usize;
    match message <= MAX_MESSAGE && data <= MAX_DATA {
        true => Ok((message, data)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "a frame is too long")),
    }
}

/// A message, with nothing behind it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message cannot be read",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_sent_is_received() {
        let hello = Hello {
            version: VERSION,
            name: "a".into(),
            id: VolumeId(1 << 127),
            session: SessionId(3),
            base: 9,
            purpose: Purpose::Decide { gives_up: true },
        };
        let mut bytes = Vec::new();
        send(&mut bytes, &hello).await.expect("sent");
        let put = ToDestination::Put {
            tag: Tag::Chunk(5),
            offset: 1 << 40,
        };
        bytes.extend(frame(&put, 3));
        bytes.extend([1, 2, 3]);
        let mut stream = bytes.as_slice();
        assert_eq!(receive::<Hello>(&mut stream).await.expect("received").0, hello);
        let (message, data) = receive::<ToDestination>(&mut stream).await.expect("received");
        assert_eq!((message, data.as_slice()), (put, [1, 2, 3].as_slice()));
    }

    #[tokio::test]
    async fn what_a_source_says_of_its_data_comes_beside_the_hello() {
        let about = About {
            path: "/dev/vg/db".to_owned(),
            identity: Identity::Device {
                names: [("wwid".to_owned(), "naa.6001405".to_owned())].into(),
                signature: None,
            },
        };
        let mut bytes = Vec::new();
        let message = ToSource::Promised;
        send_with(&mut bytes, &message, &about.encode())
            .await
            .expect("sent");
        let (received, data) = receive::<ToSource>(&mut bytes.as_slice())
            .await
            .expect("received");
        assert_eq!((received, About::decode(&data)), (message, Some(about.clone())));
        assert_eq!(About::decode(&[]), None, "an earlier release says nothing");
        let long = About {
            path: "x".repeat(MAX_ABOUT),
            ..about
        };
        assert!(long.encode().is_empty());
        assert_eq!(About::decode(&serde_json::to_vec(&long).expect("text")), None);
    }

    #[test]
    fn what_is_too_long_is_refused() {
        assert!(lengths_of([0xff; 8]).is_err());
        assert!(lengths_of([0, 0, 0, 1, 0, 0, 0, 0]).is_err());
        assert!(lengths_of([0, 16, 0, 0, 0, 0, 0, 2]).is_ok());
    }
}

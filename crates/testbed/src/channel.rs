//! What the two ends of a port say to each other: postcard messages in COBS frames, which end in a zero byte.
//!
//! A client may die in the middle of a frame, and the next one finds the guest in the middle of it. So each client begins
//! with a zero byte and a session number of its own, which all messages carry: what belongs to an earlier session, or
//! cannot be read, is dropped.
//!
//! ```text
//!  client                         guest
//!    Hello ───────────────────────►
//!    ◄─────────────────────── Hello      it is up
//!    Run ─────────────────────────►      starts the command
//!    ◄───────────── Stdout, Stderr …
//!    ◄──────────────────────── Ended     or NotStarted
//!  closes the connection                 a command that still runs is killed
//! ```

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// How many commands a machine runs at the same time.
pub(crate) const PORTS: usize = 12;

/// The name by which the guest knows port `number`.
pub(crate) fn port_name(number: usize) -> String {
    format!("testbed.{number}")
}

/// The longest piece of output in a message.
pub(crate) const CHUNK: usize = 32 << 10;

/// A message of a session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Frame<M> {
    pub session: u64,
    pub message: M,
}

/// What a client says.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToGuest {
    /// Are you there?
    Hello,
    /// Start a command.
    Run(Request),
}

/// A command to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub argv: Vec<String>,
    /// Added to the guest's environment.
    pub env: Vec<(String, String)>,
    /// The working directory; `/` if none.
    pub directory: Option<String>,
}

/// What the guest says.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromGuest {
    /// Yes.
    Hello,
    /// A piece of the command's standard output.
    Stdout(Vec<u8>),
    /// A piece of its standard error.
    Stderr(Vec<u8>),
    /// It has ended: exit status, 128 + N after signal N.
    Ended(i32),
    /// It could not be started.
    NotStarted(String),
}

/// The bytes of a message.
pub(crate) fn encode<M: Serialize>(session: u64, message: M) -> Vec<u8> {
    postcard::to_stdvec_cobs(&Frame { session, message })
        .expect("the messages have no type that postcard lacks")
}

/// Takes bytes as they come, gives messages.
#[derive(Debug, Default)]
pub(crate) struct Deframer {
    bytes: Vec<u8>,
}

impl Deframer {
    /// Adds what was read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message; what is none is skipped.
    pub fn next<M: DeserializeOwned>(&mut self) -> Option<Frame<M>> {
        loop {
            let end = self.bytes.iter().position(|&byte| byte == 0)?;
            let mut frame: Vec<u8> = self.bytes.drain(..=end).collect();
            if let Ok(message) = postcard::from_bytes_cobs(&mut frame) {
                return Some(message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_any_cut() {
        let bytes: Vec<u8> = [
            encode(1, FromGuest::Stdout(vec![0, 1, 0, 255])),
            encode(1, FromGuest::Ended(3)),
        ]
        .concat();
        for size in 1..bytes.len() {
            let mut deframer = Deframer::default();
            let mut messages = Vec::new();
            for piece in bytes.chunks(size) {
                deframer.push(piece);
                while let Some(frame) = deframer.next::<FromGuest>() {
                    messages.push(frame.message);
                }
            }
            assert_eq!(
                messages,
                [FromGuest::Stdout(vec![0, 1, 0, 255]), FromGuest::Ended(3)]
            );
        }
    }

    #[test]
    fn half_a_frame_of_a_dead_client_is_skipped() {
        let mut deframer = Deframer::default();
        let run = encode(1, ToGuest::Run(Request::default()));
        deframer.push(&run[..run.len() - 3]);
        deframer.push(&[0]);
        deframer.push(&encode(2, ToGuest::Hello));
        let frame = deframer.next::<ToGuest>().unwrap();
        assert_eq!((frame.session, frame.message), (2, ToGuest::Hello));
    }
}

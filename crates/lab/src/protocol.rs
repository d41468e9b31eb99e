//! What the lab's processes say to each other: one JSON value a line.

use crate::error::{Error, Result};
use crate::status::{LabStatus, ServiceStatus};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// To the supervisor, on `control.sock`: one request a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Status,
    Kill { host: String, service: String },
    Start { host: String, service: String },
}

/// The supervisor's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Status(LabStatus),
    Done,
    Failed { reason: String },
}

/// The supervisor's one word to whoever brings up the lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Ready,
    Failed { reason: String },
}

/// From the supervisor to a host's pid 1.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToHost {
    /// The uplink is there: configure it and start the services.
    Begin,
    Kill {
        service: String,
    },
    Start {
        service: String,
    },
}

/// From a host's pid 1 to the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromHost {
    /// How its services are now.
    Services(Vec<ServiceStatus>),
    /// All services are ready for the first time.
    Ready,
    /// It cannot go on.
    Failed { reason: String },
    /// What came of the last `Kill` or `Start`.
    Answer(Result<(), String>),
}

/// Sends `message` as one line.
pub(crate) fn send(mut to: impl Write, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads one line; an end of file is an error.
pub(crate) fn receive<T: DeserializeOwned>(from: impl BufRead) -> std::io::Result<T> {
    let mut from = from;
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

/// Sends one request to the supervisor and waits for the answer.
pub(crate) fn ask(socket: &Path, request: &Request, timeout: Duration) -> Result<Response> {
    let talk = || {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout))?;
        send(&stream, request)?;
        receive(BufReader::new(&stream))
    };
    talk().map_err(Error::io(format!(
        "ask the supervisor at {} for {request:?}",
        socket.display()
    )))
}

/// Puts lines together from what a non-blocking stream has.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    /// Reads what there is; `false` at the end of the stream.
    pub fn fill(&mut self, mut from: impl std::io::Read) -> std::io::Result<bool> {
        let mut chunk = [0; 4096];
        loop {
            match from.read(&mut chunk) {
                Ok(0) => return Ok(false),
                Ok(length) => self.buffer.extend_from_slice(&chunk[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next whole line, as a message.
    pub fn next<T: DeserializeOwned>(&mut self) -> std::io::Result<Option<T>> {
        let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') else {
            return Ok(None);
        };
        let message = serde_json::from_slice(&self.buffer[..end])?;
        self.buffer.drain(..=end);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_any_cut() {
        let mut wire = Vec::new();
        send(&mut wire, &ToHost::Begin).unwrap();
        send(
            &mut wire,
            &ToHost::Kill {
                service: "nic\n".to_owned(),
            },
        )
        .unwrap();
        for cut in 0..wire.len() {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for part in [&wire[..cut], &wire[cut..]] {
                assert!(!lines.fill(part).unwrap());
                while let Some(message) = lines.next::<ToHost>().unwrap() {
                    seen.push(message);
                }
            }
            assert!(
                matches!(&seen[..], [ToHost::Begin, ToHost::Kill { service }] if service == "nic\n"),
                "cut at {cut}"
            );
        }
    }
}

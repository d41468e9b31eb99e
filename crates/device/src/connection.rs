//! A control connection, and the version of the contract that is spoken on it.

use std::os::fd::BorrowedFd;

use verbatim_seqpacket::{Error, MAX_MESSAGE_BYTES, MAX_MESSAGE_MEMORY, Received, Socket};
use verbatim_versions::{Versioned, Versions};

use crate::control::{Reply, Request, VERSIONS};

/// Sends a message in the form of a version.
pub fn send<T: Versioned>(
    socket: &Socket,
    version: u32,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    let bytes = message
        .encode(version)
        .map_err(|source| Error::Malformed { bytes: 0, source })?;
    match bytes.len() {
        bytes if bytes > MAX_MESSAGE_BYTES => Err(Error::TooLong { bytes }),
        _ => socket.send_bytes(&bytes, fds),
    }
}

/// Receives a message in the form of a version.
pub fn recv<T: Versioned>(socket: &Socket, version: u32) -> Result<Received<T>, Error> {
    socket
        .recv_bytes()?
        .decode(|bytes| T::decode(version, bytes, &mut { MAX_MESSAGE_MEMORY }))
}

/// The connection of a context, at a program's side.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    version: u32,
}

impl Connection {
    /// Sends the first request of a version, [`Request::OpenContext`] or [`Request::AttachContext`], and returns the answer. An
    /// RNIC that does not know the version is asked again with the one below.
    pub fn begin(
        socket: Socket,
        request: impl Fn(u32) -> Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Self, Received<Reply>), Error> {
        Self::begin_in(VERSIONS, socket, request, fds)
    }

    fn begin_in(
        versions: Versions,
        mut socket: Socket,
        request: impl Fn(u32) -> Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Self, Received<Reply>), Error> {
        let mut version = versions.newest;
        loop {
            let connection = Self { socket, version };
            let mut received = connection.call(&request(version), fds)?;
            match &mut received.message {
                Reply::Error { errno, message } if *errno == libc::EPROTO => {
                    if let Some(below) = versions.below(version) {
                        (version, socket) = (below, connection.socket);
                        continue;
                    }
                    message.push_str(&format!("; the asking side has {versions}"));
                }
                _ => {}
            }
            return Ok((connection, received));
        }
    }

    /// One that somebody else has begun, and that is only to be handed over.
    pub fn taken_over(socket: Socket) -> Self {
        let version = VERSIONS.newest;
        Self { socket, version }
    }

    /// The version that both sides speak.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Sends a request.
    pub fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        send(&self.socket, self.version, request, fds)
    }

    /// Waits for an answer.
    pub fn recv(&self) -> Result<Received<Reply>, Error> {
        recv(&self.socket, self.version)
    }

    /// Sends a request and waits for the answer.
    pub fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Received<Reply>, Error> {
        self.send(request, fds)?;
        self.recv()
    }

    /// The socket.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The socket; whoever takes it over begins anew.
    pub fn into_socket(self) -> Socket {
        self.socket
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of asking an RNIC that has one version, and which versions it was asked for.
    fn asked(rnic: u32, versions: Versions) -> (Result<u32, String>, Vec<u32>) {
        let (ours, theirs) = Socket::pair().unwrap();
        let rnic = std::thread::spawn(move || {
            let mut heard = Vec::new();
            while let Ok(received) = theirs.recv::<Request>() {
                let Request::AttachContext { version } = received.message else {
                    panic!("another request");
                };
                heard.push(version);
                let reply = match version == rnic {
                    true => Reply::Done,
                    false => Reply::Error {
                        errno: libc::EPROTO,
                        message: format!("this RNIC has {rnic}"),
                    },
                };
                theirs.send(&reply, &[]).unwrap();
            }
            heard
        });
        let request = |version| Request::AttachContext { version };
        let (connection, received) = Connection::begin_in(versions, ours, request, &[]).unwrap();
        let result = match received.message {
            Reply::Done => Ok(connection.version()),
            Reply::Error { message, .. } => Err(message),
            other => panic!("{other:?}"),
        };
        drop(connection);
        (result, rnic.join().unwrap())
    }

    #[test]
    fn an_rnic_of_an_earlier_release_is_asked_for_what_it_has() {
        assert_eq!(asked(12, Versions::new(10, 12)), (Ok(12), vec![12]));
        assert_eq!(asked(10, Versions::new(10, 12)), (Ok(10), vec![12, 11, 10]));
        let (refused, tried) = asked(9, Versions::new(10, 12));
        assert_eq!(tried, [12, 11, 10]);
        assert_eq!(
            refused.unwrap_err(),
            "this RNIC has 9; the asking side has versions 10 to 12"
        );
    }
}

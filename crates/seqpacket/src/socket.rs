//! The socket, its listener, and what arrives on it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Credentials, MAX_FDS, MAX_MESSAGE_BYTES, MAX_MESSAGE_MEMORY, Process};

/// What can go wrong on a channel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side has closed the channel.
    #[error("the other side closed the channel")]
    Closed,
    /// A non-blocking socket has nothing to read, or no room to write.
    #[error("the channel is not ready")]
    WouldBlock,
    /// The other side has not answered in time, and the channel is closed: a late answer would be taken for
    /// the answer to the next request.
    #[error("there was no answer in {} s; the connection is closed", .limit.as_secs())]
    Late {
        /// The limit of the wait.
        limit: Duration,
    },
    /// The message does not fit into one packet.
    #[error("a message of {bytes} bytes is longer than the limit of {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Its encoded length.
        bytes: usize,
    },
    /// The bytes are no message of the expected type.
    #[error("a malformed message of {bytes} bytes")]
    Malformed {
        /// How many bytes came.
        bytes: usize,
        /// What the decoder said.
        #[source]
        source: postcard::Error,
    },
    /// What the bytes say would take too much memory.
    #[error("a message of {bytes} bytes says what takes more than {most} bytes of memory")]
    TooLarge {
        /// How many bytes came.
        bytes: usize,
        /// How many bytes of memory what they say may take.
        most: usize,
    },
    /// The operating system refused.
    #[error("{call} failed")]
    Os {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

impl Error {
    fn os(call: &'static str, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::AGAIN => Self::WouldBlock,
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            errno => Self::Os {
                call,
                source: errno.into(),
            },
        }
    }

    /// Why a message of so many bytes is not decoded.
    pub fn undecoded(bytes: usize, why: verbatim_bounded::Error) -> Self {
        match why {
            verbatim_bounded::Error::Malformed(source) => Self::Malformed { bytes, source },
            verbatim_bounded::Error::TooLarge { most } => Self::TooLarge { bytes, most },
        }
    }

    /// The errno that a C caller should see.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::EIO,
            Self::WouldBlock => libc::EAGAIN,
            Self::Late { .. } => libc::EIO,
            Self::TooLong { .. } | Self::TooLarge { .. } => libc::EMSGSIZE,
            Self::Malformed { .. } => libc::EPROTO,
            Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// One message and what travelled beside it.
#[derive(Debug)]
pub struct Received<T> {
    /// The message.
    pub message: T,
    /// The descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// The sender, on sockets that asked for it ([`Socket::pass_credentials`]).
    pub credentials: Option<Credentials>,
}

impl Received<Vec<u8>> {
    /// The same with what its bytes say; [`Error::Malformed`] if they say nothing.
    pub fn decode<T>(
        self,
        read: impl FnOnce(&[u8]) -> Result<T, verbatim_bounded::Error>,
    ) -> Result<Received<T>, Error> {
        let bytes = self.message.len();
        let message = read(&self.message).map_err(|why| Error::undecoded(bytes, why))?;
        Ok(Received {
            message,
            fds: self.fds,
            credentials: self.credentials,
        })
    }
}

/// One end of a channel.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Connects to the listener at `path`.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        Self::connect_within(path, None)
    }

    /// The same with a [limit](Self::limit), which also holds for connecting: a listener that hangs accepts
    /// no connection.
    pub fn connect_within(path: &Path, limit: Option<Duration>) -> Result<Self, Error> {
        let address = SocketAddrUnix::new(path).map_err(|errno| Error::os("connect", errno))?;
        let socket = Self(new_socket()?);
        if let Some(limit) = limit {
            socket.limit(limit)?;
        }
        match rustix::net::connect(&socket.0, &address) {
            Err(rustix::io::Errno::AGAIN) => Err(socket.late(Error::WouldBlock)),
            connected => connected
                .map(|()| socket)
                .map_err(|errno| Error::os("connect", errno)),
        }
    }

    /// Limits the time that a call waits for the other side. After it the call ends with [`Error::Late`], and
    /// the channel is closed.
    pub fn limit(&self, limit: Duration) -> Result<(), Error> {
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&self.0, direction, Some(limit))
                .map_err(|errno| Error::os("setsockopt", errno))?;
        }
        Ok(())
    }

    /// Turns [`Error::WouldBlock`] into [`Error::Late`] on a channel with a limit, and closes the channel.
    fn late(&self, error: Error) -> Error {
        let Error::WouldBlock = error else { return error };
        match sockopt::socket_timeout(&self.0, sockopt::Timeout::Recv) {
            Ok(Some(limit)) => {
                // A watcher of the channel sees it close.
                let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
                Error::Late { limit }
            }
            _ => error,
        }
    }

    /// Two connected ends.
    pub fn pair() -> Result<(Self, Self), Error> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| Error::os("socketpair", errno))?;
        Ok((Self(a), Self(b)))
    }

    /// Wraps a descriptor that is such a socket already.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Gives the descriptor back.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Asks the kernel to name the sender of every message that arrives here.
    pub fn pass_credentials(&self) -> Result<(), Error> {
        sockopt::set_socket_passcred(&self.0, true).map_err(|errno| Error::os("setsockopt", errno))
    }

    /// Makes calls return [`Error::WouldBlock`] instead of waiting, or wait again.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        rustix::io::ioctl_fionbio(&self.0, nonblocking).map_err(|errno| Error::os("ioctl", errno))
    }

    /// Sends one message and duplicates of `fds`.
    ///
    /// # Panics
    /// With more than [`MAX_FDS`] descriptors.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let bytes = encode(message)?;
        self.send_bytes(&bytes, fds)
    }

    /// Sends one packet of bytes that are encoded already (CRIU's protocol buffers, for one).
    ///
    /// # Panics
    /// With more than [`MAX_FDS`] descriptors.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        assert!(
            fds.len() <= MAX_FDS,
            "a message carries at most {MAX_FDS} descriptors"
        );
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = ancillary.push(SendAncillaryMessage::ScmRights(fds));
            debug_assert!(fits, "the buffer holds MAX_FDS descriptors");
        }
        self.send_packet(bytes, &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(|error| self.late(error))
    }

    /// Sends one message, or says [`Error::WouldBlock`] at once, whatever the socket is set to: for who must never wait
    /// for the other side, which may share the socket's settings.
    pub fn send_now<T: Serialize>(&self, message: &T) -> Result<(), Error> {
        let bytes = encode(message)?;
        let mut ancillary = SendAncillaryBuffer::default();
        self.send_packet(&bytes, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_packet(
        &self,
        bytes: &[u8],
        ancillary: &mut SendAncillaryBuffer<'_, '_, '_>,
        flags: SendFlags,
    ) -> Result<(), Error> {
        loop {
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::os("sendmsg", errno)),
            }
        }
    }

    /// Receives one message.
    pub fn recv<T: DeserializeOwned>(&self) -> Result<Received<T>, Error> {
        self.recv_bytes()?
            .decode(|bytes| verbatim_bounded::from_bytes(bytes, MAX_MESSAGE_MEMORY))
    }

    /// Receives one packet of bytes. A socket has one reader at a time: two could see the length of the other's packet.
    pub fn recv_bytes(&self) -> Result<Received<Vec<u8>>, Error> {
        self.recv_packet().map_err(|error| self.late(error))
    }

    fn recv_packet(&self) -> Result<Received<Vec<u8>>, Error> {
        // Most messages are short, and room for the longest would have to be cleared each time.
        let mut bytes = vec![0u8; self.next_packet_bytes()?.min(MAX_MESSAGE_BYTES)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS), ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match rustix::net::recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(received) => break received,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::os("recvmsg", errno)),
            }
        };
        if received.bytes == 0 {
            return Err(Error::Closed);
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Error::TooLong {
                bytes: received.bytes,
            });
        }
        bytes.truncate(received.bytes);
        let mut fds = Vec::new();
        let mut credentials = None;
        for message in ancillary.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
                RecvAncillaryMessage::ScmCredentials(ucred) => {
                    credentials = Some(Credentials {
                        pid: ucred.pid.as_raw_pid(),
                        uid: ucred.uid.as_raw(),
                        gid: ucred.gid.as_raw(),
                    });
                }
                _ => {}
            }
        }
        Ok(Received {
            message: bytes,
            fds,
            credentials,
        })
    }

    /// Waits for a packet and gives its length, leaving it where it is (`MSG_TRUNC`, recv(2)).
    fn next_packet_bytes(&self) -> Result<usize, Error> {
        loop {
            match rustix::net::recv(&self.0, &mut [0u8; 0][..], RecvFlags::PEEK | RecvFlags::TRUNC) {
                Ok((_, bytes)) => return Ok(bytes),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::os("recv", errno)),
            }
        }
    }

    /// Sends `request` and waits for the answer.
    pub fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        request: &Q,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Received<A>, Error> {
        self.send(request, fds)?;
        self.recv()
    }

    /// The process at the other end when the connection was made (`SO_PEERCRED`).
    pub fn peer(&self) -> Result<Credentials, Error> {
        let ucred = sockopt::socket_peercred(&self.0).map_err(|errno| Error::os("getsockopt", errno))?;
        Ok(Credentials {
            pid: ucred.pid.as_raw_pid(),
            uid: ucred.uid.as_raw(),
            gid: ucred.gid.as_raw(),
        })
    }

    /// The same process, held so that its number cannot become another's unnoticed (`SO_PEERPIDFD`).
    pub fn peer_process(&self) -> Result<Process, Error> {
        Ok(Process::of_peer(self.0.as_fd(), self.peer()?))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Accepts channels at a path.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at `path`, in the place of a socket that an earlier process may have left there. The kernel names the sender of
    /// every message on the connections that come over it, also of who connects at once: Linux 6.16 and later decide that when
    /// somebody connects, not when the connection is accepted.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Os {
                    call: "unlink",
                    source: error,
                });
            }
            _ => {}
        }
        let address = SocketAddrUnix::new(path).map_err(|errno| Error::os("bind", errno))?;
        let fd = new_socket()?;
        sockopt::set_socket_passcred(&fd, true).map_err(|errno| Error::os("setsockopt", errno))?;
        rustix::net::bind(&fd, &address).map_err(|errno| Error::os("bind", errno))?;
        rustix::net::listen(&fd, 128).map_err(|errno| Error::os("listen", errno))?;
        Ok(Self(fd))
    }

    /// Wraps a descriptor that is a listening socket already.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Asks the kernel to name the sender of every message on the connections that are accepted here. Asked of a
    /// connection after it was accepted, that would come too late for what was sent before.
    pub fn pass_credentials(&self) -> Result<(), Error> {
        sockopt::set_socket_passcred(&self.0, true).map_err(|errno| Error::os("setsockopt", errno))
    }

    /// Makes [`Listener::accept`] return [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), Error> {
        rustix::io::ioctl_fionbio(&self.0, nonblocking).map_err(|errno| Error::os("ioctl", errno))
    }

    /// Takes the next connection; it blocks, whatever the listener does.
    pub fn accept(&self) -> Result<Socket, Error> {
        loop {
            match rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(Socket(fd)),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(errno) => return Err(Error::os("accept", errno)),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, Error> {
    let bytes = postcard::to_stdvec(message).map_err(|source| Error::Malformed {
        bytes: std::mem::size_of::<T>(),
        source,
    })?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(Error::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

fn new_socket() -> Result<OwnedFd, Error> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| Error::os("socket", errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_message_a_descriptor_and_the_sender_arrive_together() {
        let (a, b) = Socket::pair().unwrap();
        b.pass_credentials().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"by descriptor").unwrap();
        a.send(&(7u32, "seven".to_owned()), &[file.as_fd()]).unwrap();

        let received = b.recv::<(u32, String)>().unwrap();
        assert_eq!(received.message, (7, "seven".to_owned()));
        assert_eq!(received.credentials.unwrap().pid, std::process::id() as i32);
        let mut copy = std::fs::File::from(received.fds.into_iter().next().unwrap());
        copy.rewind().unwrap();
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "by descriptor");
    }

    #[test]
    fn who_speaks_before_being_accepted_is_named_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let client = Socket::connect(&path).unwrap();
        client.send(&1u8, &[]).unwrap();
        let received = listener.accept().unwrap().recv::<u8>().unwrap();
        assert_eq!(received.credentials.unwrap().pid, std::process::id() as i32);
    }

    #[test]
    fn bad_bytes_and_a_closed_end_are_told_apart() {
        let (a, b) = Socket::pair().unwrap();
        a.send_bytes(&[0xff; 3], &[]).unwrap();
        assert!(matches!(
            b.recv::<(u64, u64)>(),
            Err(Error::Malformed { bytes: 3, .. })
        ));
        drop(a);
        assert!(matches!(b.recv::<u8>(), Err(Error::Closed)));
    }

    #[test]
    fn an_oversized_message_is_refused_by_the_sender() {
        let (a, b) = Socket::pair().unwrap();
        let error = a.send(&vec![0u8; MAX_MESSAGE_BYTES], &[]).unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }));
        b.set_nonblocking(true).unwrap();
        assert!(matches!(b.recv::<u8>(), Err(Error::WouldBlock)));
    }

    #[test]
    fn packets_of_every_length_arrive_whole_and_longer_ones_not_at_all() {
        let (a, b) = Socket::pair().unwrap();
        for bytes in [1, 4096, MAX_MESSAGE_BYTES] {
            let sent: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
            a.send_bytes(&sent, &[]).unwrap();
            assert_eq!(b.recv_bytes().unwrap().message, sent);
        }
        a.send_bytes(&vec![0; MAX_MESSAGE_BYTES + 1], &[]).unwrap();
        assert!(matches!(b.recv_bytes(), Err(Error::TooLong { .. })));
    }

    #[test]
    fn what_takes_more_memory_than_a_message_may_is_refused() {
        let (a, b) = Socket::pair().unwrap();
        let mut bytes = postcard::to_stdvec(&(MAX_MESSAGE_BYTES as u64 - 8)).unwrap();
        bytes.resize(MAX_MESSAGE_BYTES, 0);
        a.send_bytes(&bytes, &[]).unwrap();
        let refused = b.recv::<Vec<String>>().unwrap_err();
        assert!(
            matches!(
                refused,
                Error::TooLarge {
                    most: MAX_MESSAGE_MEMORY,
                    ..
                }
            ),
            "{refused}"
        );
        assert_eq!(refused.errno(), libc::EMSGSIZE);
    }

    #[test]
    fn who_does_not_answer_in_time_is_not_waited_for_and_what_comes_late_is_nobodys_answer() {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("s")).unwrap();
        let limit = std::time::Duration::from_millis(50);
        let caller = Socket::connect_within(&folder.path().join("s"), Some(limit)).unwrap();
        let hangs = listener.accept().unwrap();
        let called = caller.call::<u8, u8>(&1, &[]);
        assert!(matches!(called, Err(Error::Late { .. })), "{called:?}");
        assert_eq!(called.unwrap_err().errno(), libc::EIO);
        // The late server goes on: the request is there, but its caller is gone.
        assert_eq!(hangs.recv::<u8>().unwrap().message, 1);
        assert!(matches!(hangs.send(&7u8, &[]), Err(Error::Closed)));
        assert!(caller.call::<u8, u8>(&2, &[]).is_err());
        assert!(matches!(hangs.recv::<u8>(), Err(Error::Closed)));
        // Without a limit it is as ever.
        let (a, _b) = Socket::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        assert!(matches!(a.recv::<u8>(), Err(Error::WouldBlock)));
    }

    #[test]
    fn who_must_not_wait_is_told_that_there_is_no_room() {
        let (a, b) = Socket::pair().unwrap();
        let mut sent = 0u32;
        while a.send_now(&sent).is_ok() {
            sent += 1;
        }
        assert!(matches!(a.send_now(&sent), Err(Error::WouldBlock)));
        for n in 0..sent {
            assert_eq!(b.recv::<u32>().unwrap().message, n);
        }
        assert!(a.send_now(&sent).is_ok());
    }
}

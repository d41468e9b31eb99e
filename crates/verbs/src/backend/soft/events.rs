//! Events of the software RNIC: small messages on sockets that it writes to.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use verbatim_device::control::{AsyncEvent, CompletionEvent};

use crate::backend::EventChannel;
use crate::error::VerbsError;
use crate::held;

/// No event is as long as this.
const MESSAGE_BYTES: usize = 64;

fn socket_pair() -> Result<(OwnedFd, OwnedFd), VerbsError> {
    rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| VerbsError::os("socketpair", errno))
}

fn receive<T: DeserializeOwned>(socket: &OwnedFd, flags: RecvFlags) -> Result<T, VerbsError> {
    let mut bytes = [0; MESSAGE_BYTES];
    let (_, length) =
        rustix::net::recv(socket, &mut bytes[..], flags).map_err(|errno| VerbsError::os("recv", errno))?;
    let message = bytes.get(..length).unwrap_or(&bytes);
    postcard::from_bytes(message)
        .map_err(|_| VerbsError::Invalid(format!("an event of {length} bytes that is none of the RNIC's")))
}

/// Our end of the socket for asynchronous events.
#[derive(Debug)]
pub struct Events {
    /// A child's reading would take the parent's events away. Forgotten before the descriptor goes.
    _held: held::Held,
    socket: OwnedFd,
}

impl Events {
    /// And the end that goes to the RNIC.
    pub fn pair() -> Result<(Self, OwnedFd), VerbsError> {
        let (socket, theirs) = socket_pair()?;
        let events = Self {
            _held: held::hold_fd(socket.as_fd()),
            socket,
        };
        Ok((events, theirs))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next event, if there is one now.
    pub fn next(&self) -> Option<AsyncEvent> {
        receive(&self.socket, RecvFlags::DONTWAIT).ok()
    }
}

/// A completion channel.
#[derive(Debug)]
pub struct SoftChannel {
    number: u32,
    _held: [held::Held; 2],
    /// What the program waits on.
    ours: OwnedFd,
    /// A duplicate of what the RNIC writes to: while we have it, the RNIC's end does not end the channel.
    theirs: OwnedFd,
    /// Events of ours for which there was no room.
    waiting: Mutex<VecDeque<u32>>,
}

impl SoftChannel {
    /// The program's end, and the one to which the RNIC writes.
    pub fn pair() -> Result<(OwnedFd, OwnedFd), VerbsError> {
        socket_pair()
    }

    pub fn new(number: u32, ours: OwnedFd, theirs: OwnedFd) -> Self {
        Self {
            number,
            _held: [held::hold_fd(ours.as_fd()), held::hold_fd(theirs.as_fd())],
            ours,
            theirs,
            waiting: Mutex::default(),
        }
    }

    fn flush(&self, waiting: &mut VecDeque<u32>) {
        while let Some(cq) = waiting.front() {
            let mut space = [0; MESSAGE_BYTES];
            let event = CompletionEvent { cq: *cq };
            let message = postcard::to_slice(&event, &mut space).expect("an event fits");
            if rustix::net::send(&self.theirs, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err() {
                // Full of events: whoever takes one tries again.
                return;
            }
            waiting.pop_front();
        }
    }
}

impl EventChannel for SoftChannel {
    fn number(&self) -> u32 {
        self.number
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }

    fn next(&self) -> Result<u32, VerbsError> {
        let event: CompletionEvent = receive(&self.ours, RecvFlags::empty())?;
        self.flush(&mut self.waiting.lock());
        Ok(event.cq)
    }

    fn inject(&self, event: u32) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(event);
        self.flush(&mut waiting);
    }

    fn unread(&self) -> Result<Vec<u32>, VerbsError> {
        let mut waiting = self.waiting.lock();
        let mut events = Vec::new();
        loop {
            // What had no room is behind all that has.
            self.flush(&mut waiting);
            match receive::<CompletionEvent>(&self.ours, RecvFlags::DONTWAIT) {
                Ok(event) => events.push(event.cq),
                Err(error) if error.errno() == libc::EAGAIN => break,
                Err(error) => return Err(error),
            }
        }
        waiting.extend(&events);
        self.flush(&mut waiting);
        Ok(events)
    }

    fn line(&self) -> Option<BorrowedFd<'_>> {
        Some(self.theirs.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_find_no_room_come_later_and_in_order() {
        let (ours, theirs) = SoftChannel::pair().unwrap();
        let channel = SoftChannel::new(1, ours, theirs);
        for cq in 0..5000 {
            channel.inject(cq);
        }
        assert!(
            !channel.waiting.lock().is_empty(),
            "a socket has no room for so many"
        );
        rustix::io::ioctl_fionbio(&channel.ours, true).unwrap();
        for cq in 0..5000 {
            assert_eq!(channel.next().unwrap(), cq);
        }
        assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);
    }

    #[test]
    fn a_look_at_unread_events_leaves_them_there() {
        let (ours, theirs) = SoftChannel::pair().unwrap();
        let channel = SoftChannel::new(1, ours, theirs);
        assert_eq!(channel.unread().unwrap(), []);
        // More than the socket has room for.
        let all: Vec<u32> = (0..2000).collect();
        all.iter().for_each(|cq| channel.inject(*cq));
        for _ in 0..2 {
            assert_eq!(channel.unread().unwrap(), all);
        }
        let read: Vec<u32> = all.iter().map(|_| channel.next().unwrap()).collect();
        assert_eq!(read, all);
    }

    #[test]
    fn what_is_no_event_is_passed_over() {
        let (events, theirs) = Events::pair().unwrap();
        assert!(events.next().is_none());
        rustix::net::send(&theirs, &[0xff; 100], SendFlags::empty()).unwrap();
        assert!(events.next().is_none());
    }
}

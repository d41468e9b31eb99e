//! A socket on which a program is told about events. The RNIC never waits for it: what does not fit waits here, as a
//! number per different event, so that a program that does not read costs no more than it has objects.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, sockopt};
use serde::Serialize;
use verbatim_seqpacket::{Error, Socket};

use crate::error::Refused;

#[derive(Debug)]
pub struct Outbox<T> {
    socket: Socket,
    /// Different events that wait, the oldest first; how often each is in `times`.
    waiting: VecDeque<T>,
    times: HashMap<T, u32>,
    /// The other end is gone, and nobody is told any more.
    closed: bool,
    /// The loop is told when there is room.
    watched: bool,
}

impl<T: Copy + Eq + Hash + Serialize> Outbox<T> {
    /// Over the one descriptor that came with a request.
    pub fn new(fds: &mut Vec<OwnedFd>) -> Result<Self, Refused> {
        let Ok([fd]) = <[OwnedFd; 1]>::try_from(std::mem::take(fds)) else {
            return Err(Refused::invalid(
                "one descriptor is needed, on which events are sent",
            ));
        };
        let fits = sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET);
        if !fits {
            return Err(Refused::invalid(
                "events are sent on a unix socket of type SOCK_SEQPACKET",
            ));
        }
        Ok(Self {
            socket: Socket::from_fd(fd),
            waiting: VecDeque::new(),
            times: HashMap::new(),
            closed: false,
            watched: false,
        })
    }

    /// Sends the event, now or when there is room.
    pub fn send(&mut self, event: T) {
        if self.closed {
            return;
        }
        let sent = self.waiting.is_empty() && self.try_send(event);
        if sent || self.closed {
            return;
        }
        let times = self.times.entry(event).or_insert(0);
        *times = times.saturating_add(1);
        if *times == 1 {
            self.waiting.push_back(event);
        }
    }

    /// There may be room again.
    pub fn flush(&mut self) {
        while let Some(event) = self.waiting.front().copied() {
            if !self.try_send(event) {
                break;
            }
            let times = self.times.get_mut(&event).expect("what waits has a number");
            *times -= 1;
            if *times == 0 {
                self.times.remove(&event);
                self.waiting.pop_front();
            }
        }
        if self.closed {
            self.waiting.clear();
            self.times.clear();
        }
    }

    /// Leaves out what has not been sent and concerns an object that is gone.
    pub fn forget(&mut self, concerns: impl Fn(&T) -> bool) {
        self.waiting.retain(|event| !concerns(event));
        self.times.retain(|event, _| !concerns(event));
    }

    /// Whether something waits for room.
    pub fn is_blocked(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Says whether to begin (`Some(true)`) or to end (`Some(false)`) watching for room.
    pub fn change_of_watch(&mut self) -> Option<bool> {
        let wanted = self.is_blocked();
        (std::mem::replace(&mut self.watched, wanted) != wanted).then_some(wanted)
    }

    fn try_send(&mut self, event: T) -> bool {
        match self.socket.send_now(&event) {
            Ok(()) => true,
            Err(Error::WouldBlock) => false,
            Err(error) => {
                tracing::debug!(%error, "nobody reads a program's events any more");
                self.closed = true;
                false
            }
        }
    }
}

impl<T> AsFd for Outbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn outbox() -> (Outbox<u32>, Socket) {
        let (ours, theirs) = Socket::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (Outbox::new(&mut vec![ours.into_fd()]).unwrap(), theirs)
    }

    #[test]
    fn nothing_is_lost_while_nobody_reads_and_little_is_kept() {
        let (mut outbox, reader) = outbox();
        let mut sent = 0;
        while !outbox.is_blocked() {
            outbox.send(7);
            sent += 1;
        }
        assert_eq!(outbox.change_of_watch(), Some(true));
        for _ in 0..10_000 {
            outbox.send(7);
            outbox.send(8);
        }
        sent += 20_000;
        assert_eq!((outbox.waiting.len(), outbox.times.len()), (2, 2));
        let mut received = 0;
        while received < sent {
            while reader.recv::<u32>().is_ok() {
                received += 1;
            }
            outbox.flush();
        }
        assert!(!outbox.is_blocked() && reader.recv::<u32>().is_err());
        assert_eq!(
            (outbox.change_of_watch(), outbox.change_of_watch()),
            (Some(false), None)
        );
    }

    #[test]
    fn who_is_gone_costs_nothing() {
        let (mut outbox, reader) = outbox();
        while !outbox.is_blocked() {
            outbox.send(1);
        }
        outbox.send(2);
        outbox.forget(|event| *event == 1);
        assert_eq!(outbox.waiting, [2]);
        drop(reader);
        outbox.flush();
        outbox.send(3);
        assert!(!outbox.is_blocked());
    }

    #[test]
    fn only_sockets_of_the_right_kind_are_taken() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let copy = || file.as_fd().try_clone_to_owned().unwrap();
        assert!(Outbox::<u32>::new(&mut vec![]).is_err());
        assert!(Outbox::<u32>::new(&mut vec![copy()]).is_err());
        assert!(Outbox::<u32>::new(&mut vec![copy(), copy()]).is_err());
    }
}

//! The length of the disk, and the front end's knowledge of it.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::net::{SendFlags, send};

/// The message that the configuration has changed: its number, the version of the protocol, nothing behind it.
const CONFIG_CHANGED: [u32; 3] = [2, 1, 0];

/// The length of a disk with one front end.
///
/// A front end asks for the length when it connects first, and is told when the length changes. A front end
/// that reconnects to a later daemon need not ask: QEMU does not. And QEMU forgets a change that it is told
/// before its guest has started the disk; QEMU 7.2 may take the message for an answer while it sets the
/// queues up. A front end is therefore told once all queues work, if it may know another length.
pub struct Length {
    bytes: Arc<AtomicU64>,
    front_end: Mutex<FrontEnd>,
}

#[derive(Default)]
struct FrontEnd {
    /// The length that the front end was told last.
    known: Option<u64>,
    /// All queues of the front end work.
    works: bool,
    /// The channel for messages to the front end, once it has given one.
    channel: Option<UnixStream>,
}

impl Length {
    /// The length for a front end that has just connected.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes: Arc::new(AtomicU64::new(bytes)),
            front_end: Mutex::default(),
        })
    }

    /// The length in bytes, always current, for frequent users.
    pub fn bytes(&self) -> Arc<AtomicU64> {
        self.bytes.clone()
    }

    /// The front end asks for the length.
    pub fn asked(&self) -> u64 {
        let mut front_end = self.lock();
        let bytes = self.bytes.load(Ordering::Relaxed);
        front_end.known = Some(bytes);
        bytes
    }

    /// Changes the length.
    pub fn set(&self, bytes: u64) {
        let mut front_end = self.lock();
        self.bytes.store(bytes, Ordering::Relaxed);
        front_end.tell(bytes);
    }

    /// Notes whether all queues that the front end has described work.
    pub fn works(&self, works: bool) {
        let mut front_end = self.lock();
        front_end.works = works;
        front_end.tell(self.bytes.load(Ordering::Relaxed));
    }

    /// The channel for messages to the front end; `None` when it goes.
    pub fn channel(&self, channel: Option<UnixStream>) {
        self.lock().channel = channel;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FrontEnd> {
        self.front_end.lock().expect("no panic under this lock")
    }
}

impl FrontEnd {
    /// Tells the front end the length, if it has to know. A front end that does not listen learns the length
    /// when it asks.
    fn tell(&mut self, bytes: u64) {
        let Some(channel) = self.channel.as_ref().filter(|_| self.works) else {
            return;
        };
        if self.known == Some(bytes) {
            return;
        }
        self.known = Some(bytes);
        let message = CONFIG_CHANGED.map(u32::to_ne_bytes).concat();
        if let Err(error) = send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            tracing::warn!("a virtual machine is not told how large its disk is: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Number of messages to a front end since the last call.
    fn told(front_end: &mut UnixStream) -> usize {
        front_end.set_nonblocking(true).expect("a socket");
        let mut bytes = Vec::new();
        // Reads until the socket is empty.
        let _ = front_end.read_to_end(&mut bytes);
        bytes.len() / (CONFIG_CHANGED.len() * 4)
    }

    #[test]
    fn who_has_asked_is_told_of_changes_and_only_while_it_works() {
        let (mut front_end, channel) = UnixStream::pair().expect("a pair");
        let length = Length::new(5);
        length.channel(Some(channel));
        assert_eq!(length.asked(), 5);
        length.works(true);
        assert_eq!(told(&mut front_end), 0, "it knows");
        length.set(6);
        assert_eq!(told(&mut front_end), 1);
        length.works(false);
        length.set(7);
        length.set(8);
        assert_eq!(told(&mut front_end), 0, "it would forget it");
        length.works(true);
        length.works(true);
        assert_eq!(told(&mut front_end), 1);
        assert_eq!(length.bytes().load(Ordering::Relaxed), 8);
    }

    #[test]
    fn who_connects_again_and_does_not_ask_is_told_once() {
        let (mut front_end, channel) = UnixStream::pair().expect("a pair");
        let length = Length::new(5);
        length.works(false);
        length.channel(Some(channel));
        assert_eq!(told(&mut front_end), 0);
        length.works(true);
        length.works(true);
        assert_eq!(told(&mut front_end), 1);
    }
}

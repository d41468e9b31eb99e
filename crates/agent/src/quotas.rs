//! What one instance, or one other agent, may have this agent keep, open and accept.
//!
//! Whoever goes beyond gets an error; everybody else is served as before. Each line says what the number protects.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tonic::Status;

use crate::forwarding::LIFETIME;

/// Connections of one instance to its `agent.sock` at a time: each is a descriptor and a task here. A process keeps one, and a
/// thread that asks where a peer is has another one for as long.
pub const CONNECTIONS: usize = 1024;

/// How long a connection may say nothing before its greeting: it holds a place that its instance's others may need.
pub const GREETING_TIME: Duration = Duration::from_secs(10);

/// The longest greeting in bytes: it is read into memory, and up to [`CONNECTIONS`] of an instance come at once. The remote keys of
/// a process are in it, a few bytes each.
pub const GREETING_BYTES: u64 = 1 << 20;

/// The longest answer to an order in bytes, a road map for one: it is read into memory, of all processes of an instance at once. An
/// object takes about 100 bytes.
pub const ANSWER_BYTES: u64 = 64 << 20;

/// The most memory in bytes that such an answer may take: a few times its length, and not all that a list of nothing would.
pub const ANSWER_MEMORY: usize = 128 << 20;

/// The longest name of a program or device in bytes: it is kept for each process. The kernel's are shorter.
pub const NAME_BYTES: usize = 256;

/// The longest text in bytes that a program's guest library has operators read.
pub const TEXT_BYTES: usize = 4096;

/// Contexts of a process that it makes again elsewhere, of which each is kept: an RNIC opens no more for one process.
pub const MADE_AGAIN: usize = 256;

/// Memory in bytes for answers that are being read, for all tenants and for one. The longest answer fits into what one has, also
/// while its lists grow.
pub const ANSWERS_READ: usize = 1 << 30;

/// See [`ANSWERS_READ`].
pub const ANSWERS_READ_OF_ONE: usize = 512 << 20;

/// Memory in bytes of answers that are in use, of all tenants and of one.
pub const ANSWERS_HELD: usize = 512 << 20;

/// See [`ANSWERS_HELD`].
pub const ANSWERS_HELD_OF_ONE: usize = 256 << 20;

/// The most memory in bytes that what another agent says in one message may take: gRPC lets 4 MiB in.
pub const MESSAGE_MEMORY: usize = 64 << 20;

/// Questions that the programs of one instance may ask at once where an endpoint is: a program that starts connects all of its queue pairs.
pub const RESOLVES: u32 = 1 << 15;

/// As many more each second. Who tries all numbers of queue pairs, to hear of those that have moved, needs hours for one host's.
pub const RESOLVES_PER_SECOND: u32 = 1 << 10;

/// Numbers that the programs of one instance have this agent ask for within [`LIFETIME`]: each is an entry at
/// another host.
pub const PUBLISHED: usize = 1 << 14;

/// Bytes of keys in them.
pub const PUBLISHED_BYTES: usize = 64 << 20;

/// Numbers that this host gives out to the queue pairs of one other host at a time: there are a million for all of them.
pub const PUBLISHED_BY_HOST: usize = 1 << 17;

/// Bytes of keys in them.
pub const PUBLISHED_BYTES_BY_HOST: usize = 512 << 20;

/// Sessions that one other host may watch here at a time: each is a stream and a task. A host moves a handful of instances at once.
pub const WATCHED_BY_HOST: usize = 1024;

/// Datagram queue pairs that one message may say to have moved: where each is, is asked of other hosts. An instance's are in one.
pub const MOVED_AT_ONCE: usize = 1 << 14;

/// Datagram queue pairs that this host knows to have moved, in all: each takes about 100 bytes, and programs are told all.
pub const MOVED: usize = 1 << 18;

/// Files of a folder that are kept open while it is sent here: adopted memory is few files with many parts each. The others are
/// opened anew for each part.
pub const PLACED_OPEN: usize = 64;

/// Bytes of extended attributes of one file, names and values: they go in one message, which has room for 4 MiB.
pub const ATTRIBUTE_BYTES: usize = 1 << 20;

/// Names of an instance's files whose times are kept until its tasks are restored.
pub const STAMPS: usize = 1 << 20;

/// Bytes of these names.
pub const STAMP_BYTES: usize = 64 << 20;

/// Folders within folders of an instance's runtime folder: each is a descriptor while it is looked through. A path has room for 2048.
pub const DEPTH: usize = 128;

/// Bytes of RAM that was left behind which one request may ask for: they are read into memory. A destination asks for a fraction of it.
const BEHIND_BYTES: u64 = 1 << 20;

/// The same, where only fingerprints are asked for, a hundredth of it.
const DESCRIBED_BYTES: u64 = 16 << 20;

/// Connections by which one virtual machine's RAM is lent at a time.
const LENT_CONNECTIONS: usize = 4;

/// An error if a destination asks for more of it than is told, `described` or not.
pub fn may_be_told(length: u64, described: bool) -> Result<(), Status> {
    let most = match described {
        true => DESCRIBED_BYTES,
        false => BEHIND_BYTES,
    };
    match length <= most {
        true => Ok(()),
        false => Err(Status::invalid_argument(format!(
            "more than {most} bytes at once"
        ))),
    }
}

/// An error if it is to be lent by more connections than are made.
pub fn may_be_lent(connections: usize) -> Result<(), Status> {
    match connections <= LENT_CONNECTIONS {
        true => Ok(()),
        false => Err(Status::invalid_argument(format!(
            "more than {LENT_CONNECTIONS} connections at once"
        ))),
    }
}

/// Numbers that somebody was given within [`LIFETIME`]. What is older is forgotten where it was kept.
#[derive(Debug, Default)]
pub struct Given {
    /// When, and with how many bytes.
    each: VecDeque<(Instant, usize)>,
    bytes: usize,
}

impl Given {
    /// Whether one more number, with so many bytes, is within these limits; then it is counted.
    pub fn take(&mut self, now: Instant, bytes: usize, most: usize, most_bytes: usize) -> bool {
        self.forget(now);
        let fits = self.each.len() < most && self.bytes.saturating_add(bytes) <= most_bytes;
        if fits {
            self.each.push_back((now, bytes));
            self.bytes += bytes;
        }
        fits
    }

    /// The last one was not given after all.
    pub fn give_back(&mut self, bytes: usize) {
        if let Some(index) = self.each.iter().rposition(|(_, of)| *of == bytes) {
            self.each.remove(index);
            self.bytes -= bytes;
        }
    }

    /// Whether nothing counts any more.
    pub fn is_empty(&mut self, now: Instant) -> bool {
        self.forget(now);
        self.each.is_empty()
    }

    fn forget(&mut self, now: Instant) {
        while let Some((at, bytes)) = self.each.front()
            && now.saturating_duration_since(*at) >= LIFETIME
        {
            self.bytes -= bytes;
            self.each.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_is_told_where_it_is_described() {
        assert!(may_be_told(BEHIND_BYTES, false).is_ok() && may_be_told(DESCRIBED_BYTES, true).is_ok());
        for (length, described) in [(BEHIND_BYTES + 1, false), (DESCRIBED_BYTES + 1, true)] {
            assert!(may_be_told(length, described).is_err());
        }
        assert!(may_be_lent(LENT_CONNECTIONS).is_ok() && may_be_lent(LENT_CONNECTIONS + 1).is_err());
    }

    #[test]
    fn numbers_and_their_bytes_count_for_their_lifetime() {
        let (mut given, now) = (Given::default(), Instant::now());
        assert!(given.take(now, 60, 3, 100));
        assert!(!given.take(now, 41, 3, 100), "too many bytes");
        assert!(given.take(now, 40, 3, 100) && given.take(now, 0, 3, 100));
        assert!(!given.take(now, 0, 3, 100), "too many");
        given.give_back(40);
        assert!(given.take(now, 39, 3, 100));
        assert!(!given.is_empty(now));
        let later = now + LIFETIME;
        assert!(given.take(later, 100, 3, 100) && !given.take(later, 1, 3, 100));
        assert!(given.is_empty(later + LIFETIME));
    }
}

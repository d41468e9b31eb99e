//! Messages of a volume to the destination of its move, and their connection.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;
use verbatim_mirror::{Extent, Ticket};

use crate::transport::Carriage;
use crate::wire::{Tag, ToDestination, frame};

/// A message to the connection's threads.
pub enum Outgoing {
    /// A frame, and data that were not copied into it.
    Frame(Vec<u8>, Option<Arc<Vec<u8>>>),
    /// A chunk, by the connection's way for chunks.
    Chunk {
        /// Its name in the answer.
        tag: Tag,
        /// Its first byte in the volume.
        offset: u64,
        /// Its bytes.
        data: Arc<Vec<u8>>,
    },
    /// Statistics only: the destination has this many more bytes by RDMA.
    Carried(u64),
    /// Statistics only: chunks no longer go by RDMA, for this reason.
    FellBack(String),
}

/// A chunk that was read, and that the destination may not have yet.
pub struct Chunk {
    /// Its extent in the volume.
    pub extent: Extent,
    /// Its bytes.
    pub data: Arc<Vec<u8>>,
    /// Its BLAKE3, where the destination compares first.
    pub hash: Option<[u8; 32]>,
    /// All bytes are zero. Known beforehand, since the check takes time.
    pub is_zero: bool,
}

struct Link {
    number: u64,
    sender: UnboundedSender<Outgoing>,
    compares: bool,
    /// The connection's daemon knows zeros that stay allocated.
    knows_room: bool,
}

/// The connection, if there is one, and the chunks that it carries.
#[derive(Default)]
pub struct Outlet {
    /// Number of connections so far.
    links: u64,
    link: Option<Link>,
    chunks: HashMap<Ticket, Chunk>,
    /// Bytes sent for the present move, or for the last one.
    pub sent_bytes: u64,
    /// Transport of the move's chunks.
    pub carriage: Option<Carriage>,
    /// The volume is fully allocated, and shall be at the destination, too.
    keeps_room: bool,
}

impl Outlet {
    /// Begins a move. `keeps_room`: zeros stay allocated.
    pub fn begin(&mut self, keeps_room: bool) {
        (self.sent_bytes, self.carriage, self.keeps_room) = (0, None, keeps_room);
    }

    /// Begins a connection to a daemon with these abilities. Returns its number.
    pub fn connect(
        &mut self,
        (compares, knows_room): (bool, bool),
        sender: UnboundedSender<Outgoing>,
    ) -> u64 {
        self.links += 1;
        self.link = Some(Link {
            number: self.links,
            sender,
            compares,
            knows_room,
        });
        self.links
    }

    /// Whether the connection of this number is the current one.
    pub fn is_by(&self, number: u64) -> bool {
        self.link.as_ref().is_some_and(|link| link.number == number)
    }

    /// Ends the current connection by dropping its sender.
    pub fn disconnect(&mut self) {
        self.link = None;
    }

    /// Whether the destination compares chunks with its own data.
    pub fn compares(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.compares)
    }

    /// Keeps a chunk that may be sent from now on.
    pub fn keep(&mut self, ticket: Ticket, chunk: Chunk) {
        self.chunks.insert(ticket, chunk);
    }

    /// Forgets a chunk that the destination has, or that was given up.
    pub fn forget(&mut self, ticket: Ticket) {
        self.chunks.remove(&ticket);
    }

    /// Sends a kept chunk, or asks first whether the destination has the same data.
    pub fn send_chunk(&mut self, ticket: Ticket) {
        let chunk = self.chunks.get(&ticket).expect("it was read");
        let tag = Tag::Chunk(ticket.0);
        // Equal data may be a hole at the destination.
        let is_allocated = chunk.is_zero && self.keeps_room;
        match chunk.hash.filter(|_| !is_allocated) {
            Some(hash) => {
                let Extent { offset, length } = chunk.extent;
                let compare = ToDestination::Compare {
                    tag,
                    offset,
                    length,
                    hash,
                };
                self.send(&compare, None);
            }
            None => self.differs(ticket),
        }
    }

    /// Sends a chunk that the destination does not have, unless it was given up.
    pub fn differs(&mut self, ticket: Ticket) {
        let Some(chunk) = self.chunks.remove(&ticket) else {
            return;
        };
        let (tag, extent) = (Tag::Chunk(ticket.0), chunk.extent);
        if chunk.is_zero {
            self.zero(tag, extent, !self.keeps_room);
        } else if let Some(link) = &self.link {
            self.sent_bytes += extent.length;
            let (offset, data) = (extent.offset, chunk.data);
            // As in `send`.
            let _ = link.sender.send(Outgoing::Chunk { tag, offset, data });
        }
    }

    /// Sends a change by the tenant.
    pub fn change(&mut self, id: u64, extent: Extent, data: Arc<Vec<u8>>) {
        let (tag, offset) = (Tag::Change(id), extent.offset);
        match is_zero(&data) {
            true => self.zero(tag, extent, !self.keeps_room),
            false => self.send(&ToDestination::Put { tag, offset }, Some(data)),
        }
    }

    /// Sends zeros. `may_free`: they need not stay allocated.
    pub fn zero(&mut self, tag: Tag, extent: Extent, may_free: bool) {
        let Extent { offset, length } = extent;
        let knows_room = self.link.as_ref().is_some_and(|link| link.knows_room);
        let message = match may_free || !knows_room {
            true => ToDestination::Zero { tag, offset, length },
            false => ToDestination::Allocate { tag, offset, length },
        };
        self.send(&message, None);
    }

    /// Asks for a flush.
    pub fn flush(&mut self, ticket: Ticket) {
        let tag = Tag::Flush(ticket.0);
        self.send(&ToDestination::Flush { tag }, None);
    }

    fn send(&mut self, message: &ToDestination, data: Option<Arc<Vec<u8>>>) {
        let length = data.as_ref().map_or(0, |data| data.len());
        let frame = frame(message, length);
        if let Some(link) = &self.link {
            self.sent_bytes += (frame.len() + length) as u64;
            // Without a receiver, the connection's end is reported soon.
            let _ = link.sender.send(Outgoing::Frame(frame, data));
        }
    }
}

/// Whether all bytes are zero. This is one comparison of memory, and the first bytes decide for most data.
pub fn is_zero(data: &[u8]) -> bool {
    let Some((first, rest)) = data.split_first() else {
        return true;
    };
    *first == 0 && rest == &data[..rest.len()]
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    const EXTENT: Extent = Extent {
        offset: 4096,
        length: 512,
    };

    fn chunk(hash: Option<[u8; 32]>) -> Chunk {
        Chunk {
            extent: EXTENT,
            data: Arc::new(vec![7; 512]),
            hash,
            is_zero: false,
        }
    }

    fn outlet(compares: bool) -> (Outlet, u64, UnboundedReceiver<Outgoing>) {
        let (sender, receiver) = unbounded_channel();
        let mut outlet = Outlet::default();
        let number = outlet.connect((compares, true), sender);
        (outlet, number, receiver)
    }

    fn is_frame(outgoing: Outgoing, message: &ToDestination) -> bool {
        matches!(outgoing, Outgoing::Frame(bytes, None) if bytes == frame(message, 0))
    }

    #[test]
    fn a_chunk_is_sent_once_the_destination_says_that_it_differs() {
        let (mut outlet, _, mut sent) = outlet(true);
        outlet.keep(Ticket(3), chunk(Some([9; 32])));
        outlet.send_chunk(Ticket(3));
        let compare = ToDestination::Compare {
            tag: Tag::Chunk(3),
            offset: 4096,
            length: 512,
            hash: [9; 32],
        };
        assert!(is_frame(sent.try_recv().expect("a question"), &compare));
        outlet.differs(Ticket(3));
        let Ok(Outgoing::Chunk {
            offset: 4096, data, ..
        }) = sent.try_recv()
        else {
            panic!("no chunk")
        };
        assert_eq!(*data, [7; 512]);
        outlet.differs(Ticket(3));
        assert!(sent.try_recv().is_err(), "it has left already");
        assert!(outlet.sent_bytes > 512);
        outlet.begin(false);
        assert_eq!(outlet.sent_bytes, 0);
    }

    #[test]
    fn zeros_are_named_and_what_was_given_up_is_not_sent() {
        let (mut outlet, _, mut sent) = outlet(false);
        outlet.change(1, EXTENT, Arc::new(vec![0; 512]));
        let zero = ToDestination::Zero {
            tag: Tag::Change(1),
            offset: 4096,
            length: 512,
        };
        assert!(is_frame(sent.try_recv().expect("zeros"), &zero));
        let is_zero = true;
        outlet.keep(
            Ticket(3),
            Chunk {
                is_zero,
                ..chunk(None)
            },
        );
        outlet.send_chunk(Ticket(3));
        let zero = ToDestination::Zero {
            tag: Tag::Chunk(3),
            offset: 4096,
            length: 512,
        };
        assert!(is_frame(sent.try_recv().expect("zeros"), &zero));
        outlet.keep(Ticket(4), chunk(None));
        outlet.forget(Ticket(4));
        outlet.differs(Ticket(4));
        assert!(sent.try_recv().is_err());
    }

    #[test]
    fn zeros_that_keep_their_place_are_named_so_to_whoever_knows_that() {
        for knows_room in [true, false] {
            let (sender, mut sent) = unbounded_channel();
            let mut outlet = Outlet::default();
            outlet.begin(true);
            outlet.connect((true, knows_room), sender);
            let (tag, offset, length) = (Tag::Chunk(3), 4096, 512);
            let zeros = Chunk {
                is_zero: true,
                ..chunk(Some([9; 32]))
            };
            outlet.keep(Ticket(3), zeros);
            outlet.send_chunk(Ticket(3));
            outlet.zero(tag, EXTENT, false);
            let expected = match knows_room {
                true => ToDestination::Allocate { tag, offset, length },
                false => ToDestination::Zero { tag, offset, length },
            };
            for _ in 0..2 {
                assert!(is_frame(sent.try_recv().expect("zeros"), &expected));
            }
            outlet.zero(tag, EXTENT, true);
            let freed = ToDestination::Zero { tag, offset, length };
            assert!(is_frame(sent.try_recv().expect("zeros"), &freed));
        }
    }

    #[test]
    fn one_byte_that_is_not_zero_is_seen_wherever_it_is() {
        assert!(is_zero(&[]));
        for at in 0..40 {
            let mut data = vec![0; 40];
            assert!(is_zero(&data[..=at]));
            data[at] = 1;
            assert!(!is_zero(&data));
        }
    }

    #[test]
    fn one_connection_counts_and_nothing_is_counted_without_one() {
        let (mut outlet, first, mut sent) = outlet(true);
        let second = outlet.connect((false, true), unbounded_channel().0);
        assert!(!outlet.is_by(first) && outlet.is_by(second) && !outlet.compares());
        assert!(sent.blocking_recv().is_none(), "the first one's end is told");
        outlet.disconnect();
        assert!(!outlet.is_by(second));
        let before = outlet.sent_bytes;
        outlet.flush(Ticket(1));
        outlet.keep(Ticket(2), chunk(None));
        outlet.send_chunk(Ticket(2));
        assert_eq!(outlet.sent_bytes, before);
    }
}

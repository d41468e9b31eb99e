//! The source's ring, from which the destination reads chunks by RDMA, for one connection.
//!
//! A chunk is copied into the ring, and fingerprints of the same bytes go over TLS. Its place is reused only
//! after the destination has said that it has copied the chunk out. Until then the chunk's own bytes are
//! kept: a chunk that does not come by RDMA, or comes damaged, is sent again by TLS, once the destination has
//! said that it will no longer take the chunk from the ring.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use verbatim_bulk::{Accepted, Device, Offer, Operation, Options, Outgoing};

use crate::transport::Rnic;
use crate::wire::{Landing, Tag, ToDestination, frame};

/// The longest chunk that goes by RDMA.
pub const RUN_BYTES: u64 = 256 << 10;

/// Bytes of either ring: the most chunks in flight ([`verbatim_mirror::pace::MAX_DEPTH`]).
pub const RING_BYTES: u64 = 32 * RUN_BYTES;

/// A frame, and data that were not copied into it.
pub type Frame = (Vec<u8>, Option<Arc<Vec<u8>>>);

/// A chunk that the destination has not copied out yet.
struct UnderWay {
    /// The ring's position behind the chunk.
    end: u64,
    tag: Tag,
    offset: u64,
    data: Arc<Vec<u8>>,
}

/// A ring that the other host reads from.
pub struct Lending {
    outgoing: Outgoing<()>,
    device: Device,
    under_way: VecDeque<UnderWay>,
    /// Nothing more goes through the ring.
    is_over: bool,
}

impl Lending {
    /// A ring, and the offer to the other host. It takes a moment.
    pub fn open(rnic: &Rnic) -> Result<(Self, Offer), verbatim_bulk::Error> {
        let device = rnic.open()?;
        let options = Options {
            operation: Operation::Read,
            run_bytes: RUN_BYTES,
            ring_bytes: RING_BYTES,
            locks: true,
            ..Options::default()
        };
        let (outgoing, offer) = Outgoing::open(&device, options)?;
        let lending = Self {
            outgoing,
            device,
            under_way: VecDeque::new(),
            is_over: false,
        };
        Ok((lending, offer))
    }

    /// The RNIC's name.
    pub fn name(&self) -> String {
        self.device.name().to_owned()
    }

    /// The other host has made its ring.
    pub fn accept(&mut self, accepted: &Accepted) -> Result<(), verbatim_bulk::Error> {
        self.outgoing.accept(accepted)
    }

    /// The message about a chunk: its place in the ring, or all of it if the ring has no room.
    pub fn put(&mut self, tag: Tag, offset: u64, data: Arc<Vec<u8>>) -> Frame {
        match self.lend(tag, offset, &data) {
            Some((landing, fingerprints)) => {
                let message = ToDestination::Fetch { tag, offset, landing };
                (frame(&message, fingerprints.len()), Some(Arc::new(fingerprints)))
            }
            None => whole(tag, offset, data),
        }
    }

    /// The other host has copied out all chunks before this position. Returns the bytes of the chunks that
    /// this adds; an error for an impossible position.
    pub fn taken(&mut self, position: u64) -> io::Result<u64> {
        let freed = self.outgoing.freed(position);
        freed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let mut bytes = 0;
        let taken = self.under_way.partition_point(|one| one.end <= position);
        for one in self.under_way.drain(..taken) {
            bytes += one.data.len() as u64;
        }
        Ok(bytes)
    }

    /// The other host will not take this chunk from the ring. Returns the message that sends the chunk by
    /// TLS. Nothing goes through the ring from now on.
    pub fn again(&mut self, tag: Tag) -> Option<Frame> {
        self.is_over = true;
        let at = self.under_way.iter().position(|one| one.tag == tag)?;
        let UnderWay { offset, data, .. } = self.under_way.remove(at)?;
        Some(whole(tag, offset, data))
    }

    /// Whether the RNIC has gone since the last call. Nothing goes through the ring from then on.
    pub fn has_gone(&mut self) -> bool {
        let has_gone = !self.is_over && self.device.is_gone();
        self.is_over |= has_gone;
        has_gone
    }

    /// Puts a chunk into the ring; `None` if the chunk has to go by TLS.
    fn lend(&mut self, tag: Tag, offset: u64, data: &Arc<Vec<u8>>) -> Option<(Landing, Vec<u8>)> {
        if self.is_over || data.len() as u64 > RUN_BYTES {
            return None;
        }
        let mut run = self.outgoing.begin()?;
        let lent = self
            .outgoing
            .add(&mut run, data)
            .and_then(|()| self.outgoing.send(run, ()))
            .and_then(|()| self.outgoing.next(false));
        let Ok(Some((_, Some(landed)))) = lent else {
            self.is_over = true;
            return None;
        };
        self.under_way.push_back(UnderWay {
            end: landed.end(),
            tag,
            offset,
            data: data.clone(),
        });
        let landing = Landing {
            position: landed.position,
            length: data.len() as u64,
        };
        Some((landing, landed.fingerprints))
    }
}

fn whole(tag: Tag, offset: u64, data: Arc<Vec<u8>>) -> Frame {
    (frame(&ToDestination::Put { tag, offset }, data.len()), Some(data))
}

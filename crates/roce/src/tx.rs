//! Packets on their way out, collected for one UDP send with generic segmentation offload (GSO).
//!
//! The cost of UDP is per trip through the kernel's stack, so packets leave in batches: one buffer, cut by the kernel
//! into datagrams of one size (`UDP_SEGMENT`, udp(7)). All segments but the last must have that size. A [`TxBatch`]
//! keeps this rule: it refuses a packet that would break it, and the caller sends the batch and comes back.
//!
//! The payload is copied from memory into the batch once, and the ICRC is computed over that copy: the program may
//! change its memory meanwhile without making a packet that its receiver would drop.

use crate::Traffic;
use crate::wire::icrc::{Flow, ICRC_BYTES};

/// How [`crate::RcQp::poll_transmit`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// Nothing more to send until a packet, a doorbell or a timeout comes.
    Idle,
    /// The next packet does not fit: send the batch, [`TxBatch::clear`] it and call again.
    Full,
    /// The budget is used up and there is more: call again after the others had their turn.
    More,
}

/// The next packet does not fit into this batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchFull;

/// Finished packets (BTH to ICRC) for one UDP flow, ready for `sendmsg` with `UDP_SEGMENT`.
#[derive(Debug)]
pub struct TxBatch {
    flow: Flow,
    traffic: Traffic,
    buffer: Box<[u8]>,
    len_bytes: usize,
    segment_bytes: usize,
    segments: u16,
    closed: bool,
}

impl TxBatch {
    /// The most bytes in a batch: what an IP packet can carry, with some room for headers.
    pub const MAX_BYTES: usize = 65_000;
    /// The most packets in a batch (`UDP_MAX_SEGMENTS` of the Linux kernel).
    pub const MAX_SEGMENTS: u16 = 64;

    /// An empty batch. The buffer is allocated here and never again.
    pub fn new(flow: Flow) -> TxBatch {
        TxBatch {
            flow,
            traffic: Traffic::default(),
            buffer: vec![0; Self::MAX_BYTES].into_boxed_slice(),
            len_bytes: 0,
            segment_bytes: 0,
            segments: 0,
            closed: false,
        }
    }

    /// The flow that the packets are for.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// What the IP headers of the packets are to say beside the addresses.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Forgets the packets and goes on with another flow.
    pub fn restart(&mut self, flow: Flow) {
        self.restart_with(flow, Traffic::default());
    }

    /// The same with something to say in the IP headers.
    pub fn restart_with(&mut self, flow: Flow, traffic: Traffic) {
        self.flow = flow;
        self.traffic = traffic;
        self.clear();
    }

    /// Forgets the packets, which have been sent.
    pub fn clear(&mut self) {
        self.len_bytes = 0;
        self.segment_bytes = 0;
        self.segments = 0;
        self.closed = false;
    }

    /// All packets, one after the other: the payload of the send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[..self.len_bytes]
    }

    /// The size of each packet but perhaps the last: the value for `UDP_SEGMENT`.
    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// How many packets there are. Packet `i` has the IPv4 identification `i` in its ICRC.
    pub fn segments(&self) -> u16 {
        self.segments
    }

    /// Is there nothing to send?
    pub fn is_empty(&self) -> bool {
        self.segments == 0
    }

    /// The packets, one by one.
    pub fn packets(&self) -> impl Iterator<Item = &[u8]> {
        self.as_bytes().chunks(self.segment_bytes.max(1))
    }

    /// Would a packet of this size fit?
    pub(crate) fn fits(&self, packet_bytes: usize) -> Result<(), BatchFull> {
        let fits = !self.closed
            && self.segments < Self::MAX_SEGMENTS
            && packet_bytes <= Self::MAX_BYTES - self.len_bytes
            && (self.is_empty() || packet_bytes <= self.segment_bytes);
        if fits { Ok(()) } else { Err(BatchFull) }
    }

    /// Appends a packet of `packet_bytes` (ICRC included, so at least 16), which `fill` writes: all but the ICRC, which
    /// is added here. If `fill` fails, nothing is appended.
    ///
    /// # Panics
    /// If the packet does not fit; ask [`TxBatch::fits`] first.
    pub(crate) fn append<E>(
        &mut self,
        packet_bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(
            self.fits(packet_bytes).is_ok(),
            "the caller has asked whether {packet_bytes} bytes fit"
        );
        let packet = &mut self.buffer[self.len_bytes..self.len_bytes + packet_bytes];
        let (body, trailer) = packet.split_at_mut(packet_bytes - ICRC_BYTES);
        fill(body)?;
        trailer.copy_from_slice(&self.flow.icrc(body, self.segments).to_le_bytes());
        if self.is_empty() {
            self.segment_bytes = packet_bytes;
        } else if packet_bytes < self.segment_bytes {
            self.closed = true;
        }
        self.len_bytes += packet_bytes;
        self.segments += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> TxBatch {
        let end = |host| std::net::SocketAddr::from(([10, 0, 0, host], crate::UDP_PORT));
        TxBatch::new(Flow::new(end(1), end(2)).unwrap())
    }

    fn push(batch: &mut TxBatch, bytes: usize) -> Result<(), BatchFull> {
        batch.fits(bytes)?;
        batch.append(bytes, |body| {
            body.fill(7);
            Ok(())
        })
    }

    #[test]
    fn only_the_last_packet_may_be_shorter() {
        let mut batch = batch();
        assert_eq!(push(&mut batch, 1000), Ok(()));
        assert_eq!(push(&mut batch, 1016), Err(BatchFull), "longer than the first");
        assert_eq!(push(&mut batch, 1000), Ok(()));
        assert_eq!(push(&mut batch, 20), Ok(()));
        assert_eq!(
            push(&mut batch, 20),
            Err(BatchFull),
            "nothing after a shorter one"
        );
        assert_eq!(
            (batch.segments(), batch.segment_bytes(), batch.as_bytes().len()),
            (3, 1000, 2020)
        );
        assert_eq!(
            batch.packets().map(<[u8]>::len).collect::<Vec<_>>(),
            [1000, 1000, 20]
        );
        batch.clear();
        assert_eq!(push(&mut batch, 1016), Ok(()));
    }

    #[test]
    fn batches_are_bounded() {
        let mut small = batch();
        while push(&mut small, 20).is_ok() {}
        assert_eq!(small.segments(), TxBatch::MAX_SEGMENTS);
        let mut large = batch();
        while push(&mut large, 4112).is_ok() {}
        assert_eq!(large.segments(), 15);
    }

    #[test]
    fn a_failed_fill_leaves_no_trace() {
        let mut batch = batch();
        assert_eq!(batch.append(100, |_| Err("no")), Err("no"));
        assert!(batch.is_empty());
        assert_eq!(push(&mut batch, 200), Ok(()));
    }
}

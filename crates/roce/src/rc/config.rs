//! What the NIC decides about a queue pair, beside its attributes.

use std::time::Duration;

/// Settings of a reliable connection that verbs has no attribute for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RcConfig {
    /// Partition key in every packet; packets with another (but for the top bit) are dropped. Default 0xffff.
    pub pkey: u16,
    /// Is the receive queue a shared one? It is then not flushed. Default false.
    pub shared_receive_queue: bool,
    /// The most bytes that may be under way to the partner without an acknowledgement, and the most READ data that may
    /// be asked for: what the partner's socket buffer can hold. Default 512 KiB.
    pub window_bytes: u32,
    /// The same as a number of packets, for small ones. Default 256, at least 1.
    pub window_packets: u32,
    /// An acknowledgement is asked for after this many packets, besides at the end of each message. Default 32.
    pub ack_request_interval: u32,
    /// The most send requests taken off the ring and not complete. Default 256, at least 1.
    pub max_outstanding_sends: usize,
    /// A shorter local ACK timeout is lengthened to this: a software NIC may not run for a while. Default 4 ms.
    pub min_ack_timeout: Duration,
}

impl Default for RcConfig {
    fn default() -> RcConfig {
        RcConfig {
            pkey: 0xffff,
            shared_receive_queue: false,
            window_bytes: 512 * 1024,
            window_packets: 256,
            ack_request_interval: 32,
            max_outstanding_sends: 256,
            min_ack_timeout: Duration::from_millis(4),
        }
    }
}

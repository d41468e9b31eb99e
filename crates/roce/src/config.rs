//! What the NIC decides about a queue pair, beside its attributes.

use std::time::Duration;

use crate::Mtu;

/// Settings of a queue pair that verbs has no attribute for. Those about the window, acknowledgements and time are for
/// the reliable connection only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Partition key in every packet; those with a key that does not match are dropped. Default 0xffff.
    pub pkey: u16,
    /// The longest datagram: the port's active MTU. Default 1,024 bytes.
    pub port_mtu: Mtu,
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
    /// The shortest time after which a packet is sent again, once, to ask how things are; this counts as no retry and
    /// doubles each time up to the local ACK timeout. Default 1 ms.
    pub min_rto: Duration,
    /// How long an acknowledgement waits for the program's answer while the two programs answer each other one by one, so
    /// that both leave together: see [`crate::RcQp::ack_deadline`]. Default zero: it never waits.
    pub ack_delay: Duration,
    /// The most memory for READ data that came before some that are missing. None is kept if it is 0: then each loss makes the
    /// partner send again what it has sent since. Requests that come early are never kept. Default 512 KiB.
    pub hold_bytes: u32,
    /// How long a connection waits for a partner that is stopped, or that is to acknowledge where this end goes on. It then
    /// fails with [`crate::WcStatus::RetryExcErr`] and a vendor error of its own. Default 60 s.
    pub pause_limit: Duration,
}

impl Default for QpConfig {
    fn default() -> QpConfig {
        QpConfig {
            pkey: 0xffff,
            port_mtu: Mtu::default(),
            shared_receive_queue: false,
            window_bytes: 512 * 1024,
            window_packets: 256,
            ack_request_interval: 32,
            max_outstanding_sends: 256,
            min_ack_timeout: Duration::from_millis(4),
            min_rto: Duration::from_millis(1),
            ack_delay: Duration::ZERO,
            hold_bytes: 512 * 1024,
            pause_limit: Duration::from_secs(60),
        }
    }
}

//! What the owner of an id asks for.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use verbatim_roce::{Mtu, Psn, Qpn};

use crate::config::{MAX_CM_RETRIES, PACKET_LIFETIME, RESPONSE_TIMEOUT};
use crate::num::{Gid, ServiceId, Transport};
use crate::wire::{IpHeader, SidrStatus};

/// How the two ends reach each other, seen from this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// Own GID: messages are sent from it.
    pub local: Gid,
    /// The peer's GID: messages are sent to it.
    pub remote: Gid,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU.
    pub mtu: Mtu,
    /// `enum ib_rate`; it is only passed on.
    pub rate: u8,
    /// IPv6 traffic class, IPv4 type of service.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// IPv6 hop limit, IPv4 time to live. 0 and 1 mean a path that no router is on.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
    /// How long a packet is under way at most, as an exponent ([`crate::field_time`]).
    pub packet_life_time: u8,
}

impl Path {
    /// As rdma_cm has it on RoCE; `mtu` is that of the port.
    pub fn new(local: Gid, remote: Gid, mtu: Mtu) -> Path {
        Path {
            local,
            remote,
            pkey: 0xffff,
            mtu,
            rate: 3, // IB_RATE_10_GBPS
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            sl: 0,
            packet_life_time: PACKET_LIFETIME,
        }
    }
}

/// Which requests a listener takes, by the address in their private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ListenAddress {
    /// A service of InfiniBand's own (`AF_IB`): there is no header of the IP CM service, all private data is the program's.
    Native,
    /// Any address.
    Any,
    /// Any address of IPv4.
    AnyV4,
    /// Any address of IPv6.
    AnyV6,
    /// This one.
    One(IpAddr),
}

/// What a listener takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accepts {
    /// REQ of any transport.
    Connections,
    /// SIDR_REQ.
    Datagrams,
    /// Both.
    Both,
}

/// A listener ([`crate::Cm::listen`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listen {
    /// What is asked for.
    pub service: ServiceId,
    /// At which address.
    pub address: ListenAddress,
    /// Which messages.
    pub accepts: Accepts,
    /// Requests that no program has taken yet: beyond, they are dropped, and come again.
    pub backlog: u32,
}

/// A connection that is asked for with a REQ ([`crate::Cm::connect`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// The service at the peer.
    pub service: ServiceId,
    /// The way there.
    pub path: Path,
    /// The addresses of the program, in front of its private data; without, for a service of InfiniBand's own.
    pub ip: Option<IpHeader>,
    /// What is connected.
    pub transport: Transport,
    /// The own queue pair.
    pub qpn: Qpn,
    /// From which PSN on the peer is to send.
    pub starting_psn: Psn,
    /// READs and atomics that the own queue pair takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the own queue pair has under way at once.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// The own queue pair has a shared receive queue.
    pub srq: bool,
    /// Retries of the transport, 3 bits.
    pub retry_count: u8,
    /// Retries after RNR NAKs, 3 bits.
    pub rnr_retry_count: u8,
    /// How long the peer's communication manager may take for an answer, as an exponent.
    pub remote_response_timeout: u8,
    /// How long the own one takes.
    pub local_response_timeout: u8,
    /// How often each message is sent again, 4 bits.
    pub max_cm_retries: u8,
    /// 92 bytes, 36 of which `ip` takes.
    pub private_data: Vec<u8>,
}

impl Connect {
    /// With the timeouts and retries of rdma_cm, and nothing optional.
    pub fn new(service: ServiceId, path: Path, qpn: Qpn, starting_psn: Psn) -> Connect {
        Connect {
            service,
            path,
            ip: None,
            transport: Transport::Rc,
            qpn,
            starting_psn,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: false,
            srq: false,
            retry_count: 7,
            rnr_retry_count: 7,
            remote_response_timeout: RESPONSE_TIMEOUT,
            local_response_timeout: RESPONSE_TIMEOUT,
            max_cm_retries: MAX_CM_RETRIES,
            private_data: Vec::new(),
        }
    }
}

/// The answer REP to a request ([`crate::Cm::accept`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// The own queue pair.
    pub qpn: Qpn,
    /// From which PSN on the peer is to send.
    pub starting_psn: Psn,
    /// READs and atomics that the own queue pair takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the own queue pair has under way at once.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries after RNR NAKs, for the peer's queue pair, 3 bits.
    pub rnr_retry_count: u8,
    /// The own queue pair has a shared receive queue.
    pub srq: bool,
    /// 196 bytes.
    pub private_data: Vec<u8>,
}

/// The question SIDR_REQ for the queue pair behind a service ([`crate::Cm::resolve`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// The service at the peer.
    pub service: ServiceId,
    /// The way there.
    pub path: Path,
    /// The addresses of the program, in front of its private data.
    pub ip: Option<IpHeader>,
    /// How long an answer may take, as an exponent.
    pub response_timeout: u8,
    /// How often the question is sent again.
    pub max_cm_retries: u8,
    /// 216 bytes, 36 of which `ip` takes.
    pub private_data: Vec<u8>,
}

impl Resolve {
    /// With the timeout and retries of rdma_cm.
    pub fn new(service: ServiceId, path: Path) -> Resolve {
        Resolve {
            service,
            path,
            ip: None,
            response_timeout: RESPONSE_TIMEOUT,
            max_cm_retries: MAX_CM_RETRIES,
            private_data: Vec::new(),
        }
    }
}

/// The answer SIDR_REP ([`crate::Cm::answer`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// [`SidrStatus::VALID`], or why there is none.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: u32,
    /// 136 bytes.
    pub private_data: Vec<u8>,
}

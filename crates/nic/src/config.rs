//! What an operator can set.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

/// Which of the host's addresses is the port of the RNIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    /// The first IPv4 address of this network interface.
    Interface(String),
    /// This address; its interface gives the MTU.
    Address(Ipv4Addr),
}

/// The software RNIC's settings.
#[derive(Debug, Clone)]
pub struct NicConfig {
    /// Folder for the control socket and the statistics file.
    pub runtime_dir: PathBuf,
    /// The port. Default: the interface `br0`.
    pub port: Port,
    /// The device's name. Default: `verbatim0`.
    pub name: String,
    /// How long the RNIC looks for work before it sleeps. Longer saves a wake-up (some 5 µs) on the next packet or
    /// doorbell, and burns a core meanwhile. Default: 20 µs, range: 0 to 1 s.
    pub spin: Duration,
    /// What one RNIC and one program can have.
    pub limits: Limits,
}

impl NicConfig {
    /// The defaults, with the control socket in `runtime_dir`.
    pub fn new(runtime_dir: impl Into<PathBuf>) -> Self {
        Self {
            runtime_dir: runtime_dir.into(),
            port: Port::Interface("br0".to_owned()),
            name: "verbatim0".to_owned(),
            spin: Duration::from_micros(20),
            limits: Limits::default(),
        }
    }
}

/// Upper bounds. They protect the RNIC and its other programs from one that asks for too much.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Control connections. Default: 4,096.
    pub max_contexts: u32,
    /// Protection domains of all contexts. Default: 65,536.
    pub max_pd: u32,
    /// Memory regions of all contexts. Default: 524,288.
    pub max_mr: u32,
    /// Completion queues of all contexts. Default: 65,536.
    pub max_cq: u32,
    /// Entries of a completion queue. Default: 1,048,576.
    pub max_cqe: u32,
    /// Queue pairs of all contexts. Default: 65,536.
    pub max_qp: u32,
    /// Requests of a send or receive queue. Default: 32,768.
    pub max_qp_wr: u32,
    /// Outstanding READs of a queue pair, either way. Default: 16.
    pub max_rd_atomic: u8,
    /// Bytes of a context's arena, in which its queues lie; it is sparse. Default: 16 GiB.
    pub arena_bytes: u64,
    /// Bytes that may be on their way without an acknowledgement, shared by the queue pairs. More than what the caches
    /// hold makes everything slower; more than what the receiver's socket buffers makes packets drop, and the
    /// transport then narrows the windows. Default: 2 MiB.
    pub window_bytes: u32,
    /// Bytes asked for the UDP socket's buffers. Default: 32 MiB.
    pub socket_buffer_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_contexts: 4096,
            max_pd: 65_536,
            max_mr: 1 << 19,
            max_cq: 65_536,
            max_cqe: 1 << 20,
            max_qp: 65_536,
            max_qp_wr: 32_768,
            max_rd_atomic: 16,
            arena_bytes: 16 << 30,
            window_bytes: 2 << 20,
            socket_buffer_bytes: 32 << 20,
        }
    }
}

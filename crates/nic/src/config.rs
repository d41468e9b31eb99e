//! What an operator can set.

use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use verbatim_device::control::HOST_NUMBERS;

/// Which of the host's addresses is the port of the RNIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    /// The first address of this network interface, IPv4 before IPv6.
    Interface(String),
    /// This address; its interface gives the MTU.
    Address(IpAddr),
}

/// A host's number among those that objects move between: 0 to [`HOST_NUMBERS`] - 1, see there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostNumber(u8);

impl HostNumber {
    /// `None` if there is no such number.
    pub fn new(number: u8) -> Option<Self> {
        (number < HOST_NUMBERS).then_some(Self(number))
    }

    /// The number of a host whose RNIC has this address, if nothing else is said: its last 32 bits, as one big-endian number,
    /// modulo [`HOST_NUMBERS`]. So hosts with neighbouring addresses have different ones. Two with the same one may move
    /// objects as well; it only happens more often, and still rarely, that a number is taken.
    pub fn of(address: IpAddr) -> Self {
        let low = match address {
            IpAddr::V4(address) => address.to_bits(),
            IpAddr::V6(address) => address.to_bits() as u32,
        };
        Self((low % u32::from(HOST_NUMBERS)) as u8)
    }

    /// The number.
    pub fn get(self) -> u8 {
        self.0
    }

    /// Where what the RNIC gives can begin, with so many numbers for each host: in the first half of its own. Never in the
    /// first few of all, so that a number that is small by mistake is nobody's.
    pub(crate) fn first_of(self, per_host: u32) -> Range<u32> {
        let first = u32::from(self.0) * per_host;
        first.max(0x100)..first + per_host / 2
    }
}

/// The software RNIC's settings.
#[derive(Debug, Clone)]
pub struct NicConfig {
    /// Folder for the control socket and the statistics file.
    pub runtime_dir: PathBuf,
    /// The port. Default: the interface `br0`.
    pub port: Port,
    /// Whether the interface's other addresses are in the GID table too, after the port's. Switch it off where several
    /// RNICs share an interface. Default: true; the loopback interface's belong to nobody unless it is named itself.
    pub all_addresses: bool,
    /// Whether packets of this host's users to RNICs are dropped, but for those of root and of the RNIC's own user.
    /// Default: false.
    pub filters_users: bool,
    /// The device's name. Default: `verbatim0`.
    pub name: String,
    /// How long the RNIC looks for work before it sleeps. Longer saves a wake-up (some 5 µs) on the next packet or
    /// doorbell, and burns a core meanwhile. On few cores a program that polls waits for this one, and with its priority a
    /// yield of the RNIC lets nobody run. Default: 20 µs on four or more cores, else 0; range: 0 to 1 s.
    pub spin: Duration,
    /// The core to keep to; see [`crate::run`]. Default: none, the scheduler chooses.
    pub core: Option<usize>,
    /// The nice value (sched(7)) that the process asks for. Default: -10, as an agent's; programs have 0.
    pub nice: i32,
    /// Which part of the queue pair numbers and memory keys it gives. Best another one on each host: what moves between them
    /// with its numbers then finds them free. Default: made of the port's address, see [`HostNumber::of`].
    pub host_number: Option<HostNumber>,
    /// Whether this machine's own swap may be memory that the RNIC reaches. Then the RNIC may never wait for a page: all of its process is
    /// locked, registered memory and queues included, as hardware pins them, and [`crate::run`] asks for real-time priority in the place of a
    /// nice value. Memory that is in no file is refused. Default: false.
    pub locked: bool,
    /// Whether [`crate::run`] gives up what the RNIC does not need once it works: rights, system calls, and all paths but `/proc/PID`. Default: false.
    pub jailed: bool,
    /// What one RNIC and one program can have.
    pub limits: Limits,
}

impl NicConfig {
    /// The defaults, with the control socket in `runtime_dir`.
    pub fn new(runtime_dir: impl Into<PathBuf>) -> Self {
        Self {
            runtime_dir: runtime_dir.into(),
            port: Port::Interface("br0".to_owned()),
            all_addresses: true,
            filters_users: false,
            name: "verbatim0".to_owned(),
            spin: default_spin(),
            core: None,
            nice: -10,
            host_number: None,
            locked: false,
            jailed: false,
            limits: Limits::default(),
        }
    }
}

fn default_spin() -> Duration {
    match std::thread::available_parallelism() {
        Ok(cores) if cores.get() >= 4 => Duration::from_micros(20),
        _ => Duration::ZERO,
    }
}

/// Upper bounds. They protect the RNIC and its other programs from one that asks for too much. Going beyond one is
/// `ENOMEM`, or `EINVAL` where a single object is too large.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Control connections. Default: 4,096.
    pub max_contexts: u32,
    /// Protection domains of all contexts. Default: 65,536.
    pub max_pd: u32,
    /// Memory regions of all contexts. Default: 524,288.
    pub max_mr: u32,
    /// Memory windows of all contexts. Default: 524,288.
    pub max_mw: u32,
    /// Completion queues of all contexts; as many completion channels. Default: 65,536.
    pub max_cq: u32,
    /// How long a connection waits for a partner that is paused, or for its answer after this end has gone on elsewhere. Default:
    /// 60 s.
    pub pause_limit: Duration,
    /// Entries of a completion queue. Default: 1,048,576.
    pub max_cqe: u32,
    /// Queue pairs of all contexts. Default: 65,536.
    pub max_qp: u32,
    /// Requests of a send or receive queue, or of a shared receive queue. Default: 32,768.
    pub max_qp_wr: u32,
    /// Shared receive queues of all contexts. Default: 65,536.
    pub max_srq: u32,
    /// Address handles of all contexts. Default: 131,072.
    pub max_ah: u32,
    /// Multicast groups of all contexts. Default: 1,024.
    pub max_mcast_grp: u32,
    /// Bytes of on-chip memory that a program can have. The RNIC has no chip: it is memory of the program. Default:
    /// 1 MiB.
    pub max_dm_bytes: u64,
    /// Outstanding READs and atomics of a queue pair, either way. Programs ask for what the other side's device has, so that
    /// less than the kernel's rxe has would be refused to its partners. Default: 128.
    pub max_rd_atomic: u8,
    /// Bytes of a context's arena, in which its queues lie; it is sparse. Default: 16 GiB.
    pub arena_bytes: u64,
    /// Mapped files of registered memory of all contexts; fewer where the kernel gives less (`vm.max_map_count`, of which
    /// they get five eighths). Regions over the same pages share one. Default: 40,960.
    pub max_mappings: u32,
    /// Their bytes. Default: 64 TiB.
    pub max_mapped_bytes: u64,
    /// Their bytes where registered memory is locked ([`NicConfig::locked`]). Default: none, three quarters of the machine's
    /// memory.
    pub max_locked_bytes: Option<u64>,
    /// Bytes of packets that came before one that is missing, of all queue pairs. Beyond it they are dropped, and their
    /// sender sends them again. Default: 128 MiB.
    pub max_held_bytes: usize,
    /// Ids of rdma_cm; as many channels. Default, and most: 65,535.
    pub max_cm_ids: u32,
    /// What one program can have of it.
    pub per_program: PerProgram,
    /// What one tenant can have of it, with all its programs.
    pub tenants: TenantLimits,
    /// Bytes that may be on their way to one destination without an acknowledgement, shared by the queue pairs. More
    /// than what the caches hold makes everything slower; more than what the receiver's socket buffers makes packets
    /// drop, and the transport then narrows the windows. Default: 2 MiB.
    pub window_bytes: u32,
    /// Bytes asked for each UDP socket's buffers. Default: 32 MiB.
    pub socket_buffer_bytes: usize,
}

/// What one program can have. A context counts as a program; how many contexts a process can open is limited too.
#[derive(Debug, Clone)]
pub struct PerProgram {
    /// Contexts that a process has opened. Default: 256.
    pub max_contexts: u32,
    /// Default: 16,384.
    pub max_pd: u32,
    /// Default: 131,072.
    pub max_mr: u32,
    /// Pieces of which its memory regions consist: stretches with one place in a file. Default: 262,144.
    pub max_mr_pieces: u32,
    /// Mapped files of registered memory. Default: 32,768.
    pub max_mappings: u32,
    /// Their bytes. Default: 16 TiB.
    pub max_mapped_bytes: u64,
    /// Default: 131,072.
    pub max_mw: u32,
    /// Completion queues; as many completion channels. Default: 16,384.
    pub max_cq: u32,
    /// Entries of all its completion queues. Default: 4,194,304.
    pub max_cqes: u64,
    /// Default: 16,384.
    pub max_qp: u32,
    /// Default: 16,384.
    pub max_srq: u32,
    /// Default: 32,768.
    pub max_ah: u32,
    /// Memberships in multicast groups, each of one queue pair in one group. Default: 256.
    pub max_mcast_attach: u32,
    /// Ids of rdma_cm; as many channels. Default: 16,384.
    pub max_cm_ids: u32,
}

/// What one tenant can have: an instance, or else a user of the host, with all its processes and contexts. It concerns
/// connections, protection domains, regions, windows, completion queues and channels, queue pairs, shared receive queues,
/// address handles, mapped files and their bytes.
#[derive(Debug, Clone)]
pub struct TenantLimits {
    /// Of 100 of each that the RNIC can have, one tenant has at most so many (rounded up). Default: 50.
    pub share_percent: u8,
    /// Of 100 of each, so many (rounded down) are for what root of the host makes: what instances that arrive find.
    /// Default: 12.
    pub reserve_percent: u8,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            share_percent: 50,
            reserve_percent: 12,
        }
    }
}

impl TenantLimits {
    /// One tenant's share of `all`.
    pub(crate) fn share(&self, all: u64) -> u64 {
        let share = (u128::from(all) * u128::from(self.share_percent.min(100))).div_ceil(100);
        share as u64
    }

    /// What of `all` is kept for those that arrive.
    pub(crate) fn reserve(&self, all: u64) -> u64 {
        (u128::from(all) * u128::from(self.reserve_percent.min(100)) / 100) as u64
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_contexts: 4096,
            max_pd: 65_536,
            max_mr: 1 << 19,
            max_mw: 1 << 19,
            max_cq: 65_536,
            pause_limit: Duration::from_secs(60),
            max_cqe: 1 << 20,
            max_qp: 65_536,
            max_qp_wr: 32_768,
            max_srq: 65_536,
            max_ah: 131_072,
            max_mcast_grp: 1024,
            max_cm_ids: 65_535,
            max_dm_bytes: 1 << 20,
            max_rd_atomic: 128,
            arena_bytes: 16 << 30,
            max_mappings: 40_960,
            max_mapped_bytes: 64 << 40,
            max_locked_bytes: None,
            max_held_bytes: 128 << 20,
            per_program: PerProgram::default(),
            tenants: TenantLimits::default(),
            window_bytes: 2 << 20,
            socket_buffer_bytes: 32 << 20,
        }
    }
}

impl Default for PerProgram {
    fn default() -> Self {
        Self {
            max_contexts: 256,
            max_pd: 16_384,
            max_mr: 131_072,
            max_mr_pieces: 1 << 18,
            max_mappings: 32_768,
            max_mapped_bytes: 16 << 40,
            max_mw: 131_072,
            max_cq: 16_384,
            max_cqes: 4 << 20,
            max_qp: 16_384,
            max_srq: 16_384,
            max_ah: 32_768,
            max_mcast_attach: 256,
            max_cm_ids: 16_384,
        }
    }
}

#[cfg(test)]
mod tests {
    use verbatim_device::control::{FIRST_PUBLISHED_QPN, KEYS_PER_HOST, QPNS_PER_HOST};

    use super::*;

    #[test]
    fn neighbours_have_different_host_numbers_and_all_parts_have_room() {
        let of = |address: &str| HostNumber::of(address.parse().unwrap()).get();
        let numbers: Vec<_> = (1..=120).map(|last| of(&format!("10.77.0.{last}"))).collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..HOST_NUMBERS).collect::<Vec<_>>(), "{numbers:?}");
        assert_ne!(of("fd00::1"), of("fd00::2"));
        assert_eq!(HostNumber::new(HOST_NUMBERS), None);

        let limits = Limits::default();
        let last = HostNumber::new(HOST_NUMBERS - 1).unwrap();
        let end = |per_host, max| last.first_of(per_host).end + max;
        assert!(end(QPNS_PER_HOST, limits.max_qp) <= FIRST_PUBLISHED_QPN);
        assert!(end(KEYS_PER_HOST, limits.max_mr + limits.max_mw) <= 1 << 24);
    }
}

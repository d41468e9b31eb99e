//! Packets that an instance, or a local user, may not send: rules for the kernel's packet filter.
//!
//! - [`LinkFilter`]: an instance sends with its own addresses only; a container sends nothing to RNICs.
//! - [`PortFilter`]: of a host's users only root and the RNIC's own user send to RNICs.
//! - [`moving`]: what is held back in an instance's own network namespace while it moves.
//!
//! nft(8) gives the rules to the kernel, in one transaction each: it knows what each kernel can do, and operators know how to read
//! them (`nft list ruleset`). Rules lie in the network namespace of the thread that puts them there.

mod link;
pub mod moving;
mod nft;
mod port;

pub use link::LinkFilter;
pub use port::PortFilter;

/// The UDP port of RoCEv2 (IBA Annex A17.3.1).
const ROCE: u16 = 4791;

/// FNV-1a: stable across releases and restarts, unlike the standard library's hasher.
pub(crate) fn fnv(bytes: &[u8]) -> u32 {
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    bytes.iter().fold(0x811c_9dc5, step)
}

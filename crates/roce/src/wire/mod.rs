//! Wire formats, one header per file (IBA chapters 5 and 9; RoCEv2: annex A17).
//!
//! A RoCEv2 packet is the payload of a UDP datagram: BTH, the extension headers that its opcode says, payload, up to
//! three bytes of padding, and the ICRC. Everything is big-endian except the ICRC.
//!
//! Each header is a plain value with `parse` from exactly its bytes and `emit` into exactly its bytes (arrays of the
//! right size, so neither can fail or panic), and [`packet::Packet::parse`] is the one place where lengths are checked:
//! no bytes whatever make it panic.

pub mod aeth;
pub mod atomiceth;
pub mod bth;
pub mod deth;
pub mod grh;
pub mod icrc;
pub mod immdt;
pub mod migeth;
pub mod opcode;
pub mod packet;
pub mod reth;

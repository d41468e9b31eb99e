//! What is held back in an instance's network namespace while it moves.
//!
//! The rules lie in tables of their own, whose names begin with `verbatim_`: they are no part of the instance.

use std::io;

use crate::nft;

/// The table of [`refuse_connections`].
const ARRIVALS: &str = "inet verbatim_arrivals";

/// The table of [`hold_loopback`], of the family `inet`: without it that is over.
pub const LOOPBACK: &str = "verbatim_loopback";

/// The mark of what CRIU itself sends while it restores connections (`criu/include/net.h`, `SOCCR_MARK`).
const CRIU_MARK: u32 = 0xc114;

/// Drops the first packet of each new TCP connection to this network namespace. Clients repeat it after a second.
pub fn refuse_connections() -> io::Result<()> {
    nft::run(&format!(
        "add table {ARRIVALS}\n\
         add chain {ARRIVALS} input {{ type filter hook input priority -400; policy accept; }}\n\
         flush chain {ARRIVALS} input\n\
         add rule {ARRIVALS} input tcp flags & (fin | syn | rst | ack) == syn drop\n"
    ))
}

/// Ends [`refuse_connections`]; nothing where it was not called.
pub fn take_connections() -> io::Result<()> {
    nft::run(&format!("add table {ARRIVALS}\ndelete table {ARRIVALS}\n"))
}

/// Drops what TCP sends over the loopback link of this network namespace, but for packets of CRIU's own: a connection that is restored
/// with unsent data sends it at once, and its other end may not be there yet.
pub fn hold_loopback() -> io::Result<()> {
    nft::run(&format!(
        "add table inet {LOOPBACK}\n\
         add chain inet {LOOPBACK} output {{ type filter hook output priority -400; policy accept; }}\n\
         flush chain inet {LOOPBACK} output\n\
         add rule inet {LOOPBACK} output oifname \"lo\" meta l4proto tcp meta mark != {CRIU_MARK:#x} drop\n"
    ))
}

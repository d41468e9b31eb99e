//! What a host's users may send to RNICs: nothing, but for root and the RNIC's own user.
//!
//! RoCEv2 knows a sender by its address alone, and all users of a host have its address. Hardware that gets such packets from a
//! socket has the same gap. The rules are at the host's output, for its sockets of every kind.

use std::io;
use std::path::Path;

use crate::{ROCE, nft};

/// The host's table of these chains.
const TABLE: &str = "inet verbatim";

/// Rules for one RNIC. They go when this is dropped. Those of an RNIC that was killed stay until it is started again.
#[derive(Debug)]
pub struct PortFilter {
    chain: String,
}

impl PortFilter {
    /// Puts the rules in front of this network namespace's output. `folder`: the RNIC's runtime folder, which is one RNIC's at a time.
    /// `user`: the user that it runs as.
    pub fn put(folder: &Path, user: u32) -> io::Result<Self> {
        let chain = chain_of(folder);
        let users = match user {
            0 => "0".to_owned(),
            user => format!("{{ 0, {user} }}"),
        };
        nft::run(&format!(
            "add table {TABLE}\n\
             add chain {TABLE} {chain} {{ type filter hook output priority 0; policy accept; }}\n\
             flush chain {TABLE} {chain}\n\
             add rule {TABLE} {chain} udp dport {ROCE} meta skuid != {users} counter drop\n"
        ))?;
        Ok(Self { chain })
    }

    /// The commands for nft(8) that remove an RNIC's rules, whether or not they are there.
    pub fn removal(folder: &Path) -> String {
        nft::removal(TABLE, &chain_of(folder))
    }

    /// Leaves the rules there, for somebody else to remove.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

fn chain_of(folder: &Path) -> String {
    format!("rnic{:08x}", crate::fnv(folder.as_os_str().as_encoded_bytes()))
}

impl Drop for PortFilter {
    fn drop(&mut self) {
        if let Err(error) = nft::remove(TABLE, &self.chain) {
            tracing::warn!(chain = self.chain, %error, "a filter of users' packets stays behind; `nft delete chain {TABLE} {}`", self.chain);
        }
    }
}

//! Path MTUs: what the queue pairs of an instance use, and what the software RNIC of this host takes.
//!
//! A queue pair whose path MTU is more than that of the port sends packets that do not leave the host, and ends by its retries.

use std::path::{Path, PathBuf};

use anyhow::Context;
use verbatim_channel::RoadMap;

use crate::standby::{self, is_connected};

/// The largest path MTU in bytes among connected queue pairs; 0 if there are none.
pub fn of_queue_pairs<'r>(road_maps: impl IntoIterator<Item = &'r RoadMap>) -> u32 {
    let contexts = road_maps.into_iter().flat_map(|road_map| &road_map.contexts);
    let connected = contexts
        .flat_map(|context| &context.qps)
        .filter(|qp| is_connected(qp));
    let largest = connected.map(|qp| qp.attr.path_mtu).max();
    largest.map_or(0, bytes)
}

/// Why the RNIC at `nic`, on the host `here`, cannot have queue pairs with a path MTU of `wanted` bytes. An RNIC that does not answer is no
/// reason: others name it.
pub fn lacking(nic: &Path, here: &str, wanted: u32) -> Option<String> {
    if wanted == 0 {
        return None;
    }
    let active = bytes(standby::active_mtu(nic).ok()?);
    (active < wanted).then(|| {
        format!(
            "queue pairs of the instance have a path MTU of {wanted} bytes, and the RNIC of {here} takes {active}: raise the MTU of its \
             link, or connect with a smaller one"
        )
    })
}

/// The same, while others go on.
pub async fn still_lacking(nic: PathBuf, here: String, wanted: u32) -> anyhow::Result<Option<String>> {
    let asked = tokio::task::spawn_blocking(move || lacking(&nic, &here, wanted));
    asked.await.context("asking the RNIC panicked")
}

/// What an `enum ibv_mtu` stands for.
fn bytes(code: u8) -> u32 {
    match code {
        0 => 0,
        code => 128 << code.min(5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_verbs() {
        assert_eq!([0, 1, 3, 5].map(bytes), [0, 256, 1024, 4096]);
        assert_eq!(of_queue_pairs(&[RoadMap::default()]), 0);
        assert_eq!(lacking(Path::new("/no/such/nic.sock"), "dst", 4096), None);
    }
}

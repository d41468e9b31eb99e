//! What the links between a lab's hosts do to RoCEv2: loss, and a round-trip time.

use std::time::Duration;

use anyhow::Context;
use verbatim_e2e::TestLab;

const LIMIT: Duration = Duration::from_secs(10);

/// A host's link to the others.
const DEVICE: &str = "br0";

/// From now on each of these hosts loses so many of 1,000 RoCEv2 packets that come in, each by its own fate: batches are cut before
/// the link, whether any are lost or not, so that rows differ by the loss only.
pub fn lose(lab: &TestLab, hosts: &[&str], per_mille: u32) -> anyhow::Result<()> {
    for host in hosts {
        run(
            lab,
            host,
            &["ip", "link", "set", "dev", DEVICE, "gso_max_segs", "1"],
        )?;
        let rules = format!(
            "add table inet loss; delete table inet loss; add table inet loss; \
             add chain inet loss in {{ type filter hook prerouting priority -300; }}; \
             add rule inet loss in udp dport 4791 numgen random mod 1000 < {per_mille} drop"
        );
        run(lab, host, &["nft", &rules])?;
    }
    Ok(())
}

/// From now on a packet and its answer take so much longer between any two of these hosts: half of it at each one's way out. Needs
/// netem in the kernel.
pub fn delay(lab: &TestLab, hosts: &[&str], round_trip: Duration) -> anyhow::Result<()> {
    let half = format!("{}us", round_trip.as_micros() / 2);
    for host in hosts {
        let queue = ["tc", "qdisc", "replace", "dev", DEVICE, "root", "netem", "delay"];
        // As many packets as a long queue of a fast link holds: else it loses some.
        run(lab, host, &[&queue[..], &[&half, "limit", "100000"]].concat())?;
    }
    Ok(())
}

/// Why links of this machine cannot be made longer, in words, if so.
pub fn no_delay(lab: &TestLab, host: &str) -> anyhow::Result<Option<String>> {
    let tried = lab
        .start_plain(
            host,
            &[
                "tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1us",
            ],
        )?
        .wait(LIMIT)?;
    if tried.code != 0 {
        return Ok(Some(format!(
            "this kernel has no netem ({}), and nothing else here holds packets back",
            tried.stderr.trim()
        )));
    }
    run(lab, host, &["tc", "qdisc", "del", "dev", "lo", "root"])?;
    Ok(None)
}

fn run(lab: &TestLab, host: &str, argv: &[&str]) -> anyhow::Result<()> {
    lab.start_plain(host, argv)?
        .succeed(LIMIT)
        .map(drop)
        .with_context(|| format!("on {host}"))
}

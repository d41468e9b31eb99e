//! What the links between a lab's hosts do to RoCEv2: loss, and a round-trip time.

use std::time::Duration;

use anyhow::Context;
use verbatim_e2e::{Running, TestLab, eventually};

use super::delay_line;
use crate::programs;
use crate::soft_rnic::udp::{Waiting, half_round_trip_us};

const LIMIT: Duration = Duration::from_secs(10);

/// A host's link to the others.
const DEVICE: &str = "br0";

/// Messages that a round trip is measured with.
const ROUND_TRIPS: u32 = 100;
/// As long as a RoCEv2 packet of the largest MTU nearly is.
const ROUND_TRIP_BYTES: u64 = 4096;

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

/// From now on a packet and its answer take so much longer between any two of these hosts: half of it at each one's way out, in a
/// [`delay_line`] for as long as what is returned lives.
pub fn delay(lab: &TestLab, hosts: &[&str], round_trip: Duration) -> anyhow::Result<Vec<Running>> {
    let mut lines = Vec::new();
    let half = (round_trip / 2).as_micros().to_string();
    let this = programs::this()?;
    for host in hosts {
        let mtu = mtu(lab, host)?;
        let line = lab.start_plain(host, &[&this, "delay-line", &mtu, &half])?;
        eventually("the delay line", LIMIT, || {
            Ok(line.stdout()?.contains(delay_line::READY).then_some(()))
        })
        .with_context(|| line.stderr().unwrap_or_default())?;
        for command in delay_line::commands(DEVICE) {
            run(lab, host, &command.split(' ').collect::<Vec<_>>())?;
        }
        lines.push(line);
    }
    Ok(lines)
}

/// What a UDP datagram and its answer take between two hosts, the median.
pub fn round_trip(lab: &TestLab, hosts: [&str; 2]) -> anyhow::Result<Duration> {
    let half_us = half_round_trip_us(lab, hosts, Waiting::Sleeping, ROUND_TRIP_BYTES, ROUND_TRIPS)?;
    Ok(Duration::from_secs_f64(2.0 * half_us / 1e6))
}

/// The bytes that fit into a frame of the host's link.
fn mtu(lab: &TestLab, host: &str) -> anyhow::Result<String> {
    let shown = lab
        .start_plain(host, &["ip", "-json", "link", "show", "dev", DEVICE])?
        .succeed(LIMIT)?;
    let shown: serde_json::Value = serde_json::from_str(&shown.stdout)?;
    let mtu = shown[0]["mtu"].as_u64().context("ip names no MTU")?;
    Ok(mtu.to_string())
}

fn run(lab: &TestLab, host: &str, argv: &[&str]) -> anyhow::Result<()> {
    lab.start_plain(host, argv)?
        .succeed(LIMIT)
        .map(drop)
        .with_context(|| format!("on {host}"))
}

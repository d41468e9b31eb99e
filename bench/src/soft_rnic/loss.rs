//! Goodput of 64 KiB WRITEs over a link that loses packets at random.

use std::time::Duration;

use serde::Serialize;
use verbatim_e2e::TestLab;

use super::throughput::point;

/// Packets lost of 1,000.
const PER_MILLE: [u32; 6] = [0, 1, 5, 10, 20, 50];

const BYTES: u64 = 65_536;
const QUEUE_PAIRS: u32 = 4;
const LIMIT: Duration = Duration::from_secs(10);

/// The measurement at one rate of loss.
#[derive(Debug, Serialize)]
pub struct Goodput {
    /// Percent of the packets, in each direction.
    pub loss_percent: f64,
    pub gbit_s: f64,
    /// As a part of that without loss.
    pub ratio: f64,
}

pub fn measure(lab: &TestLab, seconds: u32) -> anyhow::Result<Vec<Goodput>> {
    println!("goodput of 64 KiB WRITEs, {QUEUE_PAIRS} QPs, by loss of single packets");
    for host in ["src", "peer"] {
        // Each packet meets its fate alone: batches are cut before the link.
        command(
            lab,
            host,
            &["ip", "link", "set", "dev", "br0", "gso_max_segs", "1"],
        )?;
    }
    let mut all: Vec<Goodput> = Vec::new();
    for per_mille in PER_MILLE {
        for host in ["src", "peer"] {
            let rule = format!(
                "add table inet loss; delete table inet loss; add table inet loss; \
                 add chain inet loss in {{ type filter hook prerouting priority -300; }}; \
                 add rule inet loss in udp dport 4791 numgen random mod 1000 < {per_mille} drop"
            );
            command(lab, host, &["nft", &rule])?;
        }
        let gbit_s = point(lab, "write", QUEUE_PAIRS, BYTES, seconds)?.gbit_s;
        let goodput = Goodput {
            loss_percent: f64::from(per_mille) / 10.0,
            gbit_s,
            ratio: gbit_s / all.first().map_or(gbit_s, |first| first.gbit_s),
        };
        println!(
            "{:>6.1} % {:>8.3} {:>8.3}",
            goodput.loss_percent, goodput.gbit_s, goodput.ratio
        );
        all.push(goodput);
    }
    for host in ["src", "peer"] {
        command(lab, host, &["nft", "delete table inet loss"])?;
        command(
            lab,
            host,
            &["ip", "link", "set", "dev", "br0", "gso_max_segs", "65535"],
        )?;
    }
    Ok(all)
}

fn command(lab: &TestLab, host: &str, argv: &[&str]) -> anyhow::Result<()> {
    lab.start_plain(host, argv)?.succeed(LIMIT)?;
    Ok(())
}

//! Several hosts that send to one at the same time: what arrives together, and how evenly.

use std::time::Duration;

use anyhow::bail;
use serde::Serialize;
use verbatim_e2e::{BandwidthRow, PERFTEST_PORT, TestLab, Tools};

const SENDERS: [&str; 4] = ["a", "b", "c", "d"];
const COUNTS: [usize; 3] = [1, 2, 4];
const BYTES: &str = "65536";
const QUEUE_PAIRS: &str = "16";

/// The measurement with so many senders.
#[derive(Debug, Serialize)]
pub struct Overload {
    pub senders: usize,
    /// Of all together.
    pub gbit_s: f64,
    /// Of the slowest sender.
    pub least_gbit_s: f64,
}

pub fn measure(tools: &Tools, seconds: u32) -> anyhow::Result<Vec<Overload>> {
    println!("64 KiB WRITEs, {QUEUE_PAIRS} QPs from each of several hosts to one; all, and the slowest");
    let lab = TestLab::up(tools, &[&SENDERS[..], &["peer"]].concat())?;
    let mut all = Vec::new();
    for count in COUNTS {
        let overload = at_once(&lab, &SENDERS[..count], seconds)?;
        println!(
            "{count:>6} {:>8.3} {:>8.3}",
            overload.gbit_s, overload.least_gbit_s
        );
        all.push(overload);
    }
    lab.down()?;
    Ok(all)
}

fn at_once(lab: &TestLab, senders: &[&str], seconds: u32) -> anyhow::Result<Overload> {
    let limit = Duration::from_secs(u64::from(seconds) + 60);
    let time = seconds.to_string();
    let ports: Vec<_> = (PERFTEST_PORT..).take(senders.len()).collect();
    let argv = |port: &u16| -> Vec<String> {
        let port = port.to_string();
        let all = [
            "ib_write_bw",
            "-F",
            "-s",
            BYTES,
            "-q",
            QUEUE_PAIRS,
            "-D",
            &time,
            "-p",
            &port,
        ];
        all.map(str::to_owned).to_vec()
    };
    let start = |host: &str, argv: Vec<String>| {
        let argv: Vec<_> = argv.iter().map(String::as_str).collect();
        lab.start(host, &argv)
    };
    let mut servers = Vec::new();
    for port in &ports {
        servers.push(start("peer", argv(port))?);
        lab.listens("peer", 1, *port)?;
    }
    let address = lab.address("peer")?;
    let mut clients = Vec::new();
    for (sender, port) in senders.iter().zip(&ports) {
        clients.push(start(sender, [argv(port), vec![address.clone()]].concat())?);
    }
    let mut rates = Vec::new();
    for client in clients {
        match BandwidthRow::parse(&client.succeed(limit)?)?[..] {
            [row] => rates.push(row.average_mib_s * f64::from(1 << 20) * 8.0 / 1e9),
            ref rows => bail!("ib_write_bw printed {} results", rows.len()),
        }
    }
    for server in servers {
        server.succeed(limit)?;
    }
    Ok(Overload {
        senders: senders.len(),
        gbit_s: rates.iter().sum(),
        least_gbit_s: rates.iter().copied().fold(f64::INFINITY, f64::min),
    })
}

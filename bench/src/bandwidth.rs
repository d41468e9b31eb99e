//! `ib_write_bw -s 65536` through two software RNICs, and one TCP stream between the same two hosts.
//!
//! A round takes each in turn, so that whatever else the machine does meets all of them; the ratio is taken within a
//! round. The congestion control is named (cubic), since the kernel's default may be one that is slower on a veth pair.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use verbatim_e2e::{BandwidthRow, PERFTEST_PORT, TestLab, Tools};

use crate::context::Context;
use crate::summary::Summary;

/// The TCP port of iperf3.
const IPERF_PORT: u16 = 5201;

/// Gbit/s of one round.
#[derive(Debug, Clone, Copy, Serialize)]
struct Round {
    tcp: f64,
    write_1_qp: f64,
    write_16_qps: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    seconds: u32,
    rounds: Vec<Round>,
    tcp: Summary,
    write_1_qp: Summary,
    write_16_qps: Summary,
    /// `ib_write_bw` as a part of TCP, per round.
    ratio_1_qp: Summary,
    ratio_16_qps: Summary,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, rounds: u32, seconds: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let lab = TestLab::up(tools, &["src", "peer"])?;
    println!("bandwidth, Gbit/s, 64 KiB messages, {seconds} s each");
    println!(
        "{:>6} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "round", "TCP cubic", "1 QP", "16 QPs", "ratio", "ratio"
    );
    let mut measured = Vec::new();
    for number in 1..=rounds {
        let round = Round {
            tcp: tcp(&lab, seconds)?,
            write_1_qp: write(&lab, 1, seconds)?,
            write_16_qps: write(&lab, 16, seconds)?,
        };
        line(
            &number.to_string(),
            round.tcp,
            round.write_1_qp,
            round.write_16_qps,
            ratios(&round),
        );
        measured.push(round);
    }
    lab.down()?;
    let of = |get: fn(&Round) -> f64| Summary::of(measured.iter().map(get));
    let report = Report {
        context,
        unit: "Gbit/s",
        seconds,
        tcp: of(|round| round.tcp),
        write_1_qp: of(|round| round.write_1_qp),
        write_16_qps: of(|round| round.write_16_qps),
        ratio_1_qp: of(|round| ratios(round).0),
        ratio_16_qps: of(|round| ratios(round).1),
        rounds: measured,
    };
    let medians = (report.ratio_1_qp.median, report.ratio_16_qps.median);
    line(
        "median",
        report.tcp.median,
        report.write_1_qp.median,
        report.write_16_qps.median,
        medians,
    );
    std::fs::write(out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}\n", out.display());
    Ok(())
}

fn ratios(round: &Round) -> (f64, f64) {
    (round.write_1_qp / round.tcp, round.write_16_qps / round.tcp)
}

fn line(name: &str, tcp: f64, one: f64, sixteen: f64, (ratio_one, ratio_sixteen): (f64, f64)) {
    println!("{name:>6} {tcp:>10.2} {one:>10.2} {sixteen:>10.2} {ratio_one:>8.3} {ratio_sixteen:>8.3}");
}

fn limit(seconds: u32) -> Duration {
    Duration::from_secs(u64::from(seconds) + 60)
}

/// Gbit/s of one TCP stream, cubic.
pub fn tcp(lab: &TestLab, seconds: u32) -> anyhow::Result<f64> {
    let server = lab.start_plain("peer", &["iperf3", "-s", "-1"])?;
    lab.listens("peer", 1, IPERF_PORT)?;
    let (address, time) = (lab.address("peer")?, seconds.to_string());
    let client = lab.start_plain(
        "src",
        &["iperf3", "-c", &address, "-C", "cubic", "-t", &time, "-J"],
    )?;
    let client = client.succeed(limit(seconds))?;
    server.succeed(limit(0))?;
    let report: serde_json::Value = serde_json::from_str(&client.stdout)?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(bits.with_context(|| format!("iperf3 printed no result{}", client.output()))? / 1e9)
}

fn write(lab: &TestLab, queue_pairs: u32, seconds: u32) -> anyhow::Result<f64> {
    let (pairs, time) = (queue_pairs.to_string(), seconds.to_string());
    let argv = ["ib_write_bw", "-F", "-s", "65536", "-q", &pairs, "-D", &time];
    let server = lab.start("peer", &argv)?;
    lab.listens("peer", 1, PERFTEST_PORT)?;
    let address = lab.address("peer")?;
    let client = lab
        .start("src", &[&argv[..], &[&address]].concat())?
        .succeed(limit(seconds))?;
    server.succeed(limit(0))?;
    match BandwidthRow::parse(&client)?[..] {
        [row] => Ok(row.average_mib_s * f64::from(1 << 20) * 8.0 / 1e9),
        ref rows => bail!("ib_write_bw printed {} results", rows.len()),
    }
}

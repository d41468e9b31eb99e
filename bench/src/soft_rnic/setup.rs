//! How long it takes to make and connect queue pairs, and how much memory of the RNIC they and memory regions cost.

use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use verbatim_e2e::{TestLab, eventually};

use crate::programs::program;

const QUEUE_PAIRS: [u32; 4] = [1, 64, 1024, 4096];
const REGIONS: u32 = 4096;
const LIMIT: Duration = Duration::from_secs(120);

/// So many queue pairs of one program, connected among themselves.
#[derive(Debug, Serialize)]
pub struct Setup {
    pub queue_pairs: u32,
    pub create_s: f64,
    pub connect_s: f64,
    pub destroy_s: f64,
    /// What the RNIC's resident memory grew by, per queue pair.
    pub bytes_per_queue_pair: f64,
}

/// So many regions of one page.
#[derive(Debug, Serialize)]
pub struct Regions {
    pub regions: u32,
    pub register_s: f64,
    pub deregister_s: f64,
    /// What the RNIC's resident memory grew by, per region, the page itself left out.
    pub bytes_per_region: f64,
}

#[derive(Deserialize)]
struct Up {
    create_s: f64,
    connect_s: f64,
    register_s: f64,
}

#[derive(Deserialize)]
struct Down {
    destroy_s: f64,
    deregister_s: f64,
}

pub fn measure(lab: &TestLab) -> anyhow::Result<Vec<Setup>> {
    println!("set-up of connected queue pairs");
    println!(
        "{:>6} {:>10} {:>10} {:>10} {:>12}",
        "QPs", "create s", "connect s", "destroy s", "bytes/QP"
    );
    // The first program of an RNIC pays for what the RNIC keeps.
    qp_setup(lab, 1, 1)?;
    QUEUE_PAIRS
        .into_iter()
        .map(|queue_pairs| {
            let (up, down, grown) = qp_setup(lab, queue_pairs, 0)?;
            let setup = Setup {
                queue_pairs,
                create_s: up.create_s,
                connect_s: up.connect_s,
                destroy_s: down.destroy_s,
                bytes_per_queue_pair: grown / f64::from(queue_pairs),
            };
            println!(
                "{queue_pairs:>6} {:>10.4} {:>10.4} {:>10.4} {:>12.0}",
                setup.create_s, setup.connect_s, setup.destroy_s, setup.bytes_per_queue_pair
            );
            Ok(setup)
        })
        .collect()
}

pub fn measure_regions(lab: &TestLab) -> anyhow::Result<Regions> {
    let (up, down, grown) = qp_setup(lab, 0, REGIONS)?;
    let regions = Regions {
        regions: REGIONS,
        register_s: up.register_s,
        deregister_s: down.deregister_s,
        bytes_per_region: grown / f64::from(REGIONS),
    };
    println!(
        "{REGIONS} regions of a page: registered in {:.3} s, deregistered in {:.3} s, {:.0} bytes each",
        regions.register_s, regions.deregister_s, regions.bytes_per_region
    );
    Ok(regions)
}

/// What it printed, and by how many bytes the RNIC's memory grew meanwhile.
fn qp_setup(lab: &TestLab, queue_pairs: u32, regions: u32) -> anyhow::Result<(Up, Down, f64)> {
    let program = program("qp_setup")?;
    let (qps, mrs) = (queue_pairs.to_string(), regions.to_string());
    let before = resident_bytes(lab)?;
    let running = lab.start("src", &[&program, &qps, &mrs])?;
    let line = eventually("connected queue pairs", LIMIT, || {
        Ok(running
            .stdout()?
            .lines()
            .next()
            .filter(|line| line.ends_with('}'))
            .map(str::to_owned))
    })?;
    let grown = resident_bytes(lab)? - before;
    running.signal(Signal::TERM)?;
    let finished = running.succeed(LIMIT)?;
    let last = finished.stdout.lines().last().unwrap_or_default();
    Ok((serde_json::from_str(&line)?, serde_json::from_str(last)?, grown))
}

/// The RNIC's resident memory without what it maps of programs' registered memory.
fn resident_bytes(lab: &TestLab) -> anyhow::Result<f64> {
    let pid = lab.service_pid("src", "nic")?;
    let smaps = std::fs::read_to_string(lab.path("src", &format!("/proc/{pid}/smaps"))?)?;
    let mut kib = 0.0;
    let mut counted = true;
    for line in smaps.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        if !first.ends_with(':') {
            // The head of a mapping.
            counted = !line.contains("verbatim-memory") && !line.contains("/mem/");
        } else if counted && first == "Rss:" {
            let value = line
                .split_ascii_whitespace()
                .nth(1)
                .and_then(|value| value.parse::<f64>().ok());
            kib += value.context("a malformed smaps file")?;
        }
    }
    Ok(kib * 1024.0)
}

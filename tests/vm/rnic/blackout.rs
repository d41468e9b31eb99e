//! The blackout of a program with rxe beside what CRIU alone takes in the same machine for a program without RDMA, as JSON.
//!
//! `make rnic-bench`. By turns: CRIU alone on the first host, then a move of the server to the last host and back. An emulated
//! processor's milliseconds say nothing; the ratio does.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use verbatim_container::Criu;

use crate::built;
use crate::machines::{HOSTS, Machines};
use crate::run::{CHECK, Check, MOVE_LIMIT, flows};

/// How often, unless `VERBATIM_RNIC_TURNS` says so.
const TURNS: usize = 7;

#[derive(Debug, Deserialize)]
struct Report {
    service_blackout_ms: f64,
    communication_blackout_ms: f64,
    phases_ms: BTreeMap<String, f64>,
}

/// Prints it.
pub fn tell() -> anyhow::Result<()> {
    let turns = match std::env::var("VERBATIM_RNIC_TURNS") {
        Ok(number) => number.parse().context("VERBATIM_RNIC_TURNS is no number")?,
        Err(_) => TURNS,
    };
    let machines = Machines::up()?;
    let [here, partner, there] = HOSTS;
    let (mut alone, mut service, mut communication) = (Vec::new(), Vec::new(), Vec::new());
    let mut phases: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for turn in 1..=turns {
        eprintln!("turn {turn} of {turns}");
        alone.push(criu_alone(&machines, here)?);
        machines.clear()?;
        let check = Check::start(&machines, here, partner, CHECK)?;
        for (from, to) in [(here, there), (there, here)] {
            let said = machines.verbatim(from, &["migrate", "server", "--to", to, "--json"], MOVE_LIMIT)?;
            let report: Report = serde_json::from_str(&said).with_context(|| said.clone())?;
            service.push(report.service_blackout_ms);
            communication.push(report.communication_blackout_ms);
            for (phase, ms) in report.phases_ms {
                phases.entry(phase).or_default().push(ms);
            }
            flows(&machines, partner)?;
        }
        check.end(&machines)?;
    }
    let phases: BTreeMap<_, _> = phases
        .iter_mut()
        .map(|(phase, ms)| (phase.as_str(), median(ms)))
        .collect();
    let told = serde_json::json!({
        "phases_ms": phases,
        "criu_alone_ms": median(&mut alone),
        "service_blackout_ms": median(&mut service),
        "communication_blackout_ms": median(&mut communication),
        "service_ratio": median(&mut service) / median(&mut alone),
        "moves": service.len(),
    });
    println!("{}", serde_json::to_string_pretty(&told)?);
    Ok(())
}

/// The median of some.
fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// What a program without RDMA says that it stood still for, in ms.
fn criu_alone(machines: &Machines, host: &str) -> anyhow::Result<f64> {
    let criu = Criu::find()?;
    let (criu, memory) = (criu.path().display(), built("../bench-programs/memory")?);
    let memory = memory.display();
    // The first gap that it tells is the one. Its number is free again for the restore when it was reaped, by this shell.
    let script = format!(
        "rm -rf /run/alone; mkdir -p /run/alone/images; cd /run/alone; export CRIU_FAULT=130\n\
         setsid {memory} 0 </dev/null >said 2>&1 & pid=$!\n\
         until grep -q ready said; do sleep 0.1; done\n\
         {criu} dump --tree $pid --images-dir images -o dump.log -v1 >&2 || {{ cat images/dump.log >&2; exit 1; }}\n\
         wait $pid\n\
         {criu} restore --restore-detached --images-dir images -o restore.log -v1 >&2 || {{ cat images/restore.log >&2; exit 1; }}\n\
         until grep -q 'stood still' said; do sleep 0.1; done\n\
         kill -KILL $pid; sed -n 's/.*stood still for \\(.*\\) ms/\\1/p' said"
    );
    let said = machines.shell_for(host, &script, Duration::from_secs(120))?;
    let gaps = said.lines().filter_map(|line| line.trim().parse::<f64>().ok());
    let gap = gaps.max_by(f64::total_cmp).context("it tells of no gap")?;
    ensure!(gap > 0.0, "a gap of {gap} ms");
    Ok(gap)
}

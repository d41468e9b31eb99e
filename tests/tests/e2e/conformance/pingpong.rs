//! The five examples of rdma-core, between two hosts, polling and with events.

use std::time::Duration;

use anyhow::ensure;
use verbatim_e2e::TestLab;

use crate::Test;
use crate::programs::between;

const HOSTS: &[&str] = &["src", "peer"];
const PORT: u16 = 18515;
const LIMIT: Duration = Duration::from_secs(20);

/// Command lines, each for both sides. `-c` checks what arrives, `-N` uses `ibv_wr_*`, `-t` takes timestamps.
const CASES: &[&str] = &[
    "ibv_rc_pingpong -c",
    "ibv_rc_pingpong -c -e",
    "ibv_rc_pingpong -c -e -N",
    "ibv_rc_pingpong -c -t",
    "ibv_rc_pingpong -c -s 1000000 -m 4096 -n 100",
    "ibv_uc_pingpong -c",
    "ibv_uc_pingpong -c -e",
    "ibv_ud_pingpong -c",
    "ibv_ud_pingpong -c -e",
    "ibv_srq_pingpong -c",
    "ibv_srq_pingpong -c -e -q 4",
];

/// There is no XRC here; it has to say so.
fn xrc_is_refused(lab: &TestLab) -> anyhow::Result<()> {
    let finished = lab.start("src", &["ibv_xsrq_pingpong", "-g", "0"])?.wait(LIMIT)?;
    ensure!(
        finished.code != 0 && finished.stderr.contains("XRC"),
        "status {}{}",
        finished.code,
        finished.output()
    );
    Ok(())
}

/// All of them.
pub fn tests() -> Vec<Test> {
    let test = |case: &&'static str| {
        let case = *case;
        Test::new(format!("conformance::pingpong::{case}"), HOSTS, move |lab| {
            plays(lab, case)
        })
    };
    let refused = Test::new(
        "conformance::pingpong::ibv_xsrq_pingpong is refused",
        HOSTS,
        xrc_is_refused,
    );
    CASES.iter().map(test).chain([refused]).collect()
}

fn plays(lab: &TestLab, case: &str) -> anyhow::Result<()> {
    let mut argv: Vec<_> = case.split(' ').chain(["-g", "0"]).collect();
    if !argv.contains(&"-n") {
        argv.extend(["-n", "500"]);
    }
    let (client, server) = between(lab, &argv, PORT)?;
    for side in [client, server] {
        ensure!(
            side.stdout.contains("iters in") && !side.stdout.contains("invalid data"),
            "{}{}",
            side.what,
            side.output()
        );
    }
    Ok(())
}

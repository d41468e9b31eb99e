//! UCX, a library over verbs that is not ours, and a real application over it, moved in the middle of their work. The
//! application needs what `./setup.sh --application` installs.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use verbatim_e2e::{Simulation, TestLab, Traffic, UCX_SETTING};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(180);
/// Many more than are done while an instance is being moved.
const STEPS: u32 = 900;
/// Of `ucx_perftest`.
pub const UCX_PORT: u16 = 13337;
/// What must pass for messages to be said to flow.
const SOME_BYTES: u64 = 8 << 20;

/// All of them.
pub fn tests() -> Vec<Test> {
    let ucx = |name: &str, transports: &'static str| {
        Test::new(format!("application::ucx_{name}"), HOSTS, move |lab| {
            ucx(lab, transports)
        })
    };
    vec![
        ucx("rc", "UCX_TLS=rc_verbs,ud_verbs,self"),
        ucx("ud", "UCX_TLS=ud_verbs,self"),
        // Two runs of half a minute and more.
        Test::new("application::both_ranks_move", HOSTS, both_ranks_move).only_on_demand(true),
    ]
}

/// Tag-matched messages of UCX go on when their sender has moved, and when their receiver has.
fn ucx(lab: &TestLab, transports: &str) -> anyhow::Result<()> {
    let argv = [
        "env",
        transports,
        "UCX_NET_DEVICES=verbatim0:1",
        UCX_SETTING,
        // Without end.
        "ucx_perftest",
        "-t",
        "tag_bw",
        "-s",
        "65536",
        "-n",
        "0",
    ];
    let server = lab.instance("peer", "server", &argv)?;
    server.listens(UCX_PORT)?;
    let address = server.address()?;
    let client = lab.instance("src", "client", &[&argv[..], &[&address]].concat())?;
    let flows = |host: &str| {
        let flows = Traffic::of(lab, host)?.flows(SOME_BYTES, LIMIT);
        flows.with_context(|| {
            [&client, &server]
                .map(|side| side.output().unwrap_or_default())
                .concat()
        })
    };
    flows("src")?;
    client.moves("dst")?;
    flows("dst")?;
    server.moves("src")?;
    flows("src")
}

/// Rank 1 moves, then `mpirun` with rank 0: each digit of the result is that of a run without moves.
fn both_ranks_move(lab: &TestLab) -> anyhow::Result<()> {
    if let Some(obstacle) = Simulation::obstacle() {
        bail!(obstacle);
    }
    let undisturbed = Simulation::start(lab, "peer", "src", "-undisturbed", STEPS)?;
    let expected = undisturbed.found(STEPS, LIMIT)?;

    let moved = Simulation::start(lab, "peer", "src", "-moved", STEPS)?;
    moved.reaches(STEPS / 10, LIMIT)?;
    moved.worker.moves("dst")?;
    moved.reaches(STEPS / 2, LIMIT)?;
    moved.head.moves("src")?;
    let found = moved.found(STEPS, LIMIT)?;
    ensure!(
        found == expected,
        "the moved simulation has found\n{}\nin place of\n{}",
        found.lines.join("\n"),
        expected.lines.join("\n")
    );
    Ok(())
}

//! Many moves in a row, while the network loses packets.
//!
//! Without ATOMICs: rxe of Linux 6.12 completes some of them without their result when packets are lost, also where nothing of ours is
//! (docs/rnic-assumptions.md).

use anyhow::Context;

use crate::machines::{HOSTS, Machines};
use crate::run::{Check, MOVE_LIMIT, flows, nothing_is_left_of_the_old_rnic};

/// How many, unless `VERBATIM_RNIC_MOVES` says so.
const MOVES: u32 = 50;

/// Lost of what leaves each machine, by netem, in per cent, unless `VERBATIM_RNIC_LOSS` says so.
const LOSS: &str = "1";

const CHECK_WITHOUT_ATOMICS: &str = "--op mix -q 2 --depth 8 --random-size --bidirectional --nap 5";

/// The server goes to and fro; nothing of either end may be lost, repeated or reordered.
pub fn lossy(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    let attempt = attempt(machines);
    for host in HOSTS {
        machines.shell(host, "tc qdisc del dev eth0 root 2>/dev/null || true")?;
    }
    attempt.map_err(|error| error.context(machines.told()))
}

fn attempt(machines: &Machines) -> anyhow::Result<()> {
    let moves = match std::env::var("VERBATIM_RNIC_MOVES") {
        Ok(number) => number.parse().context("VERBATIM_RNIC_MOVES is no number")?,
        Err(_) => MOVES,
    };
    let loss = std::env::var("VERBATIM_RNIC_LOSS").unwrap_or_else(|_| LOSS.to_owned());
    let [mut here, partner, mut there] = HOSTS;
    let check = Check::start(machines, here, partner, CHECK_WITHOUT_ATOMICS)?;
    for host in HOSTS {
        machines.shell(host, &format!("tc qdisc add dev eth0 root netem loss {loss}%"))?;
    }
    for number in 1..=moves {
        machines
            .verbatim(here, &["migrate", "server", "--to", there], MOVE_LIMIT)
            .with_context(|| format!("move {number} of {moves}"))?;
        std::mem::swap(&mut here, &mut there);
        flows(machines, partner)?;
        nothing_is_left_of_the_old_rnic(machines, here, "server")
            .with_context(|| format!("move {number} of {moves}"))?;
    }
    check.end(machines)
}

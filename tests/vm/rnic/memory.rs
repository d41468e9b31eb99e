//! What goes ahead of a program that has an RNIC: registered memory by one-sided RDMA between the hosts' own RNICs, by WRITE and by
//! READ, while the program uses the same RNIC; and private memory, which is compared with what was sent, or tracked.

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::machines::{HOSTS, Machines};
use crate::run::{Check, MOVE_LIMIT, flows};

/// Some MiB of registered memory at each end.
const CHECK: &str = "--op all -q 2 --depth 8 -s 131072 --random-size --bidirectional --nap 5";

/// MiB of private memory, more than goes with the images.
const PRIVATE_MIB: u64 = 48;

/// There by WRITE, and back by READ.
pub fn by_rdma(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    registered(machines).map_err(|error| error.context(format!("memory by RDMA{}", machines.told())))
}

/// There and back.
pub fn private(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    compared(machines).map_err(|error| error.context(format!("private memory{}", machines.told())))
}

fn compared(machines: &Machines) -> anyhow::Result<()> {
    let [first, partner, last] = HOSTS;
    let options = format!("{} --private {PRIVATE_MIB}", crate::run::CHECK);
    let check = Check::start(machines, first, partner, &options)?;
    // What was made ahead has pinned no page of the process's own: only its regions are written by the RNIC then, which are in files.
    for (from, to, is_compared) in [(first, last, true), (last, first, false)] {
        let said = machines.verbatim(from, &["migrate", "server", "--to", to, "--json"], MOVE_LIMIT)?;
        let report: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        let beside = &report["pre_copy"]["private_tracked"];
        let bytes = |value: &Value| value.as_u64().unwrap_or_default();
        ensure!(
            beside["compared"] == is_compared
                && bytes(&beside["rounds"][0]["bytes"]) >= PRIVATE_MIB << 20
                && bytes(&beside["last_bytes"]) < PRIVATE_MIB << 20 >> 1,
            "{said}"
        );
        eprintln!(
            "{} KiB of {PRIVATE_MIB} MiB while it stood still for {} ms",
            bytes(&beside["last_bytes"]) >> 10,
            report["service_blackout_ms"]
        );
        flows(machines, partner)?;
    }
    check.end(machines)
}

fn registered(machines: &Machines) -> anyhow::Result<()> {
    let [first, partner, last] = HOSTS;
    let check = Check::start(machines, first, partner, CHECK)?;
    for (from, to, operation) in [(first, last, "write"), (last, first, "read")] {
        let tuning = format!("operation={operation}");
        let arguments = [
            "migrate",
            "server",
            "--to",
            to,
            "--json",
            "--memory-transport",
            "rdma",
            "--memory-tuning",
            &tuning,
        ];
        let said = machines.verbatim(from, &arguments, MOVE_LIMIT)?;
        let report: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        ensure!(
            report["memory_transport"] == "rdma" && report["rdma_bytes"].as_u64() > Some(1 << 20),
            "by {operation}: {said}"
        );
        let why = report["memory_transport_reason"].as_str().unwrap_or_default();
        ensure!(why.ends_with("by rxe0"), "{why}");
        flows(machines, partner)?;
    }
    check.end(machines)
}

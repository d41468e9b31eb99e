//! Registered memory goes ahead by one-sided RDMA between the hosts' own RNICs, by WRITE and by READ, while the program uses the same RNIC.

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::machines::{HOSTS, Machines};
use crate::run::{Check, MOVE_LIMIT, flows};

/// Some MiB of registered memory at each end.
const CHECK: &str = "--op all -q 2 --depth 8 -s 131072 --random-size --bidirectional --nap 5";

/// There by WRITE, and back by READ.
pub fn run(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    attempt(machines).map_err(|error| error.context(format!("memory by RDMA{}", machines.told())))
}

fn attempt(machines: &Machines) -> anyhow::Result<()> {
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

//! `verbatim check --self-test`, on a machine with nothing but rxe.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use verbatim_testbed::{Command, Network};

use crate::{built, machines};

/// Emulated processors take several times as long as others.
const LIMIT: Duration = Duration::from_secs(540);

/// It works, says so step by step, and leaves nothing behind; a device that is not there is a clear error.
pub fn run() -> anyhow::Result<()> {
    let vm = machines::boot("self", 7, &Network::new()?)?;
    let verbatim = built("verbatim")?.display().to_string();
    let program = |arguments: &[&str]| {
        let argv = [&[verbatim.as_str()], arguments].concat();
        // No hardware breakpoints: see host.sh.
        Command::new(argv).env("CRIU_FAULT", "130")
    };
    let refused = vm.run(&program(&["check", "--self-test", "mlx5_7"]), machines::SHORT)?;
    let words = machines::words(&refused);
    ensure!(
        refused.code == 1 && words.contains("no RDMA device mlx5_7; there are: rxe0"),
        "status {}: {words}",
        refused.code
    );
    let nobody = Command::new([
        "setpriv",
        "--reuid=65534",
        &verbatim,
        "check",
        "--self-test",
        "rxe0",
        "--out",
        "/tmp/nobody.json",
    ]);
    let words = machines::words(&vm.run(&nobody, machines::SHORT)?);
    ensure!(words.contains("it needs root"), "{words}");
    let blind = program(&["check", "--self-test", "rxe0", "--out", "/tmp/blind.json"]);
    let blind = blind.env("VERBATIM_CRIU", "/nowhere/criu");
    let words = machines::words(&vm.run(&blind, machines::SHORT)?);
    ensure!(words.contains("/nowhere/criu"), "{words}");

    let seen = "ls /sys/class/net /run/netns /run/verbatim 2>/dev/null; ls -d /sys/fs/cgroup/*/; ps -e -o comm= | grep -v kworker \
                | sort | uniq -c | grep -E 'verbatim|criu|runc'";
    let seen = || {
        anyhow::Ok(machines::words(
            &vm.run(&Command::new(["sh", "-c", seen]), machines::SHORT)?,
        ))
    };
    let before = seen()?;
    let whole = program(&[
        "check",
        "--self-test",
        "rxe0",
        "--json",
        "--limit",
        "360",
        "--out",
        "/tmp/self-test.json",
    ]);
    let ended = vm.run(&whole, LIMIT)?;
    let words = machines::words(&ended);
    ensure!(ended.code == 0, "status {}: {words}", ended.code);
    let report: Value = serde_json::from_slice(&ended.stdout).context("it is no JSON")?;
    ensure!(report["outcome"] == "works", "{report:#}");
    ensure!(
        report["facts"]["driver"] == "rxe" && report["facts"]["kernel"].is_string(),
        "{report:#}"
    );
    let steps: Vec<_> = report["steps"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|step| (step["name"].as_str().unwrap_or_default(), step["ms"].is_number()))
        .collect();
    for name in [
        "machine",
        "hosts",
        "program",
        "conditions",
        "objects-on-trial",
        "criu-dump",
        "criu-restore",
        "objects-made-again",
        "program-goes-on",
        "clean-up",
    ] {
        ensure!(steps.contains(&(name, true)), "{name} is not among {steps:?}");
    }
    let file = machines::succeed(
        &vm,
        &Command::new(["cat", "/tmp/self-test.json"]),
        machines::SHORT,
    )?;
    ensure!(
        serde_json::from_str::<Value>(&file)? == report,
        "the file says something else: {file}"
    );
    let after = seen()?;
    ensure!(before == after, "it has left behind:\n{before}\n{after}");

    // Broken off in the middle of it.
    let script = format!(
        "CRIU_FAULT=130 {verbatim} check --self-test rxe0 --limit 360 --out /tmp/ended.json >/tmp/ended 2>&1 & \
         until grep -q ^conditions /tmp/ended; do kill -0 $! || break; sleep 0.1; done; kill -TERM $!; wait $!; echo status $?; cat /tmp/ended"
    );
    let words = machines::words(&vm.run(&Command::new(["sh", "-c", &script]), LIMIT)?);
    for word in ["status 1", "ended by SIGTERM", "does not show"] {
        ensure!(words.contains(word), "{word:?} is not in {words}");
    }
    let after = seen()?;
    ensure!(
        before == after,
        "broken off, it has left behind:\n{before}\n{after}"
    );
    Ok(())
}

//! A program with bound memory windows of both types moves there and back while its peer writes and reads through them.

use anyhow::ensure;
use serde_json::Value;
use verbatim_e2e::{ENDS_PORT, PYTHON, text_of};

use crate::machines::{HOSTS, Machines};
use crate::run::{MOVE_LIMIT, flows};

/// Between two binds the peer does 40 rounds, so that keys outlive a move; each bind comes after an invalidation, by either side in turn.
pub fn run(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    attempt(machines).map_err(|error| error.context(format!("windows{}", machines.told())))
}

fn attempt(machines: &Machines) -> anyhow::Result<()> {
    let [first, second, last] = HOSTS;
    let text = text_of("windows.py");
    let argv = [PYTHON, "-u", "-c", &text, "--fresh"];
    let address = machines.start(first, "server", &argv)?;
    machines.listens(first, "server", ENDS_PORT)?;
    machines.start(second, "client", &[&argv[..], &[&address]].concat())?;
    flows(machines, second)?;

    // Another queue pair could not take the place of the server's: a window is bound to that, but for the moment between an invalidation
    // and the next bind.
    let moved = machines.verbatim_ended(second, &["migrate", "client", "--to", last], MOVE_LIMIT)?;
    let words = crate::machines::words(&moved);
    let refused = words.contains("a memory window of type 2 of rxe0 is bound to it");
    ensure!(refused && moved.code != 0, "status {}: {words}", moved.code);
    flows(machines, second)?;

    for (from, to) in [(first, last), (last, first)] {
        machines.verbatim(from, &["migrate", "server", "--to", to], MOVE_LIMIT)?;
        flows(machines, second)?;
    }
    machines.interrupt(second, "client")?;
    for (host, name) in [(second, "client"), (first, "server")] {
        let code = machines.ended(host, name, MOVE_LIMIT)?;
        let said = machines.output(host, name)?;
        ensure!(code == 0, "the {name} ended with {code}: {said}");
        let report: Value = serde_json::from_str(said.trim())?;
        ensure!(report["binds"].as_u64() > Some(2), "{report}");
    }
    Ok(())
}

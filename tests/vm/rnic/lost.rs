//! A device that is taken away at the destination after all was tried there, and before the program is: what it had is lost, and nobody
//! waits for it.

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::machines::{HOSTS, Machines, SHORT, words};
use crate::run::{MOVE_LIMIT, flows};

/// The session ends, and the client goes on. With seven retries, as perftest and most programs ask for, rxe repeats a request for good, so that
/// it hears of nothing; RNICs that count give it an error.
pub fn run(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    let attempt = attempt(machines);
    // For the cases that come after this one.
    let back = "while pgrep -x rdma >/dev/null; do sleep 0.1; done\n\
                rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev br0";
    let back = machines
        .shell(HOSTS[2], back)
        .context("somebody still has the device");
    attempt
        .and(back.map(drop))
        .map_err(|error| error.context(format!("lost{}", machines.told())))
}

fn attempt(machines: &Machines) -> anyhow::Result<()> {
    const POINT: &str = "destination-commit";
    let [first, second, last] = HOSTS;
    let command = "ib_write_bw -d rxe0 -x 1 -F -u 17 -D 900 -s 4096 -t 8 -q 2";
    let argv: Vec<_> = command.split(' ').collect();
    let address = machines.start(first, "server", &argv)?;
    machines.listens(first, "server", verbatim_e2e::PERFTEST_PORT)?;
    machines.start(second, "client", &[&argv[..], &[address.as_str()]].concat())?;
    flows(machines, second)?;

    machines.order_faults(last, &format!("{POINT} hang\n"))?;
    let told = std::thread::scope(|scope| {
        let migrate =
            scope.spawn(|| machines.verbatim_ended(first, &["migrate", "server", "--to", last], MOVE_LIMIT));
        machines.reached(last, POINT)?;
        // It ends when nobody has the device open any more: what was made ahead is there until the process has been told that it is gone.
        let delete = "setsid rdma link delete rxe0 </dev/null >/dev/null 2>&1 &\n\
                      while [ -e /sys/class/infiniband_verbs/uverbs0 ]; do sleep 0.1; done";
        machines.shell(last, delete)?;
        machines.order_faults(last, "")?;
        migrate.join().expect("it does not panic")
    })?;
    let told = format!("status {}: {}", told.code, words(&told));
    ensure!(told.contains("died after the decision"), "{told}");
    eventually("no session", SHORT, || {
        for host in HOSTS {
            if machines.verbatim(host, &["sessions", "--json"], SHORT)?.trim() != "[]" {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })?;
    let client = machines.row(second, "client")?;
    ensure!(client.state == "running", "the client is {}", client.state);
    Ok(())
}

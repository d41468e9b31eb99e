//! A destination that cannot make what the program has: it refuses before the program is touched, and says what and why.

use anyhow::{Context, ensure};

use crate::machines::{HOSTS, Machines, SHORT};
use crate::run::flows;

/// Objects that instances may have there in all: fewer than a program of perftest's has.
const FEW: u32 = 3;

/// A limit of the destination's cgroup on RDMA objects, which the trial meets as the program would. Without it the same move goes well.
pub fn run(machines: &Machines) -> anyhow::Result<()> {
    machines.clear()?;
    attempt(machines).map_err(|error| error.context(format!("trial{}", machines.told())))
}

fn attempt(machines: &Machines) -> anyhow::Result<()> {
    let [first, second, last] = HOSTS;
    let command = "ib_write_bw -d rxe0 -x 1 -F -u 19 -D 60 -s 4096 -t 8";
    let argv: Vec<_> = command.split(' ').collect();
    let address = machines.start(first, "server", &argv)?;
    machines.listens(first, "server", verbatim_e2e::PERFTEST_PORT)?;
    machines.start(second, "client", &[&argv[..], &[address.as_str()]].concat())?;
    flows(machines, second)?;

    limit(machines, last, &FEW.to_string())?;
    let refused = machines.verbatim(first, &["migrate", "server", "--to", last], SHORT * 2);
    limit(machines, last, "max")?;
    let words = match refused {
        Ok(words) => anyhow::bail!("it was moved: {words}"),
        Err(error) => format!("{error:#}"),
    };
    for word in [
        "would lose its RNIC here",
        "rxe0 refuses",
        "rdma.max",
        "hca_object=3",
    ] {
        ensure!(words.contains(word), "{word:?} is not in: {words}");
    }
    ensure!(
        words.contains("completion queue") || words.contains("queue pair") || words.contains("memory region"),
        "no object is named: {words}"
    );
    let row = machines.row(first, "server")?;
    ensure!(row.state == "running", "after the refusal it is {}", row.state);
    flows(machines, second)?;
    let left = machines.shell(
        last,
        "cd /sys/fs/cgroup/verbatim; ls -d *.trial 2>/dev/null; cat rdma.current",
    )?;
    ensure!(
        !left.contains(".trial") && !left.contains("hca_object=1"),
        "the trial has left behind: {left}"
    );

    machines.verbatim(first, &["migrate", "server", "--to", last], SHORT * 2)?;
    flows(machines, second)
}

/// Sets it for all instances of a host.
/// Lets instances of a host have so many objects in all, or as many as there are (`max`).
pub fn limit(machines: &Machines, host: &str, objects: &str) -> anyhow::Result<()> {
    let script = format!(
        "mkdir -p /sys/fs/cgroup/verbatim; echo +rdma >/sys/fs/cgroup/cgroup.subtree_control; \
         echo 'rxe0 hca_object={objects}' >/sys/fs/cgroup/verbatim/rdma.max"
    );
    machines
        .shell(host, &script)
        .map(drop)
        .context("the kernel has no limits on RDMA objects")
}

//! An instance that comes back while the session in which it left is still being finished.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, Migration, TestLab, Traffic, VCHECK_PORT, eventually};

use crate::Test;
use crate::failures::{sessions, waiting_at};

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(90);

/// All of them.
pub fn tests() -> Vec<Test> {
    let test = Test::new(
        "came_back::an_agent_that_starts_lets_it_run",
        HOSTS,
        an_agent_that_starts_lets_it_run,
    );
    vec![test.injecting_faults()]
}

/// How far the instance has counted.
fn count(instance: &Instance<'_>) -> anyhow::Result<u64> {
    let output = instance.output()?;
    let counted = output.lines().rev().find_map(|line| line.strip_prefix("count "));
    counted.context("it has not counted yet")?.parse().context(output)
}

fn counts_on(instance: &Instance<'_>) -> anyhow::Result<()> {
    let before = count(instance)?;
    eventually("an instance that counts on", LIMIT, || {
        Ok((count(instance)? > before).then_some(()))
    })
}

fn an_agent_that_starts_lets_it_run(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.instance("peer", "server", &[&program, "--stall-timeout", "600"])?;
    server.listens(VCHECK_PORT)?;
    let address = server.address()?;
    let script = format!(
        "{program} --stall-timeout 600 -D 600 --op mix -q 2 -s 16384 {address} & \
         i=0; while :; do i=$((i+1)); echo count $i; \
         if [ -e /tmp/stop ]; then kill -9 $!; wait $!; rm /tmp/stop; fi; sleep 0.1; done"
    );
    let client = lab.instance("src", "client", &["sh", "-c", &script])?;
    Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;

    // It leaves, and its partner cannot be told: the session is not over at its source.
    let migrate = waiting_at(lab, "src", "source-switch")?;
    lab.lab().kill("peer", "agent")?;
    lab.order_faults("src", "")?;
    let left = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(left.error.is_some(), "its partner is away: {left:?}");
    let first = sessions(lab)?
        .into_iter()
        .find(|session| session.host == "src" && session.state == "finishing")
        .context("the first session is not over at src")?;

    // It gives up the connection, and comes back.
    std::fs::write(client.path("/tmp/stop")?, "")?;
    let stopped = client.path("/tmp/stop")?;
    eventually("a connection that is given up", LIMIT, || {
        Ok((!stopped.exists()).then_some(()))
    })?;
    client.moves("src")?;
    counts_on(&client)?;
    let goes_on = sessions(lab)?.into_iter().any(|session| {
        (session.id.as_str(), session.host.as_str()) == (&first.id, "src") && session.state == "finishing"
    });
    ensure!(goes_on, "the first session is over, and nothing is shown");
    let pid = client.row()?.pid;

    // The next agent there finds the first session, and an instance that is not its.
    lab.lab().kill("src", "agent")?;
    lab.lab().start("src", "agent")?;
    let is_the_same = || {
        let row = client.row()?;
        let is_here =
            row.host == "src" && row.pid == pid && ["running", "recovering"].contains(&row.state.as_str());
        ensure!(
            is_here,
            "{} on {}: {:?}, was {pid:?}",
            row.state,
            row.host,
            row.pid
        );
        anyhow::Ok(row.state == "running")
    };
    eventually("an instance that is taken over", LIMIT, || {
        Ok(is_the_same()?.then_some(()))
    })?;
    counts_on(&client)?;

    // The partner hears what it has missed.
    lab.lab().start("peer", "agent")?;
    eventually("sessions that are all over", LIMIT, || {
        let all = sessions(lab)?;
        let over = |state: &str| ["committed", "rolled back"].contains(&state);
        Ok(all.iter().all(|session| over(&session.state)).then_some(()))
    })
    .with_context(|| format!("{:?}", sessions(lab)))?;
    ensure!(is_the_same()?, "it is taken over");
    counts_on(&client)
}

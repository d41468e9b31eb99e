//! Moves that meet: both ends of a connection, several instances, many processes and partners, one move after the other.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use verbatim_e2e::{
    CheckReport, Finished, Instance, Migration, Running, TestLab, Traffic, VCHECK_PORT, eventually,
};

use crate::Test;
use crate::migration::Check;
use crate::robustness::blockers;

const HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const THREE_HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(90);
const OPTIONS: &[&str] = &[
    "--op",
    "all",
    "-q",
    "4",
    "-s",
    "16384",
    "--random-size",
    "--bidirectional",
];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("many::both_ends_move_at_once", HOSTS, both_ends_move_at_once),
        Test::new(
            "many::one_end_waits_until_the_other_has_moved",
            HOSTS,
            one_end_waits_until_the_other_has_moved,
        )
        .injecting_faults(),
        Test::new("many::instances_move_at_once", HOSTS, |lab| {
            instances_move_at_once(lab, 2)
        }),
        Test::new("many::more_instances_move_at_once", HOSTS, |lab| {
            instances_move_at_once(lab, 6)
        })
        .only_on_demand(true),
        Test::new("many::again_right_after", THREE_HOSTS, again_right_after),
        Test::new("many::processes_and_partners", HOSTS, |lab| {
            processes_and_partners(lab, 8)
        }),
        Test::new("many::tens_of_processes_and_partners", HOSTS, |lab| {
            processes_and_partners(lab, 32)
        })
        .only_on_demand(true),
        Test::new(
            "many::thousands_of_queue_pairs",
            THREE_HOSTS,
            thousands_of_queue_pairs,
        )
        .only_on_demand(true),
        Test::new(
            "many::an_added_process_is_not_left_behind",
            THREE_HOSTS,
            an_added_process,
        ),
        Test::new(
            "many::an_added_command_moves_along",
            THREE_HOSTS,
            an_added_command,
        ),
    ]
}

/// A move that is under way.
fn start(lab: &TestLab, instance: &Instance<'_>, to: &str) -> anyhow::Result<Running> {
    lab.verbatim(&["migrate", instance.name(), "--to", to, "--json"])
}

fn has_moved(lab: &TestLab, instance: &Instance<'_>, to: &str, moving: Running) -> anyhow::Result<()> {
    let finished = moving.wait(LIMIT)?;
    Migration::of(&finished)?.must_be_committed()?;
    let row = instance.row()?;
    ensure!(row.host == to, "{row:?}");
    Traffic::of(lab, to)?.flows(1 << 20, LIMIT)
}

/// To and fro, both at the same time; on the way they are also on one host, which they leave together.
fn both_ends_move_at_once(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let places = [
        ("dst", "spare"),
        ("peer", "src"),
        ("spare", "spare"),
        ("src", "dst"),
    ];
    for (round, (client_to, server_to)) in places.into_iter().enumerate() {
        // Whoever comes first: it must not matter.
        let mut moves = [(&check.client, client_to), (&check.server, server_to)];
        if round % 2 == 1 {
            moves.reverse();
        }
        let mut moving = Vec::new();
        for (instance, to) in moves {
            moving.push((instance, to, start(lab, instance, to)?));
        }
        for (instance, to, moving) in moving {
            has_moved(lab, instance, to, moving)
                .with_context(|| format!("{} in round {}: {}", instance.name(), round + 1, check.words()))?;
        }
    }
    check.end()?;
    Ok(())
}

/// The order is not left to chance: one is held in the middle of its move, and the other waits for it, or is cancelled.
fn one_end_waits_until_the_other_has_moved(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    // Whichever name comes first, whoever has begun goes on.
    let orders = [
        (&check.client, "src", "dst", &check.server, "peer", "spare"),
        (&check.server, "peer", "spare", &check.client, "dst", "src"),
    ];
    for (first, from, to, second, home, away) in orders {
        lab.order_faults(from, "source-transfer hang\n")?;
        let first_moves = start(lab, first, to)?;
        let reached = lab.path(from, "/run/verbatim/faults.reached")?;
        eventually("a move that is held", LIMIT, || {
            Ok(reached.exists().then_some(()))
        })?;
        let waits = |moving: &Running| {
            eventually("a move that waits", LIMIT, || {
                let told = moving.stdout()? + &moving.stderr()?;
                Ok(told.contains("going on when that has ended").then_some(()))
            })
        };
        let options = ["migrate", second.name(), "--to", away, "--json-lines"];
        let cancelled = lab.verbatim(&options)?;
        waits(&cancelled).with_context(|| cancelled.stderr().unwrap_or_default())?;
        lab.ask(&["cancel", second.name()])?;
        ensure!(cancelled.wait(LIMIT)?.code != 0, "it was cancelled");
        let row = second.row()?;
        ensure!(row.host == home && row.state == "running", "{row:?}");

        let second_moves = lab.verbatim(&options)?;
        waits(&second_moves)?;
        lab.order_faults(from, "")?;
        has_moved(lab, first, to, first_moves)?;
        let finished = second_moves.wait(LIMIT)?;
        ensure!(finished.code == 0, "{}", finished.output());
        check.flows(away)?;
        // Back for the next order; the other stays where it went.
        if home == "peer" {
            second.moves(home)?;
        }
        std::fs::remove_file(&reached)?;
    }
    check.end()?;
    Ok(())
}

/// Pairs whose sides all move at the same time, several to one host.
fn instances_move_at_once(lab: &TestLab, pairs: usize) -> anyhow::Result<()> {
    let options = ["--op", "all", "-q", "2", "-s", "4096", "--random-size"];
    let checks = (0..pairs)
        .map(|pair| Check::start_as(lab, &pair.to_string(), &options))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for (client_to, server_to) in [("dst", "spare"), ("src", "dst")] {
        let mut moving = Vec::new();
        for check in &checks {
            for (instance, to) in [(&check.client, client_to), (&check.server, server_to)] {
                moving.push((check, instance, to, start(lab, instance, to)?));
            }
        }
        for (check, instance, to, moving) in moving {
            has_moved(lab, instance, to, moving)
                .with_context(|| format!("{}: {}", instance.name(), check.words()))?;
        }
    }
    for check in checks {
        check.end()?;
    }
    Ok(())
}

/// The next move is asked for as soon as the instance is seen at its new place, while its old one is still being cleared
/// and partners may not have resumed.
fn again_right_after(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let verbatim = lab.tools().verbatim.display().to_string();
    for number in 0..6 {
        let (from, to) = if number % 2 == 0 {
            ("src", "dst")
        } else {
            ("dst", "src")
        };
        // Asked of the host itself: it says "being moved already" until the move before has ended there.
        let argv = [&verbatim, "migrate", "client", "--to", to, "--json"];
        let next = eventually("a host that lets it go on", LIMIT, || {
            let next = lab.start_plain(from, &argv)?.wait(LIMIT)?;
            let too_early = next.code != 0 && next.stderr.contains("is being moved already");
            Ok((!too_early && !next.stderr.contains("there is no instance")).then_some(next))
        })?;
        Migration::of(&next)
            .and_then(|migration| migration.must_be_committed())
            .with_context(|| format!("move {}: {}", number + 1, check.words()))?;
    }
    check.flows("src")?;
    check.end()?;
    Ok(())
}

/// An instance of many processes, each connected with a partner of its own on one of two hosts.
fn processes_and_partners(lab: &TestLab, count: u16) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    // The instance's status is good if that of each process is.
    let script = format!(
        "trap : INT; for port in $(seq {VCHECK_PORT} {}); do {program} --stall-timeout 60 --port $port & \
         servers=\"$servers $!\"; done; for server in $servers; do wait $server || exit 1; done",
        VCHECK_PORT + count - 1
    );
    let hub = lab.instance("src", "hub", &["sh", "-c", &script])?;
    let address = hub.address()?;
    let mut clients = Vec::new();
    for number in 0..count {
        let port = VCHECK_PORT + number;
        hub.listens(port)?;
        let host = if number % 2 == 0 { "peer" } else { "spare" };
        let port_text = port.to_string();
        let argv = [
            &program,
            "--op",
            "all",
            "-q",
            "1",
            "-s",
            "4096",
            "--depth",
            "8",
            "-D",
            "600",
            "--stall-timeout",
            "60",
            "--port",
            &port_text,
            &address,
        ];
        clients.push(lab.start(host, &argv)?);
    }
    let words = || {
        let of_hub = hub.output().unwrap_or_else(|error| format!("{error:#}"));
        // Those that have nothing to say run.
        let said = clients.iter().map(|client| client.stderr().unwrap_or_default());
        let of_clients: Vec<String> = said.filter(|said| !said.is_empty()).collect();
        let counters = HOSTS.iter().map(|host| match Traffic::of(lab, host) {
            Ok(traffic) => format!("{host}: {:?}", traffic.counters()),
            Err(error) => format!("{host}: {error:#}"),
        });
        let counters: Vec<String> = counters.collect();
        format!(
            "the hub: {of_hub}\nthe clients: {}\n{}",
            of_clients.join("\n"),
            counters.join("\n")
        )
    };
    Traffic::of(lab, "src")?
        .flows(4 << 20, LIMIT)
        .with_context(words)?;
    // All of them are connected before the first move.
    eventually("all connections", LIMIT, || {
        Ok((hub.row()?.connections == u32::from(count)).then_some(()))
    })
    .with_context(words)?;
    for to in ["dst", "src"] {
        let migration = hub.moves(to).with_context(words)?;
        ensure!(migration.connections == u64::from(count), "{migration:?}");
        Traffic::of(lab, to)?.flows(4 << 20, LIMIT).with_context(words)?;
    }
    for client in &clients {
        client.signal(Signal::INT)?;
    }
    let mut posted = 0;
    for client in clients {
        let client = CheckReport::parse(&client.succeed(LIMIT)?)?;
        client.must_be_clean()?;
        posted += client.posted;
    }
    let servers = hub.succeed(LIMIT)?.stdout;
    let clean = servers
        .lines()
        .filter(|line| line.contains("\"verdict\":\"ok\""))
        .count();
    ensure!(
        clean == usize::from(count) && posted > 0,
        "the processes wrote {servers}"
    );
    Ok(())
}

/// As many queue pairs as a check has room for, in four pairs of processes.
fn thousands_of_queue_pairs(lab: &TestLab) -> anyhow::Result<()> {
    const EACH: u64 = 512;
    let program = lab.tools().vcheck.display().to_string();
    let qps = EACH.to_string();
    let script = format!(
        "trap : INT; for port in $(seq {VCHECK_PORT} {}); do {program} --stall-timeout 60 --port $port & \
         servers=\"$servers $!\"; done; for server in $servers; do wait $server || exit 1; done",
        VCHECK_PORT + 3
    );
    let hub = lab.instance("src", "hub", &["sh", "-c", &script])?;
    let address = hub.address()?;
    let mut clients = Vec::new();
    for port in VCHECK_PORT..VCHECK_PORT + 4 {
        hub.listens(port)?;
        let port_text = port.to_string();
        let argv = [
            &program,
            "--op",
            "all",
            "-q",
            &qps,
            "-s",
            "256",
            "--depth",
            "4",
            "-D",
            "600",
            "--stall-timeout",
            "60",
            "--port",
            &port_text,
            &address,
        ];
        clients.push(lab.start("peer", &argv)?);
    }
    let words = || hub.output().unwrap_or_else(|error| format!("{error:#}"));
    eventually("all connections", LIMIT, || {
        Ok((u64::from(hub.row()?.connections) == 4 * EACH).then_some(()))
    })
    .with_context(words)?;
    for to in ["dst", "src"] {
        Traffic::of(lab, "peer")?
            .flows(4 << 20, LIMIT)
            .with_context(words)?;
        let migration = hub.moves(to).with_context(words)?;
        ensure!(migration.connections == 4 * EACH, "{migration:?}");
        eprintln!(
            "{} connections: service blackout {:.0} ms, communication blackout {:.0} ms",
            migration.connections, migration.service_blackout_ms, migration.communication_blackout_ms
        );
    }
    Traffic::of(lab, "src")?
        .flows(4 << 20, LIMIT)
        .with_context(words)?;
    for client in &clients {
        client.signal(Signal::INT)?;
    }
    for client in clients {
        CheckReport::parse(&client.succeed(LIMIT)?)?.must_be_clean()?;
    }
    hub.succeed(LIMIT)?;
    Ok(())
}

/// CRIU takes the descendants of the first process and no other. One that `runc exec` added is none, and would be killed
/// with the old place.
fn an_added_process(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let runc = |arguments: &[&str]| {
        let argv = [&["runc", "--root", "/run/verbatim/containers/runc"], arguments].concat();
        lab.start_plain("src", &argv)
    };
    let mut added = runc(&["exec", "client", "/bin/sleep", "600"])?;
    let blocker = eventually("a process that is seen", LIMIT, || {
        let found = blockers(lab, "client", "dst")?;
        let added = |blocker: &String| blocker.contains("runc exec") && blocker.contains("sleep");
        Ok(found.into_iter().find(added))
    })
    .with_context(|| added.stderr().unwrap_or_default())?;
    ensure!(blocker.contains("verbatim exec"), "{blocker}");
    let refused = check.client.migrate("dst")?;
    refused.must_be_rolled_back(&["started from outside (runc exec)"])?;
    ensure!(!added.has_ended()?, "it goes on");
    check.flows("src")?;
    added.signal(Signal::TERM)?;
    added.wait(LIMIT)?;
    eventually("an instance that can be moved", LIMIT, || {
        Ok(blockers(lab, "client", "dst")?.is_empty().then_some(()))
    })?;
    check.client.moves("dst")?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// A second pair of programs, each added to an instance of the first, and one more that is added after a move.
fn an_added_command(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let program = lab.tools().vcheck.display().to_string();
    let port = VCHECK_PORT + 1;
    let add = |instance: &Instance<'_>, script: &str| {
        let argv = ["exec", instance.name(), "--env", "KEPT=in a file", "--"];
        lab.ask(&[&argv[..], &["sh", "-c", script]].concat())
    };
    let vcheck = format!("{program} --stall-timeout 60 --port {port}");
    add(&check.server, &format!("exec {vcheck}"))?;
    check.server.listens(port)?;
    let address = check.server.address()?;
    let client = format!(
        "echo $$ >/tmp/added.pid; echo $KEPT >/tmp/kept; exec {vcheck} --op mix -q 2 -s 4096 -D 600 {address}"
    );
    add(&check.client, &client)?;
    let connections = |instance: &Instance<'_>| Ok::<_, anyhow::Error>(instance.row()?.connections);
    eventually("the added connections", LIMIT, || {
        Ok((connections(&check.client)? == 6 && connections(&check.server)? == 6).then_some(()))
    })?;
    for (instance, to) in [
        (&check.client, "dst"),
        (&check.server, "src"),
        (&check.client, "peer"),
    ] {
        instance.moves(to).with_context(|| check.words())?;
        check.flows(to)?;
    }

    // The first programs go on when the added ones end.
    add(&check.client, "kill -INT $(cat /tmp/added.pid); cat /tmp/kept")?;
    let reports = |output: &str| -> Vec<String> {
        let lines = output.lines().filter(|line| line.starts_with('{'));
        lines.map(str::to_owned).collect()
    };
    for instance in [&check.client, &check.server] {
        eventually("the report of an added program", LIMIT, || {
            Ok((!reports(&instance.output()?).is_empty()).then_some(()))
        })
        .with_context(|| check.words())?;
    }
    ensure!(check.client.output()?.contains("in a file"), "{}", check.words());
    check.flows("src")?;
    let (client, server) = (&check.client, &check.server);
    client.interrupt()?;
    let [client, server] = [client.succeed(LIMIT)?, server.succeed(LIMIT)?];
    for number in 0..2 {
        let [client, server] = [&client, &server].map(|finished| {
            Ok::<_, anyhow::Error>(Finished {
                what: format!("program {number} of {}", finished.what),
                stdout: reports(&finished.stdout)
                    .get(number)
                    .context("a report is missing")?
                    .clone(),
                ..finished.clone()
            })
        });
        CheckReport::both_clean(&client?, &server?)?;
    }
    Ok(())
}

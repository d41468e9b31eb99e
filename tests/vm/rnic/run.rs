//! Running a case.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{BandwidthRow, CheckReport, Finished, PERFTEST_PORT, VCHECK_PORT, eventually};

use crate::built;
use crate::cases::{Case, Moves, Program};
use crate::machines::{HOSTS, Machines, SHORT};

/// How long a program runs, in seconds: one move takes some fifteen where processors are emulated.
const STAYS_S: u32 = 3;
const MOVES_S: u32 = 45;

/// How long a move may take.
const MOVE_LIMIT: Duration = Duration::from_secs(120);

/// How long a program may go on after its time.
const END_LIMIT: Duration = Duration::from_secs(90);

/// Packets that show that it flows.
const FLOWS: u64 = 100;

/// Runs a case; a failure comes with what both programs, agents and kernels have said.
pub fn run(machines: &Machines, case: &Case) -> anyhow::Result<()> {
    machines.clear()?;
    attempt(machines, case).map_err(|error| error.context(format!("{}{}", case.name(), machines.told())))
}

/// An end, and the host on which it is.
struct End {
    name: &'static str,
    host: &'static str,
}

fn attempt(machines: &Machines, case: &Case) -> anyhow::Result<()> {
    let [first, second, last] = HOSTS;
    let moves = case.moves != Moves::Nobody;
    let (server_host, client_host) = match case.moves {
        Moves::Client => (second, first),
        Moves::Nobody | Moves::Server | Moves::ServerTwice => (first, second),
    };
    let mut server = End {
        name: "server",
        host: server_host,
    };
    let mut client = End {
        name: "client",
        host: client_host,
    };
    let seconds = if moves { MOVES_S } else { STAYS_S };
    let (argv, port) = command(case, seconds)?;
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    let address = machines.start(server.host, server.name, &argv)?;
    machines.listens(server.host, server.name, port)?;
    machines.start(
        client.host,
        client.name,
        &[&argv[..], &[address.as_str()]].concat(),
    )?;
    if moves {
        flows(machines, client.host)?;
        let (moving, stays) = match case.moves {
            Moves::Client => (&mut client, server.host),
            Moves::Nobody | Moves::Server | Moves::ServerTwice => (&mut server, client.host),
        };
        migrate(machines, moving, last)?;
        flows(machines, stays)?;
        if case.moves == Moves::ServerTwice {
            migrate(machines, moving, first)?;
            flows(machines, stays)?;
        }
    }
    let limit = Duration::from_secs(seconds.into()) + END_LIMIT;
    let [client, server] = [client, server].map(|end| finish(machines, &end, limit));
    let (client, server) = match (client, server) {
        (Ok(client), Ok(server)) if client.code == 0 && server.code == 0 => (client, server),
        (client, server) => anyhow::bail!("{}\n{}", told(client), told(server)),
    };
    judge(case, &client, &server)
}

/// What both ends run, and where the server listens.
fn command(case: &Case, seconds: u32) -> anyhow::Result<(Vec<String>, u16)> {
    let seconds = seconds.to_string();
    let (program, fixed, port): (_, &[&str], _) = match case.program {
        // -F: the frequency of an emulated processor says nothing. -u: an acknowledge timeout of 2 s.
        Program::Perftest(name) => (
            name.to_owned(),
            &["-d", "rxe0", "-x", "1", "-F", "-u", "19", "-D"],
            PERFTEST_PORT,
        ),
        Program::Check => {
            let path = built("../../vcheck/vcheck")?.display().to_string();
            (
                path,
                &[
                    "-d",
                    "rxe0",
                    "-x",
                    "1",
                    "--stall-timeout",
                    "120",
                    "--ack-timeout",
                    "19",
                    "-D",
                ],
                VCHECK_PORT,
            )
        }
    };
    let options = case.options.split_ascii_whitespace();
    let words = fixed.iter().copied().chain([seconds.as_str()]).chain(options);
    Ok((
        std::iter::once(program)
            .chain(words.map(ToOwned::to_owned))
            .collect(),
        port,
    ))
}

/// Waits until a host's RNIC has sent something more.
fn flows(machines: &Machines, host: &str) -> anyhow::Result<()> {
    let before = machines.sent(host)?;
    eventually(&format!("packets of {host}"), SHORT, || {
        Ok((machines.sent(host)? > before + FLOWS).then_some(()))
    })
}

fn migrate(machines: &Machines, end: &mut End, to: &'static str) -> anyhow::Result<()> {
    machines.verbatim(end.host, &["migrate", end.name, "--to", to], MOVE_LIMIT)?;
    end.host = to;
    let row = machines.row(to, end.name)?;
    ensure!(row.state == "running", "after the move it is {}", row.state);
    Ok(())
}

fn finish(machines: &Machines, end: &End, limit: Duration) -> anyhow::Result<Finished> {
    let code = machines.ended(end.host, end.name, limit);
    let stdout = machines.output(end.host, end.name)?;
    let code = code.with_context(|| format!("{} has written\n{stdout}", end.name))?;
    Ok(Finished {
        what: end.name.to_owned(),
        code,
        stdout,
        stderr: String::new(),
    })
}

fn told(result: anyhow::Result<Finished>) -> String {
    match result {
        Ok(finished) => format!(
            "the {} ended with status {}{}",
            finished.what,
            finished.code,
            finished.output()
        ),
        Err(error) => format!("{error:#}"),
    }
}

fn judge(case: &Case, client: &Finished, server: &Finished) -> anyhow::Result<()> {
    match case.program {
        Program::Perftest(_) => {
            let rows = BandwidthRow::parse(client)?;
            ensure!(
                rows.len() == 1 && rows[0].iterations > 0,
                "perftest counts {rows:?}{}",
                client.output()
            );
            Ok(())
        }
        Program::Check => CheckReport::both_clean(client, server).map(drop),
    }
}

//! Running a case.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{BandwidthRow, CheckReport, Finished, PERFTEST_PORT, VCHECK_PORT, eventually};

use crate::built;
use crate::cases::{Case, Moves, Program};
use crate::machines::{HOSTS, Machines, SHORT};

/// How long a program runs, in seconds, and how much longer for each move: one takes some fifteen where processors are emulated.
const STAYS_S: u32 = 3;
const MOVES_S: u32 = 42;

/// The check program ends when it is told to, or else after so many seconds.
const CHECK_S: &str = "3600";

/// How long a move may take.
pub const MOVE_LIMIT: Duration = Duration::from_secs(120);

/// What the check does where it is about who moves and what fails.
pub const CHECK: &str = "--op all -q 2 --depth 8 --random-size --bidirectional --nap 5";

/// How long a program may go on after its time.
const END_LIMIT: Duration = Duration::from_secs(90);

/// Messages that perftest sends in a second at most where it waits for events: what it is to send in all lasts long enough for a move.
const EVENTS_PER_S: u32 = 2000;

/// How much slower it may be: a processor that is emulated beside others' work.
const SLOWER: u32 = 4;

/// What an agent says of an instance that was no child of its own, and of whose end the kernel did not tell it (before Linux 6.15).
const STATUS_LOST: i32 = 255;

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
    let (server_host, client_host) = match case.moves {
        Moves::Client => (second, first),
        _ => (first, second),
    };
    let mut server = End {
        name: "server",
        host: server_host,
    };
    let mut client = End {
        name: "client",
        host: client_host,
    };
    let seconds = STAYS_S + MOVES_S * case.moves.in_a_row();
    let (argv, port) = command(case, seconds)?;
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    let address = machines.start(server.host, server.name, &argv)?;
    machines.listens(server.host, server.name, port)?;
    machines.start(
        client.host,
        client.name,
        &[&argv[..], &[address.as_str()]].concat(),
    )?;
    flows(machines, client.host)?;
    match case.moves {
        Moves::Nobody => {}
        Moves::Server => migrate(machines, &mut server, last)?,
        Moves::Client => migrate(machines, &mut client, last)?,
        Moves::ServerTwice => {
            migrate(machines, &mut server, last)?;
            flows(machines, client.host)?;
            migrate(machines, &mut server, first)?;
        }
        Moves::Both => {
            migrate(machines, &mut server, last)?;
            flows(machines, client.host)?;
            migrate(machines, &mut client, first)?;
        }
        Moves::AtOnce => std::thread::scope(|scope| {
            let other = scope.spawn(|| migrate(machines, &mut server, last));
            let one = migrate(machines, &mut client, first);
            other.join().expect("it does not panic").and(one)
        })?,
        Moves::Left => {
            migrate(machines, &mut server, last)?;
            machines.switch_off(first)?;
        }
    }
    if case.moves != Moves::Nobody {
        flows(machines, client.host)?;
    }
    if case.program == Program::Check {
        machines.interrupt(client.host, client.name)?;
    }
    let limit = Duration::from_secs(seconds.into()) * if with_events(case) { SLOWER } else { 1 } + END_LIMIT;
    let [client, server] = both([client, server].map(|end| finish(machines, &end, limit)))?;
    judge(case, &client, &server)
}

/// An error with the words of both if one did not end well.
fn both(ends: [anyhow::Result<Finished>; 2]) -> anyhow::Result<[Finished; 2]> {
    match ends {
        [Ok(client), Ok(server)] if client.code == 0 && server.code == 0 => Ok([client, server]),
        [client, server] => anyhow::bail!("{}\n{}", told(client), told(server)),
    }
}

/// perftest takes no time to run for (`-D`) where it waits for events.
fn with_events(case: &Case) -> bool {
    case.options.split_ascii_whitespace().any(|word| word == "-e")
}

/// What both ends run, and where the server listens.
fn command(case: &Case, seconds: u32) -> anyhow::Result<(Vec<String>, u16)> {
    let Program::Perftest(program) = case.program else {
        return Ok((check_command(case.options)?, VCHECK_PORT));
    };
    let (how_long, amount) = match with_events(case) {
        true => ("-n", (seconds * EVENTS_PER_S).to_string()),
        false => ("-D", seconds.to_string()),
    };
    // -F: the frequency of an emulated processor says nothing. -u: an acknowledge timeout of 2 s.
    let fixed = [
        program, "-d", "rxe0", "-x", "1", "-F", "-u", "19", how_long, &amount,
    ];
    let words = fixed.into_iter().chain(case.options.split_ascii_whitespace());
    Ok((words.map(ToOwned::to_owned).collect(), PERFTEST_PORT))
}

fn check_command(options: &str) -> anyhow::Result<Vec<String>> {
    let path = built("../../vcheck/vcheck")?.display().to_string();
    let fixed = "-d rxe0 -x 1 --stall-timeout 120 --ack-timeout 19 -D";
    let words = fixed
        .split_ascii_whitespace()
        .chain([CHECK_S])
        .chain(options.split_ascii_whitespace());
    Ok(std::iter::once(path.as_str())
        .chain(words)
        .map(ToOwned::to_owned)
        .collect())
}

/// The check program at both ends, until it is told to end.
pub struct Check {
    client_host: &'static str,
    /// The client's agent has died, and another one has taken it over.
    client_taken_over: bool,
}

impl Check {
    /// Starts a server and a client, which stays where it is.
    pub fn start(
        machines: &Machines,
        server_host: &'static str,
        client_host: &'static str,
        options: &str,
    ) -> anyhow::Result<Self> {
        let argv = check_command(options)?;
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let address = machines.start(server_host, "server", &argv)?;
        machines.listens(server_host, "server", VCHECK_PORT)?;
        machines.start(client_host, "client", &[&argv[..], &[address.as_str()]].concat())?;
        flows(machines, client_host)?;
        Ok(Self {
            client_host,
            client_taken_over: false,
        })
    }

    /// An agent of this host has died, and another one was started.
    pub fn agent_replaced(&mut self, host: &str) {
        self.client_taken_over |= host == self.client_host;
    }

    /// Ends it; an error if anything was lost, repeated, reordered or changed.
    pub fn end(&self, machines: &Machines) -> anyhow::Result<()> {
        machines.interrupt(self.client_host, "client")?;
        let client = End {
            name: "client",
            host: self.client_host,
        };
        let server = End {
            name: "server",
            host: machines.host_of("server")?,
        };
        let [mut client, server] = [client, server].map(|end| finish(machines, &end, END_LIMIT));
        if let Ok(client) = &mut client
            && client.code == STATUS_LOST
            && self.client_taken_over
        {
            // Its report says how it went.
            let said = "grep 'its exit status is lost' /run/agent.log | grep -q 'instance=\"client\"'";
            machines
                .shell(self.client_host, said)
                .context("the client has status 255, and its agent does not say that it knows none")?;
            client.code = 0;
        }
        let [client, server] = both([client, server])?;
        CheckReport::both_clean(&client, &server).map(drop)
    }
}

/// Waits until a host's RNIC has sent something more.
pub fn flows(machines: &Machines, host: &str) -> anyhow::Result<()> {
    let before = machines.sent(host)?;
    eventually(&format!("packets of {host}"), SHORT, || {
        Ok((machines.sent(host)? > before + FLOWS).then_some(()))
    })
}

fn migrate(machines: &Machines, end: &mut End, to: &'static str) -> anyhow::Result<()> {
    let before = gone_on_with(machines, to)?;
    machines.verbatim(end.host, &["migrate", end.name, "--to", to], MOVE_LIMIT)?;
    end.host = to;
    ensure!(
        gone_on_with(machines, to)? > before,
        "the program has made all by itself, after the decision"
    );
    let row = machines.row(to, end.name)?;
    ensure!(row.state == "running", "after the move it is {}", row.state);
    nothing_is_left_of_the_old_rnic(machines, to, end.name)
}

/// How many processes the agent of a host has seen go on with what was made ahead of them.
pub fn gone_on_with(machines: &Machines, host: &str) -> anyhow::Result<u32> {
    let said = machines.shell(
        host,
        "grep -c 'goes on with what was made ahead' /run/agent.log || true",
    )?;
    said.trim().parse().with_context(|| said.clone())
}

/// An error if an instance that has moved still has mappings of the RNIC that it had before, or drivers of RNICs that no machine has: each
/// move would take longer than the one before.
pub fn nothing_is_left_of_the_old_rnic(machines: &Machines, host: &str, name: &str) -> anyhow::Result<()> {
    let pid = machines.row(host, name)?.pid.context("it does not run")?;
    let maps = machines.shell(host, &format!("cat /proc/{pid}/maps"))?;
    for (file, why) in [
        (
            "verbatim-uverbs",
            "what stood for the old RNIC's queues is still mapped",
        ),
        // perftest is linked with libmlx5 itself.
        (
            "/libsiw-rdmav",
            "the driver of an RNIC that is not there is loaded",
        ),
    ] {
        ensure!(!maps.contains(file), "{why}:\n{maps}");
    }
    ensure!(maps.contains("/librxe-rdmav"), "it has no driver of rxe:\n{maps}");
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
        Program::Perftest(name) if name.ends_with("_lat") => {
            // With a duration there is only the mean: #bytes #iterations t_avg tps.
            let mut lines = client.stdout.lines().skip_while(|line| !line.contains("#bytes"));
            let row = lines.nth(1).unwrap_or_default();
            let iterations = row
                .split_ascii_whitespace()
                .nth(1)
                .and_then(|n| n.parse::<u64>().ok());
            ensure!(
                iterations.is_some_and(|iterations| iterations > 0),
                "perftest counts {row:?}{}",
                client.output()
            );
            Ok(())
        }
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

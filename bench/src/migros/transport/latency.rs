//! Half a round trip between two hosts of a lab, over three connections of one program by turns (`bench/programs/latency.c`): a plain
//! one, another plain one, and one that can be paused. What the two plain ones differ by is what nobody should read into the third.
//!
//! The third gets its secret as in operation: the agents share it when `verbatim pause` pauses the connection, and after `verbatim
//! resume` it runs with it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use verbatim_e2e::{Instance, TestLab, Tools, Traffic, eventually};

use crate::programs::program;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::summary::{Spread, Summary};

const OPERATIONS: [&str; 2] = ["send", "write"];
/// Bytes, messages of a round, and µs of plain and of migratable SoftRoCE by the paper's table 3 (`ib_send_lat`).
const SIZES: [(u32, u32, [f64; 2]); 6] = [
    (1, 1000, [25.3, 25.0]),
    (16, 1000, [25.3, 24.9]),
    (256, 1000, [26.9, 25.7]),
    (4096, 1000, [35.7, 36.8]),
    (65_536, 300, [93.2, 93.8]),
    (1 << 20, 40, [793.9, 802.0]),
];
/// Rounds of each connection, of which the paper has 30, for each repeat.
const ROUNDS: u32 = 6;
/// How often the RNIC goes through the UDP stack is counted with messages of so many bytes.
const TRIP_BYTES: u32 = 64;
const TRIP_MESSAGES: u32 = 20_000;
const LIMIT: Duration = Duration::from_secs(600);
const READY: Duration = Duration::from_secs(30);
const TCP_PORT: u16 = 18520;

/// The three connections.
const CONNECTIONS: usize = 3;

/// Half a round trip in microseconds, of all rounds' medians.
#[derive(Debug, Clone, Copy, Serialize)]
struct Latency {
    summary: Summary,
    spread: Spread,
}

/// Messages of one kind.
#[derive(Debug, Serialize)]
pub struct Row {
    operation: &'static str,
    bytes: u32,
    messages_per_round: u32,
    rounds: u32,
    plain: Latency,
    /// The other plain connection.
    again: Latency,
    migratable: Latency,
    /// Migratable less plain, round by round.
    difference: Summary,
    /// The other plain one less plain, round by round: the noise.
    noise: Summary,
    paper_plain: Option<f64>,
    paper_migratable: Option<f64>,
    rounds_us: Vec<[f64; CONNECTIONS]>,
}

/// Calls of the kernel that the sender's RNIC has made for data.
#[derive(Debug, Serialize)]
pub struct Trips {
    operation: &'static str,
    migratable: bool,
    /// UDP sends per message.
    sends: f64,
    /// UDP receives that had something, per message.
    receives: f64,
    /// Packets sent per message.
    packets: f64,
}

/// Measures and prints.
pub fn measure(tools: &Tools, repeats: u32, plot_path: &Path) -> anyhow::Result<(Vec<Row>, Vec<Trips>)> {
    let rounds = repeats * ROUNDS;
    println!("half a round trip, us: medians of {rounds} rounds (standard deviation)");
    println!(
        "{:6} {:>8} {:>15} {:>15} {:>15} {:>12} {:>8} | {:>8} {:>11}",
        "", "bytes", "plain", "plain again", "migratable", "difference", "noise", "paper", "migratable"
    );
    let lab = TestLab::up(tools, &["src", "peer"])?;
    let measured = measure_in(&lab, rounds).with_context(|| lab.logs());
    lab.down()?;
    let (rows, trips) = measured?;
    plot(&rows, plot_path)?;
    Ok((rows, trips))
}

fn measure_in(lab: &TestLab, rounds: u32) -> anyhow::Result<(Vec<Row>, Vec<Trips>)> {
    let mut rows = Vec::new();
    for operation in OPERATIONS {
        for (number, (bytes, messages, paper)) in SIZES.into_iter().enumerate() {
            // By turns, so that it is nobody's place that is measured.
            let secret = number % CONNECTIONS;
            let name = format!("{operation}-{bytes}");
            let lines = exchange(
                lab,
                &name,
                (operation, bytes, messages, rounds),
                CONNECTIONS,
                Some(secret),
            )?;
            let row = row(operation, (bytes, messages, paper), secret, &lines)?;
            print(&row);
            rows.push(row);
        }
    }
    println!("UDP sends and receives, and packets sent, of the sender's RNIC, per message of {TRIP_BYTES} B");
    let mut trips = Vec::new();
    for operation in OPERATIONS {
        for migratable in [false, true] {
            let one = count_trips(lab, operation, migratable)?;
            println!(
                "{operation:6} {:>11} {:>8.3} {:>8.3} {:>8.3}",
                if migratable { "migratable" } else { "plain" },
                one.sends,
                one.receives,
                one.packets
            );
            trips.push(one);
        }
    }
    Ok((rows, trips))
}

/// What the client prints at first.
#[derive(Debug, Deserialize)]
struct Ready {
    qpns: Vec<u32>,
}

/// What the client prints for a round.
#[derive(Debug, Deserialize)]
struct Round {
    round: usize,
    connection: usize,
    median_us: f64,
}

/// Runs the program; the connection `secret` gets one.
fn exchange(
    lab: &TestLab,
    name: &str,
    (operation, bytes, messages, rounds): (&str, u32, u32, u32),
    connections: usize,
    secret: Option<usize>,
) -> anyhow::Result<Vec<Round>> {
    let program = program("latency")?;
    let numbers = [bytes, messages, rounds, connections as u32].map(|number| number.to_string());
    let [bytes, messages, rounds, connections] = numbers.each_ref().map(String::as_str);
    let argv = [
        program.as_str(),
        operation,
        bytes,
        messages,
        rounds,
        connections,
        "0",
    ];
    let (server, client) = (format!("{name}-server"), format!("{name}-client"));
    let server = lab.instance("peer", &server, &argv)?;
    server.listens(TCP_PORT)?;
    let address = server.address()?;
    let client = lab.instance("src", &client, &[&argv[..], &[&address]].concat())?;
    let ready = ready(&client)?;
    ready_line(&server)?;
    if let Some(secret) = secret {
        let one = format!("{}/{:#x}", client.name(), ready.qpns[secret]);
        lab.ask(&["pause", &one])?;
        lab.ask(&["resume", &one])?;
        ensure!(client.row()?.paused == 0, "{one} is still paused");
    }
    for instance in [&server, &client] {
        let row = instance.row()?;
        let pid = row.pid.context("it has ended")?;
        lab.start_plain(&row.host, &["kill", "-USR1", &pid.to_string()])?
            .succeed(READY)?;
    }
    let finished = client.succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    let lines = finished.stdout.lines().filter(|line| line.contains("median_us"));
    Ok(lines.map(serde_json::from_str).collect::<Result<_, _>>()?)
}

fn ready(instance: &Instance<'_>) -> anyhow::Result<Ready> {
    Ok(serde_json::from_str(&ready_line(instance)?)?)
}

fn ready_line(instance: &Instance<'_>) -> anyhow::Result<String> {
    eventually("connected queue pairs", READY, || {
        let output = instance.output()?;
        let line = output.lines().find(|line| line.contains("qpns"));
        Ok(line.map(str::to_owned))
    })
    .with_context(|| instance.output().unwrap_or_default())
}

fn row(
    operation: &'static str,
    (bytes, messages, paper): (u32, u32, [f64; 2]),
    secret: usize,
    lines: &[Round],
) -> anyhow::Result<Row> {
    let rounds = lines.len() / CONNECTIONS;
    ensure!(
        rounds > 0 && lines.len() == rounds * CONNECTIONS,
        "{} lines",
        lines.len()
    );
    // Plain, plain again, migratable, wherever they are.
    let mut rounds_us = vec![[f64::NAN; CONNECTIONS]; rounds];
    for line in lines {
        let role = (line.connection + CONNECTIONS - 1 - secret) % CONNECTIONS;
        *rounds_us
            .get_mut(line.round)
            .and_then(|round| round.get_mut(role))
            .context("a round that there is not")? = line.median_us;
    }
    let latency = |role: usize| {
        let all = rounds_us.iter().map(|round| round[role]);
        Latency {
            summary: Summary::of(all.clone()),
            spread: Spread::of(all),
        }
    };
    let less_plain = |role: usize| Summary::of(rounds_us.iter().map(|round| round[role] - round[0]));
    // The paper's is of SEND.
    let paper = (operation == "send").then_some(paper);
    Ok(Row {
        operation,
        bytes,
        messages_per_round: messages,
        rounds: rounds as u32,
        plain: latency(0),
        again: latency(1),
        migratable: latency(2),
        noise: less_plain(1),
        difference: less_plain(2),
        paper_plain: paper.map(|[plain, _]| plain),
        paper_migratable: paper.map(|[_, migratable]| migratable),
        rounds_us,
    })
}

fn print(row: &Row) {
    let us = |of: &Latency| format!("{:.2} ({:.2})", of.summary.median, of.spread.deviation);
    let paper = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    println!(
        "{:6} {:>8} {:>15} {:>15} {:>15} {:>+12.2} {:>+8.2} | {:>8} {:>11}",
        row.operation,
        row.bytes,
        us(&row.plain),
        us(&row.again),
        us(&row.migratable),
        row.difference.median,
        row.noise.median,
        paper(row.paper_plain),
        paper(row.paper_migratable),
    );
}

fn count_trips(lab: &TestLab, operation: &'static str, migratable: bool) -> anyhow::Result<Trips> {
    let name = format!("{operation}-trips-{migratable}");
    let traffic = Traffic::of(lab, "src")?;
    let before = traffic.counters();
    let secret = migratable.then_some(0);
    exchange(lab, &name, (operation, TRIP_BYTES, TRIP_MESSAGES, 1), 1, secret)?;
    let after = traffic.counters();
    let per_message = |count: u64| count as f64 / f64::from(TRIP_MESSAGES);
    Ok(Trips {
        operation,
        migratable,
        sends: per_message(after.tx_batches - before.tx_batches),
        receives: per_message(after.rx_batches - before.rx_batches),
        packets: per_message(after.tx_packets - before.tx_packets),
    })
}

fn plot(rows: &[Row], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "half a round trip",
        x: "message size",
        y: "us",
        scale: Scale::Sizes,
    };
    let line = |operation: &'static str, name: &str, peer, get: fn(&Row) -> &Latency| Line {
        name: format!("{operation}, {name}"),
        points: rows
            .iter()
            .filter(|row| row.operation == operation)
            .map(|row| (f64::from(row.bytes), get(row).summary.median))
            .collect(),
        peer,
    };
    let lines: Vec<_> = OPERATIONS
        .into_iter()
        .flat_map(|operation| {
            [
                line(operation, "plain", true, |row| &row.plain),
                line(operation, "migratable", false, |row| &row.migratable),
            ]
        })
        .collect();
    draw(path, &axes, &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_told_apart_wherever_the_secret_is() {
        for secret in 0..CONNECTIONS {
            let lines: Vec<_> = (0..2 * CONNECTIONS)
                .map(|number| {
                    let (round, connection) = (number / CONNECTIONS, number % CONNECTIONS);
                    Round {
                        round,
                        connection,
                        median_us: if connection == secret { 9.0 } else { 5.0 },
                    }
                })
                .collect();
            let row = row("send", SIZES[0], secret, &lines).unwrap();
            assert_eq!((row.rounds, row.migratable.summary.median), (2, 9.0));
            assert_eq!((row.difference.median, row.noise.median), (4.0, 0.0));
        }
        assert!(row("send", SIZES[0], 0, &[]).is_err());
    }
}

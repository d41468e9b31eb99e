//! Debian's own programs, and the check program, between two hosts.

use std::time::Duration;

use anyhow::{bail, ensure};
use verbatim_e2e::{
    BandwidthRow, CheckReport, Finished, LatencyRow, PATIENCE, PERFTEST_PORT, Shim, TestLab, Traffic,
    VCHECK_PORT, told,
};

use crate::Test;
use crate::application::UCX_PORT;

const HOSTS: &[&str] = &["src", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// What a server gets to notice that its client has failed.
const GRACE: Duration = Duration::from_secs(1);
/// Of `ibv_rc_pingpong`.
const PINGPONG_PORT: u16 = 18515;

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("programs::ibv_devices", HOSTS, ibv_devices),
        Test::new("programs::ibv_devinfo", HOSTS, ibv_devinfo),
        Test::new("programs::ibv_rc_pingpong", HOSTS, ibv_rc_pingpong),
        Test::new("programs::ib_write_bw_all_sizes", HOSTS, all_sizes),
    ];
    for program in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
        tests.push(Test::new(format!("programs::{program}"), HOSTS, move |lab| {
            bandwidth(lab, program)
        }));
    }
    for program in ["ib_write_lat", "ib_read_lat", "ib_send_lat"] {
        tests.push(Test::new(format!("programs::{program}"), HOSTS, move |lab| {
            latency(lab, program)
        }));
    }
    for transports in ["rc_verbs,ud_verbs,self", "ud_verbs,self"] {
        let name = transports.split(',').next().expect("there is one");
        tests.push(Test::new(format!("programs::ucx_{name}"), HOSTS, move |lab| {
            ucx(lab, transports)
        }));
    }
    for operation in ["send", "write", "write-imm", "read", "mix"] {
        tests.push(Test::new(
            format!("programs::vcheck_{operation}"),
            HOSTS,
            move |lab| vcheck(lab, operation),
        ));
    }
    tests.push(Test::new("programs::vcheck_holds_still", HOSTS, holds_still));
    tests
}

/// Runs `argv` in `peer` as the server and in `src`, with that host's address, as the client. Both must end well.
pub fn between(lab: &TestLab, argv: &[&str], port: u16) -> anyhow::Result<(Finished, Finished)> {
    between_preloaded(lab, argv, port, None)
}

/// As [`between`], with another library before the guest library.
pub fn between_preloaded(
    lab: &TestLab,
    argv: &[&str],
    port: u16,
    shim: Option<&Shim>,
) -> anyhow::Result<(Finished, Finished)> {
    let server = lab.start_preloaded("peer", argv, shim)?;
    if let Err(error) = lab.listens("peer", 1, port) {
        bail!("{error:#}\n{}", told(server.wait(GRACE)));
    }
    let address = lab.address("peer")?;
    let client = lab
        .start_preloaded("src", &[argv, &[address.as_str()]].concat(), shim)?
        .wait(LIMIT);
    // Both sides' words, whoever failed; a server whose client has failed may wait for ever.
    let client_is_well = client.as_ref().is_ok_and(|client| client.code == 0);
    let server = server.wait(if client_is_well { LIMIT } else { GRACE });
    match (client, server) {
        (Ok(client), Ok(server)) if client.code == 0 && server.code == 0 => Ok((client, server)),
        (client, server) => bail!("{}\n{}", told(client), told(server)),
    }
}

/// A library that is not ours: messages, one-sided operations, atomics and streams of UCX.
fn ucx(lab: &TestLab, transports: &str) -> anyhow::Result<()> {
    let transports = format!("UCX_TLS={transports}");
    for (test, bytes, count) in [
        ("tag_lat", "1024", "1000"),
        ("tag_bw", "1048576", "100"),
        ("ucp_put_lat", "1024", "200"),
        ("ucp_get", "4096", "200"),
        ("ucp_fadd", "8", "200"),
        ("ucp_cswap", "8", "200"),
        ("stream_bw", "65536", "200"),
        ("ucp_am_bw", "65536", "200"),
    ] {
        let argv = [
            "env",
            &transports,
            "UCX_NET_DEVICES=verbatim0:1",
            verbatim_e2e::UCX_SETTING,
            "ucx_perftest",
            "-f",
            "-w",
            "10",
            "-t",
            test,
            "-s",
            bytes,
            "-n",
            count,
        ];
        let (client, _) = between(lab, &argv, UCX_PORT)?;
        // The only line of numbers: how many there were, and how fast.
        let counted = |line: &str| line.split_ascii_whitespace().next() == Some(count);
        ensure!(
            client.stdout.lines().any(counted),
            "{test} has no result{}",
            client.output()
        );
    }
    Ok(())
}

fn ibv_devices(lab: &TestLab) -> anyhow::Result<()> {
    let listed = lab.start("src", &["ibv_devices"])?.succeed(LIMIT)?;
    ensure!(listed.stdout.contains("verbatim0"), "{}", listed.output());
    Ok(())
}

fn ibv_devinfo(lab: &TestLab) -> anyhow::Result<()> {
    for argv in [&["ibv_devinfo"][..], &["ibv_devinfo", "-v"]] {
        let shown = lab.start("src", argv)?.succeed(LIMIT)?;
        for expected in ["verbatim0", "PORT_ACTIVE", "Ethernet", "active_mtu"] {
            ensure!(
                shown.stdout.contains(expected),
                "no {expected:?} in{}",
                shown.output()
            );
        }
    }
    // The port is the host's own: its GID is the IPv4-mapped address.
    let shown = lab.start("peer", &["ibv_devinfo", "-v"])?.succeed(LIMIT)?;
    let gid = format!("::ffff:{}", lab.address("peer")?);
    ensure!(shown.stdout.contains(&gid), "no GID {gid} in{}", shown.output());
    Ok(())
}

fn ibv_rc_pingpong(lab: &TestLab) -> anyhow::Result<()> {
    for arguments in [
        &["-c", "-n", "500"][..],
        &["-n", "200", "-s", "262144", "-m", "4096"],
        // The `ibv_wr_*` calls.
        &["-c", "-n", "500", "-N"],
    ] {
        let argv = [&["ibv_rc_pingpong", "-g", "0"], arguments].concat();
        let (client, server) = between(lab, &argv, PINGPONG_PORT)?;
        for side in [client, server] {
            ensure!(side.stdout.contains("iters in"), "{}{}", side.what, side.output());
        }
    }
    Ok(())
}

/// One of perftest's programs.
fn perftest(lab: &TestLab, argv: &[&str]) -> anyhow::Result<(Finished, Finished)> {
    between(lab, &[argv, PATIENCE].concat(), PERFTEST_PORT)
}

fn bandwidth(lab: &TestLab, program: &str) -> anyhow::Result<()> {
    for (size, queue_pairs, iterations) in [(2, 1, 1000), (4096, 1, 1000), (65536, 1, 1000), (65536, 16, 200)]
    {
        let (bytes, count, pairs) = (size.to_string(), iterations.to_string(), queue_pairs.to_string());
        let argv = [program, "-F", "-s", &bytes, "-n", &count, "-q", &pairs];
        let (client, _) = perftest(lab, &argv)?;
        let rows = BandwidthRow::parse(&client)?;
        let [row] = rows[..] else {
            bail!("{} lines instead of one{}", rows.len(), client.output())
        };
        ensure!(
            (row.bytes, row.iterations) == (size, iterations * queue_pairs),
            "{argv:?}: {row:?}"
        );
        // No more than memory can do, and no less than the slowest machine will.
        ensure!((0.01..1e6).contains(&row.average_mib_s), "{argv:?}: {row:?}");
    }
    // By time, as `make demo` runs it.
    let argv = [program, "-F", "-s", "65536", "-D", "1", "-q", "16"];
    let (client, _) = perftest(lab, &argv)?;
    let rows = BandwidthRow::parse(&client)?;
    ensure!(
        rows.len() == 1 && rows[0].average_mib_s > 1.0,
        "{argv:?}: {rows:?}"
    );
    Ok(())
}

fn all_sizes(lab: &TestLab) -> anyhow::Result<()> {
    let (client, _) = perftest(lab, &["ib_write_bw", "-F", "-a", "-n", "50"])?;
    let sizes: Vec<_> = BandwidthRow::parse(&client)?
        .iter()
        .map(|row| row.bytes)
        .collect();
    let expected: Vec<u64> = (1..=23).map(|power| 1 << power).collect();
    ensure!(sizes == expected, "sizes {sizes:?}");
    Ok(())
}

fn latency(lab: &TestLab, program: &str) -> anyhow::Result<()> {
    for size in [2, 4096, 65536] {
        let bytes = size.to_string();
        let argv = [program, "-F", "-s", &bytes, "-n", "500"];
        let (client, _) = perftest(lab, &argv)?;
        let rows = LatencyRow::parse(&client)?;
        let [row] = rows[..] else {
            bail!("{} lines instead of one{}", rows.len(), client.output())
        };
        ensure!((row.bytes, row.iterations) == (size, 500), "{argv:?}: {row:?}");
        ensure!((0.1..1e6).contains(&row.typical_us), "{argv:?}: {row:?}");
    }
    Ok(())
}

/// Both sides stand still now and then by libverbatim.so's own calls, in the middle of what is under way, and nothing is lost.
fn holds_still(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    // Not at the same time: who is stopped itself sends nothing that would show it that the other one is.
    let server = lab.start("peer", &[&program, "--hold-every", "300"])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let options = [
        "--op",
        "all",
        "-q",
        "8",
        "-s",
        "65536",
        "--random-size",
        "--bidirectional",
        "-D",
        "5",
    ];
    let argv = [
        &[program.as_str(), "--hold-every", "230"],
        &options[..],
        &[&address],
    ]
    .concat();
    let client = lab.start("src", &argv)?.succeed(LIMIT)?;
    let server = server.succeed(LIMIT)?;
    let (client, server) = CheckReport::both_clean(&client, &server)?;
    ensure!(client.holds > 0 && server.holds > 0, "{client:?} {server:?}");
    for host in HOSTS {
        let counters = Traffic::of(lab, host)?.counters();
        ensure!(
            counters.pauses > 0 && counters.rx_resumes > 0 && counters.pause_limit_exceeded == 0,
            "{host}: {counters:?}"
        );
    }
    Ok(())
}

fn vcheck(lab: &TestLab, operation: &str) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    for (queue_pairs, options) in [
        ("1", &["-s", "4096", "-n", "2000"][..]),
        (
            "8",
            &["-s", "65536", "--random-size", "-n", "300", "--bidirectional"],
        ),
    ] {
        let server = lab.start("peer", &[&program])?;
        lab.listens("peer", 1, VCHECK_PORT)?;
        let address = lab.address("peer")?;
        let argv = [
            &[program.as_str(), "--op", operation, "-q", queue_pairs],
            options,
            &[&address],
        ]
        .concat();
        let (client, server) = (lab.start("src", &argv)?.wait(LIMIT), server.wait(LIMIT));
        let (client, server) = match (client, server) {
            (Ok(client), Ok(server)) => (client, server),
            (client, server) => bail!("{}\n{}", told(client), told(server)),
        };
        CheckReport::both_clean(&client, &server)?;
        ensure!(
            client.code == 0 && server.code == 0,
            "clean, but status {} and {}",
            client.code,
            server.code
        );
    }
    Ok(())
}

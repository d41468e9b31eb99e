//! `tshark` decodes every packet of a run, and the invariant CRC of each is right.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use verbatim_e2e::{Capture, TestLab, VCHECK_PORT, check_icrc, decode};

use crate::Test;
use crate::programs::between;

const HOSTS: &[&str] = &["src", "peer"];
const LIMIT: Duration = Duration::from_secs(20);
/// Of perftest and the pingpong programs.
const PORT: u16 = 18515;

/// What runs, and the operation codes that must be seen then (IBA Vol 1 table 38): first, middle, last, only …
const RUNS: &[(&str, &[u8])] = &[
    ("ibv_rc_pingpong -n 20 -s 5000 -m 1024", &[0x00, 0x01, 0x02, 0x11]),
    ("ibv_rc_pingpong -n 20 -s 64", &[0x04, 0x11]),
    ("ibv_uc_pingpong -n 20 -s 5000 -m 1024", &[0x20, 0x21, 0x22]),
    ("ibv_ud_pingpong -n 20 -s 1024", &[0x64]),
    ("ib_write_bw -F -n 20 -s 5000 -m 1024", &[0x06, 0x07, 0x08, 0x11]),
    ("ib_write_bw -F -n 20 -s 5000 -m 1024 -c UC", &[0x26, 0x27, 0x28]),
    ("ib_read_bw -F -n 20 -s 5000 -m 1024", &[0x0c, 0x0d, 0x0f]),
    // One request at a time (`-o`) asks for more than two packets.
    (
        "ib_read_bw -F -n 20 -s 5000 -m 1024 -o 1",
        &[0x0c, 0x0d, 0x0e, 0x0f],
    ),
    ("ib_read_bw -F -n 20 -s 64", &[0x0c, 0x10]),
    ("ib_atomic_bw -F -n 20 -A CMP_AND_SWAP", &[0x12, 0x13]),
    ("ib_atomic_bw -F -n 20 -A FETCH_AND_ADD", &[0x12, 0x14]),
];

/// Those of a check program's WRITEs with immediate data, of one packet and of several.
const WITH_IMMEDIATE: &[u8] = &[0x09, 0x0b];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("conformance::wire::ipv4", HOSTS, |lab| {
            decodes(lab, |gid| gid.contains("::ffff:"))
        }),
        Test::new("conformance::wire::ipv6", HOSTS, |lab| {
            decodes(lab, |gid| !gid.contains("::ffff:"))
        }),
    ]
}

fn decodes(lab: &TestLab, is_meant: fn(&str) -> bool) -> anyhow::Result<()> {
    let gid_index = gid_index(lab, is_meant)?;
    let folder = tempfile::tempdir()?;
    let capture = Capture::start(lab, "src", &folder.path().join("run.pcap"))?;
    let mut expected = BTreeSet::new();
    for (run, opcodes) in RUNS {
        let option = if run.starts_with("ibv_") { "-g" } else { "-x" };
        let argv: Vec<_> = run.split(' ').chain([option, &gid_index]).collect();
        between(lab, &argv, PORT)?;
        expected.extend(opcodes.iter().copied());
    }
    let program = lab.tools().vcheck.display().to_string();
    let with_immediate = [
        "--op",
        "write-imm",
        "-n",
        "50",
        "-s",
        "8192",
        "--random-size",
        "--mtu",
        "1024",
    ];
    let argv = [&[program.as_str(), "-x", &gid_index], &with_immediate[..]].concat();
    between(lab, &argv, VCHECK_PORT)?;
    expected.extend(WITH_IMMEDIATE);

    let file = capture.finish()?;
    let frames = decode(&file)?;
    let checked = check_icrc(&file)?;
    ensure!(
        checked == frames.len(),
        "{checked} packets, but tshark saw {}",
        frames.len()
    );
    for frame in &frames {
        ensure!(frame.complaint.is_empty(), "tshark: {frame:?}");
        ensure!(frame.protocols.contains("infiniband"), "not decoded: {frame:?}");
    }
    let seen: BTreeSet<_> = frames.iter().filter_map(|frame| frame.opcode).collect();
    ensure!(
        expected.is_subset(&seen),
        "operation codes {seen:02x?}, expected {expected:02x?}"
    );
    Ok(())
}

/// The index of a GID that is meant, on both hosts.
fn gid_index(lab: &TestLab, is_meant: fn(&str) -> bool) -> anyhow::Result<String> {
    let index = |host| -> anyhow::Result<String> {
        let shown = lab.start(host, &["ibv_devinfo", "-v"])?.succeed(LIMIT)?;
        // A line `GID[  1]: fe80::1, RoCE v2`.
        let gids = shown
            .stdout
            .lines()
            .filter_map(|line| line.trim().strip_prefix("GID["));
        let mut meant = gids
            .filter_map(|line| line.split_once("]:"))
            .filter(|(_, gid)| is_meant(gid));
        let (index, _) = meant
            .next()
            .with_context(|| format!("no such GID in{}", shown.output()))?;
        Ok(index.trim().to_owned())
    };
    let (src, peer) = (index("src")?, index("peer")?);
    if src != peer {
        bail!("the GID has index {src} at src and {peer} at peer");
    }
    Ok(src)
}

//! One move after the other, under one check, and nothing that grows.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{TestLab, Traffic, left_behind};

use crate::Test;
use crate::migration::{Check, plausible};

/// So that both sides can move to and fro without ever being on one host.
const HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const LIMIT: Duration = Duration::from_secs(60);
/// After so many moves each side has been on both of its hosts, and every agent has spoken with every other.
const WARM_UP: usize = 4;
/// In a long run: after so many each thread of an agent has had its part in each step of a move, and the allocator keeps for
/// each what it has once needed.
const LONG_WARM_UP: usize = 20;
/// Of a hundred packets so many are lost.
const PERCENT: u32 = 1;
/// What a process's own memory may grow after the warm-up: what is kept of the sessions, and what the allocators keep.
const GROWTH_KIB: u64 = 6 << 10;
const PAUSE_RESUME: &[&str] = &["--method", "pause-resume"];
const OPTIONS: &[&str] = &[
    "--op",
    "all",
    "-q",
    "8",
    "-s",
    "65536",
    "--random-size",
    "--bidirectional",
];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("soak::moves_in_a_row", HOSTS, |lab| soak(lab, 10, &[])),
        Test::new("soak::pause_resume", HOSTS, |lab| soak(lab, 10, PAUSE_RESUME)),
        Test::new("soak::lossy", HOSTS, |lab| lossy(lab, &[])).only_on_demand(true),
        Test::new("soak::pause_resume_lossy", HOSTS, |lab| lossy(lab, PAUSE_RESUME)).only_on_demand(true),
    ]
}

fn lossy(lab: &TestLab, how: &[&str]) -> anyhow::Result<()> {
    let moves = match std::env::var("VERBATIM_SOAK_MOVES") {
        Ok(text) => text
            .parse()
            .with_context(|| format!("VERBATIM_SOAK_MOVES={text:?} is not a number"))?,
        Err(_) => 200,
    };
    let _loss = HOSTS
        .iter()
        .map(|host| Loss::at(lab, host))
        .collect::<anyhow::Result<Vec<_>>>()?;
    soak(lab, moves, how)
}

/// A host that loses packets of RoCEv2 until this is dropped.
struct Loss<'a> {
    lab: &'a TestLab,
    host: &'static str,
}

impl<'a> Loss<'a> {
    fn at(lab: &'a TestLab, host: &'static str) -> anyhow::Result<Self> {
        let run = |argv: &[&str]| lab.start_plain(host, argv)?.succeed(LIMIT);
        // Each packet meets its fate alone: batches are cut before the link.
        run(&["ip", "link", "set", "dev", "br0", "gso_max_segs", "1"])?;
        let rules = format!(
            "add table inet loss; add chain inet loss in {{ type filter hook prerouting priority -300; }}; \
             add rule inet loss in udp dport 4791 numgen random mod 100 < {PERCENT} counter drop"
        );
        run(&["nft", &rules])?;
        Ok(Self { lab, host })
    }
}

impl Drop for Loss<'_> {
    fn drop(&mut self) {
        let listed = self
            .lab
            .start_plain(self.host, &["nft", "list", "table", "inet", "loss"])
            .and_then(|running| running.succeed(LIMIT));
        match listed {
            Ok(listed) => {
                let counted = listed.stdout.lines().find(|line| line.contains("counter"));
                eprintln!("{}: {}", self.host, counted.unwrap_or_default().trim());
            }
            Err(error) => eprintln!("{error:#}"),
        }
    }
}

/// What a host has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sample {
    /// Of each service: KiB of memory of its own, descriptors, threads.
    services: BTreeMap<&'static str, (u64, usize, usize)>,
    /// Contexts, protection domains, regions, completion queues and queue pairs of the RNIC.
    objects: [u64; 5],
    /// Forwarding entries.
    forwarding: usize,
    /// Sessions in which it is a partner's host.
    parts: usize,
}

impl Sample {
    fn of(lab: &TestLab, host: &str) -> anyhow::Result<Self> {
        let mut services = BTreeMap::new();
        for service in ["agent", "nic"] {
            let pid = lab.service_pid(host, service)?;
            let status = std::fs::read_to_string(lab.path(host, &format!("/proc/{pid}/status"))?)?;
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
                number.with_context(|| format!("{name} of {service}"))
            };
            let fds = std::fs::read_dir(lab.path(host, &format!("/proc/{pid}/fd"))?)?.count();
            services.insert(service, (field("RssAnon:")?, fds, field("Threads:")? as usize));
        }
        let parts = lab.path(host, "/run/verbatim/partners")?;
        Ok(Self {
            services,
            objects: Traffic::of(lab, host)?.objects(),
            forwarding: forwarding_entries(lab, host)?,
            parts: std::fs::read_dir(parts).map_or(0, Iterator::count),
        })
    }
}

/// The entries that the file of a host's agent comes to.
fn forwarding_entries(lab: &TestLab, host: &str) -> anyhow::Result<usize> {
    #[derive(serde::Deserialize)]
    struct Line {
        qpn: u32,
        forward: Option<serde_json::Value>,
    }
    let text = std::fs::read_to_string(lab.path(host, "/run/verbatim/forwarding")?)?;
    let mut entries = HashMap::new();
    for line in text.lines() {
        let Line { qpn, forward } = serde_json::from_str(line)?;
        match forward {
            Some(_) => _ = entries.insert(qpn, ()),
            None => _ = entries.remove(&qpn),
        }
    }
    Ok(entries.len())
}

/// Samples of all hosts when nothing is on its way any more.
fn samples(lab: &TestLab) -> anyhow::Result<BTreeMap<&'static str, Sample>> {
    verbatim_e2e::eventually("sessions that have ended", LIMIT, || {
        let sampled = HOSTS.iter().map(|host| Ok((*host, Sample::of(lab, host)?)));
        let samples = sampled.collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        Ok(samples
            .values()
            .all(|sample| sample.parts == 0)
            .then_some(samples))
    })
}

/// The objects of programs at all RNICs.
fn objects(samples: &BTreeMap<&str, Sample>) -> [u64; 5] {
    samples.values().fold([0; 5], |sums, sample| {
        std::array::from_fn(|index| sums[index] + sample.objects[index])
    })
}

/// The same, when the keeper that held the old place's RNIC connections has ended, too, so that there are the objects that the
/// programs made and no others, and connections between agents that a move has made are closed: where an instance is, its
/// agent and RNIC have its descriptors, and a thread of the runtime may come or go, but nothing stays.
fn settled(
    lab: &TestLab,
    made: [u64; 5],
    before: Option<&BTreeMap<&'static str, Sample>>,
) -> anyhow::Result<BTreeMap<&'static str, Sample>> {
    const MARGIN: usize = 24;
    verbatim_e2e::eventually("objects, descriptors and threads as before", LIMIT, || {
        let now = samples(lab)?;
        if objects(&now) != made {
            return Ok(None);
        }
        let Some(before) = before else {
            return Ok(Some(now));
        };
        let as_before = now.iter().all(|(host, sample)| {
            sample.services.iter().all(|(service, (_, fds, threads))| {
                let (_, fds_before, threads_before) = before[host].services[service];
                fds.abs_diff(fds_before) <= MARGIN && threads.abs_diff(threads_before) <= MARGIN
            })
        });
        Ok(as_before.then_some(now))
    })
}

/// Either side by turns, there and back.
fn soak(lab: &TestLab, moves: usize, how: &[&str]) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let warm_up = match moves >= 5 * LONG_WARM_UP {
        true => LONG_WARM_UP,
        false => WARM_UP,
    };
    let made = objects(&samples(lab)?);
    let mut warm = None;
    let mut most: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for number in 0..moves {
        // There and back takes two moves of each side.
        let there = number / 2 % 2 == 0;
        let (moved, to, left) = match (number % 2 == 0, there) {
            (true, true) => (&check.client, "dst", "src"),
            (true, false) => (&check.client, "src", "dst"),
            (false, true) => (&check.server, "spare", "peer"),
            (false, false) => (&check.server, "peer", "spare"),
        };
        let when = || format!("move {}: {}", number + 1, check.words());
        let migration = moved.migrate_with(to, how).with_context(when)?;
        migration.must_be_committed().with_context(when)?;
        ensure!(
            how.is_empty() || how.contains(&migration.method.as_str()),
            "{migration:?}"
        );
        plausible(&migration, 8)?;
        check.flows(to).with_context(when)?;
        let behind = left_behind(lab, left, moved.name())?;
        ensure!(behind.is_empty(), "{left} after move {}: {behind:?}", number + 1);
        let now = settled(lab, made, warm.as_ref()).with_context(|| {
            format!(
                "after move {}: {:?}, and had {warm:?} with {made:?}",
                number + 1,
                samples(lab)
            )
        })?;
        let entries: usize = now.values().map(|sample| sample.forwarding).sum();
        // On each host where a queue pair was, its first number and its latest.
        ensure!(
            entries <= 2 * 2 * 2 * 8,
            "{entries} forwarding entries after move {}",
            number + 1
        );
        if number + 1 < warm_up {
            continue;
        }
        let before = warm.get_or_insert_with(|| now.clone());
        for (host, sample) in &now {
            for (service, (kib, ..)) in &sample.services {
                let (kib_before, ..) = before[host].services[service];
                let grown = kib.saturating_sub(kib_before);
                let worst = most.entry((*host, *service)).or_default();
                *worst = (*worst).max(grown);
                let what = format!("{service} of {host} after move {}", number + 1);
                ensure!(grown <= GROWTH_KIB, "{what} has {kib} KiB, and had {kib_before}");
            }
        }
    }
    let (client, server) = check.end()?;
    eprintln!(
        "{moves} moves: {} messages, longest gap {:.0} ms at the client, {:.0} ms at the server; grown by KiB: {most:?}",
        client.posted + server.posted,
        client.longest_gap_ms,
        server.longest_gap_ms
    );
    Ok(())
}

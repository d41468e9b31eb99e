//! Hosts of this release and of the one before it: instances move between them, agents and RNICs are exchanged under them,
//! and each keeps the guest library that it started with.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::Release::{Previous, This};
use verbatim_e2e::{Instance, Migration, Release, TestLab, eventually};

use crate::Test;
use crate::migration::{Check, plausible};

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// Several connections of all operations.
const OPTIONS: &[&str] = &["--op", "mix", "-q", "4", "-s", "16384"];
const CONNECTIONS: u32 = 4;
const METHODS: [&str; 2] = ["wait-before-stop", "pause-resume"];

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new(
            "compat::exchanged_under_an_instance",
            HOSTS,
            exchanged_under_an_instance,
        )
        .with_releases(&[("src", Previous), ("dst", This), ("peer", This)]),
        Test::new(
            "compat::one_host_after_the_other",
            HOSTS,
            one_host_after_the_other,
        )
        .with_releases(&[("src", Previous), ("dst", Previous), ("peer", Previous)]),
        Test::new("compat::commands", HOSTS, commands).with_releases(&[
            ("src", Previous),
            ("dst", This),
            ("peer", Previous),
        ]),
    ];
    for (from, name) in [(Previous, "old_to_new"), (This, "new_to_old")] {
        for (partner, of_partner) in [(Previous, "old"), (This, "new")] {
            for method in METHODS {
                let name = format!("compat::{name}_partner_{of_partner}_{method}");
                let test = Test::new(name, HOSTS, move |lab| there_and_back(lab, from, partner, method));
                let releases = [("src", from), ("dst", from.other()), ("peer", partner)];
                tests.push(test.with_releases(&releases));
            }
        }
    }
    tests
}

/// Moves it by a method, and checks that this was the method.
fn moves(instance: &Instance<'_>, to: &str, method: &str) -> anyhow::Result<Migration> {
    let migration = instance.migrate_with(to, &["--method", method])?;
    migration.must_be_committed()?;
    ensure!(migration.method == method, "{migration:?}");
    plausible(&migration, CONNECTIONS.into())?;
    Ok(migration)
}

/// The guest library in an instance's folder on a host.
fn library(lab: &TestLab, host: &str, instance: &str) -> anyhow::Result<PathBuf> {
    lab.path(
        host,
        &format!("/run/verbatim/instances/{instance}/lib/libverbatim.so"),
    )
}

/// It has the library of this release: in its folder, and its first process has that file mapped.
fn has_library(lab: &TestLab, instance: &Instance<'_>, release: Release) -> anyhow::Result<()> {
    let (here, other) = (
        release.library(lab.tools())?,
        release.other().library(lab.tools())?,
    );
    ensure!(
        here != other,
        "the libraries of both releases are the same: nothing is proven"
    );
    let row = instance.row()?;
    let path = library(lab, &row.host, instance.name())?;
    let has = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        has == here,
        "{} has the library of another release",
        instance.name()
    );
    let pid = row.pid.context("it has ended")?;
    let maps = std::fs::read_to_string(lab.path(&row.host, &format!("/proc/{pid}/maps"))?)?;
    let mapped = maps.lines().find(|line| line.ends_with("/libverbatim.so"));
    let inode = mapped.and_then(|line| line.split_whitespace().nth(4));
    let inode: u64 = inode
        .with_context(|| format!("no library is mapped: {maps}"))?
        .parse()?;
    ensure!(
        inode == std::fs::metadata(&path)?.ino(),
        "another file than {} is mapped",
        path.display()
    );
    Ok(())
}

/// A command that is added to an instance uses the instance's own library, which it says by what it has mapped.
fn added_has_library(
    lab: &TestLab,
    instance: &Instance<'_>,
    release: Release,
    mark: &str,
) -> anyhow::Result<()> {
    let inside = "/run/verbatim/lib/libverbatim.so";
    // grep looks at what it has mapped itself.
    let script = format!(
        "ibv_devinfo >/dev/null && grep -q {inside} /proc/self/maps && echo {mark} $(sha256sum <{inside})"
    );
    lab.ask(&["exec", instance.name(), "--", "sh", "-c", &script])?;
    let said = eventually("what an added command has mapped", LIMIT, || {
        let output = instance.output()?;
        let lines = output.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let mut said = lines.filter_map(|line| line.strip_prefix(mark));
        Ok(said.next().map(str::to_owned))
    })
    .with_context(|| instance.output().unwrap_or_default())?;
    let sum = said
        .split_whitespace()
        .next()
        .context("it says nothing")?
        .to_owned();
    let path = release.folder(lab.tools())?.join("libverbatim.so");
    let path = path.to_str().context("a path that is not UTF-8")?;
    let wanted = lab
        .start_plain("peer", &["sha256sum", path])?
        .succeed(LIMIT)?
        .stdout;
    ensure!(
        wanted.starts_with(&sum),
        "an added command has another library: {sum}, not {wanted}"
    );
    Ok(())
}

/// Waits until an instance is known to its agent with all its connections.
fn is_known(instance: &Instance<'_>) -> anyhow::Result<()> {
    eventually("an instance that its agent knows", LIMIT, || {
        let row = instance.row()?;
        Ok((row.state == "running" && row.connections == CONNECTIONS).then_some(()))
    })
}

/// An agent of another release takes up what the one before it has left.
fn exchange(lab: &TestLab, host: &str, service: &str, release: Release) -> anyhow::Result<()> {
    lab.install(host, release)?;
    lab.restart(host, service)?;
    ensure!(lab.release_of(host, service)? == release);
    Ok(())
}

fn there_and_back(lab: &TestLab, from: Release, partner: Release, method: &str) -> anyhow::Result<()> {
    for (host, release) in [("src", from), ("dst", from.other()), ("peer", partner)] {
        for service in ["agent", "nic"] {
            ensure!(lab.release_of(host, service)? == release, "{service} of {host}");
        }
    }
    let check = Check::start(lab, OPTIONS)?;
    has_library(lab, &check.client, from)?;
    has_library(lab, &check.server, partner)?;
    for to in ["dst", "src", "dst"] {
        moves(&check.client, to, method).with_context(|| check.words())?;
        check.flows(to)?;
        check.flows("peer")?;
        has_library(lab, &check.client, from)?;
    }
    // The partner moves, too, to a host of the other release than its connection's other end is on.
    moves(&check.server, "src", method).with_context(|| check.words())?;
    check.flows("src")?;
    has_library(lab, &check.server, partner)?;
    added_has_library(lab, &check.client, from, "on-dst")?;
    check.end()?;
    Ok(())
}

fn exchanged_under_an_instance(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    has_library(lab, &check.client, Previous)?;
    added_has_library(lab, &check.client, Previous, "before")?;
    // The agent of this release finds a running instance, and moves it.
    exchange(lab, "src", "agent", This)?;
    ensure!(lab.release_of("src", "nic")? == Previous);
    is_known(&check.client)?;
    check.flows("src")?;
    has_library(lab, &check.client, Previous)?;
    added_has_library(lab, &check.client, Previous, "under-a-new-agent")?;
    moves(&check.client, "dst", METHODS[0]).with_context(|| check.words())?;
    check.flows("dst")?;
    // With nobody's connections on it, the RNIC is exchanged as well.
    exchange(lab, "src", "nic", This)?;
    moves(&check.client, "src", METHODS[1]).with_context(|| check.words())?;
    check.flows("src")?;
    has_library(lab, &check.client, Previous)?;
    added_has_library(lab, &check.client, Previous, "after-both")?;
    // And back: an operator who does not like the new release.
    exchange(lab, "src", "agent", Previous)?;
    is_known(&check.client)?;
    moves(&check.client, "dst", METHODS[0]).with_context(|| check.words())?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// As an operator upgrades: a host is emptied, its programs are exchanged, and the instance comes back.
fn one_host_after_the_other(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let mut methods = METHODS.into_iter().cycle();
    let mut moves_by_turns = |to: &str| -> anyhow::Result<()> {
        let method = methods.next().expect("it does not end");
        moves(&check.client, to, method).with_context(|| format!("{method}: {}", check.words()))?;
        check.flows(to)
    };
    // An RNIC of this release with an agent of the previous one, and then both of this one.
    exchange(lab, "dst", "nic", This)?;
    ensure!(lab.release_of("dst", "agent")? == Previous);
    moves_by_turns("dst")?;
    moves_by_turns("src")?;
    exchange(lab, "dst", "agent", This)?;
    moves_by_turns("dst")?;
    for service in ["agent", "nic"] {
        exchange(lab, "src", service, This)?;
    }
    moves_by_turns("src")?;
    // The partner's agent, under its program.
    exchange(lab, "peer", "agent", This)?;
    is_known(&check.server)?;
    moves_by_turns("dst")?;
    check.flows("peer")?;
    for instance in [&check.client, &check.server] {
        has_library(lab, instance, Previous)?;
    }
    check.end()?;
    Ok(())
}

fn commands(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    for (release, from, to) in [
        (This, "src", "dst"),
        (Previous, "dst", "src"),
        (Previous, "src", "dst"),
    ] {
        let ask = |arguments: &[&str]| lab.verbatim_of(release, arguments)?.succeed(LIMIT);
        let listed = ask(&["ps", "--json"])?.stdout;
        ensure!(listed.contains("client") && listed.contains(from), "{listed}");
        ask(&["check", "client", "--to", to])?;
        ask(&["logs", "client"])?;
        let finished = lab
            .verbatim_of(release, &["migrate", "client", "--to", to, "--json"])?
            .wait(LIMIT)?;
        Migration::of(&finished)?.must_be_committed()?;
        check.flows(to)?;
        ask(&["sessions", "--all", "--json"])?;
    }
    check.end()?;
    Ok(())
}

//! Instances' own files, their view of the host's files, and their addresses.

use std::time::Duration;

use anyhow::ensure;
use verbatim_e2e::{Instance, TestLab, eventually, left_behind};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(60);

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("files::full", HOSTS, full),
        Test::new("files::shown", HOSTS, shown),
        Test::new("files::addresses", HOSTS, addresses),
    ]
}

fn says(instance: &Instance<'_>, word: &str) -> anyhow::Result<()> {
    eventually(&format!("{word:?} of {}", instance.name()), LIMIT, || {
        Ok(instance.output()?.lines().any(|line| line == word).then_some(()))
    })
}

/// Number of the mounts on a host for an instance.
fn mounts(lab: &TestLab, host: &str, name: &str) -> anyhow::Result<usize> {
    let table = lab
        .start_plain(host, &["cat", "/proc/self/mounts"])?
        .succeed(LIMIT)?;
    let place = format!("/run/verbatim/instances/{name}");
    let at = |line: &&str| {
        line.split(' ')
            .nth(1)
            .is_some_and(|path| path.starts_with(&place))
    };
    Ok(table.stdout.lines().filter(at).count())
}

/// An instance that fills its own files is told so, and others are not affected.
fn full(lab: &TestLab) -> anyhow::Result<()> {
    let fills = "echo begins; dd if=/dev/zero of=/tmp/x bs=1M 2>/dev/null; echo full; sleep 1000";
    let options = ["--name", "greedy", "--tmp-size", "64M", "--"];
    let greedy = Instance::run(lab, "src", &options, &["sh", "-c", fills])?;
    says(&greedy, "full")?;
    let said = lab.ask(&["logs", "greedy"])?;
    ensure!(
        said.stderr.contains("has no room left for its files"),
        "{}",
        said.output()
    );
    // One beside it has its own.
    let uses = "dd if=/dev/zero of=/dev/shm/x bs=1M count=32 2>/dev/null && echo fine; sleep 1000";
    let other = lab.instance("src", "other", &["sh", "-c", uses])?;
    says(&other, "fine")?;
    let said = lab.ask(&["logs", "other"])?;
    ensure!(said.stderr.is_empty(), "{}", said.stderr);
    ensure!(mounts(lab, "src", "greedy")? == 1 && mounts(lab, "src", "other")? == 1);
    lab.restart("src", "agent")?;
    // It has as much at its next host, and no more.
    greedy.migrate("dst")?.must_be_committed()?;
    other.migrate("dst")?.must_be_committed()?;
    let df = "df -k --output=size /run/verbatim/instances/greedy | tail -n 1";
    let size = lab.start_plain("dst", &["sh", "-c", df])?.succeed(LIMIT)?;
    ensure!(size.stdout.trim() == "65536", "{}", size.stdout);
    for name in ["greedy", "other"] {
        ensure!(mounts(lab, "src", name)? == 0, "{name} has left a mount");
        ensure!(left_behind(lab, "src", name)?.is_empty());
        lab.ask(&["stop", name])?;
        ensure!(mounts(lab, "dst", name)? == 0, "{name} has left a mount");
    }
    for name in ["greedy", "other"] {
        let left = left_behind(lab, "dst", name)?;
        ensure!(left.is_empty(), "{left:?}");
    }
    let less = lab.refused(&[
        "run",
        "--host",
        "src",
        "--name",
        "a",
        "--tmp-size",
        "1M",
        "--",
        "true",
    ])?;
    ensure!(less.contains("64 MiB"), "{less}");
    Ok(())
}

/// Mounts below the host's root are named, and seen by instances that are shown them.
fn shown(lab: &TestLab) -> anyhow::Result<()> {
    for host in HOSTS {
        let mount = "mount -t tmpfs own /mnt && echo of-the-mount > /mnt/file";
        lab.start_plain(host, &["sh", "-c", mount])?.succeed(LIMIT)?;
    }
    let program = "ls /mnt; echo done; sleep 1000";
    let run = ["run", "--host", "src", "--name"];
    let blind = lab.ask(&[&run[..], &["blind", "--", "sh", "-c", program]].concat())?;
    ensure!(
        blind.stderr.contains("not seen in it") && blind.stderr.contains("/mnt"),
        "{}",
        blind.stderr
    );
    let blind = lab.known("blind");
    says(&blind, "done")?;
    ensure!(!blind.output()?.contains("file"), "{}", blind.output()?);
    let sees = lab.ask(&[&run[..], &["sees", "--bind", "/mnt", "--", "sh", "-c", program]].concat())?;
    let note = sees.stderr.lines().find(|line| line.contains("not seen in it"));
    ensure!(!note.is_some_and(|note| note.contains("/mnt")), "{}", sees.stderr);
    let sees = lab.known("sees");
    says(&sees, "file")?;
    sees.migrate("dst")?.must_be_committed()?;
    sees.migrate("src")?.must_be_committed()?;
    // A program that is shown to an instance must be there, too.
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let path = folder.path().to_str().unwrap_or_default().to_owned();
    lab.ask(&[&run[..], &["bound", "--bind", &path, "--", "sleep", "1000"]].concat())?;
    drop(folder);
    let said = lab.verbatim(&["check", "bound", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(
        said.code == 1 && said.stdout.contains("is not there"),
        "{}",
        said.output()
    );
    let wrong = lab.refused(&[
        "run",
        "--host",
        "src",
        "--name",
        "a",
        "--bind",
        "/proc/self",
        "--",
        "true",
    ])?;
    ensure!(wrong.contains("its own /proc"), "{wrong}");
    Ok(())
}

/// Those that are started at once have different ones.
fn addresses(lab: &TestLab) -> anyhow::Result<()> {
    let names = ["a", "b", "c", "d"];
    let start = |name: &&str| lab.verbatim(&["run", "--host", "src", "--name", name, "--", "sleep", "1000"]);
    let started = names.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    for running in started {
        running.succeed(LIMIT)?;
    }
    let mut addresses = Vec::new();
    for name in names {
        addresses.push(lab.known(name).address()?);
    }
    addresses.sort();
    addresses.dedup();
    ensure!(addresses.len() == names.len(), "{addresses:?}");
    let taken = format!("{}/16", addresses[0]);
    let refused = lab.refused(&[
        "run",
        "--host",
        "src",
        "--name",
        "e",
        "--address",
        &taken,
        "--",
        "true",
    ])?;
    ensure!(refused.contains("is taken by"), "{refused}");
    Ok(())
}

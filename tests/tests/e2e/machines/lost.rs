//! What a virtual machine needs is lost, for a while or for good: its QEMU at a destination, or the daemon that serves its disk.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use verbatim_e2e::{Migration, ROLLED_BACK, TestLab, eventually, left_behind, patience};

use super::ends::waiting_at;
use super::{Guest, HOSTS, LIMIT, NAME, counted};
use crate::Test;
use crate::faults::Subject;
use crate::volumes::must;

/// How long QEMU keeps a guest's requests while its disk has no daemon (`verbatim_vm`, `reconnect-delay`).
const RECONNECTS: Duration = Duration::from_secs(60);

/// A guest that stops when a request fails, in place of getting the error.
const STOPPING: &str = "stopping";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "machines::dies_at_its_destination",
            HOSTS,
            dies_at_its_destination,
        )
        .injecting_faults(),
        Test::new("machines::volumes_daemon_is_away", HOSTS, daemon_is_away)
            .with_volumes()
            .only_on_demand(true),
        Test::new("machines::volumes_copy_is_held_up", HOSTS, copy_is_held_up)
            .with_volumes()
            .only_on_demand(true),
    ]
}

/// QEMU is killed at the destination when it has loaded the guest: before the decision the guest goes on at its source, and after it the guest has ended.
fn dies_at_its_destination(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    let migrate = waiting_at(lab, "dst", "destination-commit")?;
    guest.stands_still()?;
    guest.signal(lab, "dst", "KILL")?;
    lab.order_faults("dst", "")?;
    let migration = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains("QEMU has ended"), "{error}");
    guest.counts_on()?;
    let row = guest.instance.row()?;
    ensure!(row.host == "src" && row.state == "running", "{row:?}");
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());

    let migrate = waiting_at(lab, "dst", "destination-committed")?;
    let before = guest.count()?;
    guest.signal(lab, "dst", "KILL")?;
    lab.order_faults("dst", "")?;
    // What is said depends on when the death is noticed; the decision stays.
    let said = migrate.wait(LIMIT)?.output();
    let row = eventually("a guest that has ended", LIMIT, || {
        let row = guest.instance.row().ok();
        Ok(row.filter(|row| row.state == "exited"))
    })
    .with_context(|| said.clone())?;
    ensure!(
        row.host == "dst" && row.exit_status == Some(137),
        "{row:?}: {said}"
    );
    eventually("a source without leftovers", LIMIT, || {
        Ok(left_behind(lab, "src", NAME)?.is_empty().then_some(()))
    })?;
    ensure!(guest.count()? == before, "it has run");
    let sessions: Value = serde_json::from_str(&lab.ask(&["sessions", "--json"])?.stdout)?;
    ensure!(sessions.as_array().is_some_and(Vec::is_empty), "{sessions}");
    lab.ask(&["stop", NAME]).map(drop)
}

/// A word to a guest's QEMU.
fn tell(lab: &TestLab, name: &str, command: &'static str) -> anyhow::Result<()> {
    let qmp = lab.path("src", &format!("/run/verbatim/instances/{name}/qmp"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&qmp).await?;
        Ok(qmp.run(command, json!({})).await?)
    })
}

/// The daemon of two guests' disks is away for longer than QEMU keeps their requests. One guest gets errors, and works again after its reset. The other one is
/// stopped by QEMU (`werror=stop`, `rerror=stop`), loses nothing, and moves on.
fn daemon_is_away(lab: &TestLab) -> anyhow::Result<()> {
    const STOPS: &str = "disable-modern=on,werror=stop,rerror=stop";
    for volume in ["disk", "other"] {
        must(lab, "src", &["create", volume, "--size", "16M"])?;
    }
    let guest = Guest::start_with(lab, &["--volume", "disk:disable-modern=on"], &[])?;
    let stopping = Guest::start_as(lab, STOPPING, &["--volume", &format!("other:{STOPS}")], &[])?;
    lab.lab().kill("src", "volumes")?;
    let begun = Instant::now();
    for guest in [&guest, &stopping] {
        eventually("a guest that waits for its disk", patience(LIMIT), || {
            let before = guest.count()?;
            std::thread::sleep(Duration::from_millis(100));
            Ok((guest.count()? == before).then_some(()))
        })?;
    }
    let row = guest.instance.row()?;
    ensure!(row.state == "running" && row.troubles.is_empty(), "{row:?}");
    let troubles = |guest: &Guest| Ok::<_, anyhow::Error>(guest.instance.row()?.troubles.join("; "));
    let limit = patience(RECONNECTS + LIMIT);
    eventually("a disk that is said to have failed", limit, || {
        let said = troubles(&guest)?;
        Ok(said
            .contains("the disk verbatim-disk0 has failed: ")
            .then_some(()))
    })?;
    eventually("a guest that was stopped for its disk", limit, || {
        let said = troubles(&stopping)?;
        let is_said = [
            "stopped because a disk failed",
            "the disk verbatim-disk0: a request has failed",
        ];
        Ok(is_said.iter().all(|words| said.contains(words)).then_some(()))
    })?;
    let waited = begun.elapsed();
    ensure!(
        waited > RECONNECTS - Duration::from_secs(5),
        "it was said after {waited:?}"
    );
    let shown = lab.ask(&["ps"])?.stdout;
    ensure!(
        shown.contains("running (stopped because a disk failed"),
        "{shown}"
    );
    let said = guest.instance.output()?;
    ensure!(said.ends_with("BAD disk\n"), "{said}");

    lab.lab().start("src", "volumes")?;
    // An operator lets the one run that was stopped; the other one is restarted within its QEMU. QEMU connects anew for a request that it fails, and so may
    // stop the guest once more.
    let before = stopping.count()?;
    eventually("a guest that counts on", patience(LIMIT), || {
        tell(lab, STOPPING, "cont")?;
        std::thread::sleep(Duration::from_millis(500));
        Ok((stopping.count()? > before).then_some(()))
    })?;
    stopping.counts_on()?;
    let mut last = String::new();
    eventually("a guest with which nothing is wrong", LIMIT, || {
        last = troubles(&stopping)?;
        Ok(last.is_empty().then_some(()))
    })
    .with_context(|| last.clone())?;
    tell(lab, NAME, "system_reset")?;
    eventually("a guest that counts anew", patience(LIMIT), || {
        let said = guest.instance.output()?;
        let Some((_, since)) = said.rsplit_once("BAD disk\n") else {
            return Ok(None);
        };
        Ok((counted(since)? >= 20).then_some(()))
    })?;
    // Its failed requests stay counted as long as its QEMU lives.
    ensure!(troubles(&guest)?.contains("has failed"));
    guest.moves("dst")?;
    ensure!(troubles(&guest)?.is_empty(), "{}", troubles(&guest)?);
    stopping.instance.moves("dst")?;
    stopping.counts_on()?;
    for name in [NAME, STOPPING] {
        lab.ask(&["stop", name])?;
    }
    Ok(())
}

/// A volume's copy that comes no further is told beside `verbatim migrate`, with the reason, while the guest writes on; the move ends when the reason has.
fn copy_is_held_up(lab: &TestLab) -> anyhow::Result<()> {
    must(lab, "src", &["create", "disk", "--size", "16M"])?;
    let guest = Guest::start_with(lab, &["--volume", "disk:disable-modern=on"], &[])?;
    let migrate = lab.verbatim(&[
        "migrate",
        NAME,
        "--to",
        "dst",
        "--json-lines",
        "--max-bandwidth",
        "4",
    ])?;
    let notes = || -> anyhow::Result<String> { migrate.stdout() };
    eventually("a copy that is under way", patience(LIMIT), || {
        Ok(notes()?.contains("have still to be copied").then_some(()))
    })?;
    let signal = |signal: Signal| -> anyhow::Result<()> {
        let pid = lab.service_pid("dst", "volumes")?.to_string();
        let signal = match signal {
            Signal::STOP => "-STOP",
            _ => "-CONT",
        };
        lab.start_plain("dst", &["kill", signal, &pid])?.succeed(LIMIT)?;
        Ok(())
    };
    signal(Signal::STOP)?;
    let told = eventually("a copy that is said to come no further", patience(LIMIT), || {
        let notes = notes()?;
        let mut lines = notes.lines();
        Ok(lines
            .find(|line| line.contains("the copy has come no further for"))
            .map(str::to_owned))
    });
    let counts = guest.counts_on();
    signal(Signal::CONT)?;
    let told = told?;
    ensure!(
        told.contains("the volume disk: ") && told.contains("verbatim cancel guest"),
        "{told}"
    );
    counts.context("while its copy is held up")?;
    let ended = migrate.wait(patience(LIMIT * 2))?;
    ensure!(ended.code == 0, "{}", ended.output());
    guest.counts_on()?;
    let row = guest.instance.row()?;
    ensure!(row.host == "dst", "{row:?}");
    lab.ask(&["stop", NAME]).map(drop)
}

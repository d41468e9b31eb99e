//! QEMU's settings are put back when a move has ended, at either host and in any way; and obstacles are found
//! before a move.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_vm::{Arguments, Machine};

use crate::end::{Disk, End, consecutive, qemu};
use crate::{NEWER_VARIABLE, bring, move_it, pair, says};

/// Least size of a snapshot with the guest's RAM, most of which the guest fills.
const RAM: u64 = 4 << 20;

const LIMIT: Duration = Duration::from_secs(60);

/// All capabilities and parameters, by QEMU's answers.
async fn all(machine: &Machine) -> anyhow::Result<(Value, Value)> {
    let capabilities = machine.qmp().ask("query-migrate-capabilities", json!({})).await?;
    let parameters = machine.qmp().ask("query-migrate-parameters", json!({})).await?;
    Ok((capabilities, parameters))
}

/// The owner's values are back after each end of a move, and go along with the guest.
pub async fn put_back() -> anyhow::Result<()> {
    let (from, to) = pair(&[]).await?;
    let own = json!({"capabilities": [{"capability": "xbzrle", "state": true}]});
    from.machine.qmp().run("migrate-set-capabilities", own).await?;
    let own = json!({"max-bandwidth": 12_345_678, "downtime-limit": 77});
    from.machine.qmp().run("migrate-set-parameters", own).await?;
    let usual = all(&to.machine).await?;
    let before = all(&from.machine).await?;
    ensure!(before != usual);

    let (outgoing, state) = from.machine.leave().await?;
    drop(state);
    ensure!(all(&from.machine).await? != before, "a move needs other settings");
    outgoing.take_back().await?;
    ensure!(
        all(&from.machine).await? == before,
        "given up while the guest runs"
    );

    let (mut outgoing, _state) = from.machine.leave().await?;
    outgoing.stopped().await?;
    outgoing.take_back().await?;
    ensure!(
        all(&from.machine).await? == before,
        "given up when it stands still"
    );

    // By a later process, with the settings noted by one that died.
    let noted = from.machine.settings().await?;
    let (mut outgoing, _state) = from.machine.leave_from(noted.clone()).await?;
    outgoing.stopped().await?;
    drop(outgoing);
    from.machine.take_back(true, Some(&noted)).await?;
    ensure!(all(&from.machine).await? == before, "taken back by another");
    from.ticks_on()?;

    let moving = bring(&from, &to, true).await?;
    from.machine.quit().await?;
    moving.incoming.run().await?;
    ensure!(all(&to.machine).await? == usual, "as the one that it came to was");
    to.machine.put_back(&noted).await?;
    ensure!(all(&to.machine).await? == before, "as it was at its source");
    to.ticks_on()?;
    consecutive(&[&from, &to])?;
    Ok(())
}

/// Sends one line to QEMU's human monitor, which prints nothing on success.
async fn monitor(end: &End, line: &str) -> anyhow::Result<()> {
    let asked = json!({"command-line": line});
    let said: String = end.machine.qmp().ask("human-monitor-command", asked).await?;
    ensure!(said.trim().is_empty(), "`{line}`: {said}");
    Ok(())
}

/// Takes a snapshot and loads it: it has the RAM, and the guest goes on from it.
async fn snapshot(end: &End, name: &str) -> anyhow::Result<()> {
    monitor(end, &format!("savevm {name}")).await?;
    let nodes: Value = end
        .machine
        .qmp()
        .ask("query-named-block-nodes", json!({}))
        .await?;
    let nodes = nodes.as_array().context("a list")?.iter();
    let mut snapshots = nodes
        .filter_map(|node| node["image"]["snapshots"].as_array())
        .flatten();
    let own = snapshots
        .find(|snapshot| snapshot["name"] == name)
        .context("a snapshot")?;
    let bytes = own["vm-state-size"].as_u64().context("its size")?;
    ensure!(bytes > RAM, "{name} has {bytes} bytes: no RAM");
    end.ticks_on()?;
    let number = |line: &str| {
        line.strip_prefix("tick ")
            .and_then(|number| number.parse::<u32>().ok())
    };
    let said = end.said()?;
    let (lines, _) = said.rsplit_once('\n').context("whole lines")?;
    let before = lines.lines().next_back().and_then(number).context("a tick")?;
    monitor(end, &format!("loadvm {name}")).await?;
    // The guest checks that its memory is that of the snapshot.
    end.ticks_on()?;
    let said = end.said()?;
    // A line may mix output from before and after the load.
    let mut after = said.lines().skip(lines.lines().count() + 3).filter_map(number);
    let after = after.next().context("a tick")?;
    ensure!(after < before, "{after} after {before}: it is not that of then");
    Ok(())
}

/// QEMU's own migration to a file has the RAM, too, and ends.
async fn saved(end: &End, disk: &Disk) -> anyhow::Result<()> {
    let path = disk.beside("saved");
    let file = File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .open(&path)?;
    end.machine.qmp().give("saved", OwnedFd::from(file)).await?;
    end.machine
        .qmp()
        .run("migrate", json!({"uri": "fd:saved"}))
        .await?;
    let begun = Instant::now();
    loop {
        let now: Value = end.machine.qmp().ask("query-migrate", json!({})).await?;
        match now["status"].as_str() {
            Some("completed") => break,
            Some("setup" | "active" | "device") if begun.elapsed() < LIMIT => {}
            _ => anyhow::bail!("a migration to a file comes to {now}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let bytes = path.metadata()?.len();
    ensure!(bytes > RAM, "the file has {bytes} bytes: no RAM");
    end.machine.qmp().run("cont", json!({})).await?;
    end.ticks_on()
}

pub async fn snapshots() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let path = disk.beside("disk.qcow2").display().to_string();
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", &path, "64M"])
        .status()?;
    ensure!(made.success());
    let drive = format!("file={path},format=qcow2,if=none,id=snapshots");
    let more = ["-drive", &drive, "-device", "virtio-blk-pci,drive=snapshots"];
    let (from, to) = pair(&more).await?;
    let (mut outgoing, _state) = from.machine.leave().await?;
    outgoing.stopped().await?;
    outgoing.take_back().await?;
    snapshot(&from, "given-up").await?;
    saved(&from, &disk).await?;
    monitor(&from, "delvm given-up").await?;
    // After a load of a snapshot the guest's output is no consecutive count any more.
    move_it(&from, &to).await?;
    snapshot(&to, "moved").await?;
    saved(&to, &disk).await
}

/// Takes a shared lock on all of a file, as long as the file is open here.
fn lock(file: &File) -> anyhow::Result<()> {
    // SAFETY: a structure of numbers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as libc::c_short;
    // SAFETY: the descriptor is open, and the command takes a pointer to such a structure.
    let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
    ensure!(locked == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

/// A lock of another process is found before a move, and when the guest stands still; the guest goes on at
/// its source.
pub async fn locked() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let drive = disk.drive("threads");
    let from = End::run(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]).await?;
    let file = File::open(disk.beside("disk"))?;
    lock(&file)?;
    says(from.machine.may_move().await, "another process")?;
    drop(file);
    for is_locked in [true, false] {
        let (mut outgoing, mut state) = from.machine.leave().await?;
        let pump = tokio::spawn(async move { tokio::io::copy(&mut state, &mut tokio::io::sink()).await });
        outgoing.stopped().await?;
        // On all bytes, as a backup may do. QEMU's locks are shared, too.
        let file = File::open(disk.beside("disk"))?;
        if is_locked {
            lock(&file)?;
        }
        outgoing.hand_over().await?;
        let has_let_go = outgoing.has_let_go();
        drop(file);
        match is_locked {
            true => says(has_let_go, "another process")?,
            false => has_let_go?,
        }
        outgoing.take_back().await?;
        pump.await??;
        from.ticks_on()?;
    }
    consecutive(&[&from])?;
    Ok(())
}

pub async fn quorum() -> anyhow::Result<()> {
    let disk = Disk::new()?;
    File::create(disk.beside("other"))?.set_len(16 << 20)?;
    let file = |name: &str, path: &str| {
        format!(
            "driver=raw,node-name={name},file.driver=file,file.filename={}",
            disk.beside(path).display()
        )
    };
    let quorum = "driver=quorum,node-name=both,vote-threshold=1,children.0=one,children.1=two";
    let (one, two) = (file("one", "disk"), file("two", "other"));
    let more = ["-blockdev", &one, "-blockdev", &two, "-blockdev", quorum];
    let from = End::run(&[&more[..], &["-device", "virtio-blk-pci,drive=both"]].concat()).await?;
    says(
        from.machine.may_move().await,
        "the block node both is of driver quorum",
    )?;
    from.ticks_on()
}

/// Processors and types of machines are compared before a QEMU takes a guest.
pub async fn offered() -> anyhow::Result<()> {
    let from = End::run(&["-cpu", "max,-movbe"]).await?;
    let own = from.machine.processor(from.arguments()).await?;
    let same = from.arguments().offered().await?.processor;
    ensure!(
        own.missed_by(&same).is_none() && own.differs_from(&same).is_none(),
        "{own:?}"
    );
    let of = |line: &[&str]| Arguments::parse(&[&[&qemu()[..], "-accel", "tcg"], line].concat());
    let machine = from.machine.machine_type().await?;
    let less = of(&["-M", &machine, "-cpu", "max,-movbe,-avx2,sse4.2=off"])?;
    let less = less.offered().await?.processor;
    let why = own
        .missed_by(&less)
        .context("features are gone, and nothing is said")?;
    ensure!(
        ["avx2", "sse4.2", "-cpu max"]
            .iter()
            .all(|said| why.contains(said)),
        "{why}"
    );
    ensure!(less.missed_by(&own).is_none());
    // A feature that QEMU's accelerator lacks is not the guest's, even if the model has it.
    let (haswell, same) = (
        of(&["-M", &machine, "-cpu", "Haswell"])?,
        of(&["-M", &machine, "-cpu", "Haswell,-pcid"])?,
    );
    let (haswell, same) = (haswell.offered().await?, same.offered().await?);
    ensure!(haswell.processor.missed_by(&same.processor).is_none());

    let unknown = of(&["-M", "pc-q35-99.0"])?;
    says(
        unknown.offered().await,
        "has no machine `pc-q35-99.0`, and the newest of that kind is pc-q35-",
    )?;
    says(of(&["-M", &machine, "-cpu", "nosuch"])?.offered().await, "nosuch")?;
    let missing = Arguments::parse(&["/no/such/qemu", "-M", "pc"])?.offered().await;
    says(missing, "/no/such/qemu is not there")?;

    let Ok(newer) = std::env::var(NEWER_VARIABLE) else {
        println!("skipped: {NEWER_VARIABLE} names no newer QEMU");
        return Ok(());
    };
    // `max` is another processor with each release. What is missing is named, and with that switched off nothing is.
    let older = qemu();
    for (here, there) in [(&older, &newer), (&newer, &older)] {
        let max = |program: &str, less: &str| {
            let cpu = format!("max{less}");
            Arguments::parse(&[program, "-accel", "tcg", "-M", &machine, "-cpu", &cpu])
        };
        let own = max(here, "")?.offered().await?.processor;
        let other = max(there, "")?.offered().await?.processor;
        let Some(why) = own.missed_by(&other) else {
            println!("{here} -> {there}: nothing is missing");
            continue;
        };
        println!("{here} -> {there}: {why}");
        let named = why
            .split_once("which lacks ")
            .and_then(|(_, rest)| rest.split_once(':'));
        let (named, _) = named.with_context(|| format!("features that are not named: {why}"))?;
        let less: String = named.split(", ").map(|name| format!(",-{name}")).collect();
        let own = max(here, &less)?.offered().await?.processor;
        let why = own.missed_by(&other);
        ensure!(why.is_none(), "{here} -> {there}: {named} switched off: {why:?}");
    }
    Ok(())
}

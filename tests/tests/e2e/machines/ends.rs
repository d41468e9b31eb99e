//! How moves end: QEMU is as its owner had set it, no lock stands between the decision and the guest, and what the next host lacks is said before.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{Migration, ROLLED_BACK, Running, TestLab, eventually, left_behind};

use super::{Disk, Guest, HOSTS, LIMIT, NAME, blockers, counted, program};
use crate::Test;
use crate::faults::Subject;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::settings", HOSTS, settings).injecting_faults(),
        Test::new("machines::recovering", HOSTS, recovering).injecting_faults(),
        Test::new("machines::stands_still", HOSTS, stands_still).injecting_faults(),
        Test::new("machines::unprotected", HOSTS, unprotected).injecting_faults(),
        Test::new("machines::locked", HOSTS, locked),
        Test::new("machines::locked_there", HOSTS, locked_there).injecting_faults(),
        Test::new("machines::processors", HOSTS, processors),
        Test::new("machines::troubles", &["src"], troubles),
    ]
}

/// Asks a QEMU by its QMP socket.
fn ask(
    lab: &TestLab,
    host: &str,
    socket: &str,
    commands: &[(&'static str, Value)],
) -> anyhow::Result<Vec<Value>> {
    let socket = lab.path(host, socket)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&socket).await?;
        let mut answers = Vec::new();
        for (command, arguments) in commands {
            answers.push(qmp.ask(command, arguments.clone()).await?);
        }
        Ok(answers)
    })
}

/// What QEMU is set to, all of it.
fn set(lab: &TestLab, host: &str, socket: &str) -> anyhow::Result<Vec<Value>> {
    let all = ["query-migrate-capabilities", "query-migrate-parameters"];
    ask(lab, host, socket, &all.map(|command| (command, json!({}))))
}

/// Starts a move that waits at a point of a host.
pub(super) fn waiting_at(lab: &TestLab, host: &str, point: &str) -> anyhow::Result<Running> {
    let reached = lab.path(host, "/run/verbatim/faults.reached")?;
    // Of a move before.
    let (Ok(()) | Err(_)) = std::fs::remove_file(&reached);
    lab.order_faults(host, &format!("{point} hang\n"))?;
    let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
    eventually(point, LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains(point).then_some(()))
    })?;
    Ok(migrate)
}

/// Somebody else's QEMU is set as before after a move that came to nothing, after an agent that died in one, when it is detached, and where it arrives.
fn settings(lab: &TestLab) -> anyhow::Result<()> {
    const SOCKET: &str = "/run/guest.qmp";
    let program = program()?;
    let qemu = lab.start_plain(
        "src",
        &[
            "qemu-system-x86_64",
            "-M",
            "pc,memory-backend=mem",
            "-object",
            "memory-backend-file,id=mem,size=16M,mem-path=/run/guest.ram,share=on",
            "-accel",
            "tcg",
            "-m",
            "16",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-qmp",
            &format!("unix:{SOCKET},server=on,wait=off"),
            "-serial",
            "stdio",
            "-kernel",
            program.to_str().context("a path in UTF-8")?,
        ],
    )?;
    eventually("a guest that counts", LIMIT, || {
        Ok((counted(&qemu.stdout()?)? >= 20).then_some(()))
    })?;
    let own = [
        (
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "xbzrle", "state": true}]}),
        ),
        (
            "migrate-set-parameters",
            json!({"max-bandwidth": 12_345_678, "downtime-limit": 77}),
        ),
    ];
    ask(lab, "src", SOCKET, &own)?;
    let before = set(lab, "src", SOCKET)?;
    let is_as_before = |when: &str| -> anyhow::Result<()> {
        let now = set(lab, "src", SOCKET)?;
        ensure!(now == before, "{when}: {now:?} in the place of {before:?}");
        Ok(())
    };
    lab.ask(&["attach", NAME, "--qmp", SOCKET, "--host", "src"])?;
    let instance = lab.known(NAME);
    lab.order_faults("src", "source-transfer fail\n")?;
    let migration = instance.migrate("dst")?;
    lab.order_faults("src", "")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    is_as_before("after a move that came to nothing")?;
    lab.ask(&["detach", NAME])?;
    is_as_before("when it is detached")?;

    lab.ask(&["attach", NAME, "--qmp", SOCKET, "--host", "src"])?;
    let migrate = waiting_at(lab, "src", "source-transfer")?;
    lab.restart("src", "agent")?;
    migrate.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    eventually("an instance that is moved no more", LIMIT, || {
        Ok((instance.row()?.state == "running").then_some(()))
    })?;
    eventually("a QEMU that is set as before", LIMIT, || {
        Ok((set(lab, "src", SOCKET)? == before).then_some(()))
    })?;

    instance.moves("dst")?;
    let there = set(lab, "dst", "/run/verbatim/instances/guest/qmp")?;
    ensure!(
        there == before,
        "where it has arrived: {there:?} in the place of {before:?}"
    );
    instance.moves("src")?;
    let there = set(lab, "src", "/run/verbatim/instances/guest/qmp")?;
    ensure!(
        there == before,
        "where it is again: {there:?} in the place of {before:?}"
    );
    lab.ask(&["stop", NAME])?;
    Ok(())
}

/// Takes a shared lock of an open file (`F_OFD_SETLK`) on all of an image, and waits.
const SHARED: &str = "import fcntl, struct, sys
file = open(sys.argv[1], 'rb')
fcntl.fcntl(file, 37, struct.pack('hhqqixxxx', fcntl.F_RDLCK, 0, 0, 0, 0))
sys.stdin.read()";

/// An agent that was started anew lists an instance of a session at once, also while it cannot take it over yet: a process that an earlier agent has noted is still
/// at work.
fn recovering(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    let before = guest.instance.row()?;
    let migrate = waiting_at(lab, "src", "source-pre-copy")?;
    // Fields 1 and 22 of proc_pid_stat(5).
    let at_work = lab.start_plain("src", &["sh", "-c", "cat /proc/$$/stat; exec sleep 600"])?;
    let (pid, started) = eventually("a process that is at work", LIMIT, || {
        let stat = at_work.stdout()?;
        let mut fields = stat.split_ascii_whitespace().map(str::to_owned);
        Ok(fields.next().zip(fields.nth(22 - 2)))
    })?;
    let note = lab.path("src", "/run/verbatim/criu/guest/runc-checkpoint.process")?;
    std::fs::write(note, format!("{pid} {started}"))?;
    lab.restart("src", "agent")?;
    migrate.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    let row = guest.instance.row()?;
    ensure!(row.host == "src" && row.state == "recovering", "{row:?}");
    ensure!(row.address == before.address && row.pid == before.pid, "{row:?}");
    let said = lab.refused(&["migrate", NAME, "--to", "dst"])?;
    ensure!(said.contains("is being taken over"), "{said}");
    lab.start_plain("src", &["kill", &pid])?.succeed(LIMIT)?;
    eventually("an instance that is moved no more", LIMIT, || {
        let row = guest.instance.row()?;
        ensure!(
            ["recovering", "moving", "running"].contains(&row.state.as_str()),
            "{row:?}"
        );
        Ok((row.state == "running").then_some(()))
    })?;
    guest.counts_on()?;
    guest.moves("dst")?;
    lab.ask(&["stop", NAME])?;
    Ok(())
}

/// A program that has a lock on an image.
struct Writer {
    child: Child,
    input: Option<ChildStdin>,
}

impl Writer {
    /// Another QEMU that writes to an image, and lets others do that, too.
    fn to(image: &Path) -> anyhow::Result<Self> {
        Self::of(Command::new("qemu-io").args(["-f", "raw"]).arg(image))
    }

    /// One that reads all of an image, and denies everything to others.
    fn denies(image: &Path) -> anyhow::Result<Self> {
        Self::of(Command::new("python3").args(["-c", SHARED]).arg(image))
    }

    /// A program that locks an image until its standard input ends.
    fn of(command: &mut Command) -> anyhow::Result<Self> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let mut child = child.with_context(|| format!("{command:?} cannot be started: run setup.sh"))?;
        let (input, pid) = (child.stdin.take(), child.id());
        let mut writer = Self { child, input };
        eventually("a lock on the image", LIMIT, || {
            ensure!(writer.child.try_wait()?.is_none(), "the image is not locked");
            let folder = std::fs::read_dir(format!("/proc/{pid}/fdinfo"))?;
            let infos = folder
                .flatten()
                .map(|entry| std::fs::read_to_string(entry.path()));
            let mut infos = infos.flatten();
            Ok(infos.any(|info| info.contains("OFDLCK")).then_some(()))
        })?;
        Ok(writer)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.input.take();
        let (Ok(()) | Err(_)) = self.child.kill();
        let (Ok(_) | Err(_)) = self.child.wait();
    }
}

/// Has a QEMU that has loaded its guest let go of its images, as somebody could who has a monitor of it: by a migration of its own, which ends well.
fn has_let_go(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    let pid = std::fs::read_to_string(lab.path(host, "/run/verbatim/bundles/guest/init.pid")?)?;
    let own = format!("/proc/{}/root/tmp", pid.trim());
    let sink = std::os::unix::net::UnixListener::bind(lab.path(host, &format!("{own}/sink"))?)?;
    let taker = std::thread::spawn(move || {
        let (mut stream, _) = sink.accept()?;
        std::io::copy(&mut stream, &mut std::io::sink())
    });
    let socket = format!("{own}/own.qmp");
    let commands = [
        (
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "pause-before-switchover", "state": false}]}),
        ),
        ("migrate", json!({"uri": "unix:/tmp/sink"})),
    ];
    ask(lab, host, &socket, &commands)?;
    eventually("a migration that has ended", LIMIT, || {
        let answers = ask(lab, host, &socket, &[("query-migrate", json!({}))])?;
        Ok((answers[0]["status"] == "completed").then_some(()))
    })?;
    let taken = taker
        .join()
        .map_err(|_| anyhow::anyhow!("who takes it panicked"))?;
    ensure!(taken? > 0, "nothing was sent");
    Ok(())
}

/// QEMU at the destination does not let the guest run after the decision. The source hears of the decision all the same, the guest is listed with the reason,
/// and nobody is talked into letting it run twice.
fn stands_still(lab: &TestLab) -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let arguments = disk.arguments("threads");
    let monitor = [
        "-chardev",
        "socket,id=own,path=/tmp/own.qmp,server=on,wait=off",
        "-mon",
        "chardev=own,mode=control",
    ];
    let arguments = arguments.iter().map(String::as_str).chain(monitor);
    let guest = Guest::start(lab, &arguments.collect::<Vec<_>>())?;
    let migrate = waiting_at(lab, "dst", "destination-committed")?;
    // Both hosts have found that nobody has a lock. QEMU there has the image, lets go of it, and somebody takes it.
    has_let_go(lab, "dst")?;
    let writer = Writer::denies(&disk.path())?;
    let session = eventually("a session in doubt", LIMIT, || {
        let sessions: Value = serde_json::from_str(&lab.ask(&["sessions", "--all", "--json"])?.stdout)?;
        let sessions = sessions.as_array().context("a list")?.iter();
        let mut here = sessions.filter(|session| session["host"] == "src" && session["state"] == "in doubt");
        Ok(here
            .next()
            .and_then(|session| session["id"].as_str().map(str::to_owned)))
    })?;
    let said = lab.refused(&["session", "resolve", &session, "--keep", "source", "--force"])?;
    ensure!(said.contains("could still be let run there"), "{said}");
    lab.order_faults("dst", "")?;
    Migration::of(&migrate.wait(LIMIT)?)?.must_be_committed()?;
    let row = guest.instance.row()?;
    ensure!(row.host == "dst", "{row:?}");
    eventually("a guest that is said to stand still", LIMIT, || {
        let troubles = guest.instance.row()?.troubles.join("; ");
        Ok((troubles.contains("stands still") && troubles.contains("lock")).then_some(()))
    })?;
    guest.stands_still()?;
    eventually("a source without leftovers", LIMIT, || {
        Ok(left_behind(lab, "src", NAME)?.is_empty().then_some(()))
    })?;
    let check = lab.verbatim(&["check", NAME, "--to", "src"])?.wait(LIMIT)?;
    ensure!(
        check.code == 1 && check.output().contains("stands still"),
        "{}",
        check.output()
    );
    // An agent that comes after this one knows it, too.
    lab.restart("dst", "agent")?;
    eventually("an agent that says so", LIMIT, || {
        let row = guest.instance.row().ok();
        Ok(row
            .filter(|row| row.troubles.join("; ").contains("stands still"))
            .map(drop))
    })?;
    drop(writer);
    guest.counts_on()?;
    eventually("a guest with which nothing is wrong", LIMIT, || {
        Ok(guest.instance.row()?.troubles.is_empty().then_some(()))
    })?;
    guest.moves("src")?;
    guest.counts_on()?;
    Ok(())
}

/// What takes a lock on an image where QEMU is about to load the guest keeps it where it is, whether that QEMU would say so (it is denied what it needs), or not.
fn locked_there(lab: &TestLab) -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let arguments = disk.arguments("threads");
    let guest = Guest::start(lab, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    for locks in [Writer::denies, Writer::to] {
        // The source has proved that nobody has one.
        let migrate = waiting_at(lab, "dst", "destination-restore")?;
        let other = locks(&disk.path())?;
        lab.order_faults("dst", "")?;
        let migration = Migration::of(&migrate.wait(LIMIT)?)?;
        let disk = disk.path();
        let disk = disk.to_str().context("a path in UTF-8")?;
        migration.must_be_rolled_back(&["dst", "has a lock on", disk, "end that process"])?;
        // The source's QEMU does not get its locks back before that process ends, either.
        drop(other);
        guest.counts_on()?;
        eventually("a destination without leftovers", LIMIT, || {
            Ok(left_behind(lab, "dst", NAME)?.is_empty().then_some(()))
        })?;
    }
    guest.moves("dst")?;
    guest.counts_on()
}

/// The guest's part of an output. QEMU's words may begin in the middle of one of the guest's lines, since a guest may move between two bytes.
fn without_qemus_lines(said: &str) -> String {
    const BEGINNINGS: [&str; 2] = ["Failed to get ", "Is another process using the image "];
    let mut guests = said.to_owned();
    for beginning in BEGINNINGS {
        while let Some(from) = guests.find(beginning) {
            let length = guests[from..].find('\n').map(|end| end + 1);
            guests.drain(from..length.map_or(guests.len(), |length| from + length));
        }
    }
    guests
}

/// QEMU lets a guest run although it cannot deny its image to others: that is said as long as it is so.
fn unprotected(lab: &TestLab) -> anyhow::Result<()> {
    const SAID: &str = "is not locked against others";
    let disk = Disk::new()?;
    let arguments = disk.arguments("threads");
    let guest = Guest::start(lab, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let count = || counted(&without_qemus_lines(&guest.instance.output()?));
    let counts_on = || -> anyhow::Result<()> {
        let before = count()?;
        eventually("a guest that counts", LIMIT, || {
            Ok((count()? >= before + 20).then_some(()))
        })
    };
    let migrate = waiting_at(lab, "dst", "destination-committed")?;
    // QEMU there uses the image, and denies it to nobody before the guest runs.
    let other = Writer::to(&disk.path())?;
    lab.order_faults("dst", "")?;
    Migration::of(&migrate.wait(LIMIT)?)?.must_be_committed()?;
    counts_on()?;
    let is_said = || {
        let troubles = guest.instance.row()?.troubles.join("; ");
        let names_it = troubles.contains(&disk.path().display().to_string());
        Ok((troubles.contains(SAID) && names_it).then_some(()))
    };
    eventually("an image that is said not to be locked", LIMIT, is_said)?;
    let check = || lab.verbatim(&["check", NAME, "--to", "src"])?.wait(LIMIT);
    // The writer has a lock that the guest was to deny to others, and has not.
    let refused = check()?;
    ensure!(
        refused.code == 1 && refused.output().contains("has a lock on"),
        "{}",
        refused.output()
    );
    lab.restart("dst", "agent")?;
    eventually("an agent that says so, too", LIMIT, is_said)?;
    // QEMU does not try it again.
    drop(other);
    eventually("that it is still said", LIMIT, is_said)?;
    let allowed = check()?;
    ensure!(
        allowed.code == 0 && allowed.output().contains(SAID),
        "{}",
        allowed.output()
    );
    guest.moves("src")?;
    counts_on()?;
    let troubles = guest.instance.row()?.troubles;
    ensure!(troubles.is_empty(), "{troubles:?}");
    Ok(())
}

/// What has a lock on an image keeps a virtual machine where it is.
fn locked(lab: &TestLab) -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let arguments = disk.arguments("threads");
    let guest = Guest::start(lab, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    // QEMU has its locks together with others. A lock of an open file is seen from each PID namespace, that of a process is not.
    let reader = Writer::denies(&disk.path())?;
    let said = blockers(lab)?;
    ensure!(
        said.contains("has a lock on") && said.contains("end that process"),
        "{said}"
    );
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    guest.counts_on()?;
    drop(reader);
    guest.moves("dst")?;
    guest.counts_on()?;
    lab.ask(&["stop", NAME])?;

    // A node that keeps its locks is named before it would matter.
    let other = Disk::new()?;
    let file = |name: &str, disk: &Disk| {
        format!(
            "driver=raw,node-name={name},file.driver=file,file.filename={}",
            disk.path().display()
        )
    };
    let (one, two) = (file("one", &disk), file("two", &other));
    let quorum = "driver=quorum,node-name=both,vote-threshold=1,children.0=one,children.1=two";
    let arguments = ["-blockdev", &one, "-blockdev", &two, "-blockdev", quorum];
    let device = ["-device", "virtio-blk-pci,drive=both,disable-modern=on"];
    let guest = Guest::start(lab, &[&arguments[..], &device].concat())?;
    let said = blockers(lab)?;
    ensure!(said.contains("quorum"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    guest.counts_on()
}

/// A program that is QEMU on one host, and on another a QEMU with another processor.
struct Wrapper(tempfile::TempDir);

impl Wrapper {
    /// Each host has a `/run` of its own.
    const OTHER: &str = "/run/other-processor";

    fn new() -> anyhow::Result<Self> {
        let wrapper = Self(tempfile::TempDir::new_in("/var/tmp")?);
        let script = format!(
            "#!/bin/sh\n[ -e {} ] && [ \"$2\" != help ] && set -- \"$@\" -cpu max,-avx2,-movbe\nexec qemu-system-x86_64 \"$@\"\n",
            Self::OTHER
        );
        std::fs::write(wrapper.path(), script)?;
        for path in [wrapper.0.path(), &wrapper.path()] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755))?;
        }
        Ok(wrapper)
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("qemu-wrapper")
    }
}

/// Features that the next host's processor lacks are named before anything is sent.
fn processors(lab: &TestLab) -> anyhow::Result<()> {
    let wrapper = Wrapper::new()?;
    let (qemu, program) = (wrapper.path(), program()?);
    let words = [
        qemu.to_str().context("a path in UTF-8")?,
        "-M",
        "pc",
        "-accel",
        "tcg",
        "-cpu",
        "max",
        "-m",
        "16",
        "-nodefaults",
        "-no-user-config",
        "-serial",
        "stdio",
        "-kernel",
        program.to_str().context("a path in UTF-8")?,
    ];
    let instance = lab.machine_with("src", NAME, &[], &words)?;
    let guest = Guest { instance };
    guest.counts_on()?;
    std::fs::write(lab.path("dst", Wrapper::OTHER)?, "")?;
    let said = blockers(lab)?;
    ensure!(
        said.contains("lacks avx2, movbe") && said.contains("-cpu max"),
        "{said}"
    );
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    ensure!(migration.bytes.pre_copy == 0, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains("lacks avx2, movbe"), "{error}");
    guest.counts_on()?;
    std::fs::remove_file(lab.path("dst", Wrapper::OTHER)?)?;
    // What QEMU there has said counts for a moment.
    eventually("a host with the same processor", LIMIT, || {
        let check = lab.verbatim(&["check", NAME, "--to", "dst"])?.wait(LIMIT)?;
        Ok((check.code == 0).then_some(()))
    })?;
    guest.moves("dst")?;
    guest.counts_on()
}

/// A disk that has failed is shown.
fn troubles(lab: &TestLab) -> anyhow::Result<()> {
    let program = program()?;
    let disk = "driver=raw,node-name=bad,file.driver=blkdebug,file.image.driver=null-co,file.image.size=16777216,\
                file.inject-error.0.event=write_aio,file.inject-error.0.errno=28";
    let words = [
        "-M",
        "pc",
        "-accel",
        "tcg",
        "-m",
        "16",
        "-nodefaults",
        "-no-user-config",
        "-serial",
        "stdio",
        "-kernel",
        program.to_str().context("a path in UTF-8")?,
        "-blockdev",
        disk,
        "-device",
        "virtio-blk-pci,drive=bad,disable-modern=on,werror=stop",
    ];
    let instance = lab.machine_with("src", NAME, &[], &words)?;
    let mut last = String::new();
    eventually("a disk that is said to have failed", LIMIT, || {
        last = instance.row()?.troubles.join("; ");
        let is_said = ["stopped because a disk failed", "its storage is full"]
            .iter()
            .all(|words| last.contains(words));
        Ok(is_said.then_some(()))
    })
    .with_context(|| last.clone())?;
    let shown = lab.ask(&["ps"])?.stdout;
    ensure!(
        shown.contains("running (stopped because a disk failed"),
        "{shown}"
    );
    lab.ask(&["stop", NAME])?;
    Ok(())
}

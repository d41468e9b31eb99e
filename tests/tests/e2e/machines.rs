//! Virtual machines as instances: QEMU with a guest that knows what must be in each page of its RAM, and counts (`crates/vm/guest`).
//!
//! What the guest has said is in the instance's output, and moves with it: so that it is 1, 2, 3, … shows that no copy ran beside another and
//! none went back, and the guest says itself when a page is not what it was.

mod cards;
mod changed;
pub(crate) mod devices;
mod ends;
mod lost;
mod memory;
mod post_copy;
mod servers;
mod swap;
mod volumes;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Action, Instance, ROLLED_BACK, TestLab, eventually, left_behind};

use crate::Test;
use crate::faults::{self, Method, Point, Subject};

const HOSTS: &[&str] = &["src", "dst"];
/// With a host that none of it is on, since faults are ordered by the same code as for connections.
const THREE: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "guest";

/// Something before, at and after the commit, at either host.
const SHORT: &[(&str, Action)] = &[
    ("source-pre-copy", Action::Exit),
    ("source-freeze", Action::Fail),
    ("source-transfer", Action::Exit),
    ("source-ask", Action::Exit),
    ("source-committed", Action::Exit),
    ("destination-prepare-restore", Action::Exit),
    ("destination-restore", Action::Hang),
    ("destination-committed", Action::Exit),
    ("destination-running", Action::Exit),
];

/// What has to do with programs and their connections.
const NOT_PASSED: &[&str] = &["source-track", "source-stop", "source-pause"];

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("machines::moves", HOSTS, moves),
        Test::new("machines::faults", THREE, |lab| {
            faults::some(lab, subject(lab)?, SHORT)
        })
        .injecting_faults(),
        Test::new("machines::deaths", HOSTS, deaths).injecting_faults(),
        Test::new("machines::refused", HOSTS, refused),
        Test::new("machines::attached", HOSTS, attached).injecting_faults(),
    ];
    tests.extend(cards::tests());
    tests.extend(changed::tests());
    tests.extend(devices::tests());
    tests.extend(memory::tests());
    tests.extend(ends::tests());
    tests.extend(lost::tests());
    tests.extend(post_copy::tests());
    tests.extend(servers::tests());
    tests.extend(volumes::tests());
    tests.extend(swap::tests());
    for role in ["source", "destination"] {
        let every = Test::new(format!("machines::every_{role}"), &["src"], move |_| {
            let points = faults::points();
            let passed = points.iter().filter(|point| point.role == role);
            let passed = passed.filter(|point| !NOT_PASSED.contains(&point.name.as_str()));
            faults::every(passed, Method::WaitBeforeStop, subject, is_for)
        });
        tests.push(every.only_on_demand(true));
    }
    tests
}

/// Whether an action makes sense at a point. The RNIC is nothing to a virtual machine.
fn is_for(action: Action, point: &Point) -> bool {
    match action {
        Action::Exit | Action::Hang => true,
        Action::Fail => point.time != "at-commit",
        Action::KillNic | Action::Damage => false,
    }
}

/// The guest's program, built when it is first asked for.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    static BUILT: std::sync::OnceLock<Result<PathBuf, String>> = std::sync::OnceLock::new();
    let build = || {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let made = Command::new("make")
            .args([
                "-s",
                "-C",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/vm/guest"),
            ])
            .arg(format!("OUT={}", out.display()))
            .stdin(Stdio::null())
            .output();
        match made {
            Ok(made) if made.status.success() => Ok(out.join("check")),
            Ok(made) => Err(String::from_utf8_lossy(&made.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        }
    };
    BUILT.get_or_init(build).clone().map_err(anyhow::Error::msg)
}

/// A virtual machine.
struct Guest<'a> {
    instance: Instance<'a>,
}

impl<'a> Guest<'a> {
    /// Starts one on `src`, with more than the usual arguments; returns when it counts.
    fn start(lab: &'a TestLab, more: &[&str]) -> anyhow::Result<Self> {
        Self::start_with(lab, &[], more)
    }

    /// The same with options of `verbatim run`.
    fn start_with(lab: &'a TestLab, options: &[&str], more: &[&str]) -> anyhow::Result<Self> {
        Self::start_as(lab, NAME, options, more)
    }

    /// The same with another name.
    fn start_as(lab: &'a TestLab, name: &str, options: &[&str], more: &[&str]) -> anyhow::Result<Self> {
        let program = program()?;
        let usual = [
            "-M",
            "pc",
            "-accel",
            "tcg",
            "-m",
            "16",
            "-nodefaults",
            "-no-user-config",
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
            "-serial",
            "stdio",
            "-kernel",
            program.to_str().context("a path in UTF-8")?,
        ];
        let instance = lab.machine_with("src", name, options, &[&usual[..], more].concat())?;
        let guest = Self { instance };
        guest.counts_on()?;
        Ok(guest)
    }

    /// How far it has counted. An error if that is not 1, 2, 3, …
    fn count(&self) -> anyhow::Result<u32> {
        counted(&self.instance.output()?)
    }

    fn counts_on(&self) -> anyhow::Result<()> {
        let before = self.count()?;
        eventually("a guest that counts", LIMIT, || {
            Ok((self.count()? >= before + 20).then_some(()))
        })
    }

    fn stands_still(&self) -> anyhow::Result<()> {
        let before = self.count()?;
        std::thread::sleep(Duration::from_millis(100));
        ensure!(self.count()? == before, "the guest runs");
        Ok(())
    }

    /// Sends QEMU a signal, wherever it is.
    fn signal(&self, lab: &TestLab, host: &str, signal: &str) -> anyhow::Result<()> {
        let file = lab.path(host, "/run/verbatim/bundles/guest/init.pid")?;
        let pid = std::fs::read_to_string(file)?;
        let kill = ["kill", &format!("-{signal}"), pid.trim()];
        lab.start_plain(host, &kill)?.succeed(LIMIT)?;
        Ok(())
    }
}

/// How far a guest has counted that has said this. An error if that is not 1, 2, 3, …
pub(crate) fn counted(said: &str) -> anyhow::Result<u32> {
    let mut count = 0;
    let lines = said.split_inclusive('\n');
    for line in lines.filter_map(|line| line.strip_suffix('\n')) {
        count += 1;
        ensure!(
            line == format!("tick {count}"),
            "in the place of `tick {count}` there is `{line}`"
        );
    }
    Ok(count)
}

impl Subject for Guest<'_> {
    fn name(&self) -> &str {
        NAME
    }

    fn connections(&self) -> u32 {
        0
    }

    fn goes_on(&self, _host: &str) -> anyhow::Result<()> {
        self.counts_on()
    }

    fn moves(&self, to: &str) -> anyhow::Result<()> {
        self.instance.moves(to).map(drop)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        self.count().map(drop)
    }
}

fn subject<'a>(lab: &'a TestLab) -> anyhow::Result<Box<dyn Subject + 'a>> {
    Ok(Box::new(Guest::start(lab, &[])?))
}

/// A disk of 16 MiB that both hosts reach.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new() -> anyhow::Result<Self> {
        // tmpfs knows no O_DIRECT everywhere.
        let disk = Self(tempfile::TempDir::new_in("/var/tmp")?);
        std::fs::File::create(disk.path())?.set_len(16 << 20)?;
        Ok(disk)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("disk")
    }

    /// As QEMU's arguments: read directly, by this means.
    fn arguments(&self, aio: &str) -> Vec<String> {
        let drive = format!(
            "file={},format=raw,if=none,id=disk,cache=none,aio={aio}",
            self.path().display()
        );
        [
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,drive=disk,disable-modern=on",
        ]
        .map(str::to_owned)
        .into()
    }
}

/// There and back by both transports, between agents that are replaced, with a disk whose data go to the RAM directly.
fn moves(lab: &TestLab) -> anyhow::Result<()> {
    let disk = Disk::new()?;
    let arguments = disk.arguments("threads");
    let guest = Guest::start(lab, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let check = lab.ask(&["check", NAME, "--to", "dst"])?;
    let said = check.output();
    ensure!(said.contains("RAM goes ahead"), "{said}");
    let places = ["dst", "src", "dst", "src"];
    for (to, transport) in places.into_iter().zip(["tls", "rdma", "rdma", "tls"]) {
        let migration = guest
            .instance
            .migrate_with(to, &["--memory-transport", transport])?;
        migration.must_be_committed()?;
        ensure!(migration.memory_transport == transport, "{migration:?}");
        ensure!(
            (migration.rdma_bytes > 0) == (transport == "rdma"),
            "{migration:?}"
        );
        ensure!(migration.bytes.pre_copy > 1 << 20, "{migration:?}");
        ensure!(
            migration.bytes.stop_and_copy < migration.bytes.pre_copy,
            "{migration:?}"
        );
        guest.counts_on()?;
        let left = match to {
            "dst" => "src",
            _ => "dst",
        };
        let behind = left_behind(lab, left, NAME)?;
        ensure!(behind.is_empty(), "left on {left}: {behind:?}");
        lab.restart(to, "agent")?;
        guest.counts_on()?;
    }
    let row = guest.instance.row()?;
    ensure!(row.host == "src" && row.connections == 0, "{row:?}");
    lab.ask(&["stop", NAME])?;
    ensure!(left_behind(lab, "src", NAME)?.is_empty());
    Ok(())
}

/// QEMU is killed, or says nothing, at either end.
fn deaths(lab: &TestLab) -> anyhow::Result<()> {
    let guest = Guest::start(lab, &[])?;
    // The destination's, while RAM comes.
    lab.order_faults("src", "source-pre-setup hang\n")?;
    let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
    let reached = lab.path("src", "/run/verbatim/faults.reached")?;
    eventually("the point", LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains("source-pre-setup").then_some(()))
    })?;
    guest.signal(lab, "dst", "KILL")?;
    lab.order_faults("src", "")?;
    let migration = verbatim_e2e::Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains("QEMU"), "{error}");
    guest.counts_on()?;
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());

    // The source's is silent before anything is asked of it.
    guest.signal(lab, "src", "STOP")?;
    let migration = guest.instance.migrate("dst")?;
    guest.signal(lab, "src", "CONT")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains("may be stopped, or hang"), "{error}");
    guest.counts_on()?;

    // The source's is silent when it is to let the guest go on again, for an agent that comes after one that died.
    lab.order_faults("src", "source-transfer hang\n")?;
    let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
    let reached = lab.path("src", "/run/verbatim/faults.reached")?;
    eventually("the point", LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains("source-transfer").then_some(()))
    })?;
    guest.signal(lab, "src", "STOP")?;
    lab.restart("src", "agent")?;
    migrate.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    eventually("an agent that asks QEMU again", LIMIT, || {
        Ok(lab.logs().contains("asked again until it does").then_some(()))
    })?;
    // The session closes after that.
    eventually("an instance that is moved no more", LIMIT, || {
        Ok((guest.instance.row()?.state == "running").then_some(()))
    })?;
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    guest.stands_still()?;
    guest.signal(lab, "src", "CONT")?;
    guest.counts_on()?;

    // One that its user has paused moves, and stays so.
    let qmp = lab.path("src", "/run/verbatim/instances/guest/qmp")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&qmp).await?;
        qmp.run("stop", serde_json::json!({})).await
    })?;
    guest.stands_still()?;
    guest.moves("dst")?;
    guest.stands_still()?;
    let qmp = lab.path("dst", "/run/verbatim/instances/guest/qmp")?;
    runtime.block_on(async {
        let qmp = verbatim_vm::Qmp::connect(&qmp).await?;
        qmp.run("cont", serde_json::json!({})).await
    })?;
    guest.counts_on()?;

    // It ends while it is moved.
    lab.order_faults("dst", "source-pre-setup hang\n")?;
    let migrate = lab.verbatim(&["migrate", NAME, "--to", "src", "--json"])?;
    let reached = lab.path("dst", "/run/verbatim/faults.reached")?;
    eventually("the point", LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains("source-pre-setup").then_some(()))
    })?;
    guest.signal(lab, "dst", "KILL")?;
    lab.order_faults("dst", "")?;
    let migration = verbatim_e2e::Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let row = guest.instance.row()?;
    ensure!(row.state == "exited" && row.exit_status == Some(137), "{row:?}");
    ensure!(left_behind(lab, "src", NAME)?.is_empty());
    Ok(())
}

/// A QEMU that somebody else has started is attached, detached, moved, and killed.
fn attached(lab: &TestLab) -> anyhow::Result<()> {
    const SOCKET: &str = "/run/guest.qmp";
    let program = program()?;
    let program = program.to_str().context("a path in UTF-8")?;
    let start = || {
        lab.start_plain(
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
                program,
            ],
        )
    };
    let qemu = start()?;
    let counts_on = || {
        let before = counted(&qemu.stdout()?)?;
        eventually("a guest that counts", LIMIT, || {
            Ok((counted(&qemu.stdout()?)? >= before + 20).then_some(()))
        })
    };
    counts_on()?;
    let attach = |name: &str| ["attach", name, "--qmp", SOCKET, "--host", "src"].map(str::to_owned);
    let attach = |name: &str| {
        let words = attach(name);
        lab.verbatim(&words.each_ref().map(String::as_str))?.wait(LIMIT)
    };
    ensure!(attach(NAME)?.code == 0);
    let again = attach("other")?;
    ensure!(
        again.code == 1 && again.stderr.contains("it is the instance guest already"),
        "{}",
        again.output()
    );
    // As if nothing had been.
    lab.ask(&["detach", NAME])?;
    let behind = left_behind(lab, "src", NAME)?;
    ensure!(behind.is_empty(), "left on src: {behind:?}");
    counts_on()?;
    ensure!(attach(NAME)?.code == 0);
    let instance = lab.known(NAME);
    // An agent that comes after this one knows it, and whose it is.
    lab.restart("src", "agent")?;
    eventually("an agent that knows it", LIMIT, || {
        Ok((instance.row()?.state == "running").then_some(()))
    })?;
    lab.order_faults("src", "source-transfer fail\n")?;
    let migration = instance.migrate("dst")?;
    lab.order_faults("src", "")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    counts_on()?;
    instance.moves("dst")?;
    // The one that somebody has started is gone, and its guest counts on elsewhere.
    let before = qemu.wait(LIMIT)?.stdout;
    let all = || Ok::<_, anyhow::Error>(format!("{before}{}", instance.output()?));
    let last = counted(&all()?)?;
    for to in ["src", "dst"] {
        eventually("a guest that counts", LIMIT, || {
            Ok((counted(&all()?)? >= last + 20).then_some(()))
        })?;
        instance.moves(to)?;
    }
    ensure!(
        lab.refused(&["detach", NAME])?
            .contains("was started by Verbatim")
    );
    lab.ask(&["stop", NAME])?;
    ensure!(left_behind(lab, "dst", NAME)?.is_empty());
    // One that ends by itself.
    let qemu = start()?;
    eventually("QEMU's socket", LIMIT, || {
        Ok((attach(NAME)?.code == 0).then_some(()))
    })?;
    qemu.signal(rustix::process::Signal::KILL)?;
    eventually("the end of the instance", LIMIT, || {
        Ok((instance.row()?.state == "exited").then_some(()))
    })?;
    lab.ask(&["stop", NAME])?;
    Ok(())
}

/// What `verbatim check` says of a move that cannot be.
pub(crate) fn blockers(lab: &TestLab) -> anyhow::Result<String> {
    let check = lab.verbatim(&["check", NAME, "--to", "dst"])?.wait(LIMIT)?;
    ensure!(check.code == 1, "nothing stands in the way{}", check.output());
    Ok(check.output())
}

/// What cannot be is refused with the reason, and leaves nothing.
fn refused(lab: &TestLab) -> anyhow::Result<()> {
    for (arguments, reason) in [
        (&["-machine", "nosuch"][..], "knows no machine `nosuch`"),
        (&["-device", "nosuch"], "not a valid device model name"),
        (&["-S"], "it is started at once"),
        (&["no-such-qemu", "-m", "16"], "cannot start no-such-qemu"),
    ] {
        let words = [&["run", "--host", "src", "--vm", NAME, "--"], arguments].concat();
        let said = lab.refused(&words)?;
        ensure!(said.contains(reason), "{arguments:?}: {said}");
        let behind = left_behind(lab, "src", NAME)?;
        ensure!(behind.is_empty(), "{arguments:?}: {behind:?}");
    }
    let disk = Disk::new()?;
    let arguments = disk.arguments("native");
    let guest = Guest::start(lab, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let said = blockers(lab)?;
    ensure!(said.contains("aio=threads"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    guest.counts_on()?;
    let said = lab.refused(&["exec", NAME, "--", "true"])?;
    ensure!(said.contains("is a virtual machine"), "{said}");
    // What it names by its path is not there any more.
    std::fs::remove_file(disk.path())?;
    let said = blockers(lab)?;
    ensure!(said.contains("disk is not there"), "{said}");
    guest.counts_on()?;
    lab.ask(&["stop", NAME])?;
    elsewhere(lab)
}

/// At the destination there is another disk at the same path.
fn elsewhere(lab: &TestLab) -> anyhow::Result<()> {
    // Each host has a `/run` of its own.
    const PATH: &str = "/run/disks/disk";
    for host in HOSTS {
        std::fs::create_dir(lab.path(host, "/run/disks")?)?;
        std::fs::File::create(lab.path(host, PATH)?)?.set_len(16 << 20)?;
    }
    let drive = format!("file={PATH},format=raw,if=none,id=disk");
    let arguments = [
        "-drive",
        &drive,
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ];
    let guest = Guest::start(lab, &arguments)?;
    let said = blockers(lab)?;
    ensure!(said.contains("not the same storage"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    guest.counts_on()?;
    let folder = lab.path("src", "/run/disks")?;
    let left = std::fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.file_name());
    let left: Vec<_> = left
        .filter(|name| name.as_encoded_bytes().starts_with(b".verbatim-"))
        .collect();
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

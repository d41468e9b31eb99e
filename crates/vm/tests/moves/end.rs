//! An end of a move: a QEMU process of the test, with its RAM and its guest's output.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tempfile::TempDir;
use verbatim_vm::{Arguments, Machine, Qmp, RUN, Ram, Run};

/// QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";

/// Environment variable with another QEMU program.
const QEMU_VARIABLE: &str = "VERBATIM_QEMU";

/// The QEMU program that the tests run.
pub fn qemu() -> String {
    std::env::var(QEMU_VARIABLE).unwrap_or_else(|_| QEMU.to_owned())
}

/// Limit for a guest's next output, on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// An error that names a missing program.
pub fn installed() -> Result<(), String> {
    for program in [&qemu()[..], "cc", "make"] {
        let found = Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !found.is_ok_and(|status| status.success()) {
            return Err(format!("{program} is not installed: run setup.sh"));
        }
    }
    verbatim_tracking::supported().map_err(|unsupported| unsupported.to_string())
}

/// The network namespace of a QEMU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Network {
    /// That of the test.
    Ours,
    /// A new one, with no link that is up.
    Own,
}

/// A program of a virtual machine.
pub struct Guest<'a> {
    /// Name of the program.
    pub program: &'a str,
    pub mebibytes: &'a str,
    /// Target of the serial line.
    pub serial: &'a str,
}

/// The usual guest.
const CHECK: Guest<'_> = Guest {
    program: "check",
    mebibytes: "16",
    serial: "file:serial",
};

/// Folder of the guests' programs, which are built at the first request.
fn built() -> anyhow::Result<PathBuf> {
    static BUILT: std::sync::OnceLock<Result<PathBuf, String>> = std::sync::OnceLock::new();
    let build = || {
        let out = format!("OUT={}", env!("CARGO_TARGET_TMPDIR"));
        let made = Command::new("make")
            .args(["-s", "-C", concat!(env!("CARGO_MANIFEST_DIR"), "/guest"), &out])
            .output();
        match made {
            Ok(made) if made.status.success() => Ok(PathBuf::from(env!("CARGO_TARGET_TMPDIR"))),
            Ok(made) => Err(String::from_utf8_lossy(&made.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        }
    };
    BUILT.get_or_init(build).clone().map_err(anyhow::Error::msg)
}

/// One end of a move. Its QEMU is killed on drop, also when the test fails; the guest's output stays until
/// then.
pub struct End {
    folder: TempDir,
    child: Child,
    arguments: Arguments,
    pub machine: Arc<Machine>,
}

impl End {
    /// The usual arguments, and further ones.
    fn usual(guest: &Guest<'_>, more: &[&str]) -> anyhow::Result<Arguments> {
        let program = built()?.join(guest.program);
        let qemu = qemu();
        let usual = [
            &qemu[..],
            "-M",
            "pc",
            "-accel",
            "tcg",
            "-m",
            guest.mebibytes,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
            "-serial",
            guest.serial,
            "-kernel",
            program.to_str().context("a path in UTF-8")?,
        ];
        let line = [&usual[..], more].concat();
        let types = Command::new(&qemu).args(["-machine", "help"]).output()?;
        Ok(Arguments::parse(&line)?.versioned(std::str::from_utf8(&types.stdout)?)?)
    }

    /// Starts a QEMU with further arguments beside the usual ones. Its guest does not run yet.
    async fn start(guest: &Guest<'_>, more: &[&str]) -> anyhow::Result<Self> {
        Self::of(Self::usual(guest, more)?, false, Network::Ours).await
    }

    /// Starts a QEMU that takes the guest of another one.
    pub async fn arriving(from: &Self) -> anyhow::Result<Self> {
        Self::of(from.arguments.clone(), true, Network::Ours).await
    }

    /// Starts a QEMU that takes a guest, by these arguments.
    pub async fn arriving_as(arguments: &Arguments) -> anyhow::Result<Self> {
        Self::of(arguments.clone(), true, Network::Ours).await
    }

    /// The same in a network namespace of its own, as on another host.
    pub async fn arriving_apart(arguments: &Arguments) -> anyhow::Result<Self> {
        Self::of(arguments.clone(), true, Network::Own).await
    }

    /// Starts a QEMU by these arguments alone, with a guest that does not run, in a network namespace of its
    /// own.
    pub async fn stopped(more: &[&str]) -> anyhow::Result<Self> {
        let qemu = qemu();
        let types = Command::new(&qemu).args(["-machine", "help"]).output()?;
        let arguments = Arguments::parse(&[&[&qemu[..]], more].concat())?;
        let arguments = arguments.versioned(std::str::from_utf8(&types.stdout)?)?;
        Self::of(arguments, false, Network::Own).await
    }

    /// The arguments of its start.
    pub fn arguments(&self) -> &Arguments {
        &self.arguments
    }

    /// Starts a QEMU of another program that takes the guest of another one.
    pub async fn arriving_at(program: &str, from: &Self) -> anyhow::Result<Self> {
        Self::of(from.arguments.run_by(program), true, Network::Ours).await
    }

    async fn of(arguments: Arguments, incoming: bool, network: Network) -> anyhow::Result<Self> {
        // In tmpfs, like instances' folders.
        let folder = TempDir::new_in("/dev/shm")?;
        let ram = Ram::create(&folder.path().join("ram"), arguments.ram())?;
        let qmp = folder.path().join("qmp");
        let mut command = arguments.command(ram.path(), &qmp, incoming);
        if network == Network::Own {
            // SAFETY: between fork and exec nothing is called but unshare(2), which is safe there.
            unsafe { command.pre_exec(|| Ok(unshare_unsafe(UnshareFlags::NEWNET)?)) };
        }
        let mut child = Self::spawn(command, folder.path())?;
        let machine = match Machine::started(child.id(), ram, || Qmp::connect(&qmp)).await {
            Ok(machine) => Arc::new(machine),
            Err(error) => {
                let (Ok(()) | Err(_)) = child.kill();
                let (Ok(_) | Err(_)) = child.wait();
                let said = std::fs::read_to_string(folder.path().join("log")).unwrap_or_default();
                return Err(anyhow::Error::new(error).context(said));
            }
        };
        Ok(Self {
            folder,
            child,
            arguments,
            machine,
        })
    }

    /// Starts a guest, and waits until it runs.
    pub async fn run(more: &[&str]) -> anyhow::Result<Self> {
        let end = Self::start(&CHECK, more).await?;
        end.machine.go_on().await?;
        end.ticks_on()?;
        Ok(end)
    }

    /// The same in a network namespace of its own.
    pub async fn run_apart(more: &[&str]) -> anyhow::Result<Self> {
        let end = Self::of(Self::usual(&CHECK, more)?, false, Network::Own).await?;
        end.machine.go_on().await?;
        end.ticks_on()?;
        Ok(end)
    }

    /// Starts another guest than the usual one, without waiting for its output.
    pub async fn run_other(guest: &Guest<'_>, more: &[&str]) -> anyhow::Result<Self> {
        let end = Self::start(guest, more).await?;
        end.machine.go_on().await?;
        Ok(end)
    }

    pub fn spawn(mut command: Command, folder: &Path) -> anyhow::Result<Child> {
        let log = File::create(folder.join("log"))?;
        command.current_dir(folder);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SAFETY: between fork and exec nothing is called but prctl(2), which is safe there.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                Ok(())
            });
        }
        command.spawn().with_context(|| format!("cannot start {QEMU}"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn signal(&self, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed()).context("not 0")?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Output of the guest here: whole lines, and a part of a line that may follow.
    pub fn said(&self) -> anyhow::Result<String> {
        Ok(std::fs::read_to_string(self.path("serial"))?)
    }

    /// Output of QEMU.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Waits until the guest prints some more ticks here.
    pub fn ticks_on(&self) -> anyhow::Result<()> {
        let ticks = Ticks::since(self)?;
        while !ticks.are_there(self)? {
            std::thread::sleep(Ticks::AGAIN);
        }
        Ok(())
    }

    /// Waits for some more ticks, while other futures of this task go on.
    pub async fn ticks_on_beside(&self) -> anyhow::Result<()> {
        let ticks = Ticks::since(self)?;
        while !ticks.are_there(self)? {
            tokio::time::sleep(Ticks::AGAIN).await;
        }
        Ok(())
    }

    /// An error if the guest prints anything here within a moment.
    pub fn is_silent(&self) -> anyhow::Result<()> {
        let before = self.said()?;
        std::thread::sleep(Duration::from_millis(50));
        ensure!(self.said()? == before, "the guest runs");
        Ok(())
    }
}

/// Some more ticks of a guest.
struct Ticks {
    before: usize,
    begun: Instant,
}

impl Ticks {
    /// Pause between two looks: the growth of a file has no notification.
    const AGAIN: Duration = Duration::from_millis(2);

    fn since(end: &End) -> anyhow::Result<Self> {
        Ok(Self {
            before: end.said()?.lines().count(),
            begun: Instant::now(),
        })
    }

    /// An error if the guest reports an error, or is silent.
    fn are_there(&self, end: &End) -> anyhow::Result<bool> {
        let said = end.said()?;
        ensure!(
            !said.contains("BAD"),
            "{}",
            said.lines().last().unwrap_or_default()
        );
        ensure!(self.begun.elapsed() < LIMIT, "the guest is silent: {}", end.log());
        Ok(said.lines().count() >= self.before + 20)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let (Ok(()) | Err(_)) = self.child.kill();
        let (Ok(_) | Err(_)) = self.child.wait();
    }
}

/// A disk of 16 MiB. It is removed on drop.
pub struct Disk(TempDir);

impl Disk {
    /// On a disk of this machine: not every tmpfs supports O_DIRECT.
    pub fn new() -> anyhow::Result<Self> {
        let disk = Self(TempDir::new_in("/var/tmp")?);
        File::create(disk.0.path().join("disk"))?.set_len(16 << 20)?;
        Ok(disk)
    }

    /// A path beside the disk's file.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Value of `-drive` for direct reads by the given `aio`.
    pub fn drive(&self, aio: &str) -> String {
        let path = self.beside("disk");
        format!(
            "file={},format=raw,if=none,id=disk,cache=none,aio={aio}",
            path.display()
        )
    }
}

/// Copies runs from one RAM to another, as a move does.
pub fn copy(runs: &[Run], from: &Machine, to: &Machine) -> anyhow::Result<u64> {
    let mut bytes = vec![0; RUN as usize];
    let mut copied = 0;
    for run in runs {
        match run {
            Run::Data(range) => {
                let part = &mut bytes[..(range.end - range.start) as usize];
                from.ram().read(range.clone(), part)?;
                to.ram().write(range.start, part)?;
                copied += range.end - range.start;
            }
            Run::Zero(range) => to.ram().clear(range.clone())?,
        }
    }
    Ok(copied)
}

/// An error unless the RAMs of two guests that stand still have the same content.
pub fn same_ram(one: &Machine, other: &Machine) -> anyhow::Result<()> {
    let read = |machine: &Machine| std::fs::read(machine.ram().path());
    let (one, other) = (read(one)?, read(other)?);
    ensure!(
        one.len() == other.len(),
        "{} and {} bytes",
        one.len(),
        other.len()
    );
    let differing = (0..one.len())
        .step_by(4096)
        .filter(|page| one[*page..page + 4096] != other[*page..page + 4096]);
    let differing: Vec<usize> = differing.collect();
    ensure!(
        differing.is_empty(),
        "{} pages differ, the first at {:#x}",
        differing.len(),
        differing[0]
    );
    Ok(())
}

/// An error unless a guest's output at all its places together is 1, 2, 3, ...; returns the last number.
pub fn consecutive(places: &[&End]) -> anyhow::Result<u32> {
    let mut all = String::new();
    for place in places {
        all.push_str(&place.said()?);
    }
    let mut expected = 0;
    let mut lines = all.split('\n').peekable();
    while let Some(line) = lines.next() {
        // The last line may be incomplete.
        if lines.peek().is_none() {
            break;
        }
        expected += 1;
        if line != format!("tick {expected}") {
            bail!("in the place of `tick {expected}` there is `{line}`");
        }
    }
    ensure!(expected > 0, "the guest has said nothing");
    Ok(expected)
}

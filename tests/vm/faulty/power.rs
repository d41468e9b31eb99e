//! Power failures of one host at each step of a move. The host is a machine with a disk of nbdkit that has a
//! volatile cache (nbdkit's filter `cache`, in which a write stays until a flush): killing nbdkit loses all
//! writes that were not flushed, and killing QEMU right after it loses the memory, page cache included. QEMU
//! comes second, since it would flush its disk when it ends. The other host is a daemon on this machine, and
//! keeps running.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use verbatim_e2e::eventually;
use verbatim_testbed::{Command as InMachine, Network, Output, Session, Vm, VmConfig, VmRecord};

use crate::client::Client;
use crate::hosts::{LIMIT, read_all, succeed};
use crate::rounds::{BLOCK, Rounds};
use crate::{CPUS, FOR_TLS, INSIDE, built, words};

/// First words of the parts in a machine.
pub const TENANT: &str = "tenant";
pub const VERIFY: &str = "verify";

/// The hosts: the machine that loses power, and the host that keeps running.
const HOSTS: [(&str, &str); 2] = [("vm", "10.81.0.1"), ("out", "10.81.0.2")];

/// Size of the machine's disk in bytes, and of each volume in blocks.
const DISK: u64 = 256 << 20;
const BLOCKS: u64 = 96;

/// Rounds before the power failure.
const ROUNDS: u64 = 5;

/// Pause between two rounds.
const PAUSE: Duration = Duration::from_millis(100);

/// A step of a move, by the daemon's name of it, at which a host loses power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    Offering,
    ChunkSent,
    Mirrored,
    Held,
    Deciding,
    Asked,
    Answered,
    Moved,
    Prepared,
    Written,
    Question,
    Committing,
    Committed,
}

/// All points.
pub fn cases() -> [Point; 13] {
    use Point::*;
    [
        Offering, ChunkSent, Mirrored, Held, Deciding, Asked, Answered, Moved, Prepared, Written, Question,
        Committing, Committed,
    ]
}

impl Point {
    /// Whether the point is one of the source, and not of the destination.
    fn is_the_sources(self) -> bool {
        use Point::*;
        !matches!(self, Prepared | Written | Question | Committing | Committed)
    }

    /// The side that serves in the end, if that is certain at this point.
    fn outcome(self) -> Option<Side> {
        use Point::*;
        match self {
            Offering | ChunkSent | Mirrored | Held => Some(Side::Source),
            Committed | Answered | Moved => Some(Side::Destination),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// Indexes of the hosts.
const VM: usize = 0;
const OUT: usize = 1;

/// Both hosts, and the machine's disk.
pub struct Power {
    // Fields in the order of their drop.
    vm: Option<Vm>,
    disk: Option<Child>,
    out: Child,
    network: Network,
    folder: tempfile::TempDir,
    /// Folder of the disk, in memory: this machine's disk may be busy, and a move does not wait for a slow
    /// one.
    media: tempfile::TempDir,
    seed: u64,
}

impl Drop for Power {
    fn drop(&mut self) {
        self.cut();
        let _ = self.out.kill();
        let _ = self.out.wait();
    }
}

/// Runs a case: the machine loses power when the host passes the point.
pub fn run(slot: &mut Option<Power>, point: Point) -> anyhow::Result<()> {
    let mut power = match slot.take() {
        Some(power) => power,
        None => Power::up()?,
    };
    power.step(point).with_context(|| power.log())?;
    // After a failed case the next one gets other hosts.
    *slot = Some(power);
    Ok(())
}

impl Power {
    fn up() -> anyhow::Result<Self> {
        // Machines have their own /run, and share all other folders of this machine.
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let media = tempfile::tempdir_in("/dev/shm")?;
        let hosts = HOSTS.map(|(name, address)| format!("{name}={address}"));
        succeed(
            Command::new(built("verbatim")?)
                .arg("hosts")
                .arg(folder.path().join("cluster"))
                .args(hosts),
        )?;
        std::fs::File::create(media.path().join("disk"))?.set_len(DISK)?;
        let network = Network::new()?;
        let address = format!("{}/24", HOSTS[OUT].1);
        let namespace = format!(
            "--net=/proc/{}/fd/{}",
            std::process::id(),
            network.as_fd().as_raw_fd()
        );
        succeed(
            Command::new("nsenter")
                .arg(&namespace)
                .args(["ip", "address", "add", &address, "dev", "switch"]),
        )?;
        let place = folder.path().join("out");
        std::fs::create_dir_all(place.join("run"))?;
        let log = std::fs::File::create(folder.path().join("out.log"))?;
        let out = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "nsenter", &namespace])
            .arg(built("verbatim")?)
            .args(["volume", "daemon", "--name", HOSTS[OUT].0, "--runtime-dir"])
            .arg(place.join("run"))
            .arg("--state-dir")
            .arg(media.path().join("state"))
            .arg("--config-dir")
            .arg(folder.path().join("cluster").join(HOSTS[OUT].0))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut power = Self {
            vm: None,
            disk: None,
            out,
            network,
            folder,
            media,
            seed: 0,
        };
        let socket = power.folder.path().join("out/run/volumes.sock");
        eventually("the other host takes orders", LIMIT, || {
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })?;
        power.boot("mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/vda;")?;
        power.is_a_real_failure()?;
        Ok(power)
    }

    /// Boots the machine from its disk. Nothing is written there, or flushed, but what somebody asks for. A file system flushes by itself every
    /// five seconds, and when it prepares its inode tables, some seconds after it was mounted: that would make durable what was not to be.
    fn boot(&mut self, before: &str) -> anyhow::Result<()> {
        let socket = self.folder.path().join("disk.sock");
        let _ = std::fs::remove_file(&socket);
        let nbdkit = Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--filter=cache", "--unix"])
            .arg(&socket)
            .arg("file")
            .arg(self.media.path().join("disk"))
            .arg("cache=writeback")
            // Folder of the filter's cache, a file without a name.
            .env("TMPDIR", self.media.path())
            .stdin(Stdio::null())
            // nbdkit would report the connection that only checks whether it listens.
            .stderr(Stdio::null())
            .spawn()
            .context("nbdkit")?;
        self.disk = Some(nbdkit);
        eventually("nbdkit listens", LIMIT, || {
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })?;
        let config = VmConfig {
            cpus: CPUS,
            memory_mib: 1024,
            features: FOR_TLS.to_owned(),
            address: Some(
                format!("{}/24", HOSTS[VM].1)
                    .parse()
                    .map_err(anyhow::Error::msg)?,
            ),
            drives: vec![format!("nbd+unix:///?socket={}", socket.display())],
            ..VmConfig::new(format!("faulty-power-{}", std::process::id()))
        };
        self.vm = Some(Vm::boot(&config, &self.network)?);
        self.shell(&format!(
            "modprobe virtio_blk; modprobe ext4; until [ -b /dev/vda ]; do sleep 0.1; done; {before} mkdir -p /run/disk /run/verbatim; \
             echo 0 >/proc/sys/vm/dirty_writeback_centisecs; mount -t ext4 -o commit=3600,noinit_itable /dev/vda /run/disk"
        ))
        .map(drop)
    }

    /// Cuts the machine's power.
    fn cut(&mut self) {
        if let Some(mut disk) = self.disk.take() {
            let _ = disk.kill();
            let _ = disk.wait();
        }
        self.vm = None;
    }

    /// Checks the cut: a write that was not flushed is lost, though the disk had it, and a flushed write is
    /// not.
    fn is_a_real_failure(&mut self) -> anyhow::Result<()> {
        let write = "dd if=/dev/zero bs=4096 count=16 status=none | tr '\\0'";
        self.shell(&format!(
            "cd /run/disk; {write} a | dd of=lost iflag=fullblock bs=64k status=none conv=fsync; {write} b | dd of=kept iflag=fullblock bs=64k status=none conv=fsync; \
             sync; {write} x | dd of=lost iflag=fullblock bs=64k oflag=direct conv=notrunc status=none; grep -q x lost"
        ))?;
        self.cut();
        self.boot("")?;
        let found = self.shell("cd /run/disk; head -c 1 lost; head -c 1 kept")?;
        ensure!(
            found == "ab",
            "{found:?}: what was not flushed has survived, or what was flushed has not"
        );
        Ok(())
    }

    fn record(&self) -> anyhow::Result<VmRecord> {
        Ok(self.vm.as_ref().context("it is off")?.record().clone())
    }

    /// Runs a script in the machine; returns its output.
    fn shell(&self, script: &str) -> anyhow::Result<String> {
        let ended = Session::open(&self.record()?)?.collect(&InMachine::new(["sh", "-ec", script]), LIMIT)?;
        ensure!(
            ended.code == 0,
            "{script:?}: status {}: {}",
            ended.code,
            words(&ended)
        );
        Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
    }

    /// Starts the machine's daemon, which ends itself at the given point. The power is cut at that moment.
    fn start(&self, point: Option<Point>) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let program = built("verbatim-volume-with-faults")?;
        let script = format!(
            "rm -f /run/verbatim/volumes.sock; echo $$ >/run/daemon.pid; exec {} daemon --name vm --runtime-dir /run/verbatim --state-dir /run/disk/state \
             --config-dir {} >>/run/daemon.log 2>&1",
            program.display(),
            self.folder.path().join("cluster/vm").display()
        );
        let mut command = InMachine::new(["sh", "-ec", &script]);
        if let Some(point) = point {
            command = command.env("VERBATIM_VOLUME_DIE_AT", format!("{point:?}"));
        }
        let record = self.record()?;
        let disk = Pid::from_child(self.disk.as_ref().context("it has no disk")?);
        let running = std::thread::spawn(move || -> anyhow::Result<()> {
            Session::open(&record)?.run(&command, None, |_| Ok(()))?;
            if point.is_some() {
                // Killed at once, before anything else can be flushed.
                kill_process(disk, Signal::KILL)?;
            }
            Ok(())
        });
        self.shell(&format!(
            "until {} list >/dev/null 2>&1; do sleep 0.1; done",
            program.display()
        ))?;
        Ok(running)
    }

    /// Runs a volume command on a host; returns its JSON.
    fn order(&self, host: usize, args: &[&str]) -> anyhow::Result<Value> {
        let text = match host {
            VM => self.shell(&format!(
                "{} volume {} --json",
                built("verbatim")?.display(),
                args.join(" ")
            ))?,
            _ => succeed(&mut self.outside(args)?)?,
        };
        serde_json::from_str(&text).with_context(|| text.clone())
    }

    fn outside(&self, args: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(built("verbatim")?);
        let runtime = self.folder.path().join("out/run");
        command
            .arg("volume")
            .args(args)
            .args(["--json", "--runtime-dir"])
            .arg(runtime);
        Ok(command)
    }

    fn socket(&self, host: usize, volume: &str) -> PathBuf {
        let runtime = match host {
            VM => PathBuf::from("/run/verbatim"),
            _ => self.folder.path().join("out/run"),
        };
        runtime.join("volumes").join(format!("{volume}.sock"))
    }

    fn step(&mut self, point: Point) -> anyhow::Result<()> {
        self.seed += 1;
        let volume = format!("v-{point:?}").to_lowercase();
        let (source, destination) = match point.is_the_sources() {
            true => (VM, OUT),
            false => (OUT, VM),
        };
        if self.vm.is_none() {
            self.boot("")?;
        }
        let daemon = self.start(Some(point))?;
        let size = (BLOCKS * BLOCK as u64).to_string();
        self.order(source, &["create", &volume, "--size", &size])?;
        self.order(source, &["attach", &volume])?;
        let tenant = Working::start(self, source, &volume)?;
        tenant.reaches(ROUNDS)?;
        let mut moving = Moving::start(self, source, &volume, HOSTS[destination].0)?;
        eventually(&format!("the power fails at {point:?}"), LIMIT, || {
            moving.is_going_on()?;
            Ok(daemon.is_finished().then_some(()))
        })?;
        daemon.join().expect("it does not panic")?;
        self.cut();
        self.boot("")?;
        let daemon = self.start(None)?;
        let is_back = Instant::now();
        moving.end();
        let serving = eventually("one host serves", LIMIT, || self.one_serves(&volume))?;
        let side = match serving == source {
            true => Side::Source,
            false => Side::Destination,
        };
        ensure!(
            point.outcome().is_none_or(|outcome| outcome == side),
            "it is served at the {side:?}"
        );
        let seconds = is_back.elapsed().as_secs_f64();
        let acknowledged = tenant.end()?;
        eprintln!(
            "{point:?}: served at the {side:?}, which was settled {seconds:.1} s after the daemon was back; {acknowledged} rounds were acknowledged"
        );
        ensure!(acknowledged >= ROUNDS, "only {acknowledged} rounds");
        self.verify(serving, &volume, acknowledged)?;
        // The next step has another daemon.
        self.shell("kill -9 $(cat /run/daemon.pid)")?;
        daemon.join().expect("it does not panic")
    }

    /// The host that serves the volume, if neither copy is in doubt any more. An error if a volume is served
    /// twice.
    fn one_serves(&self, volume: &str) -> anyhow::Result<Option<usize>> {
        let lists = [self.order(VM, &["list"])?, self.order(OUT, &["list"])?];
        let role = |host: usize, name: &str| {
            let rows = lists[host].as_array()?;
            let row = rows.iter().find(|row| row["name"] == name)?;
            row["role"].as_str().map(str::to_owned)
        };
        for row in lists[VM].as_array().context("a list")? {
            let name = row["name"].as_str().context("a name")?;
            let roles = [role(VM, name), role(OUT, name)];
            let is_served_twice = roles.iter().all(|role| role.as_deref() == Some("serving"));
            ensure!(!is_served_twice, "{name} is served by both");
        }
        let roles = [VM, OUT].map(|host| role(host, volume).unwrap_or_default());
        let in_doubt = ["deciding", "unknown", "busy"];
        let is_settled = !roles.iter().any(|role| in_doubt.contains(&role.as_str()));
        let serving = roles.iter().position(|role| role == "serving");
        Ok(serving.filter(|_| is_settled))
    }

    fn verify(&self, host: usize, volume: &str, acknowledged: u64) -> anyhow::Result<()> {
        let socket = self.socket(host, volume);
        if host == OUT {
            return is_kept(&socket, self.seed, acknowledged);
        }
        let own = std::env::current_exe()?;
        let script = format!(
            "{} {INSIDE} {VERIFY} {} {} {acknowledged} 2>&1",
            own.display(),
            socket.display(),
            self.seed
        );
        self.shell(&script).map(drop)
    }

    /// Logs of both daemons.
    fn log(&self) -> String {
        let out = std::fs::read_to_string(self.folder.path().join("out.log")).unwrap_or_default();
        let vm = self.shell("cat /run/daemon.log");
        let vm = vm.unwrap_or_else(|error| format!("{error:#}"));
        format!("--- vm\n{vm}--- out\n{out}")
    }
}

/// A tenant of a volume, until its connection ends.
struct Working {
    thread: JoinHandle<()>,
    acknowledged: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Working {
    fn start(power: &Power, host: usize, volume: &str) -> anyhow::Result<Self> {
        let (acknowledged, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (socket, seed) = (power.socket(host, volume), power.seed);
        let (done, ends) = (acknowledged.clone(), is_over.clone());
        let thread = if host == OUT {
            std::thread::spawn(move || {
                // The error is that of the connection's end.
                let _ = work(&socket, seed, |round| {
                    done.store(round, Ordering::Relaxed);
                    !ends.load(Ordering::Relaxed)
                });
            })
        } else {
            let own = std::env::current_exe()?.display().to_string();
            let (socket, seed) = (socket.display().to_string(), seed.to_string());
            let command = InMachine::new([own.as_str(), INSIDE, TENANT, &socket, &seed]);
            let record = power.record()?;
            std::thread::spawn(move || {
                let mut said = String::new();
                // The error is that of the machine's end.
                let _ = Session::open(&record).and_then(|session| {
                    session.run(&command, None, |piece| {
                        if let Output::Stdout(bytes) = piece {
                            said.push_str(&String::from_utf8_lossy(bytes));
                        }
                        while let Some((line, rest)) = said.split_once('\n') {
                            if let Ok(round) = line.parse() {
                                done.store(round, Ordering::Relaxed);
                            }
                            said = rest.to_owned();
                        }
                        Ok(())
                    })
                });
            })
        };
        Ok(Self {
            thread,
            acknowledged,
            is_over,
        })
    }

    fn reaches(&self, goal: u64) -> anyhow::Result<()> {
        eventually("the tenant works", LIMIT, || {
            Ok((self.acknowledged.load(Ordering::Relaxed) >= goal).then_some(()))
        })
    }

    /// Ends the tenant; returns its last acknowledged round.
    fn end(self) -> anyhow::Result<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("it does not panic");
        Ok(self.acknowledged.load(Ordering::Relaxed))
    }
}

/// A requested move, which need not succeed.
enum Moving {
    Outside(Child),
    Inside(JoinHandle<anyhow::Result<()>>),
}

impl Moving {
    fn start(power: &Power, host: usize, volume: &str, to: &str) -> anyhow::Result<Self> {
        if host == OUT {
            let mut command = power.outside(&["migrate", volume, "--to", to])?;
            return Ok(Self::Outside(
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?,
            ));
        }
        let script = format!(
            "{} volume migrate {volume} --to {to}",
            built("verbatim")?.display()
        );
        let record = power.record()?;
        Ok(Self::Inside(std::thread::spawn(move || {
            let ended = Session::open(&record)?.collect(&InMachine::new(["sh", "-c", &script]), LIMIT)?;
            ensure!(
                ended.code != 1 || words(&ended).contains("has gone away"),
                "{}",
                words(&ended)
            );
            Ok(())
        })))
    }

    /// An error if the move has ended although the power has not failed.
    fn is_going_on(&mut self) -> anyhow::Result<()> {
        if let Self::Outside(child) = self
            && let Some(status) = child.try_wait()?
        {
            ensure!(
                status.success(),
                "the move has ended, {status}, and the power has not failed"
            );
        }
        Ok(())
    }

    /// Waits for the move's end. A source that survives continues on its own.
    fn end(self) {
        match self {
            Self::Outside(mut child) => drop(child.wait()),
            Self::Inside(thread) => drop(thread.join()),
        }
    }
}

/// Works in rounds, as long as the volume is served and `tell` returns true.
fn work(socket: &Path, seed: u64, mut tell: impl FnMut(u64) -> bool) -> anyhow::Result<()> {
    let mut client = eventually("the volume is served", LIMIT, || Ok(Client::connect(socket).ok()))?;
    let rounds = Rounds { blocks: BLOCKS, seed };
    for round in 1.. {
        rounds.carry_out(&mut client, round)?;
        if !tell(round) {
            break;
        }
        // A tenant that never rests would leave a busy machine no moment to hold it in.
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// An error unless all acknowledged rounds are kept.
fn is_kept(socket: &Path, seed: u64, acknowledged: u64) -> anyhow::Result<()> {
    let mut client = eventually("the volume is served", LIMIT, || Ok(Client::connect(socket).ok()))?;
    let data = read_all(&mut client)?;
    // Later rounds may have been acknowledged without being reported, and one was in flight.
    let rounds = Rounds { blocks: BLOCKS, seed };
    rounds.check(&data, acknowledged, acknowledged + 64)
}

/// In a machine: works, and prints each acknowledged round.
pub fn tenant(words: &[&str]) -> anyhow::Result<()> {
    let [socket, seed] = words else {
        anyhow::bail!("it needs a socket and a seed");
    };
    work(Path::new(socket), seed.parse()?, |round| {
        let mut out = std::io::stdout();
        // The output has no reader after a power failure.
        writeln!(out, "{round}").and_then(|()| out.flush()).is_ok()
    })
}

/// In a machine: checks the volume.
pub fn verify(words: &[&str]) -> anyhow::Result<()> {
    let [socket, seed, acknowledged] = words else {
        anyhow::bail!("it needs a socket, a seed and a round");
    };
    is_kept(Path::new(socket), seed.parse()?, acknowledged.parse()?)
}

//! The servers that are compared: two hosts of ours on the loopback interface, with software RNICs when these are wanted, qemu-nbd, and two
//! `qemu-storage-daemon`.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::CpuSet;
use serde_json::{Value, json};
use verbatim_e2e::eventually;
use verbatim_volume::control::{self, Order, Outcome, Row};

use super::ended;

/// So long anything may take.
pub const LIMIT: Duration = Duration::from_secs(120);

const ADDRESSES: [&str; 2] = ["127.94.0.1", "127.94.0.2"];
/// Of the target's server; on the second address.
const PORT: u16 = 10_809;

/// Of the agents that are played here.
const SESSION: u64 = 1;

/// A process that ends with it.
pub struct Server {
    child: Child,
}

impl Server {
    /// Starts it; what it says goes to that file.
    pub fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let log = File::create(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child })
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Seconds of processors that it has used.
    pub fn processor_time(&self) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(path)?;
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok());
        let ticks = ticks(11).zip(ticks(12)).context("stat has too few fields")?;
        Ok((ticks.0 + ticks.1) / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Has it run on this processor only, or on all that this program may use.
    pub fn run_on(&self, processor: Option<usize>) -> anyhow::Result<()> {
        let all = rustix::thread::sched_getaffinity(None)?;
        let wanted = processor.map_or(all, |processor| {
            let mut one = CpuSet::new();
            one.set(processor);
            one
        });
        // A thread inherits it from the one that makes it.
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let id = task?.file_name().to_str().and_then(|name| name.parse().ok());
            let id = id.and_then(Pid::from_raw).context("a thread has a number")?;
            match rustix::thread::sched_setaffinity(Some(id), &wanted) {
                Err(rustix::io::Errno::SRCH) => {}
                set => set?,
            }
        }
        Ok(())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a server.
pub fn until_there(path: &Path) -> anyhow::Result<()> {
    eventually("a server's socket", LIMIT, || Ok(path.exists().then_some(())))
}

/// qemu-nbd on a file.
pub fn qemu_nbd(folder: &Path, image: &Path) -> anyhow::Result<(Server, String)> {
    let socket = folder.join("qemu-nbd.sock");
    let mut command = Command::new("qemu-nbd");
    command
        .args([
            "-f",
            "raw",
            "-t",
            "-e",
            "8",
            "--cache=writeback",
            "-x",
            "db",
            "-k",
        ])
        .args([&socket, image]);
    let server = Server::start(&mut command, &folder.join("qemu-nbd.log"))?;
    until_there(&socket)?;
    Ok((server, format!("nbd+unix:///db?socket={}", socket.display())))
}

/// Two hosts of ours.
pub struct Ours {
    verbatim: PathBuf,
    folder: PathBuf,
    pub daemons: [Server; 2],
}

impl Ours {
    /// Both daemons run.
    pub fn start(verbatim: &Path, folder: &Path) -> anyhow::Result<Self> {
        let hosts = folder.join("hosts");
        let names = ["a", "b"].into_iter().zip(ADDRESSES);
        let names = names.map(|(name, address)| format!("{name}={address}"));
        ended(Command::new(verbatim).arg("hosts").arg(&hosts).args(names))?;
        let start = |name: &str| {
            let mut command = Command::new(verbatim);
            command
                .args(["volume", "daemon", "--name", name, "--config-dir"])
                .arg(hosts.join(name))
                .arg("--state-dir")
                .arg(folder.join(name).join("state"))
                .arg("--runtime-dir")
                .arg(folder.join(name).join("run"));
            let server = Server::start(&mut command, &folder.join(format!("{name}.log")))?;
            until_there(&folder.join(name).join("run/volumes.sock"))?;
            anyhow::Ok(server)
        };
        Ok(Self {
            verbatim: verbatim.to_owned(),
            folder: folder.to_owned(),
            daemons: [start("a")?, start("b")?],
        })
    }

    /// A command of one of the hosts.
    pub fn command(&self, host: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.verbatim);
        command
            .arg("volume")
            .args(arguments)
            .arg("--json")
            .arg("--runtime-dir")
            .arg(self.folder.join(host).join("run"));
        command
    }

    /// An order that its agent would give, and what the daemon says of the volume.
    pub fn order(&self, host: &str, order: &Order) -> anyhow::Result<Row> {
        let socket = self.folder.join(host).join("run/volumes.sock");
        match control::order_now(&socket, order, LIMIT)? {
            Outcome::Volumes(mut rows) => rows.pop().context("it says nothing of a volume"),
            other => bail!("{order:?} was answered by {other:?}"),
        }
    }

    /// A volume on the first host with that file's data, lent to an instance as a block device.
    pub fn lent(&self, name: &str, holder: &str, size: u64, image: &Path) -> anyhow::Result<PathBuf> {
        let (size, image) = (size.to_string(), image.display().to_string());
        ended(&mut self.command(
            "a",
            &["create", name, "--size", &size, "--data", &image, "--adopt"],
        ))?;
        let order = Order::Attach {
            name: name.to_owned(),
            device: true,
            vhost_user: false,
            holder: Some(holder.to_owned()),
            by: None,
            socket: None,
            read_only: false,
        };
        self.order("a", &order)?.device.context("it is no block device")
    }

    /// A volume on the first host with that file's data; its address.
    pub fn volume(&self, name: &str, size: u64, image: &Path) -> anyhow::Result<String> {
        let (size, image) = (size.to_string(), image.display().to_string());
        ended(&mut self.command(
            "a",
            &["create", name, "--size", &size, "--data", &image, "--adopt"],
        ))?;
        let rows: Value = serde_json::from_str(&ended(&mut self.command("a", &["attach", name]))?)?;
        Ok(rows[0]["uri"].as_str().context("it has no address")?.to_owned())
    }

    /// Copies it to the second host, and returns when that has everything: from then on each write goes to both.
    pub fn mirror(&self, name: &str) -> anyhow::Result<()> {
        let (name, by) = (name.to_owned(), SESSION);
        let follow = Order::Follow {
            name: name.clone(),
            to: "b".to_owned(),
            by,
            bytes_per_second: None,
        };
        self.order("a", &follow)?;
        self.order("a", &Order::Mirrored { name, by })?;
        Ok(())
    }

    /// The same by vhost-user-blk; its socket.
    pub fn vhost_user(&self, name: &str, size: u64, image: &Path) -> anyhow::Result<PathBuf> {
        let (size, image) = (size.to_string(), image.display().to_string());
        ended(&mut self.command(
            "a",
            &["create", name, "--size", &size, "--data", &image, "--adopt"],
        ))?;
        let attach = ended(&mut self.command("a", &["attach", name, "--vhost-user"]))?;
        let rows: Value = serde_json::from_str(&attach)?;
        let socket = rows[0]["vhost_user"]["socket"].as_str();
        Ok(socket.context("it has no socket")?.into())
    }

    /// A software RNIC on each host, until they are dropped.
    pub fn rnics(&self) -> anyhow::Result<Vec<Server>> {
        let start = |(name, address): (&str, &str)| {
            let runtime = self.folder.join(name).join("run");
            std::fs::create_dir_all(runtime.join("mem"))?;
            let socket = runtime.join("nic.sock");
            // One that is left over would be taken for the new one's.
            let _ = std::fs::remove_file(&socket);
            let mut command = Command::new(&self.verbatim);
            command
                .args(["nic", "--only-address", "--address", address, "--runtime-dir"])
                .arg(&runtime);
            let server = Server::start(&mut command, &self.folder.join(format!("{name}.nic.log")))?;
            until_there(&socket)?;
            Ok(server)
        };
        ["a", "b"].into_iter().zip(ADDRESSES).map(start).collect()
    }

    /// The volume of that name, as the first host knows it.
    pub fn status(&self, name: &str) -> anyhow::Result<Value> {
        let text = ended(&mut self.command("a", &["status", name]))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Forgets it on both hosts, moved or not; the first host's data stay where they are.
    pub fn forget(&self, name: &str) -> anyhow::Result<()> {
        for host in ["a", "b"] {
            // It may not be there, not be moving, or not be served; and a session's copy is given up by that session.
            let name = name.to_owned();
            let settle = Order::Settle {
                name: name.clone(),
                by: SESSION,
                is_committed: false,
            };
            let _ = self.order(host, &settle);
            for order in ["cancel", "detach"] {
                let _ = self.command(host, &[order, &name]).output();
            }
        }
        eventually("the volume's end", LIMIT, || {
            for host in ["a", "b"] {
                let _ = self.command(host, &["delete", name]).output();
            }
            let mut rows = String::new();
            for host in ["a", "b"] {
                rows += &ended(&mut self.command(host, &["list"]))?;
            }
            Ok((!rows.contains(&format!("\"{name}\""))).then_some(()))
        })
    }
}

/// Two `qemu-storage-daemon`, the first of which mirrors to the second.
pub struct Mirror {
    source: UnixStream,
    answers: BufReader<UnixStream>,
    pub servers: [Server; 2],
    pub uri: String,
}

impl Mirror {
    /// Both run; the second one's file is empty.
    pub fn start(folder: &Path, image: &Path, size: u64) -> anyhow::Result<Self> {
        let target = folder.join("target.img");
        let file = File::create(&target)?;
        file.set_len(size)?;
        let (socket, monitor) = (folder.join("mirror.sock"), folder.join("mirror.qmp"));
        let daemon = |image: &Path, address: &str, export: &str| {
            let mut command = Command::new("qemu-storage-daemon");
            command
                .arg("--blockdev")
                .arg(format!("driver=file,node-name=file,filename={}", image.display()))
                .args([
                    "--blockdev",
                    "driver=raw,node-name=disk,file=file",
                    "--nbd-server",
                    address,
                ])
                .args([
                    "--export",
                    &format!("type=nbd,id={export},node-name=disk,name=db,writable=on"),
                ]);
            command
        };
        let address = format!("addr.type=inet,addr.host={},addr.port={PORT}", ADDRESSES[1]);
        let second = Server::start(
            &mut daemon(&target, &address, "target"),
            &folder.join("target.log"),
        )?;
        let address = format!("addr.type=unix,addr.path={}", socket.display());
        let mut command = daemon(image, &address, "source");
        command
            .arg("--chardev")
            .arg(format!(
                "socket,path={},server=on,wait=off,id=qmp",
                monitor.display()
            ))
            .args(["--monitor", "chardev=qmp"]);
        let first = Server::start(&mut command, &folder.join("mirror.log"))?;
        until_there(&monitor)?;
        let source = eventually("the monitor", LIMIT, || Ok(UnixStream::connect(&monitor).ok()))?;
        source.set_read_timeout(Some(LIMIT))?;
        let answers = BufReader::new(source.try_clone()?);
        let uri = format!("nbd+unix:///db?socket={}", socket.display());
        let mut mirror = Self {
            source,
            answers,
            servers: [first, second],
            uri,
        };
        mirror.line()?;
        mirror.order("qmp_capabilities", &json!({}))?;
        Ok(mirror)
    }

    fn line(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("qemu-storage-daemon has ended");
        }
        Ok(serde_json::from_str(&line)?)
    }

    fn order(&mut self, name: &str, arguments: &Value) -> anyhow::Result<Value> {
        let order = json!({ "execute": name, "arguments": arguments });
        writeln!(self.source, "{order}")?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("{order}: {error}");
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Begins to mirror.
    pub fn begin(&mut self, copy_mode: &str, bytes_per_second: u64) -> anyhow::Result<()> {
        let server = json!({ "type": "inet", "host": ADDRESSES[1], "port": PORT.to_string() });
        let node = json!({ "driver": "nbd", "node-name": "remote", "server": server, "export": "db" });
        // The second daemon may have only just been started.
        eventually("the target", LIMIT, || Ok(self.order("blockdev-add", &node).ok()))?;
        let job = json!({
            "job-id": "mirror", "device": "disk", "target": "remote", "sync": "full", "speed": bytes_per_second,
            "copy-mode": copy_mode,
        });
        self.order("blockdev-mirror", &job)?;
        Ok(())
    }

    /// Whether the target has everything.
    pub fn is_ready(&mut self) -> anyhow::Result<bool> {
        let jobs = self.order("query-jobs", &json!({}))?;
        Ok(jobs[0]["status"] == "ready")
    }

    /// Bytes that were copied so far.
    pub fn copied(&mut self) -> anyhow::Result<u64> {
        let jobs = self.order("query-jobs", &json!({}))?;
        jobs[0]["current-progress"].as_u64().context("no progress")
    }

    /// Gives the mirror up.
    pub fn end(&mut self) -> anyhow::Result<()> {
        self.order("block-job-cancel", &json!({ "device": "mirror", "force": true }))?;
        eventually("the mirror's end", LIMIT, || {
            let jobs = self.order("query-jobs", &json!({}))?;
            Ok(jobs.as_array().is_some_and(Vec::is_empty).then_some(()))
        })?;
        self.order("blockdev-del", &json!({ "node-name": "remote" }))?;
        Ok(())
    }
}

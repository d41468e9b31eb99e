//! Two hosts on loopback addresses of one machine, each with a daemon.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use verbatim_e2e::eventually;

use crate::built;
use crate::client::Client;

/// Limit of every wait.
pub const LIMIT: Duration = Duration::from_secs(600);

/// The hosts' names; a host is its index.
pub const NAMES: [&str; 2] = ["a", "b"];

/// The volume of all cases.
pub const VOLUME: &str = "db";

/// The two hosts. Their daemons end on drop.
pub struct Hosts {
    began: Instant,
    folder: tempfile::TempDir,
    program: PathBuf,
    states: [PathBuf; 2],
    daemons: [Option<Child>; 2],
}

/// Runs a program that must succeed; returns its output.
pub fn succeed(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", words(&output));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn words(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

impl Hosts {
    /// Starts both daemons, with their state in memory.
    pub fn up() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir_in("/run")?;
        let states = NAMES.map(|name| folder.path().join(name).join("state"));
        let mut hosts = Self::with_states(folder, states)?;
        hosts.start(0)?;
        hosts.start(1)?;
        Ok(hosts)
    }

    /// Two hosts without a daemon yet; the caller provides their state folders.
    pub fn at(states: [PathBuf; 2]) -> anyhow::Result<Self> {
        Self::with_states(tempfile::tempdir_in("/run")?, states)
    }

    fn with_states(folder: tempfile::TempDir, states: [PathBuf; 2]) -> anyhow::Result<Self> {
        let program = built("verbatim")?;
        // Shared by all cases of a machine: a copy knows its other host by name, and keys take a while.
        let cluster = Path::new("/run/faulty-cluster");
        if !cluster.exists() {
            let addresses = ["a=127.0.0.11", "b=127.0.0.12"];
            succeed(Command::new(&program).arg("hosts").arg(cluster).args(addresses))?;
        }
        for name in NAMES {
            std::fs::create_dir_all(folder.path().join(name).join("run"))?;
        }
        Ok(Self {
            began: Instant::now(),
            folder,
            program,
            states,
            daemons: [None, None],
        })
    }

    /// A path in the case's own folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn runtime(&self, host: usize) -> PathBuf {
        self.folder.path().join(NAMES[host]).join("run")
    }

    /// Starts a host's daemon, and waits until it takes commands.
    pub fn start(&mut self, host: usize) -> anyhow::Result<()> {
        ensure!(self.daemons[host].is_none(), "it runs already");
        let socket = self.runtime(host).join("volumes.sock");
        // The socket of a killed daemon would be taken for the new one's.
        let _ = std::fs::remove_file(&socket);
        let path = self.path(&format!("{}.log", NAMES[host]));
        let log = std::fs::File::options().append(true).create(true).open(path)?;
        let child = Command::new(&self.program)
            .args(["volume", "daemon", "--name", NAMES[host], "--runtime-dir"])
            .arg(self.runtime(host))
            .arg("--state-dir")
            .arg(&self.states[host])
            .arg("--config-dir")
            .arg(Path::new("/run/faulty-cluster").join(NAMES[host]))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.daemons[host] = Some(child);
        eventually("a daemon takes orders", LIMIT, || {
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })
        .with_context(|| self.logs())
    }

    /// Kills a host's daemon.
    pub fn kill(&mut self, host: usize) {
        if let Some(mut child) = self.daemons[host].take() {
            // The daemon may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills a host's daemon, and does not wait: a thread of it may wait for a disk.
    pub fn strike(&mut self, host: usize) -> anyhow::Result<()> {
        let child = self.daemons[host].as_mut().context("no daemon runs")?;
        Ok(child.kill()?)
    }

    /// Waits until a host's daemon is flushing the case's volume.
    pub fn wait_for_flush(&self, host: usize) -> anyhow::Result<()> {
        let note = self
            .runtime(host)
            .join("volumes")
            .join(format!("{VOLUME}.flushing"));
        eventually("a flush is in flight", LIMIT, || {
            let note = std::fs::read(&note)?;
            Ok((note.get(40) == Some(&b'1')).then_some(()))
        })
    }

    /// Kills a host's daemon, and ends what it leaves for the next one: devices are free.
    pub fn leave(&mut self, host: usize) {
        self.kill(host);
        let _ = self.command(host, &["stop", "--force"]).output();
    }

    /// A command, not started yet.
    pub fn command(&self, host: usize, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("volume")
            .args(args)
            .arg("--runtime-dir")
            .arg(self.runtime(host));
        command
    }

    /// Runs a command that must succeed; returns its output.
    pub fn order(&self, host: usize, args: &[&str]) -> anyhow::Result<String> {
        succeed(&mut self.command(host, args)).with_context(|| self.logs())
    }

    /// Runs a command that must be refused; returns the reason.
    pub fn refused(&self, host: usize, args: &[&str]) -> anyhow::Result<String> {
        let output = self.command(host, args).output()?;
        ensure!(
            !output.status.success(),
            "{args:?} is not refused\n{}",
            self.logs()
        );
        let said = words(&output);
        eprintln!("{} {args:?}: {said}", NAMES[host]);
        Ok(said)
    }

    /// Status of a volume on a host.
    pub fn status_of(&self, host: usize, volume: &str) -> anyhow::Result<Option<Value>> {
        let output = self.command(host, &["status", volume, "--json"]).output()?;
        if !output.status.success() {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&output.stdout)?))
    }

    /// Status of the case's volume on a host.
    pub fn status(&self, host: usize) -> anyhow::Result<Value> {
        let status = self.status_of(host, VOLUME)?;
        status.with_context(|| format!("{} has no {VOLUME}\n{}", NAMES[host], self.logs()))
    }

    /// Role of a host's copy.
    pub fn role(&self, host: usize) -> anyhow::Result<String> {
        let status = self.status_of(host, VOLUME)?;
        Ok(status.map_or("none".to_owned(), |status| {
            status["role"].as_str().unwrap_or("").to_owned()
        }))
    }

    /// An error unless the copies have these roles.
    pub fn expect_roles(&self, roles: [&str; 2]) -> anyhow::Result<()> {
        let found = [self.role(0)?, self.role(1)?];
        ensure!(found == roles, "{found:?} is not {roles:?}\n{}", self.logs());
        Ok(())
    }

    /// The host that serves, if neither copy is in doubt any more. An error if both serve.
    pub fn one_serves(&self) -> anyhow::Result<Option<usize>> {
        let roles = [self.role(0)?, self.role(1)?];
        let serving: Vec<usize> = (0..2).filter(|&host| roles[host] == "serving").collect();
        ensure!(serving.len() < 2, "both serve\n{}", self.logs());
        let in_doubt = ["deciding", "unknown", "busy"];
        let is_settled = !roles.iter().any(|role| in_doubt.contains(&role.as_str()));
        Ok(serving.first().copied().filter(|_| is_settled))
    }

    /// An error unless the copy is suspect, or is not, as given.
    pub fn expect_suspect(&self, host: usize, is_suspect: bool) -> anyhow::Result<()> {
        let status = self.status(host)?;
        ensure!(
            status["suspect"] == is_suspect,
            "suspect is not {is_suspect}: {status}\n{}",
            self.logs()
        );
        Ok(())
    }

    /// Moves the case's volume; returns the move's figures.
    pub fn migrate(&self, from: usize, to: usize, more: &[&str]) -> anyhow::Result<Value> {
        let words = [&["migrate", VOLUME, "--json", "--to", NAMES[to]], more].concat();
        Ok(serde_json::from_str(&self.order(from, &words)?)?)
    }

    /// A client of a volume; waits until the volume is served.
    pub fn client_of(&self, host: usize, volume: &str) -> anyhow::Result<Client> {
        let socket = self.runtime(host).join("volumes").join(format!("{volume}.sock"));
        let connect = || Ok(Client::connect(&socket).ok());
        let mut client = eventually("the volume is served", LIMIT, connect).with_context(|| self.logs())?;
        client.wait_for_ever();
        Ok(client)
    }

    /// A client of the case's volume, if it is served there now.
    pub fn try_client(&self, host: usize) -> Option<Client> {
        let socket = self.runtime(host).join("volumes").join(format!("{VOLUME}.sock"));
        let mut client = Client::connect(&socket).ok()?;
        client.wait_for_ever();
        Some(client)
    }

    /// A client of the case's volume; waits until it is served.
    pub fn client(&self, host: usize) -> anyhow::Result<Client> {
        self.client_of(host, VOLUME)
    }

    /// Content of a copy's data file, for a copy without a place of its own.
    pub fn data(&self, host: usize) -> anyhow::Result<Vec<u8>> {
        Ok(std::fs::read(self.states[host].join(VOLUME).join("data"))?)
    }

    /// No daemon has logged a warning or an error twice within a minute.
    pub fn expect_no_repetition(&self) -> anyhow::Result<()> {
        let minutes = self.began.elapsed().as_secs() as usize / 60 + 1;
        let logs = self.logs();
        // Without the time.
        let lines = logs
            .lines()
            .filter_map(|line| Some(line.split_once('Z')?.1.trim()));
        let mut said = BTreeMap::new();
        for line in lines.filter(|line| line.starts_with("WARN ") || line.starts_with("ERROR ")) {
            *said.entry(line).or_insert(0_usize) += 1;
        }
        let most = said.values().max().copied().unwrap_or_default();
        ensure!(most > 0, "nothing was said: {logs}");
        ensure!(
            most <= 2 * minutes,
            "something was said {most} times in {minutes} minutes: {logs}"
        );
        Ok(())
    }

    /// The words of the daemons, for the message of a case that fails.
    pub fn logs(&self) -> String {
        let log = |name| std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        format!("--- a\n{}--- b\n{}", log("a"), log("b"))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.leave(0);
        self.leave(1);
    }
}

/// Reads a whole volume, by requests of 1 MiB.
pub fn read_all(client: &mut Client) -> std::io::Result<Vec<u8>> {
    let mut data = vec![0; client.size as usize];
    for (offset, part) in (0..).step_by(1 << 20).zip(data.chunks_mut(1 << 20)) {
        client.read(offset, part)?;
    }
    Ok(data)
}

/// Writes from the beginning of a volume, by requests of 1 MiB.
pub fn write_all(client: &mut Client, data: &[u8]) -> std::io::Result<()> {
    for (offset, part) in (0..).step_by(1 << 20).zip(data.chunks(1 << 20)) {
        client.write(offset, part, false)?;
    }
    Ok(())
}

/// An error unless the request failed with EIO.
pub fn expect_eio(what: &str, result: std::io::Result<()>) -> anyhow::Result<()> {
    let errno = result.as_ref().err().and_then(std::io::Error::raw_os_error);
    ensure!(
        errno == Some(rustix::io::Errno::IO.raw_os_error()),
        "{what} ends with {result:?}, not with EIO"
    );
    Ok(())
}

/// An error unless both contents are the same.
pub fn expect_same(what: &str, found: &[u8], wanted: &[u8]) -> anyhow::Result<()> {
    ensure!(
        found.len() == wanted.len(),
        "{what}: {} bytes are not {}",
        found.len(),
        wanted.len()
    );
    let differs = found
        .iter()
        .zip(wanted)
        .position(|(found, wanted)| found != wanted);
    match differs {
        None => Ok(()),
        Some(at) => {
            let count = found
                .iter()
                .zip(wanted)
                .filter(|(found, wanted)| found != wanted)
                .count();
            anyhow::bail!("{what}: {count} bytes differ, the first at {at}")
        }
    }
}

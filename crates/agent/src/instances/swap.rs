//! Swap disks of a virtual machine: memory of other hosts (`docs/remote-memory.md`), whose lease moves with it.
//!
//! Each has a process of its own, which this agent starts and which outlives it, and a folder of this host with that one's socket, by which QEMU has
//! the disk by NBD. The folder is made before the process is started and removed after it has ended. So whichever agent finds it knows
//! what to end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use verbatim_container::ContainerName;
use verbatim_swap::attach::BackupChoice;
use verbatim_swap::command::{DEADLINE_MS, PORT, backup, size};
use verbatim_swap::control::{Sockets, is_nobody_there, order_now};
use verbatim_swap::disk::{Order, Status};
use verbatim_vm::{Arguments, NbdDisk};

use crate::config::Config;

/// The folder of all instances' swap disks, in the runtime folder.
const FOLDER: &str = "swaps";

/// Where QEMU's container has the folders of their sockets. The same on all hosts, as the command line is.
const INSIDE: &str = "/run/swap";

/// Where QEMU finds a disk, in the disk's folder.
const SOCKET: &str = "nbd";

/// What a disk is called if nothing is said.
const NAME: &str = "swap";

/// A page of a disk. A guest's sector is not longer.
const PAGE_BYTES: u64 = 4096;

/// So long a process may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// So long a process may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// A swap disk of an instance, on whichever host it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapDisk {
    /// What the instance calls it.
    pub name: String,
    /// The memory server.
    pub host: String,
    /// How large it is.
    pub bytes: u64,
    /// What stands in for the server, as of `verbatim swap attach --backup`.
    pub backup: String,
    /// The port of memory servers.
    pub port: u16,
    /// So many milliseconds a page may take before the server is given up.
    pub deadline: u64,
}

impl SwapDisk {
    /// What its host calls it.
    pub fn known_as(&self, instance: &str) -> String {
        known_as(instance, &self.name)
    }

    /// The same with these servers.
    fn with_servers(&self, servers: &[String]) -> Self {
        let mut disk = self.clone();
        if let Some(first) = servers.first() {
            disk.host.clone_from(first);
        }
        if disk.backup.starts_with("mirror=")
            && let Some(second) = servers.get(1)
        {
            disk.backup = format!("mirror={second}");
        }
        disk
    }

    /// The folder of its socket in QEMU's container.
    pub fn inside(&self) -> PathBuf {
        Path::new(INSIDE).join(&self.name)
    }

    /// The hosts whose memory it is.
    pub fn servers(&self) -> impl Iterator<Item = &str> {
        let second = self.backup.strip_prefix("mirror=");
        std::iter::once(self.host.as_str()).chain(second)
    }
}

fn known_as(instance: &str, disk: &str) -> String {
    format!("{instance}.{disk}")
}

/// Reads `HOST:SIZE` or `HOST:SIZE:OPTION,OPTION…`; the disk, and properties of its device.
fn parse_one(text: &str) -> anyhow::Result<(SwapDisk, Vec<String>)> {
    let wrong = || {
        format!(
            "{text:?} is not a memory server, a size and options, such as host2:8G or host2:8G:backup=none"
        )
    };
    let mut parts = text.splitn(3, ':');
    let (Some(host), Some(bytes)) = (parts.next(), parts.next()) else {
        bail!(wrong());
    };
    let options = parts.next().map(|options| options.split(',').collect::<Vec<_>>());
    ensure!(!host.is_empty(), wrong());
    let bytes = size(bytes).map_err(|_| anyhow::anyhow!(wrong()))?;
    ensure!(
        bytes.is_multiple_of(PAGE_BYTES),
        "a swap disk has whole pages of {PAGE_BYTES} bytes"
    );
    let mut disk = SwapDisk {
        name: NAME.to_owned(),
        host: host.to_owned(),
        bytes,
        backup: "file".to_owned(),
        port: PORT,
        deadline: DEADLINE_MS,
    };
    let mut properties = Vec::new();
    for option in options.unwrap_or_default() {
        match option.split_once('=') {
            Some(("name", name)) => disk.name = checked(name)?.to_owned(),
            Some(("backup", choice)) => {
                match backup(choice).map_err(|those| anyhow::anyhow!("{text:?}: a backup is {those}"))? {
                    BackupChoice::Mirror(second) if second == host => {
                        bail!("{host} cannot stand in for itself")
                    }
                    BackupChoice::File(Some(path)) if !path.is_absolute() => {
                        bail!("{} is no absolute path", path.display())
                    }
                    _ => disk.backup = choice.to_owned(),
                }
            }
            Some(("port", port)) => disk.port = port.parse().with_context(wrong)?,
            Some(("deadline", limit)) => disk.deadline = limit.parse().with_context(wrong)?,
            Some(_) => properties.push(option.to_owned()),
            None => bail!(wrong()),
        }
    }
    Ok((disk, properties))
}

/// A name that leads nowhere else.
fn checked(name: &str) -> anyhow::Result<&str> {
    ContainerName::new(name.to_owned()).context("the name of a swap disk")?;
    Ok(name)
}

/// The virtual machine with these disks, behind those that it has.
pub fn with(arguments: Arguments, texts: &[String]) -> anyhow::Result<(Arguments, Vec<SwapDisk>)> {
    let (mut arguments, mut all) = (arguments, Vec::<SwapDisk>::new());
    for text in texts {
        let (disk, properties) = parse_one(text)?;
        if all.iter().any(|other| other.name == disk.name) {
            bail!(
                "two swap disks are called {}; give one another name with name=NAME",
                disk.name
            );
        }
        arguments = arguments.with_disk(&NbdDisk {
            export: &disk.name,
            socket: &disk.inside().join(SOCKET),
            bytes: disk.bytes,
            writable: true,
            properties: &properties,
        })?;
        all.push(disk);
    }
    Ok((arguments, all))
}

/// The swap disks of one instance on this host.
#[derive(Debug, Clone)]
pub struct Swaps {
    folder: PathBuf,
    runtime_dir: PathBuf,
    instance: String,
}

impl Swaps {
    /// Those of the instance `name` below the agent's runtime folder.
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        Self {
            folder: runtime_dir.join(FOLDER).join(name),
            runtime_dir: runtime_dir.to_owned(),
            instance: name.to_owned(),
        }
    }

    /// The folder of a disk's socket on this host.
    pub fn of(&self, disk: &str) -> PathBuf {
        self.folder.join(disk)
    }

    /// The swap disk of no instance whose usual socket has this path.
    pub fn served_at(&self, path: &Path) -> Option<String> {
        let folder = self.runtime_dir.join("swap");
        let name = path.strip_prefix(folder).ok()?.to_str()?.strip_suffix(".sock")?;
        Some(name.to_owned())
    }

    fn sockets(&self, disk: &str) -> Sockets {
        Sockets::new(&self.runtime_dir, &known_as(&self.instance, disk))
    }

    fn status(&self, disk: &str) -> anyhow::Result<Status> {
        order_now(&self.sockets(disk), &Order::Status, ANSWER_LIMIT)
    }

    /// Makes their folders.
    pub fn expect(&self, disks: &[SwapDisk]) -> anyhow::Result<()> {
        for disk in disks {
            // It may come from another host.
            let folder = self.of(checked(&disk.name)?);
            std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Ok(())
    }

    /// Starts a process for each. On an error none is left. `by`: they come here in a session of that number, which is not decided yet.
    pub fn take(&self, config: &Config, disks: &[SwapDisk], by: Option<u64>) -> anyhow::Result<()> {
        self.expect(disks)?;
        let started = disks.iter().try_for_each(|disk| {
            let started = self.start(config, disk, by);
            started.with_context(|| format!("the swap disk {}", disk.name))
        });
        if started.is_err()
            && let Err(error) = self.give_back()
        {
            let (instance, error) = (&self.instance, format!("{error:#}"));
            tracing::warn!(instance, error, "a swap disk is left");
        }
        started
    }

    fn start(&self, config: &Config, disk: &SwapDisk, by: Option<u64>) -> anyhow::Result<()> {
        let config_dir = config.hosts.parent().context("hosts.json has no folder")?;
        let mut arguments: Vec<OsString> = ["swap", "attach", &disk.host].map(OsString::from).into();
        arguments.push(disk.bytes.to_string().into());
        let mut option = |name: &str, value: OsString| arguments.extend([name.into(), value]);
        option("--name", disk.known_as(&self.instance).into());
        option("--backup", disk.backup.clone().into());
        option("--deadline", disk.deadline.to_string().into());
        option("--port", disk.port.to_string().into());
        option("--own-name", config.name.clone().into());
        option("--config-dir", config_dir.into());
        option("--runtime-dir", self.runtime_dir.clone().into());
        option("--state-dir", config.state_dir.join("swap").into());
        option("--instance", self.instance.clone().into());
        option("--socket", self.of(&disk.name).join(SOCKET).into());
        if let Some(by) = by {
            option("--arriving", by.to_string().into());
        }
        // It returns when the disk is there, and leaves a process that serves it.
        let output = Command::new(&config.program)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {}", config.program.display()))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let why = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
        bail!("{}", why.unwrap_or(&said).trim())
    }

    /// Ends their processes. Nothing if there are none.
    pub fn give_back(&self) -> anyhow::Result<()> {
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            entries => entries.with_context(|| format!("cannot read {}", self.folder.display()))?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_str().context("a folder of no swap disk")?;
            self.end(name)
                .with_context(|| format!("the swap disk {name} does not end"))?;
            std::fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
        std::fs::remove_dir(&self.folder).with_context(|| format!("cannot remove {}", self.folder.display()))
    }

    fn end(&self, disk: &str) -> anyhow::Result<()> {
        let sockets = self.sockets(disk);
        match order_now(&sockets, &Order::Detach { force: true }, ANSWER_LIMIT) {
            Ok(_) => {}
            // Of one that was killed.
            Err(error) if is_nobody_there(&error) => {
                sockets.remove();
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        // Its sockets go when it has ended.
        let end = Instant::now() + END_LIMIT;
        while sockets.control().exists() {
            ensure!(Instant::now() < end, "its process is still there");
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// An error unless all of them wait here for the decision, and can take the lease over.
    pub fn must_be_ready(&self, disks: &[SwapDisk]) -> anyhow::Result<()> {
        for disk in disks {
            let status = self.status(&disk.name);
            let status = status.with_context(|| format!("the swap disk {} there is lost", disk.name))?;
            let copies = status.copies.iter().filter_map(|copy| copy.reason.clone());
            ensure!(
                status.role == "ready",
                "the swap disk {} there cannot take its lease over: it is {}; {}",
                disk.name,
                status.role,
                copies.collect::<Vec<_>>().join("; ")
            );
        }
        Ok(())
    }

    /// The same disks, with the servers that they have by now: one may have handed its pages over to another.
    pub fn as_they_are(&self, disks: &[SwapDisk]) -> Vec<SwapDisk> {
        let now = disks.iter().map(|disk| {
            let copies = self.status(&disk.name).map(|status| status.copies);
            let servers = copies.unwrap_or_default().into_iter();
            let servers: Vec<_> = servers
                .filter(|copy| copy.kind == "server")
                .map(|copy| copy.place)
                .collect();
            disk.with_servers(&servers)
        });
        now.collect()
    }

    /// Why the instance does not move now, as far as it is for its swap disks.
    pub fn blockers(&self, disks: &[SwapDisk]) -> Vec<String> {
        let mut blockers = Vec::new();
        for disk in disks {
            let status = match self.status(&disk.name) {
                Ok(status) => status,
                Err(error) => {
                    blockers.push(format!("the swap disk {} is lost: {error:#}", disk.name));
                    continue;
                }
            };
            let servers = status.copies.iter().filter(|copy| copy.kind == "server");
            for copy in servers.filter(|copy| copy.state != "up") {
                blockers.push(format!(
                    "the memory server {} of the swap disk {} is {}: {}; the lease cannot move without it",
                    copy.place,
                    disk.name,
                    copy.state,
                    copy.reason.as_deref().unwrap_or("no reason is known")
                ));
            }
        }
        blockers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_read_and_nonsense_is_refused() {
        let qemu = || Arguments::parse(&["qemu"]).unwrap();
        let parsed = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            with(qemu(), &texts).map_err(|error| format!("{error:#}"))
        };
        let (arguments, disks) = parsed(&[
            "host2:8G",
            "host3:16M:name=fast,backup=mirror=host4,bootindex=1,deadline=500,port=9",
        ])
        .unwrap();
        let plain = SwapDisk {
            name: "swap".into(),
            host: "host2".into(),
            bytes: 8 << 30,
            backup: "file".into(),
            port: PORT,
            deadline: DEADLINE_MS,
        };
        let other = SwapDisk {
            name: "fast".into(),
            host: "host3".into(),
            bytes: 16 << 20,
            backup: "mirror=host4".into(),
            port: 9,
            deadline: 500,
        };
        assert_eq!(disks, [plain, other]);
        assert_eq!(disks[1].servers().collect::<Vec<_>>(), ["host3", "host4"]);
        assert_eq!(disks[0].known_as("vm"), "vm.swap");
        let now = disks[1].with_servers(&["host5".to_owned(), "host6".to_owned()]);
        assert_eq!(
            (now.host.as_str(), now.backup.as_str()),
            ("host5", "mirror=host6")
        );
        let now = disks[0].with_servers(&["host5".to_owned()]);
        assert_eq!((now.host.as_str(), now.backup.as_str()), ("host5", "file"));
        assert_eq!(disks[0].with_servers(&[]), disks[0]);
        let line = arguments.line().join(" ");
        assert!(line.contains("server.path=/run/swap/fast/nbd"), "{line}");
        assert!(
            line.contains("serial=fast,") && line.contains("bootindex=1"),
            "{line}"
        );
        for bad in [
            "host2",
            "host2:",
            ":8G",
            "host2:x",
            "host2:8G:quick",
            "host2:8G:port=x",
        ] {
            assert!(parsed(&[bad]).unwrap_err().contains("such as"), "{bad}");
        }
        for (bad, why) in [
            ("host2:1000", "whole pages"),
            ("host2:8G:backup=tape", "mirror=HOST"),
            ("host2:8G:backup=mirror=host2", "stand in for itself"),
            ("host2:8G:backup=file=x", "absolute"),
            ("host2:8G:name=a/b", "name"),
        ] {
            assert!(parsed(&[bad]).unwrap_err().contains(why), "{bad}");
        }
        assert!(parsed(&["a:8G", "b:8G"]).unwrap_err().contains("name=NAME"));
    }

    #[test]
    fn the_socket_of_a_disk_of_no_instance_is_known() {
        let swaps = Swaps::new(Path::new("/run/verbatim"), "vm");
        let at = |path: &str| swaps.served_at(Path::new(path));
        assert_eq!(at("/run/verbatim/swap/host2.sock"), Some("host2".to_owned()));
        assert_eq!(at("/run/verbatim/swap/host2.control"), None);
        assert_eq!(at("/run/verbatim/swaps/vm/swap/nbd"), None);
    }

    #[test]
    fn of_a_process_that_was_killed_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let swaps = Swaps::new(folder.path(), "vm");
        swaps.give_back().unwrap();
        let (_, disks) = with(Arguments::parse(&["qemu"]).unwrap(), &["host2:8G".to_owned()]).unwrap();
        swaps.expect(&disks).unwrap();
        std::fs::write(swaps.of("swap").join(SOCKET), "").unwrap();
        assert!(swaps.blockers(&disks)[0].contains("is lost"));
        assert!(swaps.must_be_ready(&disks).is_err());
        swaps.give_back().unwrap();
        assert!(!swaps.folder.exists());
    }
}

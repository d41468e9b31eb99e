//! A host whose own swap is another host's memory. It is a machine with our software RNIC: its disk's process and its RNIC are on the way of every
//! page that their own kernel swaps, and may never wait for one. The other host is on the machine's bridge, without a kernel of its own.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;
use tempfile::TempDir;
use verbatim_testbed::{Network, VmConfig};

use crate::guest::Test;
use crate::lab::{PROGRAM, end, until};
use crate::machine::{Load, Machine, Watch};

/// Of the first, in MiB. The RNIC, the disk's process and the kernel have some 200 of it.
const MEMORY: u32 = 448;
const DISK: &str = "512M";
/// The kernel's reserve, in KiB: without it nothing is left for packets when programs want all there is.
const RESERVE: u32 = 16 << 10;

const ADDRESSES: [(&str, &str); 2] = [("user", "10.79.0.1"), ("server", "10.79.0.2")];

/// All of them.
pub const ALL: &[Test] = &[("host::swaps", swaps), ("host::server_is_killed", killed)];

const LOAD: Load = Load {
    programs: 2,
    mib: 320,
    seconds: 40,
};

/// A machine and a host on one network.
struct Hosts {
    // In the order in which they go.
    user: Machine,
    server: RefCell<Server>,
    _folder: TempDir,
}

/// The host with the memory: its RNIC and its server.
struct Server {
    folder: PathBuf,
    network: Network,
    nic: Option<Child>,
    memory: Option<Child>,
}

impl Server {
    fn new(folder: &Path) -> anyhow::Result<Self> {
        let folder = folder.join("server");
        // Memory that is registered must be on tmpfs; nothing is, but what the RNIC makes.
        std::fs::create_dir_all(folder.join("mem"))?;
        let network = Network::new()?;
        let address = format!("{}/24", ADDRESSES[1].1);
        let added = network.within(|| {
            Ok(Command::new("ip")
                .args(["address", "add", &address, "dev", "switch"])
                .status())
        })??;
        ensure!(added.success(), "the bridge gets no address");
        let mut server = Self {
            folder,
            network,
            nic: None,
            memory: None,
        };
        server.nic = Some(server.start("nic.sock", &["nic", "--address", ADDRESSES[1].1])?);
        Ok(server)
    }

    fn serve(&mut self) -> anyhow::Result<()> {
        let config = self
            .folder
            .parent()
            .context("it is in the folder")?
            .join("cluster/server");
        let config = config.display().to_string();
        let serve = [
            "memory",
            "serve",
            "--size",
            "1G",
            "--name",
            "server",
            "--config-dir",
            &config,
        ];
        self.memory = Some(self.start("memory.sock", &serve)?);
        Ok(())
    }

    fn start(&self, socket: &str, arguments: &[&str]) -> anyhow::Result<Child> {
        let socket = self.folder.join(socket);
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(PROGRAM);
        command
            .args(arguments)
            .arg("--runtime-dir")
            .arg(&self.folder)
            .stdin(Stdio::null());
        let child = self.network.within(|| Ok(command.spawn()))??;
        until("a daemon answers", || socket.exists());
        Ok(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.memory);
        end(&mut self.nic);
    }
}

impl Hosts {
    fn up(cpus: u32) -> anyhow::Result<Self> {
        // Machines have a /run of their own, and see everything else.
        let folder = TempDir::new_in("/var/tmp")?;
        let cluster = folder.path().join("cluster");
        let made = Command::new(PROGRAM)
            .arg("hosts")
            .arg(&cluster)
            .args(ADDRESSES.map(|(name, address)| format!("{name}={address}")))
            .arg("--trusted-network")
            .output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let backup = folder.path().join("backup");
        std::fs::File::create(&backup)?.set_len(1 << 30)?;
        let mut server = Server::new(folder.path())?;
        server.serve()?;
        let (name, address) = ADDRESSES[0];
        let config = VmConfig {
            cpus,
            memory_mib: MEMORY,
            drives: vec![backup.display().to_string()],
            address: Some(format!("{address}/24").parse().map_err(anyhow::Error::msg)?),
            ..VmConfig::new(format!("swap-{name}-{}", std::process::id()))
        };
        let user = Machine::boot(&config, &server.network)?;
        user.shell(&format!(
            "mkdir -p /run/verbatim/mem; modprobe virtio_blk; modprobe nbd; sysctl -qw vm.min_free_kbytes={RESERVE}"
        ))?;
        user.shell(&format!(
            "setsid {PROGRAM} nic --locked --interface eth0 </dev/null >/run/nic.log 2>&1 & \
             until [ -S /run/verbatim/nic.sock ]; do kill -0 $! || {{ cat /run/nic.log >&2; exit 1; }}; sleep 0.05; done"
        ))?;
        let config = cluster.join(name);
        let attached = user.shell(&format!(
            "{PROGRAM} swap attach server {DISK} --device --backup file=/dev/vda --name disk --own-name {name} --config-dir {}",
            config.display()
        ))?;
        let said = user.shell("cat /run/nic.log /run/verbatim/swap/disk.log")?;
        ensure!(said.is_empty(), "something is lacking:\n{said}");
        eprintln!("{}", user.shell("grep -E 'MemTotal|MemAvailable' /proc/meminfo")?);
        user.swap_on(Path::new(attached.trim()))?;
        Ok(Self {
            user,
            server: RefCell::new(server),
            _folder: folder,
        })
    }

    fn status(&self) -> anyhow::Result<Value> {
        let text = self.user.shell(&format!("{PROGRAM} swap status disk --json"))?;
        Ok(serde_json::from_str(&text)?)
    }

    fn run(
        self,
        load: Load,
        trouble: impl FnOnce(&Self, &Watch<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let loaded = self.user.load(load, |watch| {
            watch.go_on(u64::from(load.mib) * 256 / u64::from(load.programs))?;
            trouble(&self, watch)
        });
        let swapped = loaded.with_context(|| self.words())?;
        let pages = u64::from(load.mib) * 256 / 4;
        ensure!(
            swapped.out > pages && swapped.back > pages,
            "hardly anything was swapped: {swapped:?}"
        );
        let status = self.status()?;
        ensure!(
            status["requests"]["failed"] == 0 && status["lost_bytes"] == 0,
            "{status}"
        );
        eprintln!("{status}");
        // What is swapped is still there, and comes back by the same way.
        let device = status["device"].as_str().context("it has a device")?;
        let detach = format!("{PROGRAM} swap detach disk");
        let refused = self.user.shell(&format!("! {detach} 2>&1"))?;
        ensure!(refused.contains("is in use; swapoff first"), "{refused}");
        self.user.shell(&format!("swapoff {device} && {detach}"))?;
        Ok(())
    }

    /// What the daemons have said.
    fn words(&self) -> String {
        let said = self
            .user
            .shell("tail -n 20 /run/nic.log /run/verbatim/swap/disk.log 2>&1");
        said.unwrap_or_else(|error| format!("{error:#}"))
    }
}

fn swaps() -> anyhow::Result<()> {
    Hosts::up(1)?.run(LOAD, |_, _| Ok(()))
}

/// For as long as one likes.
pub fn storm(cpus: u32, seconds: u32) -> anyhow::Result<()> {
    let load = Load {
        programs: 4,
        mib: 384,
        seconds,
    };
    Hosts::up(cpus)?.run(load, |_, _| Ok(()))
}

/// And started again: the backup is a disk of the host.
fn killed() -> anyhow::Result<()> {
    Hosts::up(1)?.run(LOAD, |hosts, watch| {
        end(&mut hosts.server.borrow_mut().memory);
        watch.go_on(2000)?;
        let state = hosts.status()?["copies"][0]["state"].clone();
        ensure!(state == "down", "the server is {state}");
        hosts.server.borrow_mut().serve()?;
        watch.until("it is back", || Ok(hosts.status()?["copies"][0]["state"] == "up"))?;
        watch.go_on(2000)
    })
}

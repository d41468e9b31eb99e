//! Virtual machines whose disks are served by other processes: a disk is the same one at both hosts, or the virtual machine stays where it is.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use verbatim_e2e::{ROLLED_BACK, Running, TestLab, eventually};

use super::{Guest, HOSTS, LIMIT, NAME, blockers, counted, program};
use crate::Test;

/// A socket at the same path of each host: each has a `/run` of its own.
const SOCKET: &str = "/run/disk.sock";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::disk_servers", HOSTS, disk_servers),
        Test::new("machines::disk_servers_at_loopback", HOSTS, at_loopback),
        Test::new("machines::promised_mtu", HOSTS, promised_mtu),
    ]
}

/// Servers of disks, which end when this is dropped.
struct Servers<'a> {
    lab: &'a TestLab,
    folder: tempfile::TempDir,
    running: Vec<Running>,
}

impl Drop for Servers<'_> {
    fn drop(&mut self) {
        for server in &self.running {
            let _ = server.signal(rustix::process::Signal::TERM);
        }
    }
}

impl<'a> Servers<'a> {
    fn new(lab: &'a TestLab) -> anyhow::Result<Self> {
        Ok(Self {
            lab,
            folder: tempfile::TempDir::new_in("/var/tmp")?,
            running: Vec::new(),
        })
    }

    /// A path that is the same file at both hosts.
    fn common(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Serves a disk of 16 MiB, full of this byte, at a host.
    fn serve(&mut self, host: &str, fill: u8, at: &[&str]) -> anyhow::Result<()> {
        let image = self.common(&format!("disk{fill}"));
        std::fs::File::create(&image)?.write_all_at(&vec![fill; 16 << 20], 0)?;
        let image = image.to_str().context("a path in UTF-8")?;
        let usual = ["qemu-nbd", "--persistent", "--shared=0", "--format=raw"];
        let server = self.lab.start_plain(host, &[&usual[..], at, &[image]].concat())?;
        self.running.push(server);
        Ok(())
    }

    /// The same at a socket; returns when the socket is there.
    fn serve_at(&mut self, host: &str, fill: u8, socket: &str) -> anyhow::Result<()> {
        self.serve(host, fill, &["--socket", socket])?;
        let path = self.lab.path(host, socket)?;
        eventually("the server's socket", LIMIT, || Ok(path.exists().then_some(())))
    }
}

/// A guest with a disk at this socket.
fn started<'a>(lab: &'a TestLab, socket: &Path) -> anyhow::Result<Guest<'a>> {
    let socket = socket.display();
    let drive = format!("file=nbd+unix:///?socket={socket},format=raw,if=none,id=disk");
    let device = "virtio-blk-pci,drive=disk,disable-modern=on";
    Guest::start(lab, &["-drive", &drive, "-device", device])
}

fn disk_servers(lab: &TestLab) -> anyhow::Result<()> {
    let mut servers = Servers::new(lab)?;
    servers.serve_at("src", 1, SOCKET)?;
    let guest = started(lab, Path::new(SOCKET))?;
    let refused = |why: &str| -> anyhow::Result<()> {
        let said = blockers(lab)?;
        ensure!(said.contains(SOCKET) && said.contains(why), "{said}");
        let migration = guest.instance.migrate("dst")?;
        ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
        let error = migration.error.clone().unwrap_or_default();
        ensure!(error.contains(SOCKET) && error.contains(why), "{error}");
        guest.counts_on()?;
        let row = guest.instance.row()?;
        ensure!(row.host == "src" && row.state == "running", "{row:?}");
        Ok(())
    };
    refused("is not there")?;
    servers.serve_at("dst", 2, SOCKET)?;
    refused("is the socket of another server than on the source")?;
    lab.ask(&["stop", NAME])?;

    // One server that both hosts reach, as hosts of one kernel can.
    let common = servers.common("common.sock");
    servers.serve_at("src", 3, common.to_str().context("a path in UTF-8")?)?;
    let guest = started(lab, &common)?;
    for to in ["dst", "src"] {
        guest.instance.migrate(to)?.must_be_committed()?;
        guest.counts_on()?;
    }
    lab.ask(&["stop", NAME])?;
    Ok(())
}

fn at_loopback(lab: &TestLab) -> anyhow::Result<()> {
    const MONITOR: &str = "/run/guest.qmp";
    const READY: &str = "/run/disk.pid";
    let mut servers = Servers::new(lab)?;
    for (host, fill) in [("src", 1), ("dst", 2)] {
        let ready = format!("--pid-file={READY}");
        servers.serve(host, fill, &["--bind=127.0.0.1", "--port=10809", &ready])?;
        let ready = lab.path(host, READY)?;
        eventually("a server that listens", LIMIT, || {
            Ok(ready.exists().then_some(()))
        })?;
    }
    let program = program()?;
    let line = [
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
        &format!("unix:{MONITOR},server=on,wait=off"),
        "-serial",
        "stdio",
        "-kernel",
        program.to_str().context("a path in UTF-8")?,
        "-drive",
        "file=nbd://localhost:10809,format=raw,if=none,id=disk",
        "-device",
        "virtio-blk-pci,drive=disk,disable-modern=on",
    ];
    let qemu = lab.start_plain("src", &line)?;
    eventually("a guest that counts", LIMIT, || {
        Ok((counted(&qemu.stdout()?)? >= 20).then_some(()))
    })?;
    lab.ask(&["attach", NAME, "--qmp", MONITOR, "--host", "src"])?;
    let why = "localhost, which is another server on each host";
    let said = blockers(lab)?;
    ensure!(said.contains(why), "{said}");
    let migration = lab.known(NAME).migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    let error = migration.error.clone().unwrap_or_default();
    ensure!(error.contains(why), "{error}");
    let before = counted(&qemu.stdout()?)?;
    eventually("a guest that counts", LIMIT, || {
        Ok((counted(&qemu.stdout()?)? >= before + 20).then_some(()))
    })?;
    lab.ask(&["stop", NAME])?;
    Ok(())
}

/// The agents of a lab have links with an MTU of 9000.
fn promised_mtu(lab: &TestLab) -> anyhow::Result<()> {
    let guest = |promised: &str| {
        let card = format!("virtio-net-pci,netdev=n,host_mtu={promised}");
        Guest::start(lab, &["-netdev", "tap,id=n", "-device", &card])
    };
    let too_much = guest("9216")?;
    let said = blockers(lab)?;
    let why = "a card promises its guest an MTU of 9216 (host_mtu=), and links there have 9000";
    ensure!(said.contains(why), "{said}");
    let migration = too_much.instance.migrate("dst")?;
    ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
    ensure!(
        migration.error.clone().unwrap_or_default().contains(why),
        "{migration:?}"
    );
    too_much.counts_on()?;
    lab.ask(&["stop", NAME])?;
    let fits = guest("9000")?;
    fits.instance.migrate("dst")?.must_be_committed()?;
    fits.counts_on()?;
    lab.ask(&["stop", NAME])?;
    Ok(())
}

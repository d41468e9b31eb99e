//! What others have written on top of rdma_cm: libfabric's test, and QEMU, which moves virtual machines by it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use verbatim_e2e::{Running, TestLab, Traffic, eventually};

use crate::Test;
use crate::programs::between;

const HOSTS: &[&str] = &["src", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// Of `fi_pingpong`, where it agrees on what is sent.
const PINGPONG_PORT: u16 = 47592;
/// A machine that has no disk and looks for one for ever.
const MACHINE: &str = "qemu-system-x86_64 -accel tcg -machine q35 -m 64 -nodefaults -display none";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("conformance::by_address::fi_pingpong", HOSTS, fi_pingpong).only_on_demand(true),
        Test::new("conformance::by_address::qemu", HOSTS, |lab| qemu(lab, false)).only_on_demand(true),
        Test::new("conformance::by_address::qemu_pins_all", HOSTS, |lab| {
            qemu(lab, true)
        })
        .only_on_demand(true),
    ]
}

/// Messages of all its sizes, whose content it looks at (`-c`).
fn fi_pingpong(lab: &TestLab) -> anyhow::Result<()> {
    let argv = ["fi_pingpong", "-p", "verbs", "-e", "msg", "-I", "100", "-c"];
    let (client, server) = between(lab, &argv, PINGPONG_PORT)?;
    for side in [client, server] {
        let counted = |line: &&str| line.split_ascii_whitespace().nth(2) == Some("=100");
        let sizes = side.stdout.lines().filter(counted).count();
        ensure!(sizes == 6, "{sizes} sizes{}", side.output());
    }
    Ok(())
}

/// A virtual machine goes from one host's QEMU to the other's.
fn qemu(lab: &TestLab, pins_all: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let to = format!("rdma:{}:4444", lab.address("peer")?);
    let start = |host: &str, more: &[&str]| -> anyhow::Result<(Running, PathBuf)> {
        let socket = folder.path().join(host);
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        let argv: Vec<_> = MACHINE
            .split(' ')
            .chain(["-qmp", &monitor])
            .chain(more.iter().copied())
            .collect();
        Ok((lab.start(host, &argv)?, socket))
    };
    let (mut there, socket) = start("peer", &["-incoming", "defer"])?;
    let mut destination = Monitor::of(&socket, &mut there)?;
    let (mut here, socket) = start("src", &[])?;
    let mut source = Monitor::of(&socket, &mut here)?;

    let pin = json!([{"capability": "rdma-pin-all", "state": pins_all}]);
    for side in [&mut source, &mut destination] {
        side.ask("migrate-set-capabilities", json!({"capabilities": pin}))?;
    }
    let traffic = Traffic::of(lab, "peer")?;
    let before = traffic.payload_bytes();
    destination.ask("migrate-incoming", json!({"uri": to}))?;
    source.ask("migrate", json!({"uri": to}))?;
    eventually("that QEMU has moved its machine", LIMIT, || {
        let told = source.ask("query-migrate", json!({}))?;
        match told["status"].as_str() {
            Some("completed") => Ok(Some(())),
            Some("failed" | "cancelled") => bail!("{told}; {}{}", here.stderr()?, there.stderr()?),
            _ => Ok(None),
        }
    })?;
    eventually("that the machine runs there", LIMIT, || {
        Ok((destination.ask("query-status", json!({}))?["running"] == true).then_some(()))
    })?;
    ensure!(source.ask("query-status", json!({}))?["running"] == false);
    let moved = traffic.payload_bytes() - before;
    ensure!(
        moved > 100_000,
        "its memory went another way: {moved} bytes went by RDMA"
    );
    Ok(())
}

/// QEMU's monitor for programs.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn of(socket: &Path, program: &mut Running) -> anyhow::Result<Self> {
        let stream = eventually("QEMU's monitor", LIMIT, || {
            ensure!(!program.has_ended()?, "QEMU has ended: {}", program.stderr()?);
            Ok(UnixStream::connect(socket).ok())
        })?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.hear("its greeting")?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn hear(&mut self, what: &str) -> anyhow::Result<Value> {
        let mut line = String::new();
        self.0
            .read_line(&mut line)
            .with_context(|| format!("QEMU does not say {what}"))?;
        Ok(serde_json::from_str(&line)?)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let command = json!({"execute": command, "arguments": arguments});
        writeln!(self.0.get_mut(), "{command}")?;
        loop {
            let mut told = self.hear(&format!("anything to {command}"))?;
            ensure!(told.get("error").is_none(), "QEMU refuses {command}: {told}");
            // Events come in between.
            if told.get("return").is_some() {
                return Ok(told["return"].take());
            }
        }
    }
}

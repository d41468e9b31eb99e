//! QEMU's own migration: two QEMUs on two hosts of the lab, as anybody would start them, and their monitors.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use verbatim_e2e::{Running, TestLab, eventually};
use verbatim_vm::Qmp;

use super::observer::Observer;

const PORT: u16 = 4444;
const LIMIT: Duration = Duration::from_secs(120);

/// A migration that takes longer does not come to an end: the guest writes faster than it sends.
const MIGRATION_LIMIT: Duration = Duration::from_secs(30);

/// QEMU's migration did not come to an end.
#[derive(Debug)]
pub struct DoesNotEnd;

impl std::fmt::Display for DoesNotEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "QEMU's migration does not come to an end within {MIGRATION_LIMIT:?}"
        )
    }
}

impl std::error::Error for DoesNotEnd {}

/// No limit: QEMU's own is 1 Gbit/s.
const BYTES_PER_SECOND: u64 = 100 << 30;

/// By which means it migrates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One TCP connection.
    Tcp,
    /// Two more for the RAM, on machines with two processors.
    Multifd,
    /// RDMA, over our RNIC by our rdma_cm.
    Rdma,
}

struct Qemu {
    /// It ends with this.
    _running: Running,
    qmp: Qmp,
}

/// A guest that is ready on `src`, and a QEMU that waits for it on `dst`.
pub struct Pair<'a> {
    runtime: &'a Runtime,
    source: Qemu,
    arrives: Qemu,
    uri: String,
}

impl<'a> Pair<'a> {
    /// `arguments` are those of both.
    pub fn start(
        lab: &TestLab,
        runtime: &'a Runtime,
        way: Way,
        arguments: &[String],
        observer: &Observer,
    ) -> anyhow::Result<Self> {
        let arrives = start(lab, runtime, "dst", way, arguments, &["-incoming", "defer"])?;
        let source = observer.ready(1, || start(lab, runtime, "src", way, arguments, &[]))?;
        let address = lab.address("dst")?;
        let uri = match way {
            Way::Tcp | Way::Multifd => format!("tcp:{address}:{PORT}"),
            Way::Rdma => format!("rdma:{address}:{PORT}"),
        };
        runtime.block_on(prepare(&source.qmp, &arrives.qmp, way, &uri))?;
        Ok(Self {
            runtime,
            source,
            arrives,
            uri,
        })
    }

    /// Returns when the guest runs at the other host.
    pub fn migrate(&self) -> anyhow::Result<()> {
        self.runtime
            .block_on(migrated(&self.source.qmp, &self.arrives.qmp, &self.uri))
    }
}

fn start(
    lab: &TestLab,
    runtime: &Runtime,
    host: &str,
    way: Way,
    arguments: &[String],
    more: &[&str],
) -> anyhow::Result<Qemu> {
    const SOCKET: &str = "/run/peer.qmp";
    let path = lab.path(host, SOCKET)?;
    // Of the one before.
    let _ = std::fs::remove_file(&path);
    let monitor = format!("unix:{SOCKET},server=on,wait=off");
    let mut line = vec!["qemu-system-x86_64", "-qmp", &monitor];
    line.extend(arguments.iter().map(String::as_str));
    line.extend(more);
    let running = match way {
        Way::Rdma => {
            let with = ["/usr/bin/env", "VERBATIM_RDMA_CM=1"];
            lab.start(host, &[&with[..], &line].concat())?
        }
        _ => lab.start_plain(host, &line)?,
    };
    let qmp = eventually("QEMU's monitor", LIMIT, || connected(runtime, &path))
        .with_context(|| running.stderr().unwrap_or_default())?;
    Ok(Qemu {
        _running: running,
        qmp,
    })
}

fn connected(runtime: &Runtime, path: &Path) -> anyhow::Result<Option<Qmp>> {
    match runtime.block_on(Qmp::connect(path)) {
        Ok(qmp) => Ok(Some(qmp)),
        Err(verbatim_vm::Error::Io { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

async fn prepare(source: &Qmp, arrives: &Qmp, way: Way, uri: &str) -> anyhow::Result<()> {
    for qmp in [source, arrives] {
        let mut capabilities = vec![json!({"capability": "events", "state": true})];
        let mut parameters = json!({"max-bandwidth": BYTES_PER_SECOND});
        match way {
            Way::Tcp => {}
            Way::Multifd => {
                capabilities.push(json!({"capability": "multifd", "state": true}));
                parameters["multifd-channels"] = json!(2);
            }
            // Else each MiB is registered when it is first sent.
            Way::Rdma => capabilities.push(json!({"capability": "rdma-pin-all", "state": true})),
        }
        qmp.run("migrate-set-capabilities", json!({"capabilities": capabilities}))
            .await?;
        qmp.run("migrate-set-parameters", parameters).await?;
    }
    Ok(arrives.run("migrate-incoming", json!({"uri": uri})).await?)
}

/// Returns when the guest runs at the other host.
async fn migrated(source: &Qmp, arrives: &Qmp, uri: &str) -> anyhow::Result<()> {
    let (mut source_events, mut events) = (source.events(), arrives.events());
    source.run("migrate", json!({"uri": uri})).await?;
    let moved = async {
        loop {
            tokio::select! {
                event = events.recv() => if event?.name == "RESUME" { return Ok(()) },
                event = source_events.recv() => {
                    let event = event?;
                    if event.name == "MIGRATION" && event.data["status"] == "failed" {
                        let status: Value = source.ask("query-migrate", json!({})).await?;
                        bail!("QEMU's migration failed: {status}");
                    }
                }
            }
        }
    };
    let limited = tokio::time::timeout(MIGRATION_LIMIT, moved).await;
    limited.map_err(|_| anyhow::Error::new(DoesNotEnd))?
}

//! A QEMU process, and questions to it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::net::UnixStream;

use crate::error::{Error, Result};
use crate::limit::in_time;
use crate::qmp::{Event, Qmp};
use crate::ram::Ram;

/// Limit for a new QEMU to listen: it makes its devices before, which takes seconds on a busy machine.
const START: Duration = Duration::from_secs(30);

/// QEMU's name of its end of our stream.
const STREAM: &str = "verbatim";

/// The same name in commands.
pub(crate) const STREAM_URI: &str = "fd:verbatim";

/// Interval of the checks whether QEMU listens. There is no event for that.
const LOOK: Duration = Duration::from_millis(2);

/// A virtual machine that runs here, or is about to.
#[derive(Debug)]
pub struct Machine {
    pid: u32,
    qmp: Qmp,
    ram: Arc<Ram>,
}

/// The answer to `query-status`.
#[derive(Debug, Clone, Deserialize)]
pub struct Status {
    /// `running`, `paused`, `inmigrate`, ...
    pub status: String,
    /// Whether the guest runs.
    pub running: bool,
}

/// The part of the answer to `query-migrate` that is used here.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MigrationStatus {
    #[serde(default)]
    pub status: Option<String>,
    #[serde(default)]
    pub error_desc: Option<String>,
    #[serde(default)]
    pub blocked_reasons: Vec<String>,
}

impl Machine {
    /// Connects to a QEMU that was started by [`crate::Arguments::command`], a moment ago or earlier.
    /// `connect` makes one try.
    pub async fn started<C>(pid: u32, ram: Ram, connect: impl Fn() -> C) -> Result<Self>
    where
        C: Future<Output = Result<Qmp>>,
    {
        let connected = async {
            loop {
                match connect().await {
                    Err(Error::Io { .. }) if is_there(pid) => tokio::time::sleep(LOOK).await,
                    Err(Error::Io { .. }) => return Err(Error::Gone),
                    connected => return connected,
                }
            }
        };
        let qmp = in_time("opened its QMP socket", START, connected).await?;
        let ram = Arc::new(ram);
        Ok(Self { pid, qmp, ram })
    }

    /// A running QEMU, whose RAM is shared memory in a file.
    pub async fn attached(pid: u32, qmp: Qmp) -> Result<Self> {
        let ram = Arc::new(Ram::open(&ram_file(&qmp, pid).await?)?);
        Ok(Self { pid, qmp, ram })
    }

    /// The name of the object that is the RAM.
    pub async fn memory(&self) -> Result<String> {
        shared_backend(&self.qmp).await
    }

    /// The type of machine, with its version.
    pub async fn machine_type(&self) -> Result<String> {
        let asked = json!({"path": "/machine", "property": "type"});
        let kind: String = self.qmp.ask("qom-get", asked).await?;
        Ok(kind.strip_suffix("-machine").unwrap_or(&kind).to_owned())
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// The QMP connection.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Whether the guest runs, and if not, the reason.
    pub async fn status(&self) -> Result<Status> {
        self.qmp.ask("query-status", json!({})).await
    }

    /// Lets the guest run.
    pub async fn go_on(&self) -> Result<()> {
        self.qmp.go_on().await
    }

    /// Ends QEMU, and the guest with it.
    pub async fn quit(&self) -> Result<()> {
        match self.qmp.run("quit", json!({})).await {
            Err(Error::Gone) => Ok(()),
            other => other,
        }
    }

    /// A stream whose other end QEMU has as a descriptor, so that no path has to be the same for both.
    pub(crate) async fn give_stream(&self) -> Result<UnixStream> {
        let pair = std::os::unix::net::UnixStream::pair();
        let ours = pair.and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            Ok((UnixStream::from_std(ours)?, theirs))
        });
        let (ours, theirs) = ours.map_err(Error::io("make a pair of sockets"))?;
        self.qmp.give(STREAM, OwnedFd::from(theirs)).await?;
        Ok(ours)
    }

    pub(crate) async fn migration(&self) -> Result<MigrationStatus> {
        self.qmp.ask("query-migrate", json!({})).await
    }

    /// Waits until a migration is in one of these states. `events` must have been subscribed to before.
    pub(crate) async fn comes_to(
        &self,
        wanted: &[&str],
        events: &mut tokio::sync::broadcast::Receiver<Event>,
        limit: Duration,
    ) -> Result<()> {
        let comes = async {
            loop {
                let now = self.migration().await?;
                let status = now.status.as_deref().unwrap_or("none");
                if wanted.contains(&status) {
                    return Ok(());
                }
                if ["failed", "cancelled", "completed"].contains(&status) {
                    return Err(Error::GivenUp {
                        status: status.to_owned(),
                        reason: now.error_desc,
                    });
                }
                self.qmp.may_differ(events).await?;
            }
        };
        in_time(&format!("come to {}", wanted.join(" or ")), limit, comes).await
    }
}

fn is_there(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z') && !rest.is_empty())
}

/// A memory device, by `query-memdev`.
#[derive(Debug, Deserialize)]
struct MemoryBackend {
    id: Option<String>,
    size: u64,
    share: Option<bool>,
}

fn cannot<T>(why: &str) -> Result<T> {
    Err(Error::Unmovable(vec![format!(
        "{why}; start it with `-object memory-backend-file,id=ram,size=SIZE,mem-path=FILE,share=on -machine memory-backend=ram`, \
         where FILE is in a tmpfs"
    )]))
}

/// The name of the one memory backend that a running QEMU shares, if this is all of its RAM.
async fn shared_backend(qmp: &Qmp) -> Result<String> {
    let backends: Vec<MemoryBackend> = qmp.ask("query-memdev", json!({})).await?;
    let (backend, id) = match &backends[..] {
        [backend @ MemoryBackend { id: Some(id), .. }] if backend.share == Some(true) => (backend, id),
        [MemoryBackend { .. }] => return cannot("its RAM is not shared"),
        _ => return cannot(&format!("its RAM is {} pieces", backends.len())),
    };
    let total: serde_json::Value = qmp.ask("query-memory-size-summary", json!({})).await?;
    if total["base-memory"] != backend.size {
        return cannot("its RAM is not that of its memory backend alone");
    }
    Ok(id.clone())
}

/// The file of a running QEMU's RAM.
async fn ram_file(qmp: &Qmp, pid: u32) -> Result<PathBuf> {
    let id = shared_backend(qmp).await?;
    let asked = json!({"path": format!("/objects/{id}"), "property": "mem-path"});
    let path: PathBuf = match qmp.ask("qom-get", asked).await {
        Ok(path) => path,
        Err(Error::Refused { .. }) => return cannot("its RAM is in no file"),
        Err(error) => return Err(error),
    };
    // The path as QEMU sees it.
    let seen = Path::new("/proc").join(pid.to_string()).join("root");
    Ok(seen.join(path.strip_prefix("/").unwrap_or(&path)))
}

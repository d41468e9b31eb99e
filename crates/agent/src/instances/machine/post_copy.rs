//! Post-copy: RAM that comes from the guest's last host while the guest runs already
//! (`verbatim_vm::PostCopy`).
//!
//! ```text
//!  criu/NAME/ram.missing   the missing ranges, beside the RAM in memory; as long as QEMU waits for RAM
//!  criu/NAME/ram.from      the session and the source, for a later agent
//! ```
//!
//! [`Bringing`] asks the source's agent for the ranges that a thread waits for (faults), and in the
//! background for the rest. Faults are served from before the decision on, since the load of the devices'
//! state needs them; the rest comes once the guest runs ([`Bringing::the_rest`]). A source that does not
//! answer is asked again until it does. If the source says that it keeps nothing, the guest is lost.
//! [`giving`] chooses the transport; [`borrowing`] is one-sided RDMA.

mod borrowing;
mod giving;

use std::ops::Range;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use verbatim_vm::{Error, PostCopy};

use crate::agent::Shared;
use crate::instances::home::Paths;
use crate::instances::machine::qemu;
use crate::proto::RamRun;
use crate::whole;
use giving::Giving;

/// Limit of requests in flight for ranges that no thread waits for.
const AHEAD: usize = 4;

/// Pause before a source is asked again that does not answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Origin of missing RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Session that has brought the guest here.
    pub session: u64,
    /// Host that the guest has left.
    pub source: String,
    /// Whether the RAM may come by one-sided RDMA.
    #[serde(default)]
    pub by_rdma: bool,
}

/// File of the missing ranges.
pub fn record(paths: &Paths) -> PathBuf {
    paths.work.join("ram.missing")
}

impl Origin {
    fn path(paths: &Paths) -> PathBuf {
        paths.work.join("ram.from")
    }

    /// Notes the origin for a later agent.
    pub fn keep(&self, paths: &Paths) -> anyhow::Result<()> {
        whole::write_json(&Self::path(paths), self)
    }

    fn found(paths: &Paths) -> anyhow::Result<Self> {
        let path = Self::path(paths);
        let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))
    }
}

/// State of the post-copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// RAM is missing.
    Comes,
    /// No RAM is missing.
    Whole,
    /// QEMU has ended.
    Gone,
    /// The missing RAM will not come, with the reason.
    Lost(String),
}

/// Missing RAM of a guest in bytes, and the host that has it.
pub fn missing(paths: &Paths) -> anyhow::Result<(u64, String)> {
    let left = PostCopy::left_in(&record(paths))?;
    Ok((left, Origin::found(paths)?.source))
}

/// Brings missing RAM. On drop it stops, and threads that wait for RAM wait on.
#[derive(Debug)]
pub struct Bringing {
    post_copy: Arc<PostCopy>,
    progress: watch::Receiver<Progress>,
    the_rest: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Drop for Bringing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Bringing {
    /// Serves faults from now on. All missing ranges are known by then.
    pub fn begin(agent: &Shared, origin: Origin, post_copy: PostCopy) -> Self {
        let (sender, progress) = watch::channel(Progress::Comes);
        let (the_rest, may_go_ahead) = watch::channel(false);
        let post_copy = Arc::new(post_copy);
        let agent = Arc::clone(agent);
        let task = tokio::spawn({
            let post_copy = Arc::clone(&post_copy);
            async move {
                let end = match bring(&agent, &origin, &post_copy, &sender, may_go_ahead).await {
                    Error::Gone => Progress::Gone,
                    error => Progress::Lost(format!("{:#}", anyhow::Error::from(error))),
                };
                sender.send_replace(end);
            }
        });
        Self {
            post_copy,
            progress,
            the_rest,
            task,
        }
    }

    /// Begins with the ranges that no thread waits for, once the guest runs.
    pub fn the_rest(&self) {
        self.the_rest.send_replace(true);
    }

    /// Missing RAM in bytes.
    pub fn left(&self) -> u64 {
        self.post_copy.left()
    }

    /// Takes over from an agent that has died. `None`: no RAM is missing, and no thread waits. An error: the
    /// missing RAM will not come.
    pub fn take_over(agent: &Shared, paths: &Paths, init_pid: i32) -> anyhow::Result<Option<Self>> {
        if !record(paths).exists() {
            return Ok(None);
        }
        let origin = Origin::found(paths)?;
        let ram = Arc::new(qemu::ram(paths)?);
        let post_copy = PostCopy::take_over(init_pid.unsigned_abs(), &ram, &record(paths))?;
        let bringing = post_copy.map(|post_copy| Self::begin(agent, origin, post_copy));
        Ok(bringing.inspect(Self::the_rest))
    }

    /// Present state.
    pub fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Waits for the final state.
    pub async fn ended(&self) -> Progress {
        let mut progress = self.progress.clone();
        let ended = progress.wait_for(|progress| *progress != Progress::Comes).await;
        match ended {
            Ok(progress) => progress.clone(),
            Err(_) => Progress::Lost("who brings it has ended".to_owned()),
        }
    }

    /// Ends the post-copy when no RAM is missing; no thread waits for RAM any more when this returns.
    pub async fn end(mut self) -> anyhow::Result<()> {
        self.task.abort();
        // The task holds a reference to the `post_copy` that is taken back below.
        let _ = (&mut self.task).await;
        let post_copy = Arc::clone(&self.post_copy);
        drop(self);
        let post_copy = Arc::into_inner(post_copy).context("somebody still brings RAM")?;
        Ok(post_copy.end()?)
    }
}

/// Answer to a request for a range.
struct Came {
    is_ahead: bool,
    runs: anyhow::Result<Option<Vec<RamRun>>>,
}

/// Serves faults and brings the rest; returns the reason for its end.
async fn bring(
    agent: &Shared,
    origin: &Origin,
    post_copy: &PostCopy,
    progress: &watch::Sender<Progress>,
    mut the_rest: watch::Receiver<bool>,
) -> Error {
    let source = &Giving::new(agent, origin);
    let (mut asked, mut ahead, mut is_told) = (FuturesUnordered::new(), 0, false);
    let mut connecting = pin!(source.connect(the_rest.clone(), post_copy.bytes()));
    let ask = |range: Range<u64>, is_ahead| async move {
        let runs = source.give(range, is_ahead).await;
        Came { is_ahead, runs }
    };
    loop {
        if post_copy.left() == 0 {
            // Faults in zero ranges are still served.
            let is_new = progress
                .send_if_modified(|progress| std::mem::replace(progress, Progress::Whole) != Progress::Whole);
            if is_new {
                source.tell_what_came();
            }
        }
        let goes_ahead = *the_rest.borrow_and_update();
        while goes_ahead
            && ahead < AHEAD
            && let Some(range) = post_copy.next()
        {
            ahead += 1;
            asked.push(ask(range, true));
        }
        let came = tokio::select! {
            biased;
            never = &mut connecting => match never {},
            fault = post_copy.fault() => match fault {
                Ok(range) => {
                    asked.push(ask(range, false));
                    continue;
                }
                Err(error) => return error,
            },
            Some(came) = asked.next() => came,
            Ok(()) = the_rest.changed() => continue,
        };
        ahead -= usize::from(came.is_ahead);
        let runs = match came.runs {
            Ok(Some(runs)) => runs,
            Ok(None) => {
                return Error::Lost {
                    bytes: post_copy.left(),
                };
            }
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(
                        source = origin.source,
                        session = format!("{:016x}", origin.session),
                        left_kib = post_copy.left() >> 10,
                        error = format!("{error:#}"),
                        "a guest waits for RAM that its last host does not give; it is asked again until it does"
                    );
                }
                asked.clear();
                ahead = 0;
                tokio::time::sleep(PAUSE).await;
                if let Err(error) = post_copy.ask_again() {
                    return error;
                }
                continue;
            }
        };
        if std::mem::take(&mut is_told) {
            tracing::info!(source = origin.source, "it gives RAM again");
        }
        let filled = tokio::task::block_in_place(|| {
            runs.iter().try_for_each(|run| match run.data.is_empty() {
                true => post_copy.fill_zeros(run.start..run.start.saturating_add(run.length)),
                false => post_copy.fill(run.start, &run.data),
            })
        });
        if let Err(error) = filled {
            return error;
        }
    }
}

/// Removes the notes on a guest that has ended, or that has all its RAM.
pub fn forget(paths: &Paths) -> anyhow::Result<()> {
    for path in [record(paths), Origin::path(paths)] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

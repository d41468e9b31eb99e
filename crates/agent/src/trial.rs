//! A helper process in which objects of the kernel's RNICs are made on trial, and what it has to know.
//!
//! A process that makes its contexts again does so after the decision ([`crate::session::made_again`]), when nothing can be refused any
//! more. So the destination's agent has the same objects made ahead of it, by a process that ends then:
//!
//! ```text
//!  agent ── Request + the file of registered memory ──► helper     the agent's program under another name
//!  agent ◄── what cannot be made, or what was ─────────── helper     with its descriptors
//!  agent ── SIGKILL ──────────────────────────────────► helper     the kernel destroys what nobody else has
//! ```
//!
//! What another process can go on with ([`verbatim_channel::ahead`]) the agent keeps, for the program's process to come. Not where the
//! kernel counts it against limits of the process or of the container's cgroup: it is counted against the helper's.
//!
//! It is in a cgroup beside the container's, with the limits on RDMA objects that the container will have, and has the rights and the
//! limit on locked memory that the program's process has. Who makes the objects is for the program to say ([`trial_main`]): an agent
//! has no libibverbs in it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use serde::{Deserialize, Serialize};
use verbatim_channel::ContextRecord;
use verbatim_channel::ahead::MadeAhead;
use verbatim_container::{CgroupBeside, ContainerName, Workload};
use verbatim_seqpacket::{MAX_FDS, Socket};

use crate::config::Config;
use crate::proto::ProcessLimits;

/// The name under which the program makes objects on trial.
pub const PROGRAM_NAME: &str = "verbatim-trial";

/// How long the helper may take. Pinning memory takes some 100 ms for each GiB.
const LIMIT: Duration = Duration::from_secs(60);

/// What a process may do, as far as it decides what it can make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The process, in its own PID namespace.
    pub pid: u32,
    /// How many bytes it may lock; none: as many as it likes.
    pub memlock: Option<u64>,
    /// What it is capable of, by the kernel's bits.
    pub capabilities: u64,
}

impl Limits {
    /// Those of a process that is `host_pid` in the host's PID namespace.
    pub fn of(pid: u32, host_pid: i32) -> anyhow::Result<Self> {
        let path = format!("/proc/{host_pid}/limits");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let sets = capabilities(Some(Pid::from_raw(host_pid).context("no process")?))?;
        Ok(Self {
            pid,
            memlock: memlock(&text).with_context(|| format!("{path} does not say what may be locked"))?,
            capabilities: sets.effective.bits(),
        })
    }

    fn apply(&self) -> std::io::Result<()> {
        let both = Rlimit {
            current: self.memlock,
            maximum: self.memlock,
        };
        setrlimit(Resource::Memlock, both)?;
        let own = capabilities(None)?;
        let kept = own.effective & CapabilitySet::from_bits_retain(self.capabilities);
        let sets = CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        };
        Ok(set_capabilities(None, sets)?)
    }

    /// How many bytes it may lock, if that is limited.
    fn may_lock(&self) -> Option<u64> {
        let may_all = self.capabilities & CapabilitySet::IPC_LOCK.bits() != 0;
        self.memlock.filter(|_| !may_all)
    }

    fn describe(&self) -> String {
        match self.may_lock() {
            Some(bytes) => {
                format!("it may lock {bytes} bytes (RLIMIT_MEMLOCK, and it lacks CAP_IPC_LOCK)")
            }
            None => "it may lock all memory".to_owned(),
        }
    }
}

impl From<&ProcessLimits> for Limits {
    fn from(told: &ProcessLimits) -> Self {
        Self {
            pid: told.pid,
            memlock: told.memlock,
            capabilities: told.capabilities,
        }
    }
}

impl From<Limits> for ProcessLimits {
    fn from(limits: Limits) -> Self {
        Self {
            pid: limits.pid,
            memlock: limits.memlock,
            capabilities: limits.capabilities,
        }
    }
}

/// The soft limit in a `/proc/PID/limits`.
fn memlock(limits: &str) -> Option<Option<u64>> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(None),
        bytes => Some(Some(bytes.parse().ok()?)),
    }
}

/// What one process will make again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tried {
    /// Under which limits, if they are known.
    pub limits: Option<Limits>,
    /// The names of the devices, and what was made there.
    pub contexts: Vec<(String, ContextRecord)>,
}

/// What the process can go on with, and the descriptors of all contexts in their order.
#[derive(Debug, Default)]
pub struct Ahead {
    /// Not all contexts have something.
    pub contexts: Vec<MadeAhead>,
    /// As many as the contexts say.
    pub descriptors: Vec<OwnedFd>,
}

/// As many descriptors as go to the process in one message, beside three of the message's own.
const MAX_DESCRIPTORS: usize = MAX_FDS - 3;

/// The helper's answer: what the process can go on with, and why not with the rest; or what cannot be made.
type Answer = Result<(Vec<MadeAhead>, Vec<String>), String>;

/// Makes it, in a process of its own, for the container of that name; an error says what cannot be made here. Blocks for as long as that takes.
/// Gives what the process can go on with.
pub fn run(
    config: &Config,
    (name, workload): (&ContainerName, &Workload),
    tried: &Tried,
    memory: Option<&File>,
) -> anyhow::Result<Ahead> {
    let cgroup = CgroupBeside::create(&config.cgroup_parent, name, workload);
    let cgroup = cgroup.unwrap_or_else(|error| {
        // A trial outside of it sees less, and what it sees is right.
        tracing::warn!(%error, "objects are tried without the container's cgroup");
        None
    });
    let mut helper = Helper::start(config)?;
    if let Some(cgroup) = &cgroup
        && let Err(error) = cgroup.enter(helper.child.id())
    {
        tracing::warn!(%error, "objects are tried outside of the container's cgroup");
    }
    let answer = helper.ask(tried, memory);
    // Killed, so that it destroys nothing.
    drop(helper);
    let (answer, descriptors) = answer?;
    let limited = cgroup.iter().flat_map(CgroupBeside::rdma_limits);
    let (contexts, why_not) = match answer {
        Ok(made) => made,
        Err(refused) => {
            let limits = tried.limits.iter().map(Limits::describe).chain(limited);
            bail!("{refused} ({})", limits.collect::<Vec<_>>().join("; "))
        }
    };
    for why in why_not {
        tracing::info!("a context is made only after the decision: {why}");
    }
    let may_lock = tried.limits.as_ref().map_or(Some(0), |limits| limits.may_lock());
    if may_lock.is_some() || limited.count() > 0 {
        tracing::info!(
            "contexts are made only after the decision: what they lock and have counts against limits"
        );
        return Ok(Ahead::default());
    }
    Ok(Ahead {
        contexts,
        descriptors,
    })
}

struct Helper {
    child: Child,
    socket: Socket,
}

impl Helper {
    fn start(config: &Config) -> anyhow::Result<Self> {
        let (socket, theirs) = Socket::pair()?;
        let child = Command::new(&config.program)
            .arg0(PROGRAM_NAME)
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {} to try objects", config.program.display()))?;
        Ok(Self { child, socket })
    }

    fn ask(&mut self, tried: &Tried, memory: Option<&File>) -> anyhow::Result<(Answer, Vec<OwnedFd>)> {
        let fds: Vec<_> = memory.iter().map(|file| file.as_fd()).collect();
        verbatim_channel::send(&self.socket, tried, &fds)?;
        let limit = Timespec::try_from(LIMIT)?;
        let mut answers = [PollFd::new(&self.socket, PollFlags::IN)];
        if poll(&mut answers, Some(&limit))? == 0 {
            bail!("making the program's objects on trial took longer than {LIMIT:?}");
        }
        match verbatim_channel::recv::<Answer>(&self.socket) {
            Ok(answer) => Ok(answer),
            Err(_) => {
                let status = self.child.wait()?;
                bail!("the process that made the program's objects on trial ended with {status}")
            }
        }
    }
}

impl Drop for Helper {
    /// Waits for its end: with it the kernel has destroyed all.
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            tracing::warn!(%error, "a process that tries objects may be left behind");
        }
    }
}

/// What was made of a context: what keeps it, and what another process can go on with, or why none can.
pub type Made<T> = (T, Result<(MadeAhead, Vec<OwnedFd>), String>);

/// What the program does when it is started under the name [`PROGRAM_NAME`]; its standard input is the socket. `make` makes what the record
/// says at the device of that name; the file is that of registered memory. What it gives is kept.
pub fn trial_main<T>(make: impl Fn(&str, &ContextRecord, Option<&File>) -> Result<Made<T>, String>) -> ! {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let code = match socket {
        Ok(socket) => serve(&Socket::from_fd(socket), make),
        Err(_) => 1,
    };
    std::process::exit(code)
}

fn serve<T>(
    socket: &Socket,
    make: impl Fn(&str, &ContextRecord, Option<&File>) -> Result<Made<T>, String>,
) -> i32 {
    let Ok((tried, fds)) = verbatim_channel::recv::<Tried>(socket) else {
        return 1;
    };
    let memory = fds.into_iter().next().map(File::from);
    let applied = tried.limits.as_ref().map_or(Ok(()), Limits::apply);
    let made = applied
        .map_err(|error| format!("the limits of the process cannot be had here: {error}"))
        .and_then(|()| {
            let contexts = tried.contexts.iter();
            let made = contexts.map(|(device, record)| make(device, record, memory.as_ref()));
            made.collect::<Result<Vec<_>, String>>()
        });
    let (mut kept, mut descriptors) = (Vec::new(), Vec::new());
    let answer: Answer = made.map(|made| {
        let (mut contexts, mut why_not) = (Vec::new(), Vec::new());
        for (one, ahead) in made {
            kept.push(one);
            match ahead {
                Ok((context, own)) if descriptors.len() + own.len() <= MAX_DESCRIPTORS => {
                    contexts.push(context);
                    descriptors.extend(own);
                }
                Ok((_, own)) => why_not.push(format!("it has {} descriptors, which are too many", own.len())),
                Err(why) => why_not.push(why),
            }
        }
        (contexts, why_not)
    });
    let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    if verbatim_channel::send(socket, &answer, &fds).is_err() {
        return 1;
    }
    // Until the agent has had enough, or is gone: an agent that keeps something kills.
    let _ = socket.recv_bytes();
    drop(kept);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_locked_is_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max locked memory         8388608              unlimited            bytes     \n";
        assert_eq!(memlock(text), Some(Some(8_388_608)));
        assert_eq!(memlock(&text.replace("8388608  ", "unlimited")), Some(None));
        assert_eq!(memlock("Max nice priority  0\n"), None);
        let own = Limits::of(1, std::process::id() as i32).unwrap();
        assert_eq!(own.pid, 1);
    }

    #[test]
    fn limits_are_told_where_they_count() {
        let mut limits = Limits {
            pid: 1,
            memlock: Some(65_536),
            capabilities: 0,
        };
        assert!(limits.describe().contains("65536 bytes"), "{}", limits.describe());
        limits.capabilities = CapabilitySet::IPC_LOCK.bits();
        assert_eq!(limits.describe(), "it may lock all memory");
    }

    #[test]
    fn the_helper_says_what_cannot_be_made_and_keeps_the_rest_until_it_is_let_go() {
        let context = |id| ContextRecord {
            id,
            ..ContextRecord::default()
        };
        let tried = |contexts| Tried {
            limits: None,
            contexts,
        };
        let ahead = |id| MadeAhead {
            id,
            descriptors: 1,
            memory: None,
            rkeys: vec![7],
            commands: Vec::new(),
        };
        let made = move |device: &str, record: &ContextRecord, memory: Option<&File>| {
            assert!(memory.is_some());
            match record.id {
                1 => Ok(((), Ok((ahead(1), vec![File::open("/dev/null").unwrap().into()])))),
                2 => Ok(((), Err("its queues are the library's".to_owned()))),
                other => Err(format!("{device}: no {other}")),
            }
        };
        for (contexts, expected) in [
            (
                vec![("rxe0".to_owned(), context(1)), ("mlx5_0".to_owned(), context(2))],
                Ok((vec![ahead(1)], vec!["its queues are the library's".to_owned()])),
            ),
            (
                vec![("rxe0".to_owned(), context(1)), ("rxe1".to_owned(), context(3))],
                Err("rxe1: no 3".to_owned()),
            ),
        ] {
            let (ours, theirs) = Socket::pair().unwrap();
            let helper = std::thread::spawn(move || serve(&theirs, made));
            let file = tempfile::tempfile().unwrap();
            verbatim_channel::send(&ours, &tried(contexts), &[file.as_fd()]).unwrap();
            let (answer, fds) = verbatim_channel::recv::<Answer>(&ours).unwrap();
            assert_eq!(fds.len(), usize::from(expected.is_ok()));
            assert_eq!(answer, expected);
            assert!(!helper.is_finished());
            drop(ours);
            assert_eq!(helper.join().unwrap(), 0);
        }
    }
}

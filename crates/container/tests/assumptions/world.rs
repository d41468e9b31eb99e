//! Two hosts, a program, and the means to stop CRIU and kill somebody.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use verbatim_container::{CgroupVersion, ContainerName, Fact, Link, Workload};

use crate::shim;
use crate::support::host::{Place, TestHost, make_bridge};
use crate::support::workload::Board;

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(20);

/// For how long counters are watched that must not move. A task that runs counts thousands of times in it.
const WATCHED: Duration = Duration::from_millis(20);

pub struct World {
    pub runtime: Runtime,
    pub a: TestHost,
    pub b: TestHost,
    pub version: CgroupVersion,
}

impl World {
    pub fn new() -> Self {
        // Containers become our children, as they become the agent's.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .expect("any process may be one");
        std::os::unix::fs::symlink(std::env::current_exe().expect("our own path"), shim::path())
            .expect("/run is our own");
        make_bridge();
        // On one thread, which does nothing while a case does not wait for something: so the agent stands still then.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be started");
        let (a, b) = runtime.block_on(async { (TestHost::new("a").await, TestHost::new("b").await) });
        let unified = Path::new("/sys/fs/cgroup/cgroup.procs").exists();
        let version = match unified {
            true => CgroupVersion::V2,
            false => CgroupVersion::V1,
        };
        Self {
            runtime,
            a,
            b,
            version,
        }
    }

    /// A container that runs on host `a` and counts with pauses.
    pub fn start(&self) -> Place {
        self.start_counting(Duration::from_micros(50))
    }

    /// The same with other pauses, or none.
    pub fn start_counting(&self, pause: Duration) -> Place {
        let place = self.a.make_place_for(&name(), Link::Detached, &workload(pause));
        let runc = self.a.host.runc();
        self.runtime
            .block_on(runc.run(&name(), place.bundle.path()))
            .expect("it starts");
        assert_runs(&place);
        place
    }

    /// Ends a container and removes its place.
    pub fn stop(&self, host: &TestHost, place: Place) {
        let tasks = host.tasks(&name());
        self.runtime.block_on(async {
            tasks.kill().await.expect("its tasks end");
            host.host
                .runc()
                .delete(&name(), true)
                .await
                .expect("runc forgets it");
        });
        reap();
        host.clear_place(place);
        let _ = std::fs::remove_dir_all(host.work());
    }

    pub fn fact(&self, host: &TestHost) -> Fact {
        self.runtime.block_on(host.tasks(&name()).fact())
    }

    /// Runs an operation until CRIU is where `reached` says, or to its end. After the former it stands still.
    pub fn run_until<T>(&self, operation: &mut Running<'_, T>, stop: &str, phase: &str) -> At {
        self.watch(operation, |at| at.name == stop && at.phase == phase)
            .0
            .unwrap_or_else(|| panic!("CRIU did not come to {stop}, or the operation ended before"))
    }

    /// Runs an operation to its end and returns where CRIU was on the way, and what came of it.
    pub fn run_through<T>(&self, mut operation: Running<'_, T>, mut at: impl FnMut(&At)) -> T {
        let (_, result) = self.watch(&mut operation, |reached| {
            at(reached);
            false
        });
        result.expect("it was not stopped")
    }

    fn watch<T>(
        &self,
        operation: &mut Running<'_, T>,
        mut wanted: impl FnMut(&At) -> bool,
    ) -> (Option<At>, Option<T>) {
        self.runtime.block_on(async {
            let _ = std::fs::remove_file(shim::CONTROL);
            let control = UnixListener::bind(shim::CONTROL).expect("/run is our own");
            let stopped = async {
                loop {
                    let (stream, _) = control.accept().await.expect("a shim");
                    let at = At::read(stream).await;
                    if wanted(&at) {
                        return at;
                    }
                    at.go_on().await;
                }
            };
            let ended = tokio::time::timeout(LONG, async {
                tokio::select! {
                    at = stopped => (Some(at), None),
                    result = operation.as_mut() => (None, Some(result)),
                }
            });
            let ended = ended.await.expect("neither a notification nor an end");
            let _ = std::fs::remove_file(shim::CONTROL);
            ended
        })
    }

    /// Finishes an operation that stands still.
    pub fn finish<T>(&self, operation: Running<'_, T>) -> T {
        self.runtime
            .block_on(async { tokio::time::timeout(LONG, operation).await })
            .expect("the operation does not end")
    }
}

pub type Running<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Where CRIU is, and who is who.
pub struct At {
    pub name: String,
    /// `before` the proxy has heard of it, or `after` the proxy's answer, which CRIU has not got.
    pub phase: String,
    /// CRIU, the proxy, runc, the shim.
    processes: BTreeMap<&'static str, Process>,
    control: UnixStream,
}

struct Process {
    pid: i32,
    pidfd: std::os::fd::OwnedFd,
}

impl At {
    async fn read(stream: UnixStream) -> Self {
        let mut line = String::new();
        let mut reader = BufReader::new(stream);
        reader.read_line(&mut line).await.expect("the shim speaks");
        let words: Vec<_> = line.split_whitespace().collect();
        let pids = words[2..].iter().map(|word| word.parse().expect("a number"));
        let open = |pid| Process {
            pid,
            pidfd: pidfd_open(Pid::from_raw(pid).expect("not 0"), PidfdFlags::empty()).expect("it lives"),
        };
        let processes = ["criu", "proxy", "runc", "shim"]
            .into_iter()
            .zip(pids.map(open))
            .collect();
        Self {
            name: words[0].to_owned(),
            phase: words[1].to_owned(),
            processes,
            control: reader.into_inner(),
        }
    }

    /// Lets CRIU go on.
    async fn go_on(mut self) {
        // The shim may be gone.
        let _ = self.control.write_all(b"g").await;
    }

    /// Lets CRIU's notification through to the proxy, which waits there for the agent.
    pub fn passed(self) -> Self {
        self.control.try_write(b"g").expect("the shim waits");
        self
    }

    pub fn pid(&self, who: &str) -> i32 {
        self.processes[who].pid
    }

    /// Kills one of them and returns when it is dead.
    pub fn kill(&self, who: &str) {
        let victim = &self.processes[who].pidfd;
        match pidfd_send_signal(victim, Signal::KILL) {
            // It has ended of itself, since another one was killed before.
            Err(rustix::io::Errno::SRCH) => {}
            sent => sent.expect("it is ours to kill"),
        }
        assert!(ends_within(victim, LONG), "{who} does not die");
    }

    /// Lets CRIU go on and waits until all of them have ended.
    pub fn settle(mut self) {
        // The shim may be gone.
        let _ = self.control.try_write(b"g");
        for (who, process) in std::mem::take(&mut self.processes) {
            assert!(
                ends_within(&process.pidfd, LONG),
                "{who} goes on, at {} ({})",
                self.name,
                self.phase
            );
        }
    }

    /// Whether one of them still lives.
    pub fn lives(&self, who: &str) -> bool {
        !ends_within(&self.processes[who].pidfd, Duration::ZERO)
    }
}

/// Whether a process ends in this time.
pub fn ends_within(pidfd: &impl std::os::fd::AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).expect("a short time");
    retry_on_intr(|| poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&limit))).expect("poll") > 0
}

pub fn name() -> ContainerName {
    ContainerName::new("web").expect("a good name")
}

pub fn workload(pause: Duration) -> Workload {
    Workload::Command {
        args: vec![
            "/run/verbatim/program".into(),
            "count".into(),
            pause.as_micros().to_string(),
        ],
        env: vec!["PATH=/usr/bin:/bin".into()],
        cwd: "/".into(),
        binds: Vec::new(),
    }
}

/// How far each of the program's tasks has counted.
pub fn counts(place: &Place) -> [u64; 3] {
    counted(place.board())
}

fn counted(board: &Board) -> [u64; 3] {
    [&board.ticks, &board.echoes, &board.child_ticks].map(|word| word.load(SeqCst))
}

/// Whether the program's tasks count: all of them, or none.
pub fn runs(place: &Place) -> bool {
    let before = counts(place);
    std::thread::sleep(WATCHED);
    if counts(place) == before {
        return false;
    }
    assert_runs(place);
    true
}

/// Waits until each of the program's tasks has counted on.
pub fn assert_runs(place: &Place) {
    // Each look at a place maps it.
    let board = place.board();
    let (before, start) = (counted(board), Instant::now());
    loop {
        let now = counted(board);
        if now.iter().zip(before).all(|(now, before)| *now > before) {
            return;
        }
        assert!(
            start.elapsed() < LONG,
            "from {before:?} it has come to {now:?}: {:?}",
            std::fs::read_to_string(place.runtime.join("stdout"))
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Takes what has ended and became our child.
pub fn reap() {
    while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
}

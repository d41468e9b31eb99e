//! The stories.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::pin::Pin;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use verbatim_container::{ContainerName, Exit, Link, Status, Workload, blockers};

use crate::rights;
use crate::support::{
    self,
    host::{Place, TestHost, World, copy_images, copy_runtime, program},
};
use crate::table::{Row, after_commit, note_steps, print_table};

type Story = fn() -> Pin<Box<dyn Future<Output = ()>>>;

const STORIES: [(&str, Story); 13] = [
    ("a_container_runs_and_ends", || {
        Box::pin(a_container_runs_and_ends())
    }),
    ("it_goes_on_elsewhere_with_its_connection", || {
        Box::pin(it_goes_on_elsewhere_with_its_connection())
    }),
    ("an_aborted_dump_leaves_it_running", || {
        Box::pin(an_aborted_dump_leaves_it_running())
    }),
    ("a_dropped_handle_is_an_abort", || {
        Box::pin(a_dropped_handle_is_an_abort())
    }),
    ("a_failed_restore_leaves_it_running_at_the_source", || {
        Box::pin(a_failed_restore_leaves_it_running_at_the_source())
    }),
    ("an_agent_that_dies_lets_its_frozen_container_go", || {
        Box::pin(an_agent_that_dies_lets_its_frozen_container_go())
    }),
    (
        "an_agent_that_dies_at_the_decision_leaves_its_container_frozen",
        || Box::pin(an_agent_that_dies_at_the_decision_leaves_its_container_frozen()),
    ),
    ("a_users_own_bundle_moves_too", || {
        Box::pin(a_users_own_bundle_moves_too())
    }),
    ("what_stands_in_the_way_is_found", || {
        Box::pin(what_stands_in_the_way_is_found())
    }),
    ("its_root_is_nobody_outside", || {
        Box::pin(rights::its_root_is_nobody_outside())
    }),
    ("what_only_the_destination_has_is_guarded_too", || {
        Box::pin(rights::what_only_the_destination_has_is_guarded_too())
    }),
    ("what_cannot_be_guarded_does_not_run", || {
        Box::pin(rights::what_cannot_be_guarded_does_not_run())
    }),
    ("a_program_in_run_is_shown_to_its_command", || {
        Box::pin(rights::a_program_in_run_is_shown_to_its_command())
    }),
];

pub fn names() -> impl Iterator<Item = &'static str> {
    STORIES.iter().map(|(name, _)| *name)
}

pub fn run(arguments: &[String]) -> ExitCode {
    // Containers become our children, as they become the agent's.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("any process may be one");
    let wanted: Vec<_> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let chosen = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    let world = World::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .build();
    let runtime = runtime.expect("a runtime can be started");
    for (name, story) in STORIES.iter().filter(|(name, _)| chosen(name)) {
        println!("story {name}");
        // A panic ends the program, and with it its namespaces and everything in them, once what is frozen can die.
        let told = catch_unwind(AssertUnwindSafe(|| runtime.block_on(story())));
        if told.is_err() {
            support::sweep(&support::inside().expect("the stories run inside"));
            return ExitCode::FAILURE;
        }
    }
    drop(world);
    println!("all is well");
    ExitCode::SUCCESS
}

/// The container's name.
pub fn name() -> ContainerName {
    ContainerName::new("web").unwrap()
}

/// A container that runs on host `a`.
async fn start(a: &TestHost) -> Place {
    let place = a.make_place(&name(), Link::Attached);
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    place
}

/// Ends the container and takes its place away.
pub async fn stop(host: &TestHost, place: Place) {
    host.host.runc().delete(&name(), true).await.unwrap();
    host.clear_place(place);
}

async fn a_container_runs_and_ends() {
    let a = TestHost::new("a").await;
    let place = a.make_place(&name(), Link::Attached);
    let mut init = a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    let state = a.host.runc().state(&name()).await.unwrap().unwrap();
    assert_eq!((state.status, state.pid), (Status::Running, init.pid()));
    assert_eq!(a.host.runc().list().unwrap(), [name()]);
    let uverbs = format!("/proc/{}/root/dev/infiniband/uverbs0", init.pid());
    let uverbs = std::fs::metadata(uverbs).unwrap().file_type();
    assert!(std::os::unix::fs::FileTypeExt::is_char_device(&uverbs));
    a.host.runc().kill(&name(), libc::SIGKILL).await.unwrap();
    assert_eq!(init.wait_exit().await.unwrap(), Exit::Signal(libc::SIGKILL));
    stop(&a, place).await;
    assert_eq!(a.host.runc().state(&name()).await.unwrap(), None);
}

async fn it_goes_on_elsewhere_with_its_connection() {
    let moves =
        std::env::var("VERBATIM_TEST_MOVES").map_or(4, |text| text.parse().expect("a number of moves"));
    let hosts = [TestHost::new("a").await, TestHost::new("b").await];
    let mut place = start(&hosts[0]).await;
    let mut table = Vec::new();
    for turn in 0..moves {
        let (source, destination) = (&hosts[turn % 2], &hosts[(turn + 1) % 2]);
        let (moved, row) = one_move(source, &place, destination).await;
        source.clear_place(place);
        place = moved;
        table.push(row);
    }
    print_table(&table);
    stop(&hosts[moves % 2], place).await;
}

async fn one_move(source: &TestHost, place: &Place, destination: &TestHost) -> (Place, Row) {
    let next = destination.make_place(&name(), Link::Detached);
    move_to(source, place, destination, next).await
}

/// Moves the container to `next`, a place for it at the destination.
pub async fn move_to(source: &TestHost, place: &Place, destination: &TestHost, next: Place) -> (Place, Row) {
    let mut row = Row::new();
    let mut note = |what: &str, time: Duration| row.push((what.to_owned(), time.as_secs_f64() * 1e3));
    let start = Instant::now();
    copy_runtime(place, &next);
    let checkpoint = source.checkpoint(&name()).await;
    let restore = destination.restore(&name(), &next).await;
    note("prepare", start.elapsed());
    place.assert_alive();
    place.board().longest_gap_ns.store(0, SeqCst);
    place.board().longest_echo_ns.store(0, SeqCst);

    let start = Instant::now();
    let dumped = checkpoint
        .freeze_and_dump_with(|| place.network.detach())
        .await
        .unwrap();
    let ticks = place.board().ticks.load(SeqCst);
    note_steps(&mut note, "dump", dumped.timings());
    note("dump", dumped.timings().total());
    let copying = Instant::now();
    copy_images(&source.images(&name()), &destination.images(&name()));
    copy_runtime(place, &next);
    note("copy", copying.elapsed());
    let restored = restore.restore().await.unwrap();
    note_steps(&mut note, "restore", restored.timings());
    note("restore", restored.timings().total());
    let resuming = Instant::now();
    let resumed = restored
        .resume_with(|| next.network.attach().unwrap())
        .await
        .unwrap();
    note_steps(&mut note, "resume", &after_commit(&resumed.timings));
    note("resume", resuming.elapsed());
    note("sum", start.elapsed());
    let committing = Instant::now();
    dumped.commit().await.unwrap();
    note("commit", committing.elapsed());
    let (init, runc) = resumed.settled().await;
    runc.unwrap();
    next.assert_alive();
    assert_eq!(
        place.board().ticks.load(SeqCst),
        ticks,
        "the source's copy does not run again"
    );
    assert_ordinary_priority(init.pid());
    note(
        "seen inside",
        Duration::from_nanos(next.board().longest_gap_ns.load(SeqCst)),
    );
    note(
        "seen on TCP",
        Duration::from_nanos(next.board().longest_echo_ns.load(SeqCst)),
    );

    assert_eq!(source.host.runc().state(&name()).await.unwrap(), None);
    let state = destination.host.runc().state(&name()).await.unwrap().unwrap();
    assert_eq!((state.status, state.pid), (Status::Running, init.pid()));
    (next, row)
}

/// CRIU runs ahead of everything else; what it restores must not.
fn assert_ordinary_priority(pid: i32) {
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        // After the name in parentheses the third field of `man 5 proc` follows.
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let (nice, policy) = (fields[19 - 3], fields[41 - 3]);
        assert_eq!((nice, policy), ("0", "0"), "{stat}");
    }
}

async fn an_aborted_dump_leaves_it_running() {
    let a = TestHost::new("a").await;
    let place = start(&a).await;
    a.checkpoint(&name()).await.cancel().await.unwrap();
    place.assert_alive();
    for _ in 0..2 {
        let checkpoint = a.checkpoint(&name()).await;
        let dumped = checkpoint
            .freeze_and_dump_with(|| place.network.detach())
            .await
            .unwrap();
        let frozen = place.board().ticks.load(SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(place.board().ticks.load(SeqCst), frozen, "frozen means frozen");
        dumped.abort().await.unwrap();
        place.network.attach().unwrap();
        place.assert_alive();
        assert_eq!(
            a.host.runc().state(&name()).await.unwrap().unwrap().status,
            Status::Running
        );
    }
    stop(&a, place).await;
}

async fn a_dropped_handle_is_an_abort() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let place = start(&a).await;
    drop(a.checkpoint(&name()).await.freeze_and_dump().await.unwrap());
    place.assert_alive();

    let next = b.make_place(&name(), Link::Detached);
    let checkpoint = a.checkpoint(&name()).await;
    let restore = b.restore(&name(), &next).await;
    let dumped = checkpoint.freeze_and_dump().await.unwrap();
    copy_images(&a.images(&name()), &b.images(&name()));
    copy_runtime(&place, &next);
    let restored = restore.restore().await.unwrap();
    let ticks = next.board().ticks.load(SeqCst);
    restored.abort().await.unwrap();
    dumped.abort().await.unwrap();
    place.assert_alive();
    assert_eq!(
        next.board().ticks.load(SeqCst),
        ticks,
        "the destination's copy never ran"
    );
    assert_eq!(b.host.runc().state(&name()).await.unwrap(), None);
    b.clear_place(next);
    stop(&a, place).await;
}

async fn a_failed_restore_leaves_it_running_at_the_source() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let place = start(&a).await;
    let next = b.make_place(&name(), Link::Detached);
    let checkpoint = a.checkpoint(&name()).await;
    let restore = b.restore(&name(), &next).await;
    let dumped = checkpoint
        .freeze_and_dump_with(|| place.network.detach())
        .await
        .unwrap();
    copy_images(&a.images(&name()), &b.images(&name()));
    copy_runtime(&place, &next);
    let image = b.images(&name()).join("pstree.img");
    let mut bytes = std::fs::read(&image).unwrap();
    let middle = bytes.len() / 2;
    bytes.truncate(middle);
    std::fs::write(&image, bytes).unwrap();
    let error = restore.restore().await.unwrap_err().to_string();
    assert!(
        error.contains("restore of web failed") && error.contains("CRIU says"),
        "{error}"
    );
    assert_eq!(b.host.runc().state(&name()).await.unwrap(), None);
    dumped.abort().await.unwrap();
    place.network.attach().unwrap();
    place.assert_alive();
    b.clear_place(next);

    // And then it can move after all.
    let (moved, _) = one_move(&a, &place, &b).await;
    a.clear_place(place);
    stop(&b, moved).await;
}

async fn an_agent_that_dies_lets_its_frozen_container_go() {
    let a = TestHost::new("a").await;
    let place = start(&a).await;
    freeze_and_die("frozen", &place);
    place.assert_alive();
    stop(&a, place).await;
}

async fn an_agent_that_dies_at_the_decision_leaves_its_container_frozen() {
    let a = TestHost::new("a").await;
    let place = start(&a).await;
    freeze_and_die("held", &place);
    let frozen = place.board().ticks.load(SeqCst);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(
        place.board().ticks.load(SeqCst),
        frozen,
        "it runs, and so may its copy"
    );
    // What an operator does who knows that the copy runs.
    kill_criu();
    a.host.runc().delete(&name(), true).await.unwrap();
    assert_eq!(a.host.runc().state(&name()).await.unwrap(), None);
    a.clear_place(place);
}

/// Kills every CRIU of this PID namespace, which is the stories' own.
fn kill_criu() {
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw)
            && comm.starts_with("criu")
        {
            // It may have ended meanwhile.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Starts an agent that freezes the container up to `stage`, and kills it there.
fn freeze_and_die(stage: &str, place: &Place) {
    let mut agent = Command::new(std::env::current_exe().unwrap())
        .args(["doomed-agent", stage])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(agent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line.trim_end(), stage);
    let frozen = place.board().ticks.load(SeqCst);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(place.board().ticks.load(SeqCst), frozen);
    agent.kill().unwrap();
    agent.wait().unwrap();
}

/// The part of an agent that freezes a container, holds it if it is to be `held`, and is killed then.
pub fn doomed_agent(stage: &str) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let a = TestHost::new("a").await;
        let mut dumped = a.checkpoint(&name()).await.freeze_and_dump().await.unwrap();
        if stage == "held" {
            dumped.hold().await.unwrap();
        }
        println!("{stage}");
        std::future::pending().await
    })
}

async fn a_users_own_bundle_moves_too() {
    let (a, b) = (TestHost::new("a").await, TestHost::new("b").await);
    let user = Path::new("/run/user-bundle");
    let rootfs = user.join("rootfs");
    std::fs::create_dir_all(&rootfs).unwrap();
    // Some file system with a shell and a C library in it: the machine's own. Read-only, and for this test alone.
    rustix::mount::mount_bind("/", &rootfs).unwrap();
    let flags = rustix::mount::MountFlags::BIND | rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(&rootfs, flags, "").unwrap();
    let rights = ["CAP_SETFCAP", "CAP_SETUID", "CAP_SETGID", "CAP_DAC_OVERRIDE"];
    let config = serde_json::json!({
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs", "readonly": true},
        "process": {"user": {"uid": 0, "gid": 0}, "args": program(), "cwd": "/",
                    "capabilities": {"bounding": rights, "effective": rights, "permitted": rights}},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            // Where the runtime folder's mount point is made: the machine's own need not have one.
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
        ],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network"}],
                  "maskedPaths": ["/proc/kcore"], "seccomp": {"defaultAction": "SCMP_ACT_ALLOW"}},
    });
    // What the author's own filter lets through. All else is refused all the same, in a user namespace too.
    let allowed = [
        "find the keyring of the host's root",
        "mount its cgroup in a user namespace",
    ];
    std::fs::write(user.join("config.json"), config.to_string()).unwrap();
    let workload = Workload::from_bundle(user).unwrap();
    let place = a.make_place_for(&name(), Link::Attached, &workload);
    a.host.runc().run(&name(), place.bundle.path()).await.unwrap();
    place.assert_alive();
    let next = b.make_place_for(&name(), Link::Detached, &workload);
    rights::assert_allowed(&a, &place, &allowed).await;
    let (next, _) = move_to(&a, &place, &b, next).await;
    a.clear_place(place);
    rights::assert_allowed(&b, &next, &allowed).await;
    stop(&b, next).await;
    rustix::mount::unmount(&rootfs, rustix::mount::UnmountFlags::DETACH).unwrap();
}

async fn what_stands_in_the_way_is_found() {
    let a = TestHost::new("a").await;
    let place = start(&a).await;
    let init = a.host.runc().state(&name()).await.unwrap().unwrap().pid;
    assert_eq!(blockers(init, false, &[], None).unwrap(), Vec::<String>::new());
    let (host, sleeper) = (a.host.clone(), ["sleep", "1000"].map(str::to_owned));
    let exec = tokio::spawn(async move { host.runc().exec(&name(), &sleeper).await });
    let found = loop {
        let found = blockers(init, false, &[], None).unwrap();
        if found.iter().any(|line| line.contains("(sleep)")) {
            break found;
        }
        assert!(!exec.is_finished(), "runc exec ended");
        tokio::task::yield_now().await;
    };
    assert!(
        found.iter().any(|line| line.contains("started from outside")),
        "{found:?}"
    );
    stop(&a, place).await;
    let _ = exec.await.unwrap();
}

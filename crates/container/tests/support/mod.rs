//! What the tests with real containers share: virtual hosts, a program to run in them, and namespaces of their own.
//!
//! Such a test binary has its own `main` (`harness = false`), because it plays several parts: the test itself, the proxy
//! that runc starts under the name `criu`, and the program in the container. The test runs in mount, network, PID, UTS and
//! IPC namespaces, so whatever it leaves is gone when it ends, but for cgroups, which [`sweep`] removes: two runs at once
//! have names of their own.

#![allow(dead_code, reason = "each test uses its part of this")]

pub mod host;
pub mod workload;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

/// Set for the part of the program that runs in its own namespaces: what its cgroups' names begin with.
const INSIDE: &str = "VERBATIM_TEST_INSIDE";

/// What this run's cgroups' names begin with, inside the namespaces.
pub fn inside() -> Option<String> {
    std::env::var(INSIDE).ok()
}

/// Starts the program again in namespaces of its own, in which the shell script `prepare` has run.
pub fn enter_namespaces(unique: &str, prepare: &str, arguments: &[String]) -> Command {
    let program = std::env::current_exe().expect("a program knows its own path");
    // The tmpfs on /run is a virtual host's: CRIU keeps what it has probed there.
    let script = format!(
        "mount -t tmpfs -o mode=755 run /run && ip link set lo up && {{ {prepare}; }} && exec \"$@\""
    );
    let mut command = Command::new("unshare");
    command
        .args([
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        .args(["sh", "-c", &script, "sh"])
        .arg(program)
        .args(arguments)
        .env(INSIDE, unique);
    command
}

/// A name for this run, which no other that runs has.
pub fn unique() -> String {
    format!("verbatim-test-{}", std::process::id())
}

/// Waits for what [`enter_namespaces`] has started, and removes what is left of its cgroups. After `limit` it is ended.
pub fn finish(mut child: Child, unique: &str, limit: Duration) -> ExitCode {
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().expect("unshare is our child") {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => {
                eprintln!("not done after {limit:?}: ended");
                // It takes its namespaces along, once what is frozen there can die.
                let _ = child.kill();
                sweep(unique);
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    sweep(unique);
    match status {
        Some(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Ends what is in the cgroups of a run and removes them.
pub fn sweep(unique: &str) {
    let mounted = Path::new("/sys/fs/cgroup");
    let below = std::fs::read_dir(mounted).into_iter().flatten().flatten();
    for hierarchy in below.map(|entry| entry.path()).chain([mounted.to_owned()]) {
        let groups = std::fs::read_dir(&hierarchy).into_iter().flatten().flatten();
        let ours = groups.filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.strip_prefix(unique)
                .is_some_and(|rest| rest.starts_with('-'))
        });
        for group in ours {
            remove_group(&group.path());
        }
    }
}

fn remove_group(group: &Path) {
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_group(&entry.path());
        }
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = std::fs::remove_dir(group) {
        if error.kind() == std::io::ErrorKind::NotFound || Instant::now() >= deadline {
            return;
        }
        for pid in std::fs::read_to_string(group.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
        {
            if let Some(pid) = pid.parse().ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        // Whichever it has: neither file is there in the other version.
        for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            if group.join(file).exists() {
                let _ = std::fs::write(group.join(file), thawed);
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Why the test cannot run here.
pub fn reason_to_skip() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root may make containers and namespaces".to_owned());
    }
    for tool in ["runc", "unshare", "ip", "nsenter"] {
        let found = Command::new(tool)
            .arg("--version")
            .output()
            .or_else(|_| Command::new(tool).arg("-V").output());
        if found.is_err() {
            return Some(format!("{tool} is not installed"));
        }
    }
    verbatim_container::Criu::find()
        .err()
        .map(|error| error.to_string())
}

/// Whether the program was started in the place of CRIU.
pub fn is_called(name: &str) -> bool {
    let called = std::env::args_os().next().map(PathBuf::from);
    called.is_some_and(|called| called.file_name().is_some_and(|called| called == name))
}

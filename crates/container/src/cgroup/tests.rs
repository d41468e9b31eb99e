//! Against the kernel: each version of the freezer that this machine has mounted.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::*;

/// More than any kernel needs; what takes as long has failed.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn events_are_read_by_their_names() {
    let text = "populated 1\nfrozen 0\n";
    assert_eq!(flag(text, "populated"), Some(true));
    assert_eq!(flag(text, "frozen"), Some(false));
    assert_eq!(flag(text, "thawed"), None);
    assert_eq!(flag("frozen 2\n", "frozen"), None);
}

#[test]
fn a_cgroup_that_is_not_there_is_empty_and_one_that_cannot_be_read_is_not() {
    let folder = tempfile::tempdir().unwrap();
    for version in [CgroupVersion::V1, CgroupVersion::V2] {
        let path = folder.path().join("gone");
        let gone = Cgroup { version, path };
        assert!(gone.tasks().unwrap().is_empty());
        assert!(!gone.is_populated().unwrap());
        let path = folder.path().join(format!("{version:?}"));
        std::fs::create_dir(&path).unwrap();
        let other = Cgroup {
            version,
            path: path.clone(),
        };
        assert!(other.tasks().is_err(), "this is no cgroup");
        assert!(other.is_populated().is_err() && other.is_frozen().is_err());
        for name in ["cgroup.threads", "tasks", "cgroup.events", "freezer.state"] {
            std::fs::write(path.join(name), "what\n").unwrap();
        }
        let damaged = Cgroup { version, path };
        assert!(damaged.tasks().is_err());
        assert!(damaged.is_populated().is_err());
        assert!(damaged.is_frozen().is_err());
    }
}

/// A cgroup of our own with a program in it that never sleeps and has a child that never sleeps.
struct Spinner {
    cgroup: Cgroup,
    shell: Child,
}

impl Spinner {
    /// In each hierarchy that there is; none without root.
    fn everywhere(name: &str) -> Vec<Self> {
        let hierarchies = [
            (CgroupVersion::V1, "/sys/fs/cgroup/freezer"),
            (CgroupVersion::V2, "/sys/fs/cgroup/unified"),
            (CgroupVersion::V2, "/sys/fs/cgroup"),
        ];
        let file = |version| match version {
            CgroupVersion::V1 => "freezer.state",
            CgroupVersion::V2 => "cgroup.freeze",
        };
        let mut all = Vec::new();
        for (version, mounted) in hierarchies {
            let path = Path::new(mounted).join(format!("verbatim-unit-{}-{name}", std::process::id()));
            if std::fs::create_dir(&path).is_err() {
                continue;
            }
            let cgroup = Cgroup { version, path };
            if !cgroup.file(file(version)).exists() {
                cgroup.remove().unwrap();
                continue;
            }
            let script = r#"echo 0 >"$1/cgroup.procs" && { (while :; do :; done) & while :; do :; done; }"#;
            let shell = Command::new("sh")
                .args(["-c", script, "sh"])
                .arg(&cgroup.path)
                .stdin(Stdio::null())
                .spawn()
                .unwrap();
            let spinner = Self { cgroup, shell };
            while spinner.cgroup.tasks().unwrap().len() < 2 {
                std::thread::yield_now();
            }
            all.push(spinner);
        }
        if all.is_empty() {
            eprintln!("skipped: no hierarchy with a freezer in which a cgroup can be made");
        }
        all
    }

    /// The time that all of them have been given, in clock ticks: proc_pid_stat(5), utime.
    fn used(&self) -> u64 {
        let tasks = self.cgroup.tasks().unwrap();
        let stats = tasks
            .iter()
            .map(|task| std::fs::read_to_string(format!("/proc/{task}/stat")).unwrap());
        stats
            .map(|stat| {
                let (_, fields) = stat.rsplit_once(')').unwrap();
                fields
                    .split_whitespace()
                    .nth(14 - 3)
                    .unwrap()
                    .parse::<u64>()
                    .unwrap()
            })
            .sum()
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        let killed = self.cgroup.kill(LIMIT);
        let _ = self.shell.wait();
        let removed = self.cgroup.remove();
        if !std::thread::panicking() {
            killed.unwrap();
            removed.unwrap();
        }
    }
}

#[test]
fn frozen_tasks_get_no_time_and_thawed_ones_do() {
    for spinner in Spinner::everywhere("freeze") {
        let cgroup = &spinner.cgroup;
        assert!(!cgroup.is_frozen().unwrap() && cgroup.is_populated().unwrap());
        cgroup.freeze(LIMIT).unwrap();
        assert!(cgroup.is_frozen().unwrap());
        let used = spinner.used();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(spinner.used(), used, "{:?}", cgroup.version);
        // Twice is once.
        cgroup.freeze(LIMIT).unwrap();
        cgroup.thaw(LIMIT).unwrap();
        assert!(!cgroup.is_frozen().unwrap());
        while spinner.used() == used {
            std::thread::yield_now();
        }
    }
}

#[test]
fn running_and_frozen_tasks_are_killed_and_waited_for() {
    for frozen in [false, true] {
        for mut spinner in Spinner::everywhere(if frozen { "kill-frozen" } else { "kill" }) {
            if frozen {
                spinner.cgroup.freeze(LIMIT).unwrap();
            }
            spinner.cgroup.kill(LIMIT).unwrap();
            assert!(!spinner.cgroup.is_populated().unwrap());
            assert!(spinner.cgroup.tasks().unwrap().is_empty());
            assert!(spinner.shell.try_wait().unwrap().is_some(), "it has ended");
            // Again, and when nothing is there any more.
            spinner.cgroup.kill(LIMIT).unwrap();
            spinner.cgroup.remove().unwrap();
            spinner.cgroup.kill(LIMIT).unwrap();
            spinner.cgroup.thaw(LIMIT).unwrap();
            assert!(spinner.cgroup.freeze(LIMIT).is_err(), "nothing was frozen");
        }
    }
}

#[test]
fn tasks_in_cgroups_below_are_found_frozen_and_killed() {
    for spinner in Spinner::everywhere("below") {
        let below = Cgroup {
            version: spinner.cgroup.version,
            path: spinner.cgroup.file("below"),
        };
        std::fs::create_dir(&below.path).unwrap();
        for task in spinner.cgroup.tasks().unwrap() {
            below.write("cgroup.procs", &task.to_string()).unwrap();
        }
        assert_eq!(spinner.cgroup.tasks().unwrap().len(), 2);
        spinner.cgroup.freeze(LIMIT).unwrap();
        assert!(below.is_frozen().unwrap());
        assert!(
            below.thaw(Duration::from_millis(10)).is_err(),
            "the one above is frozen"
        );
        spinner.cgroup.kill(LIMIT).unwrap();
        assert!(!below.is_populated().unwrap());
        below.remove().unwrap();
    }
}

#[test]
fn threads_that_were_apart_are_so_again() {
    let Some(mounted) = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        .map(Path::new)
        .into_iter()
        .find(|mounted| mounted.join("cgroup.controllers").exists())
    else {
        return;
    };
    let top = mounted.join(format!("verbatim-unit-{}-threads", std::process::id()));
    if std::fs::create_dir(&top).is_err() {
        return;
    }
    let cgroup = |name: &str| {
        let path = top.join(name);
        std::fs::create_dir(&path).unwrap();
        let version = CgroupVersion::V2;
        Cgroup { version, path }
    };
    let (first, other) = (cgroup("first"), cgroup("other"));
    for threaded in [&first, &other] {
        threaded.write("cgroup.type", "threaded").unwrap();
    }
    // A process with a second thread.
    let mut python = Command::new("python3")
        .args([
            "-c",
            "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = python.id();
    std::io::Read::read_exact(python.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut threads = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap());
    let second: u32 = threads.find(|thread| *thread != pid).unwrap();
    first.take_in(pid).unwrap();
    other.take_thread_in(second).unwrap();
    let apart = first.of_threads(pid).unwrap();
    assert_eq!(apart, [(second, other.clone())]);
    // `away` is no part of the threaded subtree, as a container's is not.
    let outside = mounted.join(format!("verbatim-unit-{}-away", std::process::id()));
    std::fs::create_dir(&outside).unwrap();
    let version = CgroupVersion::V2;
    let away = Cgroup {
        version,
        path: outside,
    };
    away.take_in(pid).unwrap();
    assert!(first.of_threads(pid).unwrap().is_empty());
    let gone = (u32::MAX - 1, other.clone());
    crate::tasks::put_back(pid, &first, &[apart[0].clone(), gone]).unwrap();
    assert_eq!(first.of_process(pid).unwrap(), first);
    assert_eq!(first.of_threads(pid).unwrap(), apart);
    python.kill().unwrap();
    python.wait().unwrap();
    for cgroup in [&first, &other, &away] {
        cgroup.remove().unwrap();
    }
    std::fs::remove_dir(&top).unwrap();
}

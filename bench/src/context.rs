//! What was measured on: without it a number says nothing.

use std::process::Command;

use serde::Serialize;

/// The machine and the version.
#[derive(Debug, Serialize)]
pub struct Context {
    /// `git describe` of the working tree, if there is one.
    pub commit: Option<String>,
    /// The kernel's release.
    pub kernel: String,
    /// The processor's name.
    pub processor: String,
    /// Processors that this program may use.
    pub processors: usize,
    /// The average number of runnable processes in the minute before: above 0.5 something else was running.
    pub load_before: f64,
}

impl Context {
    /// Of this machine, now.
    pub fn now() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let described = Command::new("git")
            .args(["describe", "--always", "--dirty"])
            .output()
            .ok();
        let commit = described.filter(|output| output.status.success());
        let processor = read("/proc/cpuinfo");
        let processor = processor
            .lines()
            .find_map(|line| line.strip_prefix("model name"))
            .unwrap_or_default();
        Self {
            commit: commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: processor.trim_start_matches([':', ' ', '\t']).to_owned(),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            load_before: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

//! What CRIU alone takes to write a program down and make it again, as the program itself sees it: the peer of every blackout.
//!
//! The program is `bench/programs/memory.c`, which has no RDMA, on this machine itself: in no host of a lab and in no container.
//! Images lie in memory, nothing is sent anywhere, and CRIU does what it does by itself: `criu dump`, then at once
//! `criu restore`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use verbatim_container::Criu;
use verbatim_e2e::eventually;

use crate::programs::program;

const LIMIT: Duration = Duration::from_secs(120);

/// The longest time for which a program says that it stood still, in ms, of those that ended at `since` or later.
pub fn longest_gap(said: &str, since: f64) -> Option<f64> {
    let gaps = said.lines().filter_map(|line| {
        let (at, gap) = line.strip_suffix(" ms")?.split_once(" stood still for ")?;
        Some((at.parse::<f64>().ok()?, gap.parse::<f64>().ok()?))
    });
    gaps.filter(|(at, _)| *at >= since)
        .map(|(_, gap)| gap)
        .max_by(f64::total_cmp)
}

/// Now, by the clock of [`longest_gap`].
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// What a program that holds so much private memory says that it stood still for, in ms, while CRIU alone wrote it down and made
/// it again.
pub fn gap(mebibytes: u32) -> anyhow::Result<f64> {
    let criu = Criu::find()?;
    let place = Place::new()?;
    let mut started = place.start(mebibytes)?;
    let pid = started.id().cast_signed();
    let measured = place.dump_and_restore(criu.path(), &mut started);
    // Whichever of the two lives has the number.
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::KILL);
    }
    let _ = started.wait();
    measured
}

/// A folder in memory, which is removed when this is dropped.
struct Place(PathBuf);

impl Place {
    fn new() -> anyhow::Result<Self> {
        let folder = PathBuf::from(format!("/dev/shm/verbatim-stock-criu-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("images"))
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self(folder))
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.0.join("output")).unwrap_or_default()
    }

    /// In a session of its own, without a terminal, with files for its streams.
    fn start(&self, mebibytes: u32) -> anyhow::Result<Child> {
        let output = File::create(self.0.join("output"))?;
        let started = Command::new("setsid")
            .args([&program("memory")?, &mebibytes.to_string()])
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .spawn()
            .context("setsid cannot be started")?;
        eventually("the program's memory", LIMIT, || {
            Ok(self.said().contains("ready").then_some(()))
        })?;
        Ok(started)
    }

    fn dump_and_restore(&self, criu: &Path, started: &mut Child) -> anyhow::Result<f64> {
        let begun = now();
        self.criu(criu, "dump", &["--tree", &started.id().to_string()])?;
        // The number is free again when it is reaped.
        started.wait()?;
        self.criu(criu, "restore", &["--restore-detached"])?;
        eventually("the program that goes on", LIMIT, || {
            Ok(longest_gap(&self.said(), begun))
        })
    }

    fn criu(&self, criu: &Path, what: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let images = self.0.join("images");
        let log = format!("{what}.log");
        let status = Command::new(criu)
            .arg(what)
            .arg("--images-dir")
            .arg(&images)
            .args(["--log-file", &log, "-v1"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            let said = std::fs::read_to_string(images.join(&log)).unwrap_or_default();
            bail!("criu {what} failed ({status}):\n{said}");
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_of_those_that_count_is_found() {
        let said = "ready\n10.5 stood still for 900.000 ms\n20.0 stood still for 12.5 ms\n21.0 stood still for 80.25 ms\n";
        assert_eq!(longest_gap(said, 15.0), Some(80.25));
        assert_eq!(longest_gap(said, 0.0), Some(900.0));
        assert_eq!(longest_gap(said, 30.0), None);
    }
}

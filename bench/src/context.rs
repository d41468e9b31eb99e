//! What was measured on: without it a number says nothing.

use std::process::Command;

use serde::Serialize;

/// How busy the machine's processors have been since it began (proc_stat(5)).
#[derive(Debug, Clone, Copy)]
pub struct Processors {
    /// Ticks of programs and of the kernel.
    busy: u64,
    /// Ticks in which there was something to do, and the hypervisor let others run.
    stolen: u64,
}

impl Processors {
    /// Until now; all zero where the kernel does not tell.
    pub fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        Self::parse(&stat)
    }

    fn parse(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .map_while(|tick| tick.parse().ok())
            .collect();
        let [user, nice, system, _idle, _iowait, irq, softirq, stolen, ..] = ticks[..] else {
            return Self { busy: 0, stolen: 0 };
        };
        Self {
            busy: user + nice + system + irq + softirq,
            stolen,
        }
    }

    /// Which part of the time that it wanted the machine did not get since then, in percent: others had the processors.
    pub fn stolen_since(self, before: Self) -> f64 {
        let stolen = self.stolen.saturating_sub(before.stolen);
        let wanted = stolen + self.busy.saturating_sub(before.busy);
        100.0 * stolen as f64 / wanted.max(1) as f64
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_took_is_a_part_of_what_was_wanted() {
        let before = Processors::parse("cpu  100 0 50 1000 5 0 10 7 0 0\ncpu0 …\n");
        let after = Processors::parse("cpu  160 5 60 2000 5 3 12 27 0 0\ncpu0 …\n");
        assert_eq!(after.stolen_since(before), 20.0);
        assert_eq!(before.stolen_since(before), 0.0);
        assert_eq!(Processors::parse("").stolen_since(after), 0.0);
    }
}

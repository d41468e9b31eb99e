//! What a program has, in its own words.

use std::time::Duration;

use anyhow::bail;
use verbatim_channel::{Answer, Order, RoadMap};

use super::{Guest, WITH_MADE_AGAIN, unexpected};

/// How often a program that does not answer is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Seen stopped so often, it is not waited for: who stopped it will hardly let it go on before the time is over.
const LOOKS: u32 = 10;

impl Guest {
    /// Its road map. A program that is stopped (SIGSTOP) cannot tell it, which is an error after half a second.
    pub async fn describe(&self) -> anyhow::Result<RoadMap> {
        let order = match self.version {
            ..WITH_MADE_AGAIN => Order::Describe,
            _ => Order::DescribeAll,
        };
        let answered = tokio::select! {
            biased;
            answered = self.order(order, Vec::new()) => answered?,
            () = self.stays_stopped() => bail!(
                "{} (process {}) is stopped, as by SIGSTOP, and says nothing: let it go on, or end it",
                self.program,
                self.pid
            ),
        };
        match answered.0 {
            Answer::Described(road_map) => Ok(road_map),
            Answer::DescribedAll { road_map, made_again } => {
                *self.made_again.lock().expect("no panic under this lock") = made_again;
                Ok(road_map)
            }
            other => Err(unexpected(&other, "Described")),
        }
    }

    async fn stays_stopped(&self) {
        let mut looks = 0;
        while looks < LOOKS {
            tokio::time::sleep(LOOK).await;
            looks = match self.host_pid().is_some_and(is_stopped) {
                true => looks + 1,
                false => 0,
            };
        }
    }
}

/// Whether a process is stopped by a signal. One that a tracer holds is not: CRIU lets it go soon.
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Its name comes before, in brackets, and may have any in it.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields);
    fields.is_some_and(|fields| fields.trim_start().starts_with('T'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(!is_stopped(pid));
        let process = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        let stopped = rustix::process::WaitOptions::UNTRACED;
        let status = rustix::process::waitpid(Some(process), stopped).unwrap().unwrap();
        assert!(status.1.stopped() && is_stopped(pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

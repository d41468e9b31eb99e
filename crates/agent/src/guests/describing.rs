//! What a program has, in its own words.

use std::time::Duration;

use anyhow::bail;
use verbatim_channel::{Answer, MadeAgain, Order, RoadMap};

use super::{Guest, Held, WITH_MADE_AGAIN, unexpected};
use crate::quotas;

/// How often a program that does not answer is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Seen stopped so often, it is not waited for: who stopped it will hardly let it go on before the time is over.
const LOOKS: u32 = 10;

impl Guest {
    /// Its road map. A program that is stopped (SIGSTOP) cannot tell it, which is an error after half a second.
    pub async fn describe(&self) -> anyhow::Result<RoadMap> {
        self.describe_held().await.map(|(road_map, _)| road_map)
    }

    /// The same; the road map counts for its tenant until its place is given up.
    pub async fn describe_held(&self) -> anyhow::Result<(RoadMap, Held)> {
        let order = match self.version {
            ..WITH_MADE_AGAIN => Order::Describe,
            _ => Order::DescribeAll,
        };
        let answered = tokio::select! {
            biased;
            answered = self.order_held(order, Vec::new()) => answered?,
            () = self.stays_stopped() => bail!(
                "{} (process {}) is stopped, as by SIGSTOP, and says nothing: let it go on, or end it",
                self.program,
                self.pid
            ),
        };
        let (answer, _, held) = answered;
        match answer {
            Answer::Described(road_map) => Ok((road_map, held)),
            Answer::DescribedAll { road_map, made_again } => {
                if !may_be_kept(&made_again) {
                    bail!(
                        "{} (process {}) says that it makes more, or longer named, devices again than a process can open",
                        self.program,
                        self.pid
                    );
                }
                *self.made_again.lock().expect("no panic under this lock") = made_again;
                Ok((road_map, held))
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

/// What a process says of its devices outlives the answer.
fn may_be_kept(made_again: &[MadeAgain]) -> bool {
    let fits = |made: &MadeAgain| {
        let driver = made.driver.as_deref().unwrap_or_default();
        made.device.len().max(driver.len()) <= quotas::NAME_BYTES
    };
    made_again.len() <= quotas::MADE_AGAIN && made_again.iter().all(fits)
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
    fn what_is_kept_of_a_process_is_short() {
        let made = |device: &str, driver: Option<String>| MadeAgain {
            id: 0,
            device: device.to_owned(),
            driver,
        };
        assert!(may_be_kept(&vec![made("mlx5_0", None); quotas::MADE_AGAIN]));
        assert!(!may_be_kept(&vec![made("mlx5_0", None); quotas::MADE_AGAIN + 1]));
        let long = "x".repeat(quotas::NAME_BYTES + 1);
        assert!(!may_be_kept(&[made(&long, None)]) && !may_be_kept(&[made("mlx5_0", Some(long))]));
    }

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

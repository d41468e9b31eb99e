//! Perftest's bandwidth tests between two instances, for as long as a test of ours needs.
//!
//! Run by time (`-D`), perftest waits before it counts, counts, and waits again before it ends. Each of the three lasts until
//! an alarm (`catch_alarm` in `perftest_resources.c`). The alarm need not be its own: with a time that never ends, a test
//! sends the first one when data flows, and the others when it has seen enough. A server of RDMA WRITE or READ takes no
//! alarms, and ends with its client.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::instance::{Instance, words};
use crate::lab::TestLab;
use crate::perftest::{BandwidthRow, PATIENCE, PERFTEST_PORT};
use crate::running::Finished;
use crate::wait::{eventually, patience};

/// Longer than any test, in seconds.
const FOREVER: &str = "7200";

/// How long it may take to begin, or to end.
const LIMIT: Duration = Duration::from_secs(60);

/// So many alarms a program takes; at one more it says that it does not know what to do.
const ALARMS: u32 = 3;

/// `SIGALRM` in the masks of `/proc/PID/status`.
const ALARM: u64 = 1 << (14 - 1);

/// A server and a client, each in an instance.
pub struct Bandwidth<'a> {
    lab: &'a TestLab,
    /// The client.
    pub client: Instance<'a>,
    /// The server.
    pub server: Instance<'a>,
    by_time: bool,
    /// How many alarms the client and the server have taken.
    taken: [Cell<u32>; 2],
}

impl<'a> Bandwidth<'a> {
    /// With these options a test goes on until [`Self::end`].
    pub const ENDLESS: [&'static str; 2] = ["-D", FOREVER];

    /// Starts perftest with these options, the server (`server`) on `peer` and the client (`client`) on `src`; returns when the client
    /// counts. With a number of messages among them (`-n`) it ends
    /// by itself when those are through, else it goes on until [`Bandwidth::end`].
    pub fn start(lab: &'a TestLab, argv: &[&str]) -> anyhow::Result<Self> {
        let by_time = !argv.contains(&"-n");
        let length: &[&str] = if by_time { &Self::ENDLESS } else { &[] };
        let patience: &[&str] = if argv.contains(&"-u") { &[] } else { PATIENCE };
        let argv = [argv, &["-F"], length, patience].concat();
        let server = lab.instance("peer", "server", &argv)?;
        server.listens(PERFTEST_PORT)?;
        let address = server.address()?;
        let client = lab.instance("src", "client", &[&argv[..], &[&address]].concat())?;
        Self::of(lab, client, server, by_time)
    }

    /// Of two that are connected, started with [`Self::ENDLESS`] if they go by time; returns when the client counts.
    pub fn of(
        lab: &'a TestLab,
        client: Instance<'a>,
        server: Instance<'a>,
        by_time: bool,
    ) -> anyhow::Result<Self> {
        let started = Self {
            lab,
            client,
            server,
            by_time,
            taken: Default::default(),
        };
        if by_time {
            started.begins_to_count().with_context(|| started.words())?;
        }
        Ok(started)
    }

    /// What both sides have said so far.
    pub fn words(&self) -> String {
        words(&self.client, &self.server)
    }

    fn begins_to_count(&self) -> anyhow::Result<()> {
        eventually("a client that takes alarms", patience(LIMIT), || {
            self.alarm(&self.client, &self.taken[0])?;
            Ok((self.taken[0].get() > 0).then_some(()))
        })
    }

    /// Sends an alarm, if the program takes any more; returns when it has taken this one.
    fn alarm(&self, instance: &Instance, taken: &Cell<u32>) -> anyhow::Result<()> {
        let row = instance.row()?;
        let Some(pid) = row.pid.filter(|_| taken.get() < ALARMS) else {
            return Ok(());
        };
        let status = self.lab.path(&row.host, &format!("/proc/{pid}/status"))?;
        let mask = |name: &str| {
            let status = std::fs::read_to_string(&status).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(line.trim(), 16).ok()
        };
        if mask("SigCgt:").is_none_or(|caught| caught & ALARM == 0) {
            return Ok(());
        }
        self.lab
            .start_plain(&row.host, &["kill", "-ALRM", &pid.to_string()])?
            .wait(patience(LIMIT))?;
        eventually("an alarm that is taken", patience(LIMIT), || {
            let is_pending = mask("ShdPnd:").is_some_and(|pending| pending & ALARM != 0);
            Ok((!is_pending).then_some(()))
        })?;
        taken.set(taken.get() + 1);
        Ok(())
    }

    /// Ends it; both sides must have ended well, and messages have arrived.
    pub fn end(self) -> anyhow::Result<Finished> {
        let finished = self.both_ended().with_context(|| self.words())?;
        let rows = BandwidthRow::parse(&finished)?;
        ensure!(
            rows.len() == 1 && rows[0].average_mib_s > 0.0 && rows[0].iterations > 0,
            "{rows:?}"
        );
        Ok(finished)
    }

    fn both_ended(&self) -> anyhow::Result<Finished> {
        if self.by_time {
            eventually("perftest's end", patience(LIMIT), || {
                let mut ended = true;
                for (instance, taken) in [&self.client, &self.server].into_iter().zip(&self.taken) {
                    ended &= instance.row()?.state == "exited";
                    self.alarm(instance, taken)?;
                }
                Ok(ended.then_some(()))
            })?;
        }
        let finished = self.client.succeed(LIMIT)?;
        self.server.succeed(LIMIT)?;
        Ok(finished)
    }
}

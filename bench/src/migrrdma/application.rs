//! A program over a library that is not ours, moved in the middle of its work, against killing it and starting it again
//! (MigrRDMA §5.6, figure 6: the paper's is Hadoop over RDMA).
//!
//! Ours is Debian's `ucx_perftest`, tag-matched messages of UCX over its `rc_verbs` transport, between two containers. UCX
//! makes what MPI libraries make of verbs: reliable connections that are set up through datagrams, a shared receive queue,
//! a completion channel. The work is a fixed number of messages; its time is that from the start to the client's end.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use verbatim_e2e::{Instance, Migration, TestLab, Tools, Traffic};

use super::write;
use crate::context::Context;
use crate::summary::Summary;

const PORT: u16 = 13337;
const BYTES: u64 = 65536;
/// Messages for each second that the work shall take, roughly.
const MESSAGES_PER_SECOND: u64 = 4000;
const LIMIT: Duration = Duration::from_secs(300);
/// What the job's throughput lost, by the paper: with MigrRDMA, and with Hadoop's own failover.
const PAPER_LOSS: [f64; 2] = [0.125, 0.658];
/// And how much longer it took with MigrRDMA.
const PAPER_EXTRA_S: f64 = 3.0;

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: String,
    messages: u64,
    unit: &'static str,
    undisturbed: Summary,
    moved: Summary,
    restarted: Summary,
    paper_throughput_loss_moved: f64,
    paper_throughput_loss_failover: f64,
    paper_extra_s_moved: f64,
    rounds: Vec<Round>,
}

#[derive(Debug, Serialize)]
struct Round {
    undisturbed_s: f64,
    moved_s: f64,
    restarted_s: f64,
    migration: Migration,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, seconds: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let job = Job {
        messages: u64::from(seconds) * MESSAGES_PER_SECOND,
    };
    println!("{} of {} messages, s", job.program(), job.messages);
    println!("{:>12} {:>12} {:>12}", "undisturbed", "moved", "restarted");
    let mut rounds = Vec::new();
    for _ in 0..repeats {
        let undisturbed_s = job.undisturbed(tools)?;
        let (moved_s, migration) = job.moved(tools)?;
        let restarted_s = job.restarted(tools)?;
        println!("{undisturbed_s:>12.2} {moved_s:>12.2} {restarted_s:>12.2}");
        rounds.push(Round {
            undisturbed_s,
            moved_s,
            restarted_s,
            migration,
        });
    }
    let of = |get: fn(&Round) -> f64| Summary::of(rounds.iter().map(get));
    let report = Report {
        context,
        program: job.program(),
        messages: job.messages,
        unit: "s",
        undisturbed: of(|round| round.undisturbed_s),
        moved: of(|round| round.moved_s),
        restarted: of(|round| round.restarted_s),
        paper_throughput_loss_moved: PAPER_LOSS[0],
        paper_throughput_loss_failover: PAPER_LOSS[1],
        paper_extra_s_moved: PAPER_EXTRA_S,
        rounds,
    };
    println!(
        "moved: {:+.2} s; killed and started again: {:+.2} s",
        report.moved.median - report.undisturbed.median,
        report.restarted.median - report.undisturbed.median
    );
    write(&report, out)
}

struct Job {
    messages: u64,
}

impl Job {
    fn program(&self) -> String {
        // The GID of IPv6: where it cannot read sysfs, UCX takes datagrams' headers for those of RoCE v1, which IPv6's are
        // like and IPv4's are not.
        format!(
            "env UCX_TLS=rc_verbs,ud_verbs:aux,self UCX_NET_DEVICES=verbatim0:1 UCX_IB_GID_INDEX=1 ucx_perftest -p {PORT} \
             -t tag_bw -s {BYTES} -w 10 -n {}",
            self.messages
        )
    }

    fn undisturbed(&self, tools: &Tools) -> anyhow::Result<f64> {
        in_lab(tools, |lab| {
            let start = Instant::now();
            let (_server, client) = self.start(lab, "one", "")?;
            client.succeed(LIMIT)?;
            Ok(start.elapsed().as_secs_f64())
        })
    }

    fn moved(&self, tools: &Tools) -> anyhow::Result<(f64, Migration)> {
        in_lab(tools, |lab| {
            let start = Instant::now();
            let (_server, client) = self.start(lab, "one", "")?;
            self.half_is_done(lab)?;
            let migration = client.moves("other")?;
            client.succeed(LIMIT)?;
            Ok((start.elapsed().as_secs_f64(), migration))
        })
    }

    /// Both sides are started again: what the server held of the connection is gone with the client.
    fn restarted(&self, tools: &Tools) -> anyhow::Result<f64> {
        in_lab(tools, |lab| {
            let start = Instant::now();
            let (server, client) = self.start(lab, "one", "")?;
            self.half_is_done(lab)?;
            for instance in [&client, &server] {
                end(instance)?;
            }
            let (_server, client) = self.start(lab, "other", "-again")?;
            client.succeed(LIMIT)?;
            Ok(start.elapsed().as_secs_f64())
        })
    }

    fn start<'lab>(
        &self,
        lab: &'lab TestLab,
        client_host: &str,
        suffix: &str,
    ) -> anyhow::Result<(Instance<'lab>, Instance<'lab>)> {
        let program = self.program();
        let argv: Vec<_> = program.split_ascii_whitespace().collect();
        let server = lab.instance("peer", &format!("server{suffix}"), &argv)?;
        server.listens(PORT)?;
        let address = server.address()?;
        let client = lab.instance(
            client_host,
            &format!("client{suffix}"),
            &[&argv[..], &[&address]].concat(),
        )?;
        Ok((server, client))
    }

    fn half_is_done(&self, lab: &TestLab) -> anyhow::Result<()> {
        Traffic::of(lab, "peer")?.flows(self.messages * BYTES / 2, LIMIT)
    }
}

fn in_lab<T>(tools: &Tools, story: impl FnOnce(&TestLab) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let told = story(&lab).with_context(|| lab.logs());
    lab.down()?;
    told
}

/// Ends an instance, if it has not ended by itself.
fn end(instance: &Instance<'_>) -> anyhow::Result<()> {
    if instance.row()?.pid.is_some() {
        instance.kill()?;
    }
    verbatim_e2e::eventually(&format!("the end of {}", instance.name()), LIMIT, || {
        Ok(instance.row()?.pid.is_none().then_some(()))
    })
}

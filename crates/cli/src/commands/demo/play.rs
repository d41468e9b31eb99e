//! One run: start both programs, let data flow, move one of them, wait for their end.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};
use verbatim_agent::client::MigrationEvent;
use verbatim_agent::proto::{Instance, MigrateRequest, RunRequest};
use verbatim_nic::StatsReader;
use verbatim_report::Trace;

use super::listening::listening;
use super::progress::{Progress, gigabits};
use super::sampler::Sampler;
use super::scenario::{Scenario, Side};
use super::stage::{Stage, payload};
use super::timeline::{Timeline, milliseconds, timeline};

/// Data flow when this many bytes have passed the partner's RNIC: more than any handshake sends.
const FLOWING_BYTES: u64 = 4 << 20;
/// How long that may take.
const FLOWING_LIMIT: Duration = Duration::from_secs(20);
/// How often the counter is looked at meanwhile.
const FLOWING_INTERVAL: Duration = Duration::from_millis(20);
/// How long a migration may take.
const MIGRATION_LIMIT: Duration = Duration::from_secs(60);
/// How much longer than they were told the programs may run.
const END_LIMIT: Duration = Duration::from_secs(45);
/// How long the partner of a program that failed may go on.
const FAILED_LIMIT: Duration = Duration::from_secs(5);

/// What came of a run.
#[derive(Debug, Default)]
pub struct Played {
    /// Bytes through the RNIC of the partner's host.
    pub trace: Trace,
    /// The migrations.
    pub moves: Vec<Moved>,
    /// The ends of sender and receiver.
    pub ends: [End; 2],
    /// Bytes that passed the RNICs of the hosts where sender and receiver are at the end, after the last migration.
    pub bytes_after: Option<[u64; 2]>,
    /// Why the run was broken off.
    pub broken_off: Option<String>,
}

/// One migration.
#[derive(Debug)]
pub struct Moved {
    /// What `verbatim migrate --json` prints.
    pub report: Value,
    /// When its phases were.
    pub timeline: Timeline,
}

/// The end of a program.
#[derive(Debug, Default)]
pub struct End {
    /// The host where it was last.
    pub host: String,
    /// Its exit status, if it has ended.
    pub exit_status: Option<i32>,
    /// All it printed.
    pub output: String,
}

/// Plays a run. Whatever fails is told in the result, with what is known up to there.
pub async fn play(stage: &Stage, scenario: &Scenario, progress: &Progress) -> Played {
    progress.step(&format!("run {}: {}", scenario.number, scenario.title));
    let mut run = Run {
        stage,
        scenario,
        progress,
        hosts: scenario.hosts,
        played: Played::default(),
    };
    if let Err(error) = run.whole().await {
        run.played.broken_off = Some(format!("{error:#}"));
        progress.step(&format!("run {} is broken off: {error:#}", scenario.number));
    }
    run.collect().await;
    run.played
}

struct Run<'a> {
    stage: &'a Stage,
    scenario: &'a Scenario,
    progress: &'a Progress,
    /// Where sender and receiver are now.
    hosts: [&'static str; 2],
    played: Played,
}

impl Run<'_> {
    async fn whole(&mut self) -> anyhow::Result<()> {
        let partner = self.scenario.partner();
        let counters = self.stage.counters(partner)?;
        let telling = self.progress.clone();
        let sampler = Sampler::start(move || payload(&counters), move |bits| telling.rate(Some(bits)))?;
        let result = self.acts(&sampler).await;
        self.progress.rate(None);
        self.played.trace = sampler.finish();
        result
    }

    async fn acts(&mut self, sampler: &Sampler) -> anyhow::Result<()> {
        let partner = self.stage.counters(self.scenario.partner())?;
        let before = payload(&partner);
        self.start().await?;
        self.flowing(&partner, before).await?;
        for destination in &self.scenario.destinations {
            self.rolling(&partner).await?;
            self.migrate(destination, sampler).await?;
        }
        let counters = [
            self.stage.counters(self.hosts[0])?,
            self.stage.counters(self.hosts[1])?,
        ];
        let moved = counters.each_ref().map(payload);
        self.progress.now("waiting for the programs to end");
        self.ends().await?;
        let now = counters.each_ref().map(payload);
        self.played.bytes_after = Some([now[0].saturating_sub(moved[0]), now[1].saturating_sub(moved[1])]);
        Ok(())
    }

    /// Starts the server, and the client once the server listens.
    async fn start(&self) -> anyhow::Result<()> {
        let server = self.launch(Side::Receiver, None).await?;
        let address = server.address.as_str();
        let proc = self.stage.path(&server.host, &format!("/proc/{}", server.pid))?;
        listening(Path::new(&proc), self.scenario.port).await?;
        self.launch(Side::Sender, Some(address)).await?;
        Ok(())
    }

    async fn launch(&self, side: Side, server: Option<&str>) -> anyhow::Result<Instance> {
        let host = self.hosts[side as usize];
        let name = self.scenario.instance(side);
        self.progress.now(&format!("starting {name} on {host}"));
        let request = RunRequest {
            name: name.clone(),
            command: self.scenario.command(server),
            ..RunRequest::default()
        };
        let instance = self
            .stage
            .agent(host)?
            .run(request)
            .await
            .with_context(|| format!("cannot start {name} on {host}"))?;
        let role = if server.is_some() { "client" } else { "server" };
        self.progress.step(&format!(
            "  {role} in a container on {host}, address {}",
            instance.address
        ));
        Ok(instance)
    }

    /// Waits until the partner's RNIC carries the program's data.
    async fn flowing(&self, partner: &StatsReader, before: u64) -> anyhow::Result<()> {
        self.progress.now("waiting for data to flow");
        let deadline = Instant::now() + FLOWING_LIMIT;
        while payload(partner) < before + FLOWING_BYTES {
            if Instant::now() > deadline {
                bail!("no data flowed within {} s", FLOWING_LIMIT.as_secs());
            }
            tokio::select! {
                ended = self.any_end() => bail!("{} ended before data flowed", ended?),
                () = tokio::time::sleep(FLOWING_INTERVAL) => {}
            }
        }
        Ok(())
    }

    /// Lets data flow for a while, so that there is something to compare with.
    async fn rolling(&self, partner: &StatsReader) -> anyhow::Result<()> {
        let [sender, receiver] = self.hosts;
        self.progress.now(&format!(
            "{} sends from {sender} to {receiver}",
            self.scenario.program
        ));
        let (before, begun) = (payload(partner), Instant::now());
        tokio::select! {
            ended = self.any_end() => bail!("{} ended before it could be moved", ended?),
            () = tokio::time::sleep(self.scenario.lead) => {}
        }
        let bits = (payload(partner) - before) as f64 * 8.0 / begun.elapsed().as_secs_f64();
        self.progress
            .step(&format!("  {} from {sender} to {receiver}", gigabits(bits)));
        Ok(())
    }

    /// The name of the first program that ends.
    async fn any_end(&self) -> anyhow::Result<String> {
        let [sender, receiver] = Side::BOTH.map(|side| self.scenario.instance(side));
        let (one, other) = (self.stage.agent(self.hosts[0])?, self.stage.agent(self.hosts[1])?);
        tokio::select! {
            reply = one.wait(&sender) => reply.map(|_| sender.clone()),
            reply = other.wait(&receiver) => reply.map(|_| receiver.clone()),
        }
    }

    async fn migrate(&mut self, destination: &'static str, sampler: &Sampler) -> anyhow::Result<()> {
        let side = self.scenario.moved as usize;
        let (source, name) = (self.hosts[side], self.scenario.instance(self.scenario.moved));
        let mut heard = Vec::new();
        let request = MigrateRequest {
            name: name.clone(),
            destination: destination.to_owned(),
            ..MigrateRequest::default()
        };
        let migration = self.stage.agent(source)?.migrate(request, |event| match event {
            MigrationEvent::Phase(phase) => {
                heard.push((phase.clone(), sampler.begun().elapsed()));
                self.progress
                    .now(&format!("moving {name} from {source} to {destination}: {phase}"));
            }
            MigrationEvent::Note(note) => self.progress.step(&format!("    {note}")),
            MigrationEvent::PreCopy(_) | MigrationEvent::Report(_) => {}
        });
        let report = timeout(MIGRATION_LIMIT, migration)
            .await
            .with_context(|| {
                format!(
                    "moving {name} to {destination} took more than {} s",
                    MIGRATION_LIMIT.as_secs()
                )
            })?
            .with_context(|| format!("moving {name} to {destination}"))?;
        let report: Value = serde_json::from_str(&report).context("the agent's report")?;
        let timeline = timeline(&report, &heard);
        let committed = report["outcome"] == "committed";
        let error = report["error"].as_str().map(str::to_owned);
        let service = milliseconds(&report["service_blackout_ms"]).as_secs_f64() * 1e3;
        let communication = milliseconds(&report["communication_blackout_ms"]).as_secs_f64() * 1e3;
        self.played.moves.push(Moved { report, timeline });
        if committed {
            self.hosts[side] = destination;
            self.progress.step(&format!(
                "  moved from {source} to {destination}: service blackout {service:.1} ms, communication blackout \
                 {communication:.1} ms"
            ));
        }
        match error {
            None if committed => Ok(()),
            error => bail!(
                "moving {name} from {source} to {destination}{}: {}",
                if committed { "" } else { " was rolled back" },
                error.unwrap_or_else(|| "no reason was given".to_owned())
            ),
        }
    }

    /// Waits until both programs have ended, not for ever.
    async fn ends(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.scenario.duration + END_LIMIT;
        let names = Side::BOTH.map(|side| self.scenario.instance(side));
        let (one, other) = (self.stage.agent(self.hosts[0])?, self.stage.agent(self.hosts[1])?);
        let (mut one, mut other) = (Box::pin(one.wait(&names[0])), Box::pin(other.wait(&names[1])));
        let late = |name: &str| format!("{name} has not ended in time");
        let limit = |status: Option<i32>| {
            if status == Some(0) {
                deadline
            } else {
                Instant::now() + FAILED_LIMIT
            }
        };
        tokio::select! {
            () = tokio::time::sleep_until(deadline) => bail!("{} and {} have not ended in time", names[0], names[1]),
            reply = &mut one => {
                let status = reply?.exit_status;
                timeout_at(limit(status), other).await.with_context(|| late(&names[1]))??;
            }
            reply = &mut other => {
                let status = reply?.exit_status;
                timeout_at(limit(status), one).await.with_context(|| late(&names[0]))??;
            }
        }
        Ok(())
    }

    /// Whatever the programs said and however they ended, also after a failure; then they are removed.
    async fn collect(&mut self) {
        for side in Side::BOTH {
            let name = self.scenario.instance(side);
            let host = self.hosts[side as usize];
            let end = &mut self.played.ends[side as usize];
            host.clone_into(&mut end.host);
            let Ok(agent) = self.stage.agent(host) else {
                continue;
            };
            let Ok(instances) = agent.list().await else {
                continue;
            };
            let Some(instance) = instances.into_iter().find(|instance| instance.name == name) else {
                continue;
            };
            end.exit_status = instance.exit_status;
            let mut output = Vec::new();
            let read = agent.logs(&name, false, |data| {
                output.extend_from_slice(data);
                Ok(())
            });
            if let Err(error) = read.await {
                self.progress
                    .step(&format!("  the output of {name} is lost: {error:#}"));
            }
            end.output = String::from_utf8_lossy(&output).into_owned();
            if let Err(error) = agent.remove(&name).await {
                self.progress
                    .step(&format!("  {name} cannot be removed: {error:#}"));
            }
        }
    }
}

//! What happens while the instance's connections are suspended: wait-before-stop, quiesce, freeze, stop-and-copy, restore.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Answer, Order};
use verbatim_container::Descriptors;
use verbatim_device::control::QpType;

use super::images::Images;
use super::obstacles;
use super::participants::Suspended;
use super::plan;
use super::{Failure, Source};
use crate::faults::Point;
use crate::guests::unexpected;
use crate::instances::network;
use crate::instances::tasks::Dumped;
use crate::report::{Phase, milliseconds};
use crate::session::members::Undrained;
use crate::session::{in_time, told};

/// What the hosts may take to answer beyond the limit of the drain.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl Source {
    /// The last round before the connections stop.
    pub(super) async fn before_the_stop(&mut self) -> Result<(), Failure> {
        // Before the last round: it takes up to half a second, in which the program writes.
        self.empty_queues().await;
        // What the program wrote since the last round would otherwise have to be sent while it is frozen.
        self.round().await?;
        self.keeps_the_limit()?;
        // Somebody may have added one meanwhile.
        self.takes_all().await?;
        Ok(())
    }

    /// Intercepts requests at all ends: how many messages each has sent. Of connections that pause the partners' hosts only learn
    /// that nothing but the decision ends the session from here on.
    pub(super) async fn suspend(&mut self, phase: Phase, point: Point) -> Result<Suspended, Failure> {
        self.before_the_stop().await?;
        self.enter(phase);
        self.pass(point).await?;
        self.intercept().await
    }

    /// Intercepts requests at all ends, now.
    pub(super) async fn intercept(&mut self) -> Result<Suspended, Failure> {
        self.timeline.suspended();
        self.suspended = true;
        let marks = self.marks && !self.pauses();
        let participants = self.participants().into_iter();
        let suspended = participants.map(|participant| participant.suspend(marks));
        let mut all = Suspended::default();
        let mut failed = None;
        for suspended in join_all(suspended).await {
            match suspended {
                Ok(Suspended { sent, allows }) => {
                    all.sent.extend(sent);
                    all.allows.extend(allows);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        if self.has_new_partners().await {
            return Err(Failure::Changed);
        }
        Ok(all)
    }

    /// Intercepts requests on both sides and waits until nothing is in flight (MigrRDMA §3.4).
    pub(super) async fn wait_before_stop(&mut self) -> Result<(), Failure> {
        let suspended = self.suspend(Phase::WaitBeforeStop, Point::SourceSuspend).await?;
        let unreliable = self.processes.iter().any(|process| {
            let qps = process.road_map.contexts.iter().flat_map(|context| &context.qps);
            qps.into_iter().any(|qp| qp.qp_type == QpType::Uc)
        });
        self.pass(Point::SourceDrain).await?;
        if unreliable {
            // What is not drained now is found again below.
            self.drain(&suspended, true).await?;
        }
        let undrained = self.drain(&suspended, false).await?;
        if !undrained.is_empty() {
            self.settle(undrained).await?;
        }
        Ok(())
    }

    /// What is not drained when the limit has come.
    pub(super) async fn drain(&self, suspended: &Suspended, sends_only: bool) -> anyhow::Result<Undrained> {
        let limit = self.request.drain_timeout;
        let drained = self.participants().into_iter().map(|participant| {
            let ends = plan::connected(&self.connections, participant.ends());
            let expected = plan::said_at_the_other_end(&self.connections, ends, &suspended.sent);
            let marks =
                plan::allowed_at_the_other_end(&self.connections, participant.ends(), &suspended.allows);
            async move { participant.drain(expected?, marks, limit, sends_only).await }
        });
        let drained = tokio::time::timeout(limit + ANSWER_TIMEOUT, try_join_all(drained)).await;
        let drained = drained.context("waiting for what is in flight took too long")??;
        Ok(drained.into_iter().collect())
    }

    /// The processes let go of their RNIC and wait at the gate.
    pub(super) async fn quiesce(&mut self) -> anyhow::Result<()> {
        self.gate_closed = true;
        let (guests, session) = (&self.agent.guests, self.session);
        let orders = self.processes.iter().map(|process| async move {
            let order = Order::Quiesce { session };
            let (answer, fds) = in_time("quiescing", process.guest.order(order, Vec::new())).await?;
            // Nothing that leads out of the process may be open when it is frozen.
            let closed = async {
                guests.gone(&process.guest).await;
                Ok(())
            };
            if let Err(error) = in_time("closing a process's channel", closed).await {
                tracing::warn!(
                    pid = process.guest.pid,
                    error = format!("{error:#}"),
                    "CRIU may refuse the process"
                );
            }
            match answer {
                Answer::Quiesced if fds.len() == process.contexts() => Ok((process.guest.pid, fds)),
                Answer::Quiesced => bail!(
                    "a process gave {} connections to its RNIC away, not all",
                    fds.len()
                ),
                other => Err(unexpected(&other, "Quiesced")),
            }
        });
        let mut failed = None;
        for result in join_all(orders).await {
            match result {
                Ok((pid, fds)) => {
                    // From here on they do not depend on this agent's life.
                    let copies: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    let keeper = self.keeper.as_ref().context("the keeper was not started");
                    let kept = keeper.and_then(|keeper| keeper.keep(&pid, &copies));
                    failed = kept.err().or(failed);
                    self.quiesced.push((pid, fds));
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Freezes the instance and writes its images; meanwhile the last changes of its files are sent.
    pub(super) async fn freeze(&mut self) -> anyhow::Result<()> {
        if self.is_machine() {
            return self.stop_machine().await;
        }
        let checkpoint = self
            .checkpoint
            .take()
            .context("the checkpoint was not prepared")?;
        self.timeline.frozen();
        self.detached = true;
        let home = &self.instance.home;
        let init = self.instance.init_pid();
        let (frozen, when_frozen) = tokio::sync::oneshot::channel();
        let dump = checkpoint.freeze_and_dump_with(|| {
            obstacles::let_closed_send(home);
            let detached = home.detach();
            // The tasks do not run, and the RNIC's contexts are parked: nothing writes to the files any more.
            let _ = frozen.send(Descriptors::of(init));
            detached
        });
        let way = self.in_a_hurry();
        let is_tracked = self.ahead.fills();
        let (files, mut destination) = (&mut self.files, self.destination.clone());
        let contents = home.network_contents()?;
        let (reader, folder) = (self.network.clone(), home.paths.images.clone());
        // Beside the dump: nobody changes it any more.
        let network = move |descriptors: Descriptors| match (&contents, &reader) {
            (Some(contents), Some(reader)) => {
                network::write((contents, reader), (init, &descriptors), &folder)
            }
            _ => Ok(()),
        };
        let tracked = &mut self.ahead.tracked;
        let mut kept = None;
        let keeping = &mut kept;
        let last_round = async {
            match (when_frozen.await, &mut destination) {
                (Ok(descriptors), Some(destination)) => {
                    let descriptors = descriptors.context("the descriptors of the tasks cannot be read")?;
                    files.hurry();
                    files.end();
                    let mut beside = destination.clone();
                    let private = async {
                        match is_tracked {
                            true => way.last_written(tracked, init, &mut beside).await,
                            false => Ok(0),
                        }
                    };
                    let of_network = descriptors.clone();
                    let network = tokio::task::spawn_blocking(move || network(of_network));
                    let begun = Instant::now();
                    let of_tasks = Self::read_kept(init, descriptors);
                    let (files, private, network, of_tasks) =
                        tokio::join!(files.round(destination), private, network, of_tasks);
                    network.context("reading the network namespace panicked")??;
                    *keeping = Some(of_tasks);
                    let last = milliseconds(begun.elapsed());
                    tracing::debug!("the last round of memory took {last:.1} ms");
                    anyhow::Ok((files?, private?))
                }
                // The dump has failed, and says why.
                _ => Ok((0, 0)),
            }
        };
        let images = &self.instance.home.paths.images;
        let images = self.images.insert(Images::new(self.session, images));
        let mut to = self.destination.clone().context("there is no destination")?;
        let ((dumped, ahead), sent) = tokio::join!(images.ahead(&mut to, dump), last_round);
        // Kept before the other's error is looked at, so that it is undone in order.
        let judged = self.ahead.judge(&dumped);
        let dumped = dumped?;
        tracing::debug!("dumped: {}", dumped.timings());
        self.dumped = Some(Dumped::Container(Box::new(dumped)));
        judged?;
        ahead.context("CRIU's images cannot be sent")?;
        let (files, private) = sent?;
        let kept = kept.context("nothing was read of the tasks")??;
        self.keep(&kept)?;
        self.bytes.stop_and_copy += files + private;
        self.ahead.last_bytes += private;
        self.send_new_names().await
    }

    /// Sends the images, and what private memory they lack.
    pub(super) async fn stop_and_copy(&mut self) -> anyhow::Result<()> {
        self.send_the_rest().await?;
        let mut destination = self.destination();
        let images = self.images.as_mut().context("nothing was dumped")?;
        images.rest(&mut destination).await?;
        self.bytes.stop_and_copy += images.sent;
        Ok(())
    }

    /// Restores the tasks at the destination; they do not run yet.
    pub(super) async fn restore(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        told(
            &to,
            "restore the instance",
            self.destination().restore(self.id()).await,
        )?;
        Ok(())
    }
}

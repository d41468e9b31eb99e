//! The partner's machine (`verbatim_session::decision::partner`), and what it wants done.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use verbatim_session::decision::partner::{Action, Event, State};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Mark, Outcome, Timer};

use super::{Partner, forget};
use crate::agent::Shared;
use crate::proto::SessionId;
use crate::proto::outcome_reply::Outcome as Answered;

/// How long another host may take to say what was decided.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Who finishes a session asks much more often than this.
const ALONE_AFTER: Duration = Duration::from_secs(30);

impl Partner {
    /// Gives the machine an event, and does what it wants until it waits for somebody else.
    pub(super) async fn decide(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.machine.handle(event) {
                match action {
                    // The programs need not wait for the disk.
                    Action::Write(mark @ Mark::Switched) => self.writer.begin(mark).await,
                    Action::Write(mark) => {
                        let written = self.writer.write(mark).await;
                        events.push_back(Event::Written(mark, written));
                    }
                    Action::Drained => self.refused = false,
                    Action::Refuse => self.refused = true,
                    // Orders wait for programs that have not come back.
                    Action::Probe => events.push_back(Event::Fact(Fact::Running)),
                    Action::Undo => {
                        self.undo().await;
                        events.push_back(Event::Undone);
                    }
                    Action::Switch => {
                        let switched = self.put_in_place().await;
                        if let Err(error) = &switched {
                            tracing::warn!(
                                session = format!("{:016x}", self.session),
                                error = format!("{error:#}"),
                                "the new connections are not in place yet; whoever finishes the session asks again"
                            );
                        } else {
                            tokio::spawn(go_on_alone(Arc::clone(&self.agent), self.session));
                        }
                        self.switched = Some(switched);
                    }
                    Action::Ask => {
                        let hosts = [self.destination.clone(), self.source.clone()];
                        tokio::spawn(ask_others(Arc::clone(&self.agent), self.session, hosts));
                    }
                    Action::After(timer) => {
                        tokio::spawn(elapsed(Arc::clone(&self.agent), self.session, timer));
                    }
                }
            }
        }
    }

    /// Nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.machine.state(), State::Ended(_))
    }

    /// Nothing is in flight at this end, or the connections pause. The source may decide when this has returned.
    pub(super) async fn quiesced(&mut self) -> anyhow::Result<()> {
        self.refused = true;
        self.decide(Event::Quiesced).await;
        if self.refused {
            bail!(
                "{} does not come to a stop for the session: it was out of sight of the source meanwhile, or its journal cannot \
                 be written",
                self.agent.name()
            );
        }
        Ok(())
    }

    /// Puts the standby queue pairs in place; says how many RECVs were posted again. It may be asked again.
    pub async fn switch(&mut self) -> anyhow::Result<u64> {
        self.decide(Event::Switch).await;
        match self.machine.state() {
            State::Switching => match self.switched.take() {
                Some(switched) => switched,
                None => self.put_in_place().await,
            },
            State::Closing(Outcome::Committed) | State::Ended(Outcome::Committed) => Ok(0),
            state => bail!("the connections were not brought to a stop for the session ({state:?})"),
        }
    }

    /// The queue pairs are not switched: everything is taken back.
    async fn undo(&mut self) {
        if let Err(error) = self.members.take_back(&[]).await {
            tracing::warn!(
                session = format!("{:016x}", self.session),
                error = format!("{error:#}"),
                "not every program goes on with its connections"
            );
        }
        self.agent.turns.leave(self.session);
        forget(&self.agent, self.session);
    }
}

/// Whoever finishes the session has all ends go on together. Where nobody does any more, since an operator has given it up, the programs
/// here go on after a while.
fn go_on_alone(agent: Shared, session: u64) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        tokio::time::sleep(ALONE_AFTER).await;
        let Ok(partner) = agent.partners.get(session) else {
            return;
        };
        let mut partner = partner.lock().await;
        if partner.machine.state() != State::Switching {
            return;
        }
        if let Err(error) = partner.resume().await {
            tracing::warn!(
                session = format!("{session:016x}"),
                error = format!("{error:#}"),
                "not every program goes on with its new connections"
            );
        }
        if partner.is_over() {
            agent.partners.close(session);
        }
    })
}

/// Tells a session something, and forgets it if that was its end.
pub(super) async fn hear(agent: &Shared, session: u64, event: Event) {
    let Ok(partner) = agent.partners.get(session) else {
        return;
    };
    let mut partner = partner.lock().await;
    partner.decide(event).await;
    if partner.is_over() {
        agent.partners.close(session);
    }
}

/// Asks the destination, and then the source, once. Who knows nothing is asked again when the time has come.
fn ask_others(agent: Shared, session: u64, hosts: [String; 2]) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        for host in hosts {
            let asked = async {
                let mut client = agent.peers.connect(&host).await?;
                let mut request = tonic::Request::new(SessionId { session });
                request.set_timeout(ANSWER_TIMEOUT);
                anyhow::Ok(client.outcome(request).await?.into_inner().outcome())
            };
            let answer = match asked.await {
                Ok(Answered::Committed) => CommitAnswer::Runs,
                Ok(Answered::RolledBack) => CommitAnswer::NotRun(Evidence::GivenUp),
                Ok(Answered::Unknown | Answered::Undecided) => continue,
                Err(error) => {
                    tracing::debug!(host, error = format!("{error:#}"), "cannot say what was decided");
                    continue;
                }
            };
            return hear(&agent, session, Event::Answer(answer)).await;
        }
    })
}

/// Boxed, since what a machine wants after a time is again to be told when a time has passed.
fn elapsed(agent: Shared, session: u64, timer: Timer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        tokio::time::sleep(timer.duration()).await;
        hear(&agent, session, Event::Elapsed(timer)).await;
    })
}

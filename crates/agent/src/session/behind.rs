//! How long RAM is kept that a virtual machine has left here by post-copy ([`crate::behind`]): what [`verbatim_session::behind`] wants done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_session::Role;
use verbatim_session::behind::{Action, Behind, Event, State, Told};
use verbatim_session::decision::Outcome;
use verbatim_session::fill::Noted;

use crate::agent::Shared;
use crate::proto::outcome_reply::{Memory, Outcome as Answered};
use crate::proto::{OutcomeReply, SessionId};

/// How long the destination is let be after an answer, at first and at last.
const PAUSE: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// How long the destination may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often it is said that something is kept for long.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Goes on with what an earlier agent has kept, once sessions were taken up. Those that are not over say themselves when they are.
pub fn recover(agent: &Shared) {
    for session in agent.behinds.all() {
        let parts = agent.journal.parts(session);
        let own = parts.iter().find(|part| part.role == Role::Source);
        match own.map(|part| (part.has_ended(), part.is_decided())) {
            Some((true, Some(outcome))) => over(agent, session, outcome),
            // The destination knows better.
            Some((true, None)) | None => over(agent, session, Outcome::Committed),
            Some((false, _)) => {}
        }
    }
}

/// The session is over here. What was left in it is kept as long as the destination needs it.
pub fn over(agent: &Shared, session: u64, outcome: Outcome) {
    let Some(host) = agent.behinds.over(session) else {
        return;
    };
    let (behind, actions) = Behind::recover(Some(outcome));
    let keeping = Keeping {
        agent: Arc::clone(agent),
        session,
        host,
        behind,
        pause: PAUSE[0],
        told: Instant::now(),
    };
    tokio::spawn(keeping.run(actions.into()));
}

/// What is kept for a destination, and what is done for it.
struct Keeping {
    agent: Shared,
    session: u64,
    host: String,
    behind: Behind,
    pause: Duration,
    told: Instant,
}

impl Keeping {
    async fn run(mut self, mut actions: VecDeque<Action>) {
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Ask => self.ask().await,
                Action::Clear => Event::Cleared {
                    gone: self.clear().await,
                },
                Action::After(timer) => {
                    tokio::time::sleep(self.pause).await;
                    self.pause = (self.pause * 2).min(PAUSE[1]);
                    Event::Elapsed(timer)
                }
            };
            actions.extend(self.behind.handle(event));
        }
        debug_assert_eq!(self.behind.state(), State::Ended);
    }

    async fn ask(&mut self) -> Event {
        let session = self.session;
        let asked = async {
            let mut client = self.agent.peers.connect(&self.host).await?;
            anyhow::Ok(client.outcome(SessionId { session }).await?.into_inner())
        };
        let answer = tokio::time::timeout(ANSWER, asked).await;
        let event = match &answer {
            Ok(Ok(reply)) => Event::Told(told(reply)),
            Ok(Err(_)) | Err(_) => Event::Silent,
        };
        if self.told.elapsed() >= TELL_EVERY {
            self.told = Instant::now();
            let (session, host) = (format!("{session:016x}"), &self.host);
            tracing::warn!(
                session,
                host,
                ?answer,
                "RAM is kept for a virtual machine that has not all of it yet"
            );
        }
        event
    }

    async fn clear(&self) -> bool {
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        let cleared = tokio::task::spawn_blocking(move || agent.behinds.forget(session)).await;
        let gone = cleared.unwrap_or(false);
        if gone {
            let (session, host) = (format!("{session:016x}"), &self.host);
            tracing::info!(
                session,
                host,
                "it needs nothing of the RAM that was kept here, which is given back"
            );
        }
        gone
    }
}

/// What the destination says.
fn told(reply: &OutcomeReply) -> Told {
    match reply.outcome() {
        Answered::Unknown => Told::NotKnown,
        Answered::Undecided => Told::Undecided,
        Answered::RolledBack => Told::RolledBack,
        Answered::Committed => Told::Committed(match reply.memory() {
            Memory::Whole => Noted::Nothing,
            Memory::Missing => Noted::Missing,
            Memory::NotSaid => Noted::Unknown,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_answers_give_it_back() {
        let needs_nothing = |outcome: Answered, memory: Memory| {
            let reply = OutcomeReply {
                outcome: outcome.into(),
                memory: memory.into(),
                ..OutcomeReply::default()
            };
            told(&reply).needs_nothing()
        };
        assert!(needs_nothing(Answered::Committed, Memory::Whole));
        assert!(needs_nothing(Answered::RolledBack, Memory::NotSaid));
        assert!(!needs_nothing(Answered::Committed, Memory::Missing));
        assert!(!needs_nothing(Answered::Committed, Memory::NotSaid));
        let lost_its_journal = needs_nothing(Answered::Unknown, Memory::Whole);
        assert!(!lost_its_journal);
        assert!(!needs_nothing(Answered::Undecided, Memory::Whole));
    }
}

//! How long RAM is kept that a virtual machine has left here by post-copy ([`crate::behind`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_session::Role;
use verbatim_session::decision::Outcome;

use crate::agent::Shared;
use crate::proto::outcome_reply::{Memory, Outcome as Answered};
use crate::proto::{OutcomeReply, SessionId};

/// How often the destination is asked whether it has all, at first and at last.
const ASK: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// How long the destination may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often it is said that something is kept for long.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Watches what an earlier agent has kept, once sessions were taken up. Those that are not over forget or watch theirs.
pub fn watch_found(agent: &Shared) {
    for (session, _) in agent.behinds.all() {
        let parts = agent.journal.parts(session);
        let own = parts.iter().find(|part| part.role == Role::Source);
        match own.map(|part| (part.has_ended(), part.is_decided())) {
            Some((true, Some(Outcome::RolledBack))) => agent.behinds.forget(session),
            Some((true, _)) | None => watch(agent, session),
            Some((false, _)) => {}
        }
    }
}

/// The virtual machine has left: asks the destination until it has all, and then forgets what was left.
pub fn watch(agent: &Shared, session: u64) {
    let found = agent.behinds.all().into_iter().find(|(of, _)| *of == session);
    let Some((_, host)) = found else { return };
    let agent = Arc::clone(agent);
    tokio::spawn(async move {
        let (mut pause, mut told) = (ASK[0], Instant::now());
        loop {
            let asked = async {
                let mut client = agent.peers.connect(&host).await?;
                anyhow::Ok(client.outcome(SessionId { session }).await?.into_inner())
            };
            let answer = tokio::time::timeout(ANSWER, asked).await;
            if let Ok(Ok(reply)) = &answer
                && has_all(reply)
            {
                break;
            }
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                let session = format!("{session:016x}");
                tracing::warn!(
                    session,
                    host,
                    ?answer,
                    "RAM is kept for a virtual machine that has not all of it yet"
                );
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ASK[1]);
        }
        agent.behinds.forget(session);
        tracing::info!(
            session = format!("{session:016x}"),
            host,
            "it has all of its RAM; what was kept here is given back"
        );
    });
}

/// Whether the destination needs nothing of what is kept for it.
fn has_all(reply: &OutcomeReply) -> bool {
    match reply.outcome() {
        // It has never run there, and never will.
        Answered::RolledBack => true,
        Answered::Committed => reply.memory() == Memory::Whole,
        // It may have lost its journal, and run.
        Answered::Unknown | Answered::Undecided => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept_until_the_destination_has_all() {
        let says = |outcome: Answered, memory: Memory| {
            has_all(&OutcomeReply {
                outcome: outcome.into(),
                memory: memory.into(),
                ..OutcomeReply::default()
            })
        };
        assert!(says(Answered::Committed, Memory::Whole));
        assert!(says(Answered::RolledBack, Memory::NotSaid));
        assert!(!says(Answered::Committed, Memory::Missing));
        assert!(!says(Answered::Committed, Memory::NotSaid));
        assert!(!says(Answered::Unknown, Memory::Whole), "it has lost its journal");
        assert!(!says(Answered::Undecided, Memory::Whole));
    }
}

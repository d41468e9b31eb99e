//! Migrations as an operator sees them: what they have come to, cancelling one, deciding one.

use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_session::Role;
use verbatim_session::decision::{Keep, Outcome as Decided};
use verbatim_session::record::Standing;

use crate::agent::Shared;
use crate::instances::{State, recovery};
use crate::journal::Known;
use crate::proto::outcome_reply::Outcome;
use crate::proto::resolve_session_request::Keep as Kept;
use crate::proto::{CancelReply, ResolveSessionRequest, Session, SessionId, SessionStep};
use crate::session::control::Stage;

/// Limit for a destination's answer about the outcome of a session.
const ANSWER: Duration = Duration::from_secs(5);

/// Rolls back the migration of an instance of this host; returns when the instance runs on.
pub async fn cancel(agent: &Shared, name: &str) -> anyhow::Result<CancelReply> {
    let instance = recovery::find(agent, name)?;
    let Some(control) = agent.controls.of_instance(name) else {
        match instance.state() {
            State::MovedTo(host) => bail!("too late: {name} has moved to {host}"),
            State::Exited(status) => bail!("{name} is not being moved: it has ended with status {status}"),
            State::Moving => bail!("too late: {name} has arrived on {}", agent.name()),
            State::Running => bail!("{name} is not being moved; it runs on {}", agent.name()),
        }
    };
    control.cancel()?;
    control.ended().await;
    Ok(CancelReply {
        host: agent.name().to_owned(),
    })
}

/// All that the journal knows.
pub fn all(agent: &Shared) -> Vec<Session> {
    let known = agent.journal.sessions();
    known.into_iter().map(|known| describe(agent, known)).collect()
}

fn state(agent: &Shared, known: &Known) -> &'static str {
    match known.part.standing {
        Standing::Closed(Decided::Committed) => "committed",
        Standing::Closed(Decided::RolledBack) | Standing::RolledBack | Standing::Resolved(Keep::Source) => {
            "rolled back"
        }
        Standing::Ran | Standing::Cleared | Standing::Switched | Standing::Resolved(Keep::Destination) => {
            "finishing"
        }
        Standing::Committed => "finishing",
        Standing::Deciding | Standing::Damaged if known.role == Role::Source => {
            let stage = agent.controls.of_session(known.session);
            match stage.map(|control| control.stage()) {
                Some(Stage::InDoubt) | None => "in doubt",
                Some(_) => "open",
            }
        }
        // The other hosts are asked, and none of them knows yet.
        Standing::Damaged if known.role == Role::Destination => "in doubt",
        Standing::Opened | Standing::Deciding | Standing::Drained | Standing::Damaged => "open",
    }
}

fn describe(agent: &Shared, known: Known) -> Session {
    let state = state(agent, &known).to_owned();
    let Known {
        session,
        role,
        told,
        steps,
        ..
    } = known;
    let bytes = told.bytes;
    let steps = steps
        .into_iter()
        .map(|(unix_ms, name)| SessionStep { name, unix_ms });
    Session {
        id: format!("{session:016x}"),
        instance: told.instance.unwrap_or_default(),
        source: told.source.unwrap_or_default(),
        destination: told.destination.unwrap_or_default(),
        host: agent.name().to_owned(),
        role: role.name().to_owned(),
        state,
        steps: steps.collect(),
        partners: told.partners,
        pre_copy_bytes: bytes.pre_copy,
        stop_and_copy_bytes: bytes.stop_and_copy,
        error: told.error.unwrap_or_default(),
    }
}

/// An error if the destination says that the instance runs there, or may yet run there: only the destination
/// can give that up. If it does not answer, the operator has to make sure.
async fn must_not_run_there(agent: &Shared, session: u64, instance: &str, to: &str) -> anyhow::Result<()> {
    let asked = async {
        let mut client = agent.peers.connect(to).await?;
        let answer = client.outcome(SessionId { session }).await?;
        anyhow::Ok(answer.into_inner().outcome())
    };
    let says = match tokio::time::timeout(ANSWER, asked).await {
        Ok(Ok(Outcome::Committed)) => "runs there",
        Ok(Ok(Outcome::Undecided)) => "could still be let run there",
        Ok(Ok(Outcome::RolledBack | Outcome::Unknown) | Err(_)) | Err(_) => return Ok(()),
    };
    bail!(
        "{to} answers that {instance} {says}: it would run twice if it went on here. Wait for the decision of {to} \
         (`verbatim session show {session:016x}`), or choose --keep destination. To keep it here, switch {to} off first, so \
         that it no longer answers, and repeat this command"
    )
}

/// Decides a session whose hosts lost each other at the commit. Returns what came of it.
pub async fn resolve(agent: &Shared, request: ResolveSessionRequest) -> anyhow::Result<String> {
    let session = u64::from_str_radix(&request.session, 16)
        .ok()
        .with_context(|| format!("{:?} is not the number of a session", request.session))?;
    let keep = match request.keep() {
        Kept::Source => Keep::Source,
        Kept::Destination => Keep::Destination,
    };
    let Some(control) = agent.controls.of_session(session) else {
        let parts = agent.journal.parts(session);
        let Some(known) = parts.iter().find(|known| known.role == Role::Source) else {
            bail!(
                "session {session:016x} does not begin on {}; it is decided where the instance is frozen",
                agent.name()
            );
        };
        bail!(
            "session {session:016x} is {}; there is nothing to decide",
            state(agent, known)
        );
    };
    match control.stage() {
        Stage::InDoubt => {}
        Stage::Open => bail!(
            "session {session:016x} is not decided yet; `verbatim cancel {}` rolls it back",
            control.instance
        ),
        Stage::Cancelled => bail!("session {session:016x} is being rolled back; there is nothing to decide"),
        Stage::Deciding => bail!("session {session:016x} is being decided by its hosts right now"),
        Stage::Committed => bail!("session {session:016x} is committed; there is nothing to decide"),
    }
    let (instance, to) = (&control.instance, &control.destination);
    if !request.force {
        // It has been asked all the time: whoever gets here gets no answer from it.
        bail!(
            "{to} does not say whether {instance} runs there, and only it knows. As soon as it answers, the session goes \
             on by itself: mend the connection or start the agent of {to}. If that cannot be done, decide, with \
             --force:\n\
             --keep source: {instance} goes on here. If it runs on {to}, it runs twice, with one address and one \
             identity, and what it did there is lost: first make sure that {to} is off, or that `verbatim session show \
             {session:016x}` says there that it is rolled back.\n\
             --keep destination: the copy here is killed. If {to} never let it run, {instance} is lost: first make sure \
             that `verbatim ps` on {to} shows it."
        );
    }
    if keep == Keep::Source {
        must_not_run_there(agent, session, instance, to).await?;
    }
    control.resolve(keep);
    Ok(match keep {
        Keep::Source => format!("{instance} goes on here, as you say; see that it never runs on {to}"),
        Keep::Destination => format!("{instance} is {to}'s, as you say; the copy here is removed"),
    })
}

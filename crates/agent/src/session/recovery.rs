//! Migrations that an earlier agent of this host had begun.
//!
//! | the journal's last word | what is done |
//! | --- | --- |
//! | source, opened | rolled back: nobody was asked to commit |
//! | source, committed | the destination is asked what it did, until it answers or an operator decides |
//! | source, running | the instance is the destination's: the old place is cleared |
//! | destination, opened | undone: nothing of it runs |
//! | destination, committed | it runs here or it does not: whichever is the case is the decision |
//! | destination, running | this host finishes: [`super::driver`] |
//! | partner | undone, or finished by whoever drives: [`super::partner::Partners::recover`] |

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use verbatim_channel::{Answer, Order};
use verbatim_container::{CheckpointConfig, Dumped};

use super::control::{Driven, Keep, Stage};
use super::destination::Destinations;
use super::partner::Partners;
use super::{PAUSE, in_time};
use crate::agent::Shared;
use crate::guests::{Guest, unexpected};
use crate::instances::Instance;
use crate::instances::home::Undecided;
use crate::journal::{Event, Known, Role, Told};
use crate::keeper::{self, Keeper};
use crate::proto::SessionId;
use crate::proto::outcome_reply::Outcome;

/// How long another host may take for an answer, or to undo its part.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a process may take to come back after its agent was started.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);

/// Brings the migrations of an instance that was found to an end.
pub fn take_up(agent: &Shared, instance: Arc<Instance>, undecided: Option<Undecided>) {
    let open = agent
        .journal
        .sessions()
        .into_iter()
        .filter(|known| !known.has_ended() && known.told.instance.as_deref() == Some(instance.name()));
    for known in open {
        let (agent, instance) = (Arc::clone(agent), Arc::clone(&instance));
        let taken_up = match (known.role, &undecided) {
            (Role::Source, Some(undecided)) if undecided.session == known.session => {
                let undecided = undecided.clone();
                tokio::spawn(decide(agent, instance, known, undecided));
                Ok(())
            }
            (Role::Source, _) => {
                let to = known.told.destination.as_deref().unwrap_or_default();
                let driven = agent.controls.begin(instance.name(), to, Stage::Cancelled);
                driven.control.set_session(known.session);
                tokio::spawn(roll_back(agent, instance, known, driven));
                Ok(())
            }
            (Role::Destination, _) => arrived(&agent, instance, &known),
            (Role::Partner, _) => Ok(()),
        };
        if let Err(error) = taken_up {
            tracing::error!(error = format!("{error:#}"), "a migration cannot be taken up");
        }
    }
}

/// Writes down what has become of sessions whose instances are not here, and takes up those of partners.
pub fn close_the_rest(agent: &Shared) -> anyhow::Result<()> {
    for known in agent.journal.sessions() {
        let name = known.told.instance.as_deref().unwrap_or_default();
        if known.has_ended() || known.role == Role::Partner || agent.instances.get(name).is_some() {
            continue;
        }
        let event = match (known.role, known.last) {
            // It ran, and has ended since, or it is the destination's and nothing is left here.
            (_, Event::Running) => Event::Closed,
            (Role::Source, Event::Committed) => {
                // The tasks are gone, so this copy cannot run; what the other one does is for the destination to say.
                Event::Closed
            }
            _ => Event::RolledBack,
        };
        let told = Told::error(&anyhow::anyhow!("the agent was restarted"));
        agent.journal.write(known.session, known.role, event, told)?;
    }
    let open: Vec<u64> = agent
        .journal
        .sessions()
        .iter()
        .filter(|known| !known.has_ended() && known.role != Role::Partner)
        .map(|known| known.session)
        .collect();
    keeper::clear(&agent.config.runtime_dir, |session| open.contains(&session));
    Partners::recover(agent)
}

/// An instance that was to come here is here.
fn arrived(agent: &Shared, instance: Arc<Instance>, known: &Known) -> anyhow::Result<()> {
    if known.last == Event::Opened {
        // Another one of that name: the session was refused.
        agent.journal.write(
            known.session,
            Role::Destination,
            Event::RolledBack,
            Told::default(),
        )?;
        instance.end_move();
        return Ok(());
    }
    if known.last == Event::Committed {
        agent
            .journal
            .write(known.session, Role::Destination, Event::Running, Told::default())?;
    }
    instance.home.attach()?;
    instance
        .home
        .gate()?
        .open_up()
        .context("the gate does not open")?;
    Destinations::take_up(agent, known.session, instance)
}

/// The source's agent died before anybody was asked to commit: the instance goes on here, with its connections.
async fn roll_back(agent: Shared, instance: Arc<Instance>, known: Known, driven: Driven) {
    let session = known.session;
    let _turn = agent.turns.have(instance.name(), session);
    if let Err(error) = instance.home.attach() {
        tracing::error!(
            error = format!("{error:#}"),
            "attaching the instance's network again"
        );
    }
    let keeper = Keeper::find(&agent.config, session);
    let returned = give_back(&agent, &instance, session, keeper.as_ref()).await;
    // Processes that were not at the gate yet.
    agent.guests.undo(session);
    abort_others(&agent, &known).await;
    for guest in returned {
        let resumed = in_time("resuming", guest.order(Order::Resume { session }, Vec::new())).await;
        if let Err(error) = resumed {
            tracing::error!(
                pid = guest.pid,
                error = format!("{error:#}"),
                "requests stay intercepted"
            );
        }
    }
    if let Some(keeper) = keeper {
        keeper.end();
    }
    let told = Told::error(&anyhow::anyhow!("the source's agent was restarted"));
    if let Err(error) = agent
        .journal
        .write(session, Role::Source, Event::RolledBack, told)
    {
        tracing::warn!(%error, "the journal cannot be written");
    }
    instance.end_move();
    drop(driven);
}

/// Opens the gate and gives the processes that waited there their own RNIC connections back.
async fn give_back(
    agent: &Shared,
    instance: &Arc<Instance>,
    session: u64,
    keeper: Option<&Keeper>,
) -> Vec<Guest> {
    if let Err(error) = instance.home.gate().and_then(|gate| Ok(gate.open_up()?)) {
        tracing::error!(error = format!("{error:#}"), "the gate does not open");
    }
    let kept = keeper.map(Keeper::take::<u32>).transpose();
    let kept = kept.unwrap_or_else(|error| {
        tracing::error!(
            error = format!("{error:#}"),
            "the instance's RNIC connections are lost"
        );
        None
    });
    let claims = kept.unwrap_or_default().into_iter().map(|(pid, fds)| async move {
        let claim = async {
            let came = agent.guests.returned(instance.name(), pid);
            let guest = tokio::time::timeout(RETURN_TIMEOUT, came)
                .await
                .context("it has not come back from the gate")?;
            let order = Order::Claim {
                session,
                contexts: Vec::new(),
                key_tables: Vec::new(),
            };
            match in_time("claiming", guest.order(order, fds)).await?.0 {
                Answer::Claimed { .. } => {}
                other => return Err(unexpected(&other, "Claimed")),
            }
            agent.guests.claimed(&guest);
            anyhow::Ok(guest)
        };
        claim
            .await
            .inspect_err(|error| {
                tracing::error!(pid, error = format!("{error:#}"), "a process lost its queues");
            })
            .ok()
    });
    join_all(claims).await.into_iter().flatten().collect()
}

/// Tells the other hosts that the session is undone. Those who do not hear it find out by themselves.
async fn abort_others(agent: &Shared, known: &Known) {
    let partners = known.told.partners.iter().flatten();
    let aborted = partners.chain(&known.told.destination).map(|host| async move {
        let abort = async {
            let mut client = agent.peers.connect(host).await?;
            let session = known.session;
            client.abort(SessionId { session }).await?;
            anyhow::Ok(())
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, abort).await {
            Ok(Ok(())) => {}
            failed => tracing::warn!(host, ?failed, "did not confirm that it undid the session"),
        }
    });
    join_all(aborted).await;
}

/// The source's agent died when the destination was asked, or later.
async fn decide(agent: Shared, instance: Arc<Instance>, known: Known, undecided: Undecided) {
    let Undecided {
        session,
        destination,
        held,
        forward,
    } = undecided;
    let is_known = known.last == Event::Running;
    let stage = if is_known {
        Stage::Committed
    } else {
        Stage::InDoubt
    };
    let driven = agent.controls.begin(instance.name(), &destination, stage);
    driven.control.set_session(session);
    let _turn = agent.turns.have(instance.name(), session);
    let keep = if is_known {
        instance.moved(&destination);
        Keep::Destination
    } else {
        tokio::select! {
            keep = ask(&agent, session, &destination) => keep,
            keep = driven.control.resolved() => keep,
        }
    };
    let checkpoint = CheckpointConfig {
        name: instance.home.record.name.clone(),
        images: instance.home.paths.images.clone(),
        work: instance.home.paths.work.clone(),
        parent: None,
    };
    let dumped = Dumped::take_over(&agent.tools, checkpoint, &held).await;
    if dumped.is_err()
        && let Err(error) = verbatim_container::outlast(&instance.home.paths.work).await
    {
        // Nobody was asked to hold the tasks yet, so its proxy is letting them go on.
        tracing::warn!(%error, "the end of the checkpoint is not awaited");
    }
    match keep {
        Keep::Source => {
            let thawed = match dumped {
                Ok(dumped) => dumped.abort().await,
                Err(error) => Err(error),
            };
            if let Err(error) = thawed {
                tracing::error!(
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "thawing the instance"
                );
            }
            if let Err(error) = instance.home.keep_record(instance.init_pid(), None) {
                tracing::error!(
                    error = format!("{error:#}"),
                    "an agent that comes after this one is misled"
                );
            }
            roll_back(agent, instance, known, driven).await;
        }
        Keep::Destination => {
            // Until the old place is cleared no new one may be made under its name.
            let _reservation = agent.instances.reserve(instance.name());
            driven.control.committed();
            instance.moved(&destination);
            agent.forwarding.insert(forward);
            if let Some(keeper) = Keeper::find(&agent.config, session) {
                keeper.end();
            }
            let name = &instance.home.record.name;
            let removed = match dumped {
                Ok(dumped) => dumped.commit().await,
                Err(_) => agent.tools.runc().delete(name, true).await,
            };
            if let Err(error) = removed {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::error!(instance = %name, error, "the copy that was left is not removed");
            }
            let home = Arc::clone(&instance);
            let _ = tokio::task::spawn_blocking(move || home.home.remove()).await;
            let written = agent
                .journal
                .write(session, Role::Source, Event::Closed, Told::default());
            if let Err(error) = written {
                tracing::warn!(%error, "the journal cannot be written");
            }
        }
    }
}

/// Asks the destination until it knows. First it is told that the session is not wanted any more: if it has not
/// committed by then, it never will.
async fn ask(agent: &Shared, session: u64, destination: &str) -> Keep {
    loop {
        let asked = async {
            let mut client = agent.peers.connect(destination).await?;
            client.abort(SessionId { session }).await?;
            anyhow::Ok(
                client
                    .outcome(SessionId { session })
                    .await?
                    .into_inner()
                    .outcome(),
            )
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, asked).await {
            Ok(Ok(Outcome::Committed)) => return Keep::Destination,
            Ok(Ok(Outcome::RolledBack)) => return Keep::Source,
            unknown => tracing::error!(
                session = format!("{session:016x}"),
                ?unknown,
                "frozen until {destination} says whether the instance runs there"
            ),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

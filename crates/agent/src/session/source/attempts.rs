//! A migration is one attempt, or some: what made one fail is left out of the next.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::ahead::Ahead;
use super::deep::{self, Tried};
use super::{Progress, Request, Source};
use crate::agent::{Changed, Shared};
use crate::instances::Instance;
use crate::method::Choice;
use crate::report::Migration;
use crate::session::control::{Driven, Stage};

/// How often a migration starts anew because the program changed its objects meanwhile.
pub(super) const ATTEMPTS: u32 = 3;

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The program made, changed or destroyed objects after the pre-setup: worth another attempt.
    Changed,
    /// The connections cannot be paused, for this reason: worth another attempt by the other method.
    CannotPause(String),
    /// Anything else.
    Error(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        match error.is::<Changed>() {
            true => Self::Changed,
            false => Self::Error(error),
        }
    }
}

/// Begins a migration; [`migrate`] carries it out. What is returned cancels it.
pub fn begin(agent: &Shared, instance: &Instance, request: &Request) -> anyhow::Result<Driven> {
    instance.begin_move()?;
    Ok(agent
        .controls
        .begin(instance.name(), &request.destination, Stage::Open))
}

/// Moves an instance.
pub async fn migrate(
    agent: Shared,
    instance: Arc<Instance>,
    request: Request,
    driven: Driven,
    progress: mpsc::Sender<Progress>,
) -> Migration {
    let tried = deep::before_migration(&agent, &instance, &request, &driven.control, &progress).await;
    let deep_check = tried.as_ref().map(|(_, stood)| stood.service);
    let needed_files = match tried {
        Some((Tried::Refused { why, log }, _)) => {
            let mut source = Source::new(&agent, &instance, &request, &driven.control, &progress);
            source.deep_check = deep_check;
            return source
                .finish(Some(format!("{why}; CRIU's log: {}", log.display())))
                .await;
        }
        Some((Tried::Fine(files), _)) => files,
        // What came in between is told by the attempt, if it is still there.
        Some((Tried::Prevented(why), _)) => {
            tracing::info!(
                instance = instance.name(),
                why,
                "the dump was not tried to its end"
            );
            Vec::new()
        }
        None => Vec::new(),
    };
    let mut attempt = 1;
    let mut choice = Choice::first(request.method);
    let mut ahead = Ahead::default();
    let mut no_rdma: Option<String> = None;
    loop {
        let mut source = Source::new(&agent, &instance, &request, &driven.control, &progress);
        source.choice = choice.clone();
        source.deep_check = deep_check;
        source.needed_files.clone_from(&needed_files);
        // A program that changes its objects all the time is let wait with that.
        source.holds = attempt > 1;
        source.ahead = ahead;
        source.no_rdma = no_rdma.clone();
        let result = source.attempt().await;
        // Once the destination was asked, or an operator had to decide, the answer stands: what fails after that is no
        // reason to move all the same.
        let open = driven.control.stage() == Stage::Open;
        match result {
            Err(Failure::Changed) if attempt < ATTEMPTS => {
                let changed = anyhow::anyhow!("the program changed its verbs objects meanwhile");
                source.roll_back(&changed).await;
                source.close();
                source.note("the program changed its verbs objects meanwhile; starting again");
                ahead = source.ahead.again();
                attempt += 1;
            }
            Err(Failure::CannotPause(why)) => {
                let error = anyhow::anyhow!("the connections cannot be paused: {why}");
                source.roll_back(&error).await;
                source.close();
                source.note(&format!("{error:#}; going on with wait-before-stop"));
                choice = Choice::instead(&why);
                ahead = source.ahead.again();
            }
            Err(Failure::Error(error)) if open && source.route.bulk.failure().is_some() => {
                source.roll_back(&error).await;
                source.close();
                let why = source.route.bulk.failure().unwrap_or_default();
                source.note(&format!(
                    "memory could not go by RDMA: {why}; starting again, over TLS"
                ));
                no_rdma = Some(format!("RDMA failed in the attempt before: {why}"));
                ahead = source.ahead.again();
            }
            Err(Failure::Error(error)) if open && source.ahead.is_to_blame() => {
                source.roll_back(&error).await;
                source.close();
                source.note(&format!(
                    "{error:#}; starting again, with private memory in one piece"
                ));
                ahead = Ahead::in_one_piece(format!(
                    "a dump that relied on what was sent ahead failed: {error:#}"
                ));
            }
            result => {
                let error = match result {
                    Ok(()) => None,
                    Err(Failure::Changed) => Some(format!(
                        "the program changed its verbs objects during each of {ATTEMPTS} attempts; try again later"
                    )),
                    Err(Failure::Error(error)) => Some(format!("{error:#}")),
                    Err(Failure::CannotPause(_)) => unreachable!("another attempt was made"),
                };
                return source.finish(error).await;
            }
        }
    }
}

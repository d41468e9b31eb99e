//! What CRIU refuses of an instance, and connections that no process has yet.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use verbatim_container::{Carried, Descriptors, Kept};

use super::Source;
use crate::agent::Shared;
use crate::instances::Instance;
use crate::instances::home::Home;
use crate::memory::obstacles;
use crate::protocol::FILE_ATTRIBUTES;
use crate::report::milliseconds;

/// What listeners get to accept what has come to them, and how often that is looked at: nobody tells when a queue is empty.
const ACCEPT_LIMIT: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(5);

/// What closed connections get to send the rest of them, which takes a round trip, while the tasks stand still already; and how often that
/// is looked at.
const CLOSE_LIMIT: Duration = Duration::from_millis(20);
const CLOSE_LOOK: Duration = Duration::from_micros(500);

/// What CRIU would refuse of an instance's tasks, in words for an operator: `check` says it, and a migration refuses it before anything
/// is touched.
///
/// What the agent of `destination` knows decides some of it: that it lacks something is believed once it has said so.
pub async fn of_tasks(agent: &Shared, instance: &Instance, destination: &str) -> Vec<String> {
    let record = &instance.home.record;
    if record.machine.is_some() {
        return Vec::new();
    }
    let (init, has_rnics) = (instance.init_pid(), !record.rnics.is_empty());
    let (guests, folder) = (guests(agent, instance), instance.home.paths.folder.clone());
    let keeps_links = !agent.peers.lacks(destination, FILE_ATTRIBUTES);
    let looked = tokio::task::spawn_blocking(move || {
        let carried = obstacles::device(&folder).map(|device| Carried { device, keeps_links });
        let mut found = verbatim_container::blockers(init, has_rnics, &guests, carried)?;
        found.extend(obstacles::of(&folder, init));
        std::io::Result::Ok(found)
    })
    .await;
    let mut found = match looked {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return vec![format!("the container's processes cannot be looked at: {error}")],
        Err(error) => return vec![format!("the container's processes cannot be looked at: {error}")],
    };
    let tools = agent.tools.clone();
    let users = tokio::task::spawn_blocking(move || match tools.moves_users() {
        Ok(()) => Ok(Vec::new()),
        Err(why) => verbatim_container::of_users(init)
            .map(|found| found.into_iter().map(|who| format!("{who}: {why}")).collect()),
    });
    match users.await {
        Ok(Ok(users)) => found.extend(users),
        Ok(Err(error)) => found.push(format!("the users of its processes are not known: {error}")),
        Err(error) => found.push(format!("the users of its processes are not known: {error}")),
    }
    found
}

/// What changes at a move without standing in its way, for `check`.
pub async fn notes_of_tasks(agent: &Shared, instance: &Instance) -> Vec<String> {
    if instance.home.record.machine.is_some() {
        return Vec::new();
    }
    let (init, guests) = (instance.init_pid(), guests(agent, instance));
    let looked = tokio::task::spawn_blocking(move || verbatim_container::notes(init, &guests)).await;
    // Who cannot be looked at stands in the way.
    let mut notes = looked.ok().and_then(Result::ok).unwrap_or_default();
    notes.extend(unaccepted(instance));
    notes
}

/// Processes with RDMA.
fn guests(agent: &Shared, instance: &Instance) -> Vec<i32> {
    let guests = agent.guests.of_instance(instance.name());
    guests.iter().filter_map(|guest| guest.host_pid()).collect()
}

/// Connections that no process has accepted.
fn unaccepted(instance: &Instance) -> Option<String> {
    let queues = tokio::task::block_in_place(|| instance.home.unaccepted()).ok()?;
    let count: u64 = queues.iter().map(|(_, count)| u64::from(*count)).sum();
    let listeners: Vec<_> = queues.iter().map(|(listener, _)| listener.to_string()).collect();
    (count > 0).then(|| {
        format!(
            "{count} TCP connection{} not accepted yet (at {}): what is not accepted when the instance is frozen is reset at the commit \
             (`verbatim migrate --no-reset` rolls back instead)",
            if count == 1 { " is" } else { "s are" },
            listeners.join(", ")
        )
    })
}

/// Connections that the frozen tasks have closed send the rest of them: CRIU does not write them down.
pub(super) fn let_closed_send(home: &Home) {
    let begun = Instant::now();
    while begun.elapsed() < CLOSE_LIMIT && home.are_connections_closing().is_ok_and(|are| are) {
        std::thread::sleep(CLOSE_LOOK);
    }
}

impl Source {
    /// An error if something of its tasks cannot be written down.
    pub(super) async fn can_be_written_down(&self) -> anyhow::Result<()> {
        match of_tasks(&self.agent, &self.instance, &self.request.destination)
            .await
            .as_slice()
        {
            [] => Ok(()),
            found => bail!("{}", found.join("; ")),
        }
    }

    /// New connections to the instance wait, and what has come gets some time to be accepted: no call puts a restored connection into a
    /// listener's queue.
    pub(super) async fn empty_queues(&mut self) {
        if self.is_machine() {
            return;
        }
        self.refuses_connections = true;
        let home = &self.instance.home;
        let refused = tokio::task::block_in_place(|| home.refuse_connections());
        if let Err(error) = refused {
            tracing::warn!(
                error = format!("{error:#}"),
                "new connections to an instance are not held back while it moves"
            );
        }
        let begun = Instant::now();
        while begun.elapsed() < ACCEPT_LIMIT {
            match tokio::task::block_in_place(|| home.are_connections_arriving()) {
                Ok(true) => tokio::time::sleep(LOOK).await,
                _ => break,
            }
        }
        tracing::debug!("queues of listeners took {:.1} ms", milliseconds(begun.elapsed()));
    }

    /// Reads what CRIU does not keep of the frozen tasks. Needs the dump to have cut them off.
    pub(super) async fn read_kept(init: i32, descriptors: Descriptors) -> anyhow::Result<Kept> {
        let read = tokio::task::spawn_blocking(move || Kept::read(init, &descriptors)).await;
        read.context("looking at the tasks panicked")?
            .context("what CRIU does not keep of the tasks cannot be read")
    }

    /// Puts it beside the images. An error if clients would lose their connections, and may not.
    pub(super) fn keep(&mut self, kept: &Kept) -> anyhow::Result<()> {
        self.reset_connections = kept.lost.len();
        if self.request.no_reset
            && let Some(first) = kept.lost.first()
        {
            bail!(
                "{} TCP connections of clients, of which one is {}, are not accepted, or closed with data that was not sent, and would be reset",
                kept.lost.len(),
                first.remote
            );
        }
        kept.write(&self.instance.home.paths.images)
    }

    /// New connections reach the instance again.
    pub(super) fn take_connections(&mut self) {
        if std::mem::take(&mut self.refuses_connections)
            && let Err(error) = tokio::task::block_in_place(|| self.instance.home.take_connections())
        {
            tracing::error!(
                error = format!("{error:#}"),
                "new connections to the instance are held back: `nft delete table inet verbatim_arrivals` in its network namespace lets them in"
            );
        }
    }
}

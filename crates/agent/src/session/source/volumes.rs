//! The instance's volumes, which move in the same session. The order is: all of a volume is copied while the instance runs, and what it
//! writes goes to both hosts; its tasks are frozen; its file systems are brought to rest (a guest's disks QEMU has drained and flushed); the volumes
//! are held, and promised by the destination, which mounts them for the restore. The decision about the tasks is that about the volumes.
//!
//! The lease of a swap disk moves by the same steps, and nothing of it is copied: its servers hear at which host it may go on; its pages are all at
//! them; it is held, and they get what is known of its pages; the decision is the fence (`docs/remote-memory.md`).

use std::time::Duration;

use anyhow::Context;
use futures_util::future::try_join_all;
use tokio::task::JoinHandle;
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_swap::disk::Order as SwapOrder;
use verbatim_volume::control::Order;

use super::Source;
use crate::agent::Shared;
use crate::instances::record::Record;
use crate::instances::volumes::{Disks, Form, Mounted};
use crate::session::volumes::{give, give_swap, note, settle};

/// How often it is told how far they are.
const TELLING: Duration = Duration::from_secs(1);

/// How long a volume daemon may keep an instance waiting that is to go on.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// How long file systems may take to come to rest.
const FREEZE_LIMIT: Duration = Duration::from_secs(30);

impl Source {
    fn volumes(&self) -> &[Mounted] {
        &self.record().volumes
    }

    /// Whether it has something that the session decides about.
    fn has_any(&self) -> bool {
        !self.volumes().is_empty() || !self.record().swap.is_empty()
    }

    fn disks(&self) -> Disks {
        self.instance.home.paths.disks.clone()
    }

    /// Begins to copy them.
    pub(super) async fn follow_volumes(&self) -> anyhow::Result<()> {
        note(&self.agent, self.session, Role::Source, self.record()).await?;
        for mounted in self.volumes() {
            let name = &mounted.volume;
            let order = Order::Follow {
                name: name.clone(),
                to: self.request.destination.clone(),
                by: self.session,
                bytes_per_second: self.request.max_bandwidth.map(Into::into),
            };
            let begun = give(&self.agent, &order).await;
            begun.with_context(|| format!("the volume {name} cannot be copied"))?;
        }
        let to = self.request.destination.clone();
        let follow = SwapOrder::Follow { to, by: self.session };
        all_swaps(&self.agent, self.record(), &follow).await
    }

    /// Waits until the destination has them, and gets what is written. Memory is copied after that: what is written to it meanwhile would have to
    /// be sent again.
    pub(super) async fn volumes_are_there(&self) -> anyhow::Result<()> {
        let mirrored = SwapOrder::Mirrored { by: self.session };
        all_swaps(&self.agent, self.record(), &mirrored).await?;
        if self.volumes().is_empty() {
            return Ok(());
        }
        let waits = self.volumes().iter().map(|mounted| async move {
            let order = Order::Mirrored {
                name: mounted.volume.clone(),
                by: self.session,
            };
            let mirrored = give(&self.agent, &order).await;
            mirrored.with_context(|| format!("the volume {}", mounted.volume))
        });
        let all = try_join_all(waits);
        tokio::pin!(all);
        loop {
            tokio::select! {
                mirrored = &mut all => return mirrored.map(drop),
                () = tokio::time::sleep(TELLING) => self.tell_how_far_volumes_are().await,
            }
        }
    }

    async fn tell_how_far_volumes_are(&self) {
        let disks = self.disks();
        let Ok(Ok(rows)) = tokio::task::spawn_blocking(move || disks.all()).await else {
            return;
        };
        for mounted in self.volumes() {
            let row = rows.iter().find(|row| row.name == mounted.volume);
            let Some((row, migration)) = row.and_then(|row| Some((row, row.migration.as_ref()?))) else {
                continue;
            };
            if let Some(why) = &row.stalled {
                self.note(&format!(
                    "the volume {}: {why} (`verbatim cancel {}` gives the move up)",
                    row.name,
                    self.record().name
                ));
            } else if let Some(lacking) = migration["lacking_bytes"].as_u64() {
                self.note(&format!(
                    "the volume {}: {} of {} MiB have still to be copied",
                    row.name,
                    lacking >> 20,
                    row.length_bytes >> 20
                ));
            }
        }
    }

    /// What is written now need not be written while nothing runs.
    pub(super) async fn sync_volumes(&self) -> anyhow::Result<()> {
        if self.volumes().is_empty() {
            return Ok(());
        }
        if Form::of(self.record()) == Form::FileSystem {
            let disks = self.disks();
            return tokio::task::spawn_blocking(move || disks.sync()).await?;
        }
        let flushed = self.volumes().iter().map(|mounted| async move {
            let name = mounted.volume.clone();
            let flushed = give(&self.agent, &Order::Sync { name }).await;
            flushed.with_context(|| format!("the volume {}", mounted.volume))
        });
        try_join_all(flushed).await.map(drop)
    }

    /// The tasks are frozen: file systems are brought to rest, and then the volumes are held. The answer comes while memory is sent.
    pub(super) async fn hold_volumes(&self) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        if Form::of(self.record()) == Form::FileSystem {
            let (disks, volumes) = (self.disks(), self.volumes().to_vec());
            let frozen = tokio::task::spawn_blocking(move || disks.freeze(&volumes));
            tokio::time::timeout(FREEZE_LIMIT, frozen)
                .await
                .context("a file system does not come to rest")???;
        }
        let (agent, session, volumes) = (self.agent.clone(), self.session, self.volumes().to_vec());
        let record = self.record().clone();
        Ok(tokio::spawn(async move {
            let hold = SwapOrder::Hold { by: session };
            let swaps = all_swaps(&agent, &record, &hold);
            let held = volumes.iter().map(|mounted| async {
                let order = Order::Hold {
                    name: mounted.volume.clone(),
                    by: session,
                };
                let held = give(&agent, &order).await;
                held.with_context(|| format!("the volume {} cannot be handed over", mounted.volume))
            });
            tokio::try_join!(try_join_all(held), swaps).map(drop)
        }))
    }

    /// They stay here.
    pub(super) async fn take_volumes_back(&self) {
        if self.has_any() {
            take_back(
                settle(&self.agent, self.session, Role::Source, Outcome::RolledBack),
                self.disks(),
            )
            .await;
        }
    }

    /// They are the destination's, and so are the file systems, which are shut down here: tasks that end have nothing to write any more.
    pub(super) async fn leave_volumes(&self) {
        if self.has_any() {
            leave(
                settle(&self.agent, self.session, Role::Source, Outcome::Committed),
                self.disks(),
            )
            .await;
        }
    }
}

/// Gives an order to the processes of all swap disks of an instance.
async fn all_swaps(agent: &Shared, record: &Record, order: &SwapOrder) -> anyhow::Result<()> {
    let given = record.swap.iter().map(|disk| async move {
        let given = give_swap(agent, &disk.known_as(record.name.as_str()), order).await;
        given.with_context(|| format!("the swap disk {}", disk.name))
    });
    try_join_all(given).await.map(drop)
}

/// The daemon serves them again, and then the file systems go on. A daemon that does not answer is not waited for.
pub async fn take_back(mut settled: JoinHandle<()>, disks: Disks) {
    if tokio::time::timeout(SETTLE_LIMIT, &mut settled).await.is_err() {
        tracing::error!("the volume daemon does not answer; who writes to a volume waits for it");
    }
    let thawed = tokio::task::spawn_blocking(move || disks.thaw());
    match tokio::time::timeout(SETTLE_LIMIT, thawed).await {
        Ok(Ok(Ok(()))) => {}
        failed => tracing::error!(?failed, "a file system of a volume stays frozen"),
    }
}

/// The daemon refuses what comes for them, and then the file systems are shut down: that wants an answer of their disks.
pub async fn leave(mut settled: JoinHandle<()>, disks: Disks) {
    if tokio::time::timeout(SETTLE_LIMIT, &mut settled).await.is_err() {
        tracing::warn!("the volume daemon does not answer; it is told later that its volumes have moved");
    }
    let shut_down = tokio::task::spawn_blocking(move || disks.shut_down());
    match tokio::time::timeout(SETTLE_LIMIT, shut_down).await {
        Ok(Ok(Ok(()))) => {}
        failed => tracing::warn!(
            ?failed,
            "a file system of a volume that has moved is not shut down"
        ),
    }
}

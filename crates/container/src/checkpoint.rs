//! The source's half of a move: freeze a container and write it down, without giving up the way back.
//!
//! ```text
//!  Checkpoint::prepare ─► Checkpoint ─ freeze_and_dump ─► Dumped ─┬─ commit: the tasks are killed, runc forgets them
//!     (container runs)                   (tasks frozen)           └─ abort:  the tasks go on
//! ```

use std::fmt::Display;
use std::num::NonZeroU32;
use std::path::PathBuf;

use crate::error::Error;
use crate::gate::{Kind, LAZY_VARIABLE, NETWORK_VARIABLE, NO_TERMINALS_VARIABLE, STOP_LIMIT_VARIABLE};
use crate::host::Host;
use crate::name::ContainerName;
use crate::operation::Operation;
use crate::timings::Timings;

/// What to write down, and where.
#[derive(Debug, Clone)]
pub struct CheckpointConfig {
    /// The container.
    pub name: ContainerName,
    /// Where CRIU writes its images; made if missing, and should be empty and on tmpfs. A file is complete once
    /// [`Checkpoint::freeze_and_dump`] has returned.
    pub images: PathBuf,
    /// Where CRIU writes its log (`dump.log`); made if missing.
    pub work: PathBuf,
    /// The images of the last [`pre_dump`](crate::pre_dump()), relative to `images`: only what was written since is
    /// written down. They must be at the same place, relative to the images, where the container is restored.
    pub parent: Option<PathBuf>,
    /// Private memory is left out of the images where CRIU can (`criu/mem.c`, `vma_entry_can_be_lazy`): the list of pages
    /// says which, and whoever restores them must have their contents. As long as the tasks stand still their memory can be
    /// read.
    pub lazy: bool,
    /// The container's network namespace. If it is named CRIU works in it, the images say nothing of a network namespace, and who
    /// restores them says in which one ([`RestoreConfig::network`](crate::RestoreConfig::network)). Else CRIU has the kernel search the
    /// whole table of connections that it tracks, twice: 18 ms with a table of 262,144 buckets.
    pub network: Option<PathBuf>,
    /// The container may have RNICs of the kernel's open ([`BundleConfig::rnics`](crate::BundleConfig::rnics)): CRIU is to leave them
    /// alone, by our plugin ([`HostConfig::plugin`](crate::HostConfig::plugin)).
    pub rnics: bool,
    /// Who restores the container gives it its terminals' file system again where the images have none
    /// ([`Restore::restore`](crate::Restore::restore)), or has a place for it. Else it is left out of the images; a container that has a
    /// terminal open cannot be written down then.
    pub terminals: bool,
    /// How many seconds CRIU tries to stop the tasks; by its own measure, 10, if `None`.
    pub stop_limit: Option<NonZeroU32>,
}

/// A checkpoint that is ready to freeze: runc and CRIU are started and everything that can be probed is.
/// The container runs. Dropping it cancels the checkpoint.
#[derive(Debug)]
pub struct Checkpoint(Operation);

/// A container that is frozen and written down. Dropping it aborts: the tasks go on.
#[derive(Debug)]
pub struct Dumped(Operation);

impl Checkpoint {
    /// Starts runc and CRIU and waits until only the freeze is left to do. Takes about 0.2 s.
    pub async fn prepare(host: &Host, config: CheckpointConfig) -> Result<Self, Error> {
        let CheckpointConfig {
            name,
            images,
            work,
            parent,
            lazy,
            network,
            rnics,
            terminals,
            stop_limit,
        } = config;
        let mut command = host.runc().checkpoint(&name, &images, &work, parent.as_deref());
        if lazy {
            command.env(LAZY_VARIABLE, "1");
        }
        if let Some(network) = network {
            command.env(NETWORK_VARIABLE, network);
        }
        if !terminals {
            command.env(NO_TERMINALS_VARIABLE, "1");
        }
        if let Some(limit) = stop_limit {
            command.env(STOP_LIMIT_VARIABLE, limit.to_string());
        }
        host.load_plugin(&mut command, rnics)?;
        Ok(Self(
            Operation::prepare(host, Kind::Dump, name, command, &images, &work).await?,
        ))
    }

    /// Freezes the container and writes its images. When it returns they are complete and the tasks are frozen.
    ///
    /// `cut` is called when the tasks are frozen and before their sockets are written down: it should detach the
    /// instance's network ([`Network::detach`](crate::Network::detach)), so that no packet changes a connection after
    /// it was written down. Detached earlier, what the program still sends would be lost, and a restored connection
    /// sends it again only after a second (RFC 6298 §2.1).
    ///
    /// On an error the container runs on; if `cut` was called, its network is to be attached again.
    pub async fn freeze_and_dump_with<E: Display>(
        mut self,
        cut: impl FnOnce() -> Result<(), E>,
    ) -> Result<Dumped, Error> {
        self.0.release(cut).await?;
        Ok(Dumped(self.0))
    }

    /// The same for an instance whose network is detached already, or has no connections to lose.
    pub async fn freeze_and_dump(self) -> Result<Dumped, Error> {
        self.freeze_and_dump_with(|| Ok::<(), Error>(())).await
    }

    /// Gives up before the freeze; returns when runc and CRIU are gone.
    pub async fn cancel(self) -> Result<(), Error> {
        self.0.abort().await
    }
}

impl Dumped {
    /// When what happened, from `go` (just before the freeze) to `post-dump`.
    pub fn timings(&self) -> &Timings {
        self.0.timings()
    }

    /// Takes over from an agent that died while it held the tasks: `held` is what its [`Dumped::held_path`] said.
    pub async fn take_over(
        host: &Host,
        config: CheckpointConfig,
        held: &std::path::Path,
    ) -> Result<Self, Error> {
        let CheckpointConfig { name, work, .. } = config;
        Ok(Self(Operation::take_over(host, name, &work, held).await?))
    }

    /// Where an agent that comes after this one can take over, once the tasks are held.
    pub fn held_path(&self) -> PathBuf {
        self.0.held_path()
    }

    /// Freezes the container's cgroup: from now on the tasks stand still whatever becomes of CRIU, the proxy and runc. Takes
    /// less than a millisecond, and some 10 µs for each thread. Dropping this still lets them go on, and so does the
    /// end of this process; twice is once.
    ///
    /// On an error the container runs on: CRIU was lost, for one, and with it the images are out of date.
    pub async fn freeze(&mut self) -> Result<(), Error> {
        self.0.freeze().await
    }

    /// The decision is about to be made elsewhere: freezes as [`Dumped::freeze`] does, if that is not done, and from now on
    /// only [`Dumped::commit`] or [`Dumped::abort`] lets go. Dropping this, or the end of this process, of the proxy, of CRIU
    /// or of runc leaves the tasks frozen. Where the proxy is gone, too, so that nobody can [take over](Dumped::take_over),
    /// [`Tasks::kill`](crate::Tasks::kill) and [`Tasks::thaw`](crate::Tasks::thaw) are what is left to do.
    ///
    /// On an error the container runs on.
    pub async fn hold(&mut self) -> Result<(), Error> {
        self.0.hold().await
    }

    /// Kills the frozen tasks for good; returns when runc has forgotten the container. Takes some 10 ms.
    ///
    /// If CRIU was lost, they are killed all the same, and do not run before they are dead if they were frozen.
    pub async fn commit(self) -> Result<(), Error> {
        let (runc, name) = (self.0.runc().clone(), self.0.name().clone());
        let cgroup = self.0.cgroup().cloned();
        let committed = match self.0.commit("finished", || {}).await {
            Ok((_, settling)) => settling.settled().await,
            Err(error) => Err(error),
        };
        if let Err(error) = committed {
            tracing::warn!(container = %name, %error, "CRIU did not end the container; its cgroup is killed");
            // Before runc does it, which thaws by version 1 of the freezer.
            crate::operation::kill(&name, cgroup).await?;
            runc.delete(&name, true).await?;
        }
        Ok(())
    }

    /// Lets the tasks go on as if nothing had happened; returns when they run.
    pub async fn abort(self) -> Result<(), Error> {
        self.0.abort().await
    }
}

//! The tasks of an instance that moves: of a container, by CRIU, or a virtual machine's QEMU.
//!
//! Both are stopped without giving up the way back, made elsewhere without running, and run or are killed when the session has
//! decided. What the states mean is `verbatim_container`'s; the session does not know which kind it has.

use std::path::PathBuf;

use verbatim_container::{Init, Resumed};

use crate::instances::machine::arriving::{Arriving, Loaded};
use crate::instances::machine::leaving::Stopped;

/// Tasks that stand still and are written down.
#[derive(Debug)]
pub enum Dumped {
    /// Of a container.
    Container(Box<verbatim_container::Dumped>),
    /// QEMU's.
    Machine(Box<Stopped>),
}

impl Dumped {
    /// Freezes their cgroup: they stand still whatever becomes of who else holds them.
    pub async fn freeze(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Container(dumped) => Ok(dumped.freeze().await?),
            Self::Machine(stopped) => stopped.freeze().await,
        }
    }

    /// The decision is about to be made elsewhere: from now on only [`Dumped::commit`] or [`Dumped::abort`] lets go.
    pub async fn hold(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Container(dumped) => Ok(dumped.hold().await?),
            // Its cgroup is all that holds it.
            Self::Machine(stopped) => stopped.freeze().await,
        }
    }

    /// Where an agent that comes after this one can take over.
    pub fn held_path(&self) -> PathBuf {
        match self {
            Self::Container(dumped) => dumped.held_path(),
            Self::Machine(stopped) => stopped.held_path(),
        }
    }

    /// Kills them for good; returns when runc has forgotten the container.
    pub async fn commit(self) -> anyhow::Result<()> {
        match self {
            Self::Container(dumped) => Ok(dumped.commit().await?),
            Self::Machine(stopped) => stopped.commit().await,
        }
    }

    /// Lets them go on as if nothing had happened.
    pub async fn abort(self) -> anyhow::Result<()> {
        match self {
            Self::Container(dumped) => Ok(dumped.abort().await?),
            Self::Machine(stopped) => stopped.abort().await,
        }
    }
}

/// A place that is ready for them.
#[derive(Debug)]
pub enum Restore {
    /// Of a container: runc and CRIU wait for the images.
    Container(verbatim_container::Restore),
    /// QEMU waits for the guest.
    Machine(Arriving),
}

impl Restore {
    /// Makes them; all that they need must be complete. They do not run. On an error nothing of them is left on this host.
    pub async fn restore(self) -> anyhow::Result<Restored> {
        match self {
            Self::Container(restore) => {
                let restored = restore.restore().await?;
                tracing::debug!("restored: {}", restored.timings());
                Ok(Restored::Container(restored))
            }
            Self::Machine(arriving) => Ok(Restored::Machine(arriving.load().await?)),
        }
    }

    /// Gives up; returns when nothing is left.
    pub async fn cancel(self) -> anyhow::Result<()> {
        match self {
            Self::Container(restore) => Ok(restore.cancel().await?),
            Self::Machine(arriving) => arriving.cancel().await,
        }
    }
}

/// Tasks that are made, and do not run yet.
#[derive(Debug)]
pub enum Restored {
    /// Of a container.
    Container(verbatim_container::Restored),
    /// QEMU's.
    Machine(Loaded),
}

/// What comes of letting them run: the first process, and when no other call of runc is in its way any more.
pub enum Runs {
    /// Of a container.
    Container(Resumed),
    /// QEMU's.
    Machine(Init),
}

impl Restored {
    /// The first process, which does not run yet.
    pub fn pid(&self) -> Option<i32> {
        match self {
            Self::Container(restored) => restored.pid(),
            Self::Machine(loaded) => Some(loaded.pid()),
        }
    }

    /// An error if they are known not to be there any more.
    pub async fn is_there(&self) -> anyhow::Result<()> {
        match self {
            // Its proxy says so when it is asked to let them run.
            Self::Container(_) => Ok(()),
            Self::Machine(loaded) => loaded.is_there().await,
        }
    }

    /// The decision is made: from now on nothing that fails kills tasks that may have run.
    pub fn leave_released(&mut self) {
        match self {
            Self::Container(restored) => restored.leave_released(),
            // Nobody kills it but by `abort`.
            Self::Machine(_) => {}
        }
    }

    /// Lets them run; returns when they do. `connect` is called when there is no way back, and before they do.
    pub async fn resume_with(self, connect: impl FnOnce()) -> anyhow::Result<Runs> {
        match self {
            Self::Container(restored) => {
                let resumed = restored.resume_with(connect).await?;
                tracing::debug!("resumed: {}", resumed.timings);
                Ok(Runs::Container(resumed))
            }
            Self::Machine(loaded) => Ok(Runs::Machine(loaded.run(connect).await?)),
        }
    }

    /// Kills them before they have run; returns when nothing of them is left on this host.
    pub async fn abort(self) -> anyhow::Result<()> {
        match self {
            Self::Container(restored) => Ok(restored.abort().await?),
            Self::Machine(loaded) => loaded.abort().await,
        }
    }
}

impl Runs {
    /// The first process.
    pub fn pid(&self) -> i32 {
        match self {
            Self::Container(resumed) => resumed.init.pid(),
            Self::Machine(init) => init.pid(),
        }
    }

    /// Waits until runc has ended, too.
    pub async fn settled(self) -> anyhow::Result<Init> {
        match self {
            Self::Container(resumed) => {
                let (init, runc) = resumed.settled().await;
                if let Err(error) = runc {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(
                        pid = init.pid(),
                        error,
                        "runc did not end well, and the tasks run without it"
                    );
                }
                Ok(init)
            }
            Self::Machine(init) => Ok(init),
        }
    }
}

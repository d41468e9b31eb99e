//! The destination's half of a move: make a container from its images, without letting it run too early.
//!
//! ```text
//!  Restore::prepare ─► Restore ─ restore ─► Restored ─┬─ resume: the tasks run
//!   (images missing)           (tasks do not run yet)  └─ abort:  the tasks are killed, runc forgets them
//! ```

use std::path::PathBuf;

use anyhow::Context;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use verbatim_filter::moving;

use crate::blocking::blocking;
use crate::error::Error;
use crate::gate::{Kind, LAZY_VARIABLE, NETWORK_VARIABLE};
use crate::host::Host;
use crate::init::Init;
use crate::kept::unaccepted::reset;
use crate::kept::{Connection, Kept};
use crate::name::ContainerName;
use crate::namespace::inside_at;
use crate::netlink::delete_table;
use crate::operation::Operation;
use crate::timings::Timings;

/// What to restore, and from where.
#[derive(Debug, Clone)]
pub struct RestoreConfig {
    /// The container's name on this host.
    pub name: ContainerName,
    /// The bundle made for it ([`Bundle`](crate::Bundle)); its network namespace and runtime folder must exist.
    pub bundle: PathBuf,
    /// Where the images are or will be; made if missing, and should be on tmpfs. Must not be replaced by another
    /// directory after `prepare`: CRIU holds it open.
    pub images: PathBuf,
    /// Where CRIU writes its log (`restore.log`); made if missing.
    pub work: PathBuf,
    /// The images leave private memory out, and the socket `lazy-pages.socket` in `work` is that of whoever has it: a task is given
    /// a page when it touches it, or before (userfaultfd(2)). The socket is needed when [`Restore::restore`] is called.
    pub lazy: bool,
    /// The container's network namespace. CRIU works in it, and so do tasks whose images say nothing of one
    /// ([`CheckpointConfig::network`](crate::CheckpointConfig::network)).
    pub network: PathBuf,
    /// As in [`CheckpointConfig::rnics`](crate::CheckpointConfig::rnics): where an RNIC was open there are placeholders.
    pub rnics: bool,
}

/// A restore that waits for its images: runc and CRIU are started. Dropping it cancels the restore.
#[derive(Debug)]
pub struct Restore {
    operation: Operation,
    bundle: PathBuf,
    images: PathBuf,
    network: PathBuf,
    /// What is sent over the loopback link there is dropped.
    holds_loopback: bool,
}

/// A container whose tasks are restored and do not run yet. Dropping it aborts: the tasks are killed.
#[derive(Debug)]
pub struct Restored {
    operation: Operation,
    network: PathBuf,
    /// Connections whose clients are to be told that they are gone.
    lost: Vec<Connection>,
}

/// A container that runs again.
#[derive(Debug)]
pub struct Resumed {
    /// Its first process.
    pub init: Init,
    /// When what happened, from `go` over `commit` to `post-resume`.
    pub timings: Timings,
    settled: JoinHandle<Result<(), Error>>,
}

impl Resumed {
    /// Waits until runc has ended, too: before that, no other call of runc should name the container. Takes some
    /// 10 ms. Returns the first process, which runs whatever became of runc, and how runc has ended.
    pub async fn settled(self) -> (Init, Result<(), Error>) {
        let runc = self.settled.await.expect("waiting for runc does not panic");
        (self.init, runc)
    }
}

impl Restore {
    /// Starts runc and CRIU and waits until only the images are missing. Takes about 0.2 s.
    pub async fn prepare(host: &Host, config: RestoreConfig) -> Result<Self, Error> {
        let RestoreConfig {
            name,
            bundle,
            images,
            work,
            lazy,
            network,
            rnics,
        } = config;
        crate::error::make_dir(&images)?;
        // runc reads it before it starts CRIU. Its entries matter only where they name pipes, and our containers'
        // standard streams are files (`bundle`); the source's own copy of the file may replace this one.
        let descriptors = images.join("descriptors.json");
        if !descriptors.exists() {
            std::fs::write(&descriptors, br#"["/dev/null","/dev/null","/dev/null"]"#)
                .map_err(|source| Error::file("write", &descriptors, source))?;
        }
        let mut command = host.runc().restore(&name, &bundle, &images, &work);
        if lazy {
            command.env(LAZY_VARIABLE, "1");
        }
        command.env(NETWORK_VARIABLE, &network);
        host.load_plugin(&mut command, rnics)?;
        let operation = Operation::prepare(host, Kind::Restore, name, command, &images, &work).await?;
        let held = network.clone();
        let held = blocking(move || inside_at(&held, moving::hold_loopback)).await;
        if let Err(error) = &held {
            // Only what is unsent on a connection within the container makes a restore fail without it.
            tracing::warn!(%error, "connections within the container are not held while they are restored");
        }
        Ok(Self {
            operation,
            bundle,
            images,
            network,
            holds_loopback: held.is_ok(),
        })
    }

    /// Makes the tasks; the images and every file that they refer to must be complete. When it returns the tasks
    /// exist and do not run, and what the bundle hides or makes read-only is so.
    ///
    /// On an error nothing of the container is left on this host.
    pub async fn restore(self) -> Result<Restored, Error> {
        let Self {
            mut operation,
            bundle,
            images,
            network,
            holds_loopback,
        } = self;
        operation.release(|| Ok::<(), Error>(())).await?;
        let mut restored = Restored {
            operation,
            network,
            lost: Vec::new(),
        };
        let completed = restored.complete(bundle, images, holds_loopback).await;
        match completed {
            Ok(lost) => {
                restored.lost = lost;
                Ok(restored)
            }
            Err(error) => {
                let failed = restored.failed(format!("{error:#}"));
                restored.abort().await?;
                Err(failed)
            }
        }
    }

    /// Gives up before the images are used; returns when runc and CRIU are gone.
    pub async fn cancel(self) -> Result<(), Error> {
        self.operation.abort().await
    }
}

impl Restored {
    /// When what happened, from `go` to `post-restore`.
    pub fn timings(&self) -> &Timings {
        self.operation.timings()
    }

    /// Its first process, which does not run yet.
    pub fn pid(&self) -> Option<i32> {
        self.operation.pid
    }

    /// What CRIU has left to do. Returns connections that are lost.
    async fn complete(
        &self,
        bundle: PathBuf,
        images: PathBuf,
        holds_loopback: bool,
    ) -> anyhow::Result<Vec<Connection>> {
        let (pid, network) = (self.first_process()?, self.network.clone());
        let completed = blocking(move || {
            let complete = || {
                crate::bundle::masks::complete(&bundle, pid)?;
                let kept = Kept::of(&images)?;
                kept.put_back(pid)?;
                if holds_loopback {
                    inside_at(&network, || delete_table(moving::LOOPBACK))
                        .context("connections within the container cannot be let go")?;
                }
                anyhow::Ok(kept.lost)
            };
            Ok(complete())
        });
        completed.await?
    }

    fn first_process(&self) -> Result<i32, Error> {
        let pid = self.operation.pid;
        pid.ok_or_else(|| self.failed("CRIU did not name the first process".to_owned()))
    }

    fn failed(&self, reason: String) -> Error {
        Error::Operation {
            operation: Kind::Restore.subcommand(),
            container: self.operation.name().to_string(),
            stage: Kind::Restore.decision().unwrap_or_default().to_owned(),
            reason,
            criu_log: Vec::new(),
        }
    }

    /// The decision is made: from now on neither dropping this nor a failed [`Restored::resume_with`] kills tasks that may have
    /// run. What is the case then [`Tasks::fact`](crate::Tasks::fact) says, and
    /// [`Tasks::end_unreleased`](crate::Tasks::end_unreleased) whether they have not and will not.
    pub fn leave_released(&mut self) {
        self.operation.leave_released();
    }

    /// Lets the tasks run; returns when they do.
    ///
    /// After an error they may have run ([`released`](crate::released) says whether), and are killed unless
    /// [`Restored::leave_released`] was called.
    ///
    /// `connect` is called when there is no way back and before the sockets work again: it should attach the
    /// instance's network ([`Network::attach`](crate::Network::attach)). A restored connection tells its peer at once
    /// that it is there (`tcp_send_window_probe`); if that is lost, the peer finds out a timeout later. `connect` cannot
    /// fail, since nothing can be taken back: a network that cannot be attached is the operator's to repair.
    pub async fn resume_with(self, connect: impl FnOnce()) -> Result<Resumed, Error> {
        let pid = self.first_process()?;
        let (announce, settled) = oneshot::channel();
        let init = Init::open_early(pid, settled)
            .map_err(|error| self.failed(format!("process {pid} cannot be opened: {error}")))?;
        let Self {
            operation,
            network,
            lost,
        } = self;
        let (timings, settling) = operation.commit("post-resume", connect).await?;
        if !lost.is_empty() {
            let count = lost.len();
            let told = blocking(move || inside_at(&network, || reset(&lost))).await;
            if let Err(error) = told {
                tracing::warn!(%error, count, "not all clients are told that their connections are gone");
            }
        }
        let settled = tokio::spawn(async move {
            let result = settling.settled().await;
            // Nobody may wait for the first process.
            let _ = announce.send(());
            result
        });
        Ok(Resumed {
            init,
            timings,
            settled,
        })
    }

    /// The same for an instance whose network is attached already, or is attached later.
    pub async fn resume(self) -> Result<Resumed, Error> {
        self.resume_with(|| {}).await
    }

    /// Kills the tasks before they have run; returns when nothing of the container is left on this host.
    pub async fn abort(self) -> Result<(), Error> {
        self.operation.abort().await
    }
}

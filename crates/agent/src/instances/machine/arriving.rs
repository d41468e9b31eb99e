//! A virtual machine that arrives: the counterpart of a restore.
//!
//! ```text
//!  Arriving::prepare ─ (RAM comes) ─ load ─► Loaded ─┬─ run:   the guest runs
//!   (QEMU waits)                  (guest is there)   └─ abort: QEMU is killed
//! ```

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use rustix::fs::OFlags;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use verbatim_container::{ContainerName, Host, Init, Runc, Tasks};
use verbatim_vm::{Error, Incoming, Machine, PostCopy};

use super::guest::{Guest, Owned};
use super::leaving::{DEVICES, RAN, read_ran};
use super::qemu::{connect, last_words};
use super::{domain, locks, make_ram, post_copy, settings, standing};
use crate::beneath;
use crate::instances::home::{Home, Paths};
use crate::instances::start;
use crate::whole;

/// Container of a machine that arrives. It is removed unless the session decides for this host.
#[derive(Debug)]
struct Place {
    tasks: Tasks,
    runc: Runc,
    name: ContainerName,
    paths: Paths,
}

impl Place {
    /// Removes everything of the machine from this host.
    async fn clear(self) -> anyhow::Result<()> {
        self.tasks.kill().await?;
        domain::end(&self.paths).await?;
        Ok(self.runc.delete(&self.name, true).await?)
    }
}

/// A machine that arrives: its QEMU waits for the guest.
#[derive(Debug)]
pub struct Arriving {
    place: Place,
    waiting: Waiting,
}

#[derive(Debug)]
struct Waiting {
    init: Init,
    machine: Arc<Machine>,
    incoming: Incoming,
    stream: UnixStream,
}

impl Arriving {
    /// Starts QEMU in the container of `home`, which has its bundle already. The RAM must arrive later:
    /// QEMU's own writes to it at the start are not the guest's. `may_lack`: part of the RAM may arrive after
    /// the guest runs.
    pub async fn prepare(
        host: &Host,
        home: &Home,
        may_lack: bool,
    ) -> anyhow::Result<(Self, Option<PostCopy>)> {
        let (name, paths) = (&home.record.name, &home.paths);
        let place = Place {
            tasks: Tasks::of(host, name, &paths.work),
            runc: host.runc().clone(),
            name: name.clone(),
            paths: paths.clone(),
        };
        let guest = home.record.machine.as_ref().context("it is no virtual machine")?;
        if let Guest::Qemu(arguments) = guest {
            let (folder, bytes) = (paths.folder.clone(), arguments.ram());
            let prealloc = home.record.prealloc;
            let made = tokio::task::spawn_blocking(move || make_ram(&folder, bytes, prealloc)).await;
            made.context("making the RAM panicked")??;
        }
        let init = start::start(host.runc(), home).await?;
        let waiting = async {
            place.tasks.keep_unreleased().await?;
            let machine = match guest {
                Guest::Qemu(_) => connect(paths, init.pid()).await?,
                Guest::Domain(Owned { domain, ram }) => {
                    domain::start(domain, *ram, &place.tasks, paths).await?
                }
            };
            let lacks = match may_lack {
                true => Some(machine.post_copy(&post_copy::record(paths)).await?),
                false => None,
            };
            let (incoming, stream) = machine.arrive().await?;
            let waiting = Waiting {
                init,
                machine,
                incoming,
                stream,
            };
            anyhow::Ok((waiting, lacks))
        };
        match waiting.await {
            Ok((waiting, lacks)) => Ok((Self { place, waiting }, lacks)),
            Err(error) => {
                place.clear().await?;
                Err(error)
            }
        }
    }

    /// File of the machine's RAM, unless it is in the runtime folder.
    pub fn ram_elsewhere(&self) -> std::io::Result<Option<File>> {
        let machine = &self.waiting.machine;
        let elsewhere = machine.qmp().domain().map(|_| machine.ram().file().try_clone());
        elsewhere.transpose()
    }

    /// Gives QEMU the state of the devices, once the RAM is complete; the guest is loaded then, and does not
    /// run.
    ///
    /// On an error nothing of the machine is left on this host.
    pub async fn load(self) -> anyhow::Result<Loaded> {
        let Self { place, waiting } = self;
        let Waiting {
            init,
            machine,
            mut incoming,
            mut stream,
        } = waiting;
        let folder = place.paths.folder.clone();
        let loaded = async {
            let ran = place.ran()?;
            settings::arrive(&place.paths, incoming.noted())?;
            let state = beneath::open(&place.paths.images, Path::new(DEVICES), OFlags::RDONLY)?;
            let mut state = tokio::fs::File::from_std(state.context("the devices' state has not come")?);
            let give = async {
                tokio::io::copy(&mut state, &mut stream).await?;
                stream.shutdown().await
            };
            // QEMU's own error says why QEMU takes no more of the state.
            let (given, loaded) = tokio::join!(give, incoming.loaded());
            match loaded {
                Err(error @ (Error::Gone | Error::GivenUp { .. })) => match machine.qmp().domain() {
                    None => anyhow::bail!("QEMU cannot load the guest: {}", last_words(&folder)),
                    Some(domain) => anyhow::bail!(
                        "QEMU cannot load the guest ({error}); libvirt's log of the domain {} there has its words",
                        domain.name()
                    ),
                },
                loaded => loaded?,
            }
            given.context("QEMU does not take the devices' state")?;
            locks::must_be_free(&place.paths, &machine).await?;
            Ok(ran)
        };
        match loaded.await {
            Ok(ran) => Ok(Loaded {
                place,
                init,
                machine,
                ran,
            }),
            Err(error) => {
                place.clear().await?;
                Err(error)
            }
        }
    }

    /// Gives up; returns when nothing of the machine is left.
    pub async fn cancel(self) -> anyhow::Result<()> {
        drop(self.waiting);
        self.place.clear().await
    }
}

impl Place {
    /// Whether the guest ran at its source; noted for a later agent.
    fn ran(&self) -> anyhow::Result<bool> {
        let path = self.paths.images.join(RAN);
        let ran = read_ran(&path, std::fs::read(&path))?;
        let kept = self.paths.work.join(RAN);
        whole::write_json(&kept, &ran)?;
        Ok(ran)
    }
}

/// A machine with a loaded guest that does not run.
#[derive(Debug)]
pub struct Loaded {
    place: Place,
    init: Init,
    machine: Arc<Machine>,
    ran: bool,
}

impl Loaded {
    /// The container's first process.
    pub fn pid(&self) -> i32 {
        self.init.pid()
    }

    /// An error unless QEMU still answers, with a guest that stands still.
    pub async fn is_there(&self) -> anyhow::Result<()> {
        let status = self.machine.status().await?;
        ensure!(!status.running, "the guest runs already");
        Ok(())
    }

    /// Lets the guest run, if it ran at its source, after `connect`, which lets its traffic flow. If QEMU
    /// does not let the guest run, the guest is this host's all the same, and QEMU is asked again: the source
    /// may still have a lock, which it frees when it hears of the decision.
    pub async fn run(self, connect: impl FnOnce()) -> anyhow::Result<Init> {
        self.place.tasks.release().await?;
        connect();
        let Self {
            place,
            init,
            machine,
            ran,
        } = self;
        let runs = standing::let_run(&place.paths, &machine, ran).await;
        // QEMU serves one connection at a time.
        drop(machine);
        if let Err(error) = runs {
            standing::later(&place.paths, init.pid(), &error);
        }
        Ok(init)
    }

    /// Kills QEMU before the guest has run; returns when nothing of the machine is left.
    pub async fn abort(self) -> anyhow::Result<()> {
        self.place.clear().await
    }
}

//! The instances of this host.
//!
//! - [`record`]: what an instance is, wherever it is; it goes along when it moves;
//! - [`machine`]: what one is that is a virtual machine;
//! - [`home`]: its place on one host: runtime folder, sockets, network, bundle;
//! - [`Instance`]: both, with the running container;
//! - [`filling`]: private memory that comes to it while it runs;
//! - [`shown`]: further files of its host that it sees;
//! - [`start`]: starting its program;
//! - [`storage`]: whether another host reaches its disks;
//! - [`tasks`]: what runs in it, while it moves;
//! - [`swap`]: memory of other hosts that a virtual machine has as disks;
//! - [`volumes`]: local disks of it, as file systems, which [`freeze`] brings to rest;
//! - [`away`]: addresses of those that have left;
//! - [`reserved`]: names, addresses and memory kept for one that is being made;
//! - [`recovery`]: what an agent finds that comes after one that died.

pub mod away;
pub mod filling;
mod freeze;
pub mod home;
pub mod machine;
pub mod network;
pub mod record;
pub mod recovery;
mod reserved;
pub mod shown;
pub mod start;
pub mod storage;
pub mod swap;
pub mod tasks;
pub mod volumes;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use anyhow::bail;
use tokio::sync::watch;
use verbatim_container::{Exit, Init};
use verbatim_session::Role;

use away::Away;
use home::Home;
use record::Record;
use reserved::Held;
pub use reserved::Reservation;

use crate::memory::private;

/// What an instance is doing on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It runs here.
    Running,
    /// It runs here and is being moved away.
    Moving,
    /// It has ended here, with this status; 128 + N after signal N.
    Exited(i32),
    /// It lives on another host.
    MovedTo(String),
}

/// An instance on this host.
pub struct Instance {
    /// Its place.
    pub home: Home,
    init_pid: i32,
    state: watch::Sender<State>,
    settled: watch::Sender<bool>,
    /// It has all of its private memory.
    whole: watch::Sender<bool>,
    /// The troubles found when it was last listed.
    troubles: machine::trouble::Seen,
}

impl Instance {
    /// Takes charge of a container whose first process is `init_pid`; `init` comes when runc is done with it. It is
    /// [`State::Moving`] until [`Instance::end_move`] if it has just come from another host.
    pub fn start(
        home: Home,
        init_pid: i32,
        init: impl Future<Output = anyhow::Result<Init>> + Send + 'static,
        arriving: bool,
    ) -> Arc<Self> {
        let instance = Self::take_over(home, init_pid, init, arriving);
        instance.keep_record();
        instance
    }

    /// It is an agent's that comes after this one.
    fn keep_record(&self) {
        let (home, init_pid) = (&self.home, self.init_pid);
        if let Err(error) = home.keep_record(init_pid, None) {
            tracing::warn!(instance = %home.record.name, error = format!("{error:#}"), "an agent that comes after \
                           this one will not know it");
        }
    }

    /// The same for one that an earlier agent has written down already; `moving` as `arriving` above.
    pub fn take_over(
        home: Home,
        init_pid: i32,
        init: impl Future<Output = anyhow::Result<Init>> + Send + 'static,
        moving: bool,
    ) -> Arc<Self> {
        let state = watch::Sender::new(if moving { State::Moving } else { State::Running });
        let settled = watch::Sender::new(false);
        let instance = Arc::new(Self {
            home,
            init_pid,
            state,
            settled,
            whole: watch::Sender::new(true),
            troubles: Default::default(),
        });
        machine::sizes::watch(&instance);
        let watched = Arc::clone(&instance);
        tokio::spawn(async move {
            let init = init.await;
            watched.settled.send_replace(true);
            let exit = async { anyhow::Ok(init?.wait_exit().await?) }.await;
            watched.state.send_if_modified(|state| {
                // The frozen tasks of one that has moved away are killed, which is no end of the instance.
                if !matches!(state, State::Running | State::Moving) {
                    return false;
                }
                *state = State::Exited(match exit {
                    Ok(Exit::Code(code)) => code,
                    Ok(Exit::Signal(signal)) => 128 + signal,
                    Err(error) => {
                        let error = format!("{error:#}");
                        tracing::warn!(instance = watched.name(), error, "its exit status is lost");
                        255
                    }
                });
                true
            });
            if matches!(watched.state(), State::Exited(_)) {
                let _ = tokio::task::spawn_blocking(move || {
                    watched.home.give_volumes_back();
                    watched.home.drop_ram();
                })
                .await;
            }
        });
        instance
    }

    /// Waits until runc is done with starting or restoring it: before that no other call of runc may name it.
    pub async fn settled(&self) {
        // The sender is part of self.
        let _ = self.settled.subscribe().wait_for(|settled| *settled).await;
    }

    /// Whether it takes room on this host: it runs here, or is frozen here.
    fn is_here(&self) -> bool {
        matches!(self.state(), State::Running | State::Moving)
    }

    /// Its share of this host's memory: all of a virtual machine's RAM, touched or not; a container's present
    /// use.
    pub fn promised(&self) -> u64 {
        match &self.home.record.machine {
            Some(guest) => guest.ram(),
            None => private::bytes_of_tree(self.init_pid),
        }
    }

    /// Part of its private memory has still to come, or all of it has.
    pub fn set_whole(&self, whole: bool) {
        self.whole.send_replace(whole);
    }

    /// Whether it has all of its private memory.
    pub fn is_whole(&self) -> bool {
        *self.whole.borrow()
    }

    /// Waits until it has all of its private memory: before that it can be neither written down nor sent.
    pub async fn whole(&self) {
        // The sender is part of self.
        let _ = self.whole.subscribe().wait_for(|whole| *whole).await;
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.home.record.name.as_str()
    }

    /// The first process, in the host's PID namespace.
    pub fn init_pid(&self) -> i32 {
        self.init_pid
    }

    /// What it is doing now.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// To wait for changes.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Begins to move it, if it runs and nobody else moves it.
    pub fn begin_move(&self) -> anyhow::Result<()> {
        let mut now = State::Running;
        let begun = self.state.send_if_modified(|state| {
            now = state.clone();
            let runs = *state == State::Running;
            if runs {
                *state = State::Moving;
            }
            runs
        });
        match now {
            _ if begun => Ok(()),
            State::Running | State::Moving => bail!(
                "{} is being moved already; wait until that has ended",
                self.name()
            ),
            State::Exited(status) => bail!("{} has ended with status {status}", self.name()),
            State::MovedTo(host) => bail!("{} lives on {host}; ask the agent there", self.name()),
        }
    }

    /// It stays after all.
    pub fn end_move(&self) {
        self.state.send_if_modified(|state| {
            let moving = *state == State::Moving;
            if moving {
                *state = State::Running;
            }
            moving
        });
    }

    /// The decision has been taken: it lives on `host`.
    pub fn moved(&self, host: &str) {
        self.state.send_replace(State::MovedTo(host.to_owned()));
    }
}

/// An instance of this host that its agent, which has just been started, has not taken over yet.
#[derive(Debug, Clone)]
pub struct Recovering {
    /// What it is.
    pub record: Record,
    /// Its first process.
    pub pid: i32,
    /// This host's part in a session of it.
    session: Option<(u64, Role)>,
}

/// All instances of this host, those included that have ended or moved away and were not forgotten yet.
#[derive(Default)]
pub struct Instances {
    known: Mutex<BTreeMap<String, Arc<Instance>>>,
    /// Those that are to be taken over, until they are known or gone.
    recovering: Mutex<BTreeMap<String, Recovering>>,
    /// Names whose places are being made or cleared.
    reserved: watch::Sender<BTreeMap<String, Held>>,
    /// Addresses of those that have left.
    pub away: Away,
}

impl Instances {
    /// None yet; these addresses are those of instances that have left.
    pub fn new(away: Away) -> Self {
        Self {
            away,
            ..Self::default()
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<Instance>>> {
        self.known.lock().expect("no panic under this lock")
    }

    fn recovering(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Recovering>> {
        self.recovering.lock().expect("no panic under this lock")
    }

    /// All of them, by name.
    pub fn all(&self) -> Vec<Arc<Instance>> {
        self.lock().values().cloned().collect()
    }

    /// The one of that name.
    pub fn get(&self, name: &str) -> Option<Arc<Instance>> {
        self.lock().get(name).cloned()
    }

    /// The one of that name, or an error that names those which are here.
    pub fn find(&self, name: &str) -> anyhow::Result<Arc<Instance>> {
        let known = self.lock();
        match known.get(name) {
            Some(instance) => Ok(Arc::clone(instance)),
            None if known.is_empty() => bail!("there is no instance {name} on this host, nor any other"),
            None => {
                let names: Vec<_> = known.keys().map(String::as_str).collect();
                bail!(
                    "there is no instance {name} on this host; there are: {}",
                    names.join(", ")
                )
            }
        }
    }

    /// Adds one.
    pub fn insert(&self, instance: Arc<Instance>) {
        self.lock().insert(instance.name().to_owned(), instance);
    }

    /// Forgets exactly this one.
    pub fn remove(&self, instance: &Arc<Instance>) {
        let mut known = self.lock();
        if known
            .get(instance.name())
            .is_some_and(|other| Arc::ptr_eq(other, instance))
        {
            known.remove(instance.name());
        }
    }
}

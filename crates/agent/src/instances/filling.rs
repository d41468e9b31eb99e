//! Private memory that comes to an instance while it runs: what [`verbatim_session::fill`] wants done.
//!
//! The destination has all of it before the decision, in `private/NAME`, and the tasks are restored without it. The processes of
//! [`verbatim_fill`] give it to them, from before they run until all of it is theirs. They outlive the agent; an agent
//! that comes after it finds them by their socket:
//!
//! | the journal | those processes | what that means | what is done |
//! | --- | --- | --- | --- |
//! | memory is missing | are there | it comes | wait |
//! | memory is missing | say, or have left word, that all is given, or that the tasks have ended | nothing is missing | that is noted, the folder is removed, then they end |
//! | memory is missing | are gone | what is missing would read as zeros | the instance is ended |
//! | nothing is missing | are there or not | | the folder is removed, then they end |
//! | does not say | | as above: memory is missing if the folder is there, or the socket | |
//!
//! What lies in memory ends with the machine, as the tasks do: of those of another boot nothing is missing.
//!
//! The RAM of a virtual machine that was left behind comes from another host ([`post_copy`]), by this agent itself: what is missing waits while there is
//! none, and is lost when that host says so.

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::oneshot;
use verbatim_container::Tasks;
use verbatim_fill::{Config, Error, Filler, Phase};
use verbatim_session::Role;
use verbatim_session::decision::Written;
use verbatim_session::fill::{Action, Event, Fill, State};
use verbatim_session::record::What;

use crate::agent::Shared;
use crate::instances::Instance;
use crate::instances::home::Paths;
use crate::instances::machine::post_copy::{self, Bringing, Progress};

/// How often it is said of a fill that it goes on.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// How long a restore that has ended is still listened to.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Where the socket of those processes is.
fn control(paths: &Paths) -> PathBuf {
    paths.work.join("filler.sock")
}

/// Starts them for tasks that are about to be restored.
pub fn start(agent: &Shared, paths: &Paths) -> anyhow::Result<Filler> {
    let config = Config {
        images: paths.images.clone(),
        cache: paths.private.clone(),
        work: paths.work.clone(),
        control: control(paths),
        log: paths.work.join("filler.log"),
    };
    Filler::start(&agent.config.program, &config).context("nobody can give the tasks their memory")
}

/// Ends them, if they are there: the tasks are gone, or nothing is missing.
pub fn give_up(paths: &Paths) {
    let given_up = Filler::find(&control(paths)).and_then(|found| found.map_or(Ok(()), Filler::give_up));
    if let Err(error) = given_up {
        tracing::warn!(
            work = %paths.work.display(),
            error = format!("{:#}", anyhow::Error::from(error)),
            "processes that give memory to tasks may be left behind"
        );
    }
}

/// Removes the folder of what is missing, if it is there: nothing is.
pub fn forget(paths: &Paths) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(&paths.private) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", paths.private.display()))
        }
        _ => Ok(()),
    }
}

/// Loses some of what has come, for a test that wants to see it missed: the middle of each task's longest run of pages.
pub fn lose_some(paths: &Paths) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(&paths.private)? {
        let file = File::options().read(true).write(true).open(entry?.path())?;
        let (mut at, mut longest) = (0, 0..0);
        while let Ok(begin) = seek(&file, SeekFrom::Data(at)) {
            at = seek(&file, SeekFrom::Hole(begin))?;
            if at - begin > longest.end - longest.start {
                longest = begin..at;
            }
        }
        let quarter = (longest.end - longest.start) / 4 / 4096 * 4096;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, flags, longest.start + quarter, quarter)?;
    }
    Ok(())
}

/// Who gives the tasks what they lack.
pub enum Giver {
    /// Processes of this host's, to the tasks of a container.
    Processes,
    /// The host that a virtual machine has left. There is nobody to bring it if that cannot come, or nothing is missing.
    Host(Option<Bringing>),
}

/// The tasks of an instance run without some of their memory; `session` has brought it here.
pub fn watch(agent: &Shared, instance: &Arc<Instance>, session: u64, giver: Giver) {
    if let Giver::Host(Some(bringing)) = &giver {
        let (instance, left_kib) = (instance.name(), bringing.left() >> 10);
        tracing::info!(
            instance,
            left_kib,
            "it runs, and the rest of its RAM comes from the host that it has left"
        );
    }
    Filling::spawn(agent, instance, Some(session), giver, Fill::begin());
}

/// The same for an instance that an earlier agent has left running.
pub fn take_over(agent: &Shared, instance: &Arc<Instance>) {
    let paths = &instance.home.paths;
    let (session, noted) = agent.journal.memory(instance.name());
    if !post_copy::record(paths).exists() {
        let traces = paths.private.exists() || control(paths).exists();
        Filling::spawn(
            agent,
            instance,
            session,
            Giver::Processes,
            Fill::recover(noted, traces),
        );
        return;
    }
    let bringing = Bringing::take_over(agent, paths, instance.init_pid()).unwrap_or_else(|error| {
        let (instance, error) = (instance.name(), format!("{error:#}"));
        tracing::error!(instance, error, "the RAM that it lacks cannot be brought");
        None
    });
    Filling::spawn(
        agent,
        instance,
        session,
        Giver::Host(bringing),
        Fill::recover(noted, true),
    );
}

/// What an instance still lacks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Missing {
    /// In bytes.
    pub bytes: u64,
    /// The host that has it, if that is not this one.
    pub from: Option<String>,
}

/// What an instance lacks that runs; `None` if it has all. Where nobody can say how much that is, it is said to be nothing.
pub async fn missing(instance: &Instance) -> Option<Missing> {
    if instance.is_whole() {
        return None;
    }
    let paths = instance.home.paths.clone();
    let missing = tokio::task::spawn_blocking(move || {
        if post_copy::record(&paths).exists() {
            let (bytes, host) = post_copy::missing(&paths)?;
            let from = Some(host);
            return anyhow::Ok(Missing { bytes, from });
        }
        let filler = Filler::find(&control(&paths))?;
        let pages = filler.map_or(Ok(0), |filler| filler.status().map(|status| status.pages_left))?;
        let bytes = pages * rustix::param::page_size() as u64;
        Ok(Missing { bytes, from: None })
    });
    let missing = missing.await.context("that panicked").and_then(|missing| missing);
    Some(missing.unwrap_or_else(|error| {
        let (instance, error) = (instance.name(), format!("{error:#}"));
        tracing::debug!(instance, error, "how much it lacks is not known");
        Missing::default()
    }))
}

/// Notes of sessions that nothing is missing to the tasks that they have brought here: those are gone. `is_here` says of an instance that it is, or may be.
pub fn note_what_is_gone(agent: &Shared, is_here: impl Fn(&str) -> bool) {
    for (session, instance) in agent.journal.filling() {
        if !is_here(&instance)
            && let Err(error) = agent.journal.write(session, Role::Destination, What::Filled)
        {
            tracing::warn!(instance, %error, "that its tasks are gone is not noted; the next agent tries again");
        }
    }
}

/// A fill, and what is done for it.
struct Filling {
    agent: Shared,
    instance: Arc<Instance>,
    /// Whose record it is noted in. There is none if records are missing.
    session: Option<u64>,
    giver: Giver,
    fill: Fill,
}

impl Filling {
    fn spawn(
        agent: &Shared,
        instance: &Arc<Instance>,
        session: Option<u64>,
        giver: Giver,
        (fill, actions): (Fill, Vec<Action>),
    ) {
        let filling = Self {
            agent: Arc::clone(agent),
            instance: Arc::clone(instance),
            session,
            giver,
            fill,
        };
        instance.set_whole(fill.is_whole());
        tokio::spawn(filling.run(actions.into()));
    }

    async fn run(mut self, mut actions: VecDeque<Action>) {
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Listen => self.listen().await,
                Action::Kill => Event::Killed {
                    gone: self.kill().await,
                },
                Action::Write => Event::Written(self.note().await),
                Action::Clear => Event::Cleared {
                    gone: self.clear().await,
                },
                Action::After(timer) => {
                    tokio::time::sleep(timer.duration()).await;
                    Event::Elapsed(timer)
                }
            };
            actions.extend(self.fill.handle(event));
            self.instance.set_whole(self.fill.is_whole());
        }
        debug_assert_eq!(self.fill.state(), State::Ended);
    }

    /// Until it is known how it ends.
    async fn listen(&self) -> Event {
        let ended = match &self.giver {
            Giver::Processes => self.processes().await,
            Giver::Host(bringing) => match bringing {
                Some(bringing) => match bringing.ended().await {
                    Progress::Lost(why) => Err(why),
                    Progress::Comes | Progress::Whole | Progress::Gone => Ok(()),
                },
                // Unless it is known what is missing, and nothing is.
                None if !post_copy::record(&self.instance.home.paths).exists() => Ok(()),
                None => Err("it cannot be brought".to_owned()),
            },
        };
        match ended {
            Ok(()) => Event::Filled,
            Err(why) => {
                tracing::error!(
                    instance = self.instance.name(),
                    "what gave it its memory was lost ({why}); it is ended, since it would go on with zeros"
                );
                Event::Lost
            }
        }
    }

    /// Until the processes say how it ends.
    async fn processes(&self) -> Result<(), String> {
        let control = control(&self.instance.home.paths);
        match Filler::find(&control) {
            Ok(Some(filler)) => wait(filler).await,
            // They take their socket away when they end in order.
            Ok(None) => Ok(()),
            Err(error) => Err(format!("{:#}", anyhow::Error::from(error))),
        }
    }

    /// Ends the tasks. Whether none is left.
    async fn kill(&self) -> bool {
        let home = &self.instance.home;
        if home.while_there(|_| ()).is_none() {
            return true;
        }
        // A frozen one, which is being moved, would have its memory: it is not frozen before.
        let tasks = Tasks::of(&self.agent.tools, &home.record.name, &home.paths.work);
        let killed = tasks.kill().await;
        if let Err(error) = &killed {
            tracing::error!(
                instance = self.instance.name(),
                error = format!("{error:#}"),
                "it cannot be ended; it is tried again"
            );
        }
        killed.is_ok()
    }

    /// Notes that nothing is missing.
    async fn note(&self) -> Written {
        let Some(session) = self.session else {
            return Written::Durable;
        };
        let journal = Arc::clone(&self.agent.journal);
        let write = move || journal.write(session, Role::Destination, What::Filled);
        match tokio::task::spawn_blocking(write).await {
            Ok(Ok(())) => Written::Durable,
            failed => {
                let instance = self.instance.name();
                tracing::error!(
                    instance,
                    ?failed,
                    "that it has all of its memory cannot be written down, and it does not move before; look after the disk of the journal"
                );
                Written::Failed
            }
        }
    }

    /// Removes what was kept for it, then ends those who gave it. Whether nothing is left.
    async fn clear(&mut self) -> bool {
        if let Giver::Host(bringing) = &mut self.giver
            && let Some(bringing) = bringing.take()
            && bringing.ended().await == Progress::Whole
            && let Err(error) = bringing.end().await
        {
            // Its QEMU may have ended just now.
            tracing::warn!(
                instance = self.instance.name(),
                error = format!("{error:#}"),
                "it has all of its RAM, and QEMU still has what waited for it"
            );
        }
        let instance = Arc::clone(&self.instance);
        let cleared = tokio::task::spawn_blocking(move || {
            let cleared = instance.home.while_there(|paths| {
                forget(paths)?;
                post_copy::forget(paths)?;
                give_up(paths);
                anyhow::Ok(())
            });
            cleared.unwrap_or(Ok(()))
        });
        let cleared = cleared.await.context("that panicked").and_then(|cleared| cleared);
        if let Err(error) = &cleared {
            tracing::warn!(
                instance = self.instance.name(),
                error = format!("{error:#}"),
                "it has all of its memory, and the room of it is not given back yet"
            );
        }
        cleared.is_ok()
    }
}

/// Why they will not give the tasks their memory; never ends if they do, or there is nobody.
pub async fn refused(filler: Option<&Filler>) -> String {
    let Some(filler) = filler.cloned() else {
        return std::future::pending().await;
    };
    let (sender, receiver) = oneshot::channel();
    let waiting = std::thread::Builder::new()
        .name("refused".to_owned())
        .stack_size(128 << 10)
        .spawn(move || {
            while !sender.is_closed() {
                match filler.wait(&Phase::Filled, Instant::now() + LOOK_EVERY) {
                    Ok(_) => return,
                    Err(Error::Phase(Phase::Lost(why) | Phase::Refused(why))) => {
                        let _ = sender.send(why);
                        return;
                    }
                    // Late, or one is replaced by another.
                    Err(_) => {}
                }
            }
        });
    match waiting.map(|_| receiver) {
        Ok(receiver) => match receiver.await {
            Ok(why) => why,
            Err(_) => std::future::pending().await,
        },
        Err(error) => format!("nobody can wait for their word: {error}"),
    }
}

/// Waits until nothing is missing, or for why what is missing cannot come; in a thread of its own: an agent that ends does not wait for it.
async fn wait(filler: Filler) -> Result<(), String> {
    let (sender, receiver) = oneshot::channel();
    let waiting = std::thread::Builder::new()
        .name("fill".to_owned())
        .stack_size(128 << 10)
        .spawn(move || {
            let _ = sender.send(wait_on(&filler));
        });
    match waiting {
        // The sender speaks before it is dropped.
        Ok(_) => receiver.await.unwrap_or(Err("waiting panicked".to_owned())),
        Err(error) => Err(format!("nobody can wait for it: {error}")),
    }
}

fn wait_on(filler: &Filler) -> Result<(), String> {
    loop {
        match filler.wait(&Phase::Filled, Instant::now() + TELL_EVERY) {
            Ok(_) => return Ok(()),
            Err(Error::Phase(Phase::Lost(why) | Phase::Refused(why))) => return Err(why),
            // They are not gone, and so nothing is lost yet.
            Err(error) => {
                let left = filler.status().ok();
                tracing::warn!(
                    control = %filler.control().display(),
                    pages_left = left.as_ref().map(|status| status.pages_left),
                    stalled = left.and_then(|status| status.stalled),
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "tasks are still being given their memory"
                );
            }
        }
    }
}

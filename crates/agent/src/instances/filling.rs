//! Private memory that comes to an instance while it runs.
//!
//! The destination has all of it before the decision, in `private/NAME`, and the tasks are restored without it. The processes of
//! [`verbatim_fill`] give it to them, from before they run until all of it is theirs. They outlive the agent; an agent
//! that comes after it finds them by their socket. The folder says how it stands:
//!
//! | the folder | those processes | what that means | what is done |
//! | --- | --- | --- | --- |
//! | is there | are there | memory is missing yet | wait |
//! | is there | say that all is given, or that the tasks have ended | nothing is missing | the folder is removed, then they end |
//! | is there | are gone | what is missing would read as zeros | the instance is ended |
//! | is not there | are there or not | nothing is missing | they end |
//!
//! So the removal of the folder is what is noted of the end. It lies in memory and ends with the machine, as the tasks do.

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::oneshot;
use verbatim_fill::{Config, Error, Filler, Phase};

use crate::agent::Shared;
use crate::instances::Instance;
use crate::instances::home::Paths;

/// The signal that ends an instance whose memory is lost.
const SIGKILL: i32 = 9;

/// How often it is said of a fill that it goes on.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// How a fill has ended.
#[derive(Debug)]
enum Ended {
    /// Nothing is missing any more.
    Filled,
    /// What is missing cannot come any more, for this reason.
    Lost(String),
}

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

/// The tasks of an instance run, and get their memory from this one.
pub fn watch(agent: &Shared, instance: &Arc<Instance>, filler: Filler) {
    instance.set_whole(false);
    tokio::spawn(until_whole(Arc::clone(agent), Arc::clone(instance), Some(filler)));
}

/// The same for an instance that an earlier agent has left running; nothing, if none of its memory is missing.
pub fn take_over(agent: &Shared, instance: &Arc<Instance>) {
    let paths = &instance.home.paths;
    if !paths.private.exists() {
        give_up(paths);
        return;
    }
    instance.set_whole(false);
    let filler = Filler::find(&control(paths)).unwrap_or_else(|error| {
        tracing::error!(
            instance = instance.name(),
            error = format!("{:#}", anyhow::Error::from(error)),
            "those who give it its memory do not answer"
        );
        None
    });
    tokio::spawn(until_whole(Arc::clone(agent), Arc::clone(instance), filler));
}

async fn until_whole(agent: Shared, instance: Arc<Instance>, filler: Option<Filler>) {
    let ended = match filler {
        Some(filler) => wait(filler).await,
        None => Ended::Lost("they are gone".to_owned()),
    };
    let paths = &instance.home.paths;
    match ended {
        Ended::Filled => match forget(paths) {
            Ok(()) => {
                let paths = paths.clone();
                let _ = tokio::task::spawn_blocking(move || give_up(&paths)).await;
            }
            // They stay, and say the same to the next agent.
            Err(error) => {
                tracing::warn!(
                    instance = instance.name(),
                    error = format!("{error:#}"),
                    "it has all of its memory, and the room of it is not given back"
                );
            }
        },
        Ended::Lost(why) => {
            tracing::error!(
                instance = instance.name(),
                "what gave it its memory was lost ({why}); it is ended, since it would go on with zeros"
            );
            let name = &instance.home.record.name;
            // A frozen one, which is being moved, would have its memory: it is not frozen before.
            if let Err(error) = agent.tools.runc().kill(name, SIGKILL).await {
                tracing::error!(instance = instance.name(), %error, "it cannot be ended; end it");
            }
        }
    }
    instance.set_whole(true);
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

/// Waits in a thread of its own: an agent that ends does not wait for it.
async fn wait(filler: Filler) -> Ended {
    let (sender, receiver) = oneshot::channel();
    let waiting = std::thread::Builder::new()
        .name("fill".to_owned())
        .stack_size(128 << 10)
        .spawn(move || {
            let _ = sender.send(wait_on(&filler));
        });
    match waiting {
        // The sender speaks before it is dropped.
        Ok(_) => receiver
            .await
            .unwrap_or(Ended::Lost("waiting panicked".to_owned())),
        Err(error) => Ended::Lost(format!("nobody can wait for it: {error}")),
    }
}

fn wait_on(filler: &Filler) -> Ended {
    loop {
        match filler.wait(&Phase::Filled, Instant::now() + TELL_EVERY) {
            Ok(_) => return Ended::Filled,
            Err(Error::Phase(Phase::Lost(why) | Phase::Refused(why))) => return Ended::Lost(why),
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

//! A small process that keeps RNIC connections for the agent of a session, in case that dies.
//!
//! An RNIC context lives as long as somebody holds its connection. While an instance is frozen, or not yet there, that is
//! its agent; with an agent that dies the instance's connections would go. So the agent gives a copy of each to a keeper
//! as soon as it has it, and an agent that comes after it fetches them there.
//!
//! ```text
//!  agent ── Keep(label) + descriptors ──► keeper      as often as there is something
//!  agent ── Take(n) ────────────────────► keeper      the n-th of what was kept, or nothing
//!  agent ── End ────────────────────────► keeper      it lets go of everything, and ends
//! ```
//!
//! It is the `verbatim` program under another name, and its socket lies in `keepers/` in the runtime folder, one for each
//! session. It ends for nothing but `End`: an operator who removes an agent for good ends it by hand.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Listener, Socket};

use crate::config::Config;
use crate::session::{decode, encode};

/// The name under which the program is a keeper.
pub const PROGRAM_NAME: &str = "verbatim-keeper";

/// The forms of these never change: the keeper may be of an earlier release than its agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    Keep(Vec<u8>),
    Take(u32),
    End,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Kept(Vec<u8>),
    Nothing,
}

/// The agent's end.
#[derive(Debug)]
pub struct Keeper {
    socket: Socket,
    path: PathBuf,
}

/// Something that was kept: what it is called, and the descriptors.
pub type Kept<T> = (T, Vec<OwnedFd>);

fn path(config: &Config, session: u64) -> PathBuf {
    config.runtime_dir.join("keepers").join(format!("{session:016x}"))
}

impl Keeper {
    /// Starts one for a session. Takes some ms.
    pub fn start(config: &Config, session: u64) -> anyhow::Result<Self> {
        let path = path(config, session);
        std::fs::create_dir_all(path.parent().expect("it has a folder"))?;
        let listener = Listener::bind(&path)?;
        let socket = Socket::connect(&path)?;
        let mut child = std::process::Command::new(&config.program)
            .arg0(PROGRAM_NAME)
            .stdin(Stdio::from(rustix::io::fcntl_dupfd_cloexec(&listener, 0)?))
            .stdout(Stdio::null())
            // What ends the agent, such as Ctrl-C, does not end its keepers.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start a keeper ({})", config.program.display()))?;
        // Reaped when it ends, which may be long after this session.
        std::thread::Builder::new()
            .name("keeper".to_owned())
            .stack_size(64 << 10)
            .spawn(move || child.wait())?;
        Ok(Self { socket, path })
    }

    /// That of a session which an earlier agent has begun, if there is one.
    pub fn find(config: &Config, session: u64) -> Option<Self> {
        let path = path(config, session);
        let socket = Socket::connect(&path).ok()?;
        Some(Self { socket, path })
    }

    fn call(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> anyhow::Result<(Answer, Vec<OwnedFd>)> {
        // Labels are as long as the connections are many.
        let answer = verbatim_channel::send(&self.socket, order, fds)
            .and_then(|()| verbatim_channel::recv::<Answer>(&self.socket));
        answer.context("the keeper of the session does not answer")
    }

    /// Keeps copies of `fds` under `label`.
    pub fn keep<T: Serialize>(&self, label: &T, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        match self.call(&Order::Keep(encode(label)), fds)?.0 {
            Answer::Done => Ok(()),
            other => bail!("the keeper answered {other:?}"),
        }
    }

    /// Copies of all that is kept, in order.
    pub fn take<T: DeserializeOwned>(&self) -> anyhow::Result<Vec<Kept<T>>> {
        let mut all = Vec::new();
        loop {
            match self.call(&Order::Take(all.len() as u32), &[])? {
                (Answer::Kept(label), fds) => all.push((decode(&label)?, fds)),
                (Answer::Nothing, _) => return Ok(all),
                (other, _) => bail!("the keeper answered {other:?}"),
            }
        }
    }

    /// Lets it go, with all that it keeps.
    pub fn end(self) {
        if let Err(error) = self.call(&Order::End, &[]) {
            tracing::warn!(error = format!("{error:#}"), "a keeper may be left behind");
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot be removed");
        }
    }
}

/// Ends the keepers of sessions that are over, which an agent that died may have left.
pub fn clear(runtime_dir: &Path, is_open: impl Fn(u64) -> bool) {
    let Ok(entries) = std::fs::read_dir(runtime_dir.join("keepers")) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let session = name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok());
        if session.is_some_and(&is_open) {
            continue;
        }
        let path = entry.path();
        match Socket::connect(&path) {
            Ok(socket) => Keeper { socket, path }.end(),
            Err(_) => {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// What the program does when it is started under the name [`PROGRAM_NAME`]: its standard input is the socket.
pub fn keeper_main() -> ! {
    let code = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(listener) => keep_on(&Listener::from_fd(listener)),
        Err(_) => 1,
    };
    std::process::exit(code)
}

/// Serves one agent after the other until one says that it is enough; the exit status.
fn keep_on(listener: &Listener) -> i32 {
    let mut kept: Vec<Kept<Vec<u8>>> = Vec::new();
    loop {
        let Ok(agent) = listener.accept() else { return 1 };
        while let Ok((order, fds)) = verbatim_channel::recv::<Order>(&agent) {
            let answered = match order {
                Order::Keep(label) => {
                    kept.push((label, fds));
                    verbatim_channel::send(&agent, &Answer::Done, &[])
                }
                Order::Take(index) => match kept.get(index as usize) {
                    Some((label, fds)) => {
                        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                        verbatim_channel::send(&agent, &Answer::Kept(label.clone()), &fds)
                    }
                    None => verbatim_channel::send(&agent, &Answer::Nothing, &[]),
                },
                Order::End => {
                    kept.clear();
                    let _ = verbatim_channel::send(&agent, &Answer::Done, &[]);
                    return 0;
                }
            };
            if answered.is_err() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn what_is_kept_outlives_the_agent_and_goes_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keeper");
        let listener = Listener::bind(&path).unwrap();
        let connect = || Keeper {
            socket: Socket::connect(&path).unwrap(),
            path: path.clone(),
        };
        let first = connect();
        let keeper = std::thread::spawn(move || keep_on(&listener));
        let (mut reader, writer) = std::io::pipe().unwrap();
        first
            .keep(&(7u32, "seven".to_owned()), &[writer.as_fd()])
            .unwrap();
        first.keep(&(8u32, "eight".to_owned()), &[]).unwrap();
        drop((first, writer));

        let second = connect();
        let mut kept: Vec<Kept<(u32, String)>> = second.take().unwrap();
        assert_eq!(kept[1].0, (8, "eight".to_owned()));
        let ((number, _), fds) = kept.remove(0);
        assert_eq!((number, fds.len()), (7, 1));
        for fd in fds {
            std::fs::File::from(fd).write_all(b"still there").unwrap();
        }
        second.end();
        assert_eq!(keeper.join().unwrap(), 0);
        // Nobody has the writing end any more.
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still there");
        assert!(!path.exists());
    }
}

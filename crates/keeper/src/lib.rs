//! A small process that keeps descriptors for a daemon, in case the daemon dies.
//!
//! The kernel destroys some objects with their last descriptor: the context of an RNIC, or a FUSE connection.
//! A daemon therefore gives copies of its descriptors to a keeper as soon as it has them, and the next daemon
//! takes them from there.
//!
//! ```text
//!  daemon ── Keep(label) + descriptors ──► keeper      for each set of descriptors
//!  daemon ── Take(n) ────────────────────► keeper      the n-th set, or nothing
//!  daemon ── End ────────────────────────► keeper      it closes everything, and ends
//! ```
//!
//! The keeper is the daemon's own program under another name, and listens at a path of the daemon's choice.
//! Only `End` ends it: an operator who removes a daemon for good ends its keeper by the daemon's command, or
//! by hand.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Error, Listener, Socket};

/// The name under which the program is a keeper.
pub const PROGRAM_NAME: &str = "verbatim-keeper";

/// This very program, also where another one has its path meanwhile.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Orders to the keeper. Their format never changes: the keeper may be of an earlier release than its daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Keep these descriptors under this label.
    Keep(Vec<u8>),
    /// Return copies of the set with this number; the first is 0.
    Take(u32),
    /// Close everything, and end.
    End,
}

/// The keeper's answer to an order.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The order was carried out.
    Done,
    /// The label of the set; its descriptors come along.
    Kept(Vec<u8>),
    /// There is no set with this number.
    Nothing,
}

/// The error of a keeper's answer to another order.
const UNASKED: &str = "the keeper answers what was not asked: is it of a release that works with this one?";

/// A kept set: its label, and the descriptors.
pub type Kept = (Vec<u8>, Vec<OwnedFd>);

/// The daemon's end of the connection.
#[derive(Debug)]
pub struct Keeper {
    socket: Socket,
    path: PathBuf,
}

impl Keeper {
    /// Starts a keeper that listens at this path, in place of one that has left its socket there. This takes
    /// some ms. The main function of `program` has to begin with [`run_role`].
    pub fn start(program: &Path, path: &Path) -> anyhow::Result<Self> {
        let listener = Listener::bind(path)?;
        let socket = Socket::connect(path)?;
        let mut child = Command::new(program)
            .arg0(PROGRAM_NAME)
            .current_dir("/")
            .stdin(Stdio::from(rustix::io::fcntl_dupfd_cloexec(&listener, 0)?))
            // A reader that waits for the end of the daemon's output must not wait for the keeper.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A signal that ends the daemon, such as Ctrl-C, must not end its keepers.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start a keeper ({})", program.display()))?;
        // The thread reaps the keeper when it ends, perhaps long after this.
        std::thread::Builder::new()
            .name("keeper".to_owned())
            .stack_size(64 << 10)
            .spawn(move || child.wait())?;
        Ok(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// Connects to the keeper at this path, if there is one.
    pub fn find(path: &Path) -> Option<Self> {
        let socket = Socket::connect(path).ok()?;
        Some(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// The same, with a limit for this wait and for each order: a keeper serves one daemon at a time.
    pub fn find_within(path: &Path, limit: Duration) -> Option<Self> {
        let socket = Socket::connect_within(path, Some(limit)).ok()?;
        Some(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// The same. An error if there may be a keeper that this process cannot reach, for example without free
    /// descriptors.
    pub fn look_within(path: &Path, limit: Duration) -> anyhow::Result<Option<Self>> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        match Socket::connect_within(path, Some(limit)) {
            Ok(socket) => Ok(Some(Self {
                socket,
                path: path.to_owned(),
            })),
            Err(verbatim_seqpacket::Error::Os { source, .. })
                if matches!(source.kind(), ConnectionRefused | NotFound) =>
            {
                Ok(None)
            }
            Err(error) => {
                Err(error).with_context(|| format!("cannot reach the keeper at {}", path.display()))
            }
        }
    }

    fn call(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> anyhow::Result<(Answer, Vec<OwnedFd>)> {
        // Labels may be long.
        let answer = verbatim_channel::send(&self.socket, order, fds)
            .and_then(|()| verbatim_channel::recv::<Answer>(&self.socket));
        answer.with_context(|| format!("the keeper at {} does not answer", self.path.display()))
    }

    /// Keeps copies of `fds` under `label`.
    pub fn keep(&self, label: Vec<u8>, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        match self.call(&Order::Keep(label), fds)?.0 {
            Answer::Done => Ok(()),
            Answer::Kept(_) | Answer::Nothing => bail!("{UNASKED}"),
        }
    }

    /// Copies of all that is kept, in order.
    pub fn take(&self) -> anyhow::Result<Vec<Kept>> {
        let mut all = Vec::new();
        loop {
            match self.call(&Order::Take(all.len() as u32), &[])? {
                (Answer::Kept(label), fds) => all.push((label, fds)),
                (Answer::Nothing, _) => return Ok(all),
                (Answer::Done, _) => bail!("{UNASKED}"),
            }
        }
    }

    /// A descriptor that hangs up when the keeper ends.
    pub fn watched(&self) -> std::io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }

    /// Ends the keeper, and closes everything that it keeps. A keeper that does not answer in time stays as
    /// it is: it may serve another process.
    pub fn end(self) {
        if let Err(error) = self.call(&Order::End, &[]) {
            tracing::warn!(error = format!("{error:#}"), "a keeper may be left behind");
            if matches!(error.downcast_ref::<Error>(), Some(Error::Late { .. })) {
                return;
            }
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot be removed");
        }
    }
}

/// Runs a keeper, and does not return, if the program was started under the name [`PROGRAM_NAME`]: its
/// standard input is the socket.
pub fn run_role() {
    if std::env::args_os().next().is_none_or(|name| name != PROGRAM_NAME) {
        return;
    }
    // The kernel may know the program by another path. Without the privileges nothing changes.
    let _ = rustix::thread::set_name(c"verbatim-keeper");
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let code = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(listener) => keep_on(&Listener::from_fd(listener)),
        Err(_) => 1,
    };
    std::process::exit(code)
}

/// Serves one daemon after the other until an order to end; returns the exit status.
fn keep_on(listener: &Listener) -> i32 {
    let mut kept: Vec<Kept> = Vec::new();
    loop {
        let Ok(daemon) = listener.accept() else { return 1 };
        while let Ok((order, fds)) = verbatim_channel::recv::<Order>(&daemon) {
            let answered = match order {
                Order::Keep(label) => {
                    kept.push((label, fds));
                    verbatim_channel::send(&daemon, &Answer::Done, &[])
                }
                Order::Take(index) => match kept.get(index as usize) {
                    Some((label, fds)) => {
                        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                        verbatim_channel::send(&daemon, &Answer::Kept(label.clone()), &fds)
                    }
                    None => verbatim_channel::send(&daemon, &Answer::Nothing, &[]),
                },
                // The order came while another process was served, and its sender has left.
                Order::End if has_hung_up(&daemon) => break,
                Order::End => {
                    kept.clear();
                    let _ = verbatim_channel::send(&daemon, &Answer::Done, &[]);
                    return 0;
                }
            };
            if answered.is_err() {
                break;
            }
        }
    }
}

fn has_hung_up(daemon: &Socket) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut one = [PollFd::new(daemon, PollFlags::empty())];
    poll(&mut one, Some(&now)).is_ok() && one[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn what_is_kept_outlives_the_daemon_and_goes_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keeper");
        let listener = Listener::bind(&path).unwrap();
        let first = Keeper::find(&path).unwrap();
        let keeper = std::thread::spawn(move || keep_on(&listener));
        let (mut reader, writer) = std::io::pipe().unwrap();
        first.keep(b"seven".to_vec(), &[writer.as_fd()]).unwrap();
        first.keep(b"eight".to_vec(), &[]).unwrap();
        drop((first, writer));

        let second = Keeper::find(&path).unwrap();
        let mut kept = second.take().unwrap();
        assert_eq!(kept[1].0, b"eight");
        let (label, fds) = kept.remove(0);
        assert_eq!((label.as_slice(), fds.len()), (b"seven".as_slice(), 1));
        for fd in fds {
            std::fs::File::from(fd).write_all(b"still there").unwrap();
        }
        second.end();
        assert_eq!(keeper.join().unwrap(), 0);
        // The writing end is closed everywhere.
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still there");
        assert!(!path.exists());
    }

    #[test]
    fn an_end_that_nobody_waits_for_any_more_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keeper");
        let listener = Listener::bind(&path).unwrap();
        let daemon = Keeper::find(&path).unwrap();
        let keeper = std::thread::spawn(move || keep_on(&listener));
        daemon.keep(b"seven".to_vec(), &[]).unwrap();
        // The other daemon is still connected, so this order waits in vain.
        let other = Keeper::find_within(&path, Duration::from_millis(50)).unwrap();
        other.end();
        drop(daemon);

        let next = Keeper::find(&path).unwrap();
        assert_eq!(next.take().unwrap().len(), 1);
        next.end();
        assert_eq!(keeper.join().unwrap(), 0);
        assert!(!path.exists());
    }
}

//! The RNIC's side: its questions, its answers.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::net::sockopt;
use tokio::sync::{Mutex, mpsc};
use verbatim_device::control::{PeerAnswer, PeerNews, PeerPair, PeerStanding, Reply, Request};
use verbatim_seqpacket::{Error as SocketError, Socket};

use crate::standby;

/// An RNIC answers sooner, or it hangs.
const LIMIT: Duration = Duration::from_secs(5);

/// What an RNIC gives.
pub enum Taken {
    /// Its questions, and what else other hosts are to hear, until it is gone.
    News(mpsc::Receiver<PeerNews>),
    /// Nothing: it is of an earlier release. A connection that ends when it does.
    TooOld(OwnedFd),
}

/// Takes the questions of the RNIC that is there, at most so many ahead.
pub fn take_questions(nic: &Path, ahead: usize) -> anyhow::Result<Taken> {
    let socket = standby::connect_within(nic, LIMIT)?;
    match socket.call::<_, Reply>(&Request::TakePeerQuestions, &[])?.message {
        Reply::Done => {}
        Reply::Error {
            errno: libc::EPROTO, ..
        } => return Ok(Taken::TooOld(socket.into_fd())),
        other => bail!("the RNIC asks nothing: {other:?}"),
    }
    // The next question may be long in coming.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, None).context("setsockopt")?;
    let (sender, receiver) = mpsc::channel(ahead);
    let read = move || {
        while let Ok(news) = socket.recv::<PeerNews>() {
            if sender.blocking_send(news.message).is_err() {
                return;
            }
        }
    };
    // Not one of the runtime's threads: it ends with the RNIC, or with this process.
    let thread = std::thread::Builder::new().name("peer-questions".to_owned());
    thread.spawn(read).context("cannot start a thread")?;
    Ok(Taken::News(receiver))
}

/// A connection for requests, opened at first use and kept while it works. One thread at a time waits for the RNIC, however many ask.
#[derive(Debug, Default)]
pub struct Rnic(Arc<Mutex<Option<Socket>>>);

impl Rnic {
    /// Gives the RNIC answers. If it is gone, so are its questions.
    pub async fn tell(&self, nic: &Path, answers: Vec<PeerAnswer>) {
        if answers.is_empty() {
            return;
        }
        match self.call(nic, Request::AnswerPeerQuestions { answers }).await {
            Ok(Reply::Done) => {}
            Ok(other) => tracing::warn!(reply = ?other, "the RNIC does not take answers"),
            Err(error) => tracing::debug!(error = format!("{error:#}"), "the RNIC does not take answers"),
        }
    }

    /// How its queue pairs stand to those of another host that name them; `None` if it cannot say.
    pub async fn meet(&self, nic: &Path, pairs: Vec<PeerPair>) -> anyhow::Result<Option<Vec<PeerStanding>>> {
        let count = pairs.len();
        match self.call(nic, Request::MeetPeers { pairs }).await? {
            Reply::PeerStandings(standings) if standings.len() == count => Ok(Some(standings)),
            Reply::Error {
                errno: libc::EPROTO, ..
            } => Ok(None),
            other => bail!("the RNIC does not say what its queue pairs name: {other:?}"),
        }
    }

    /// The other ends name these of its queue pairs no more: it sends nothing to them any more.
    pub async fn peers_gone(&self, nic: &Path, pairs: Vec<PeerPair>) -> anyhow::Result<()> {
        match self.call(nic, Request::PeersGone { pairs }).await? {
            // One of an earlier release was confirmed nothing.
            Reply::Done
            | Reply::Error {
                errno: libc::EPROTO, ..
            } => Ok(()),
            other => bail!("the RNIC does not hear of other ends that are gone: {other:?}"),
        }
    }

    /// The RNICs of the other ends have heard that these of its queue pairs are gone.
    pub async fn peers_heard(&self, nic: &Path, pairs: Vec<PeerPair>) {
        match self.call(nic, Request::PeersHeard { pairs }).await {
            Ok(Reply::Done) => {}
            Ok(other) => tracing::warn!(reply = ?other, "the RNIC does not hear that other hosts know"),
            Err(error) => tracing::debug!(
                error = format!("{error:#}"),
                "the RNIC does not hear that other hosts know"
            ),
        }
    }

    async fn call(&self, nic: &Path, request: Request) -> anyhow::Result<Reply> {
        let turn = Arc::clone(&self.0).lock_owned();
        let mut kept = tokio::time::timeout(LIMIT, turn)
            .await
            .map_err(|_| anyhow!("the RNIC has not answered what was asked before, in {LIMIT:?}"))?;
        let nic = nic.to_owned();
        let asked = tokio::task::spawn_blocking(move || ask(&mut kept, &nic, &request));
        asked.await.context("asking the RNIC panicked")?
    }
}

fn ask(kept: &mut Option<Socket>, nic: &Path, request: &Request) -> anyhow::Result<Reply> {
    // The kept one may be that of an RNIC which has ended.
    for attempt in 0..2 {
        let socket = match kept.take() {
            Some(socket) => socket,
            None => standby::connect_within(nic, LIMIT)?,
        };
        match socket.call::<_, Reply>(request, &[]) {
            Ok(received) => {
                *kept = Some(socket);
                return Ok(received.message);
            }
            // One that hangs is not waited for twice.
            Err(error @ SocketError::Late { .. }) => return Err(error.into()),
            Err(error) if attempt > 0 => return Err(error.into()),
            Err(_) => {}
        }
    }
    bail!("the RNIC is gone")
}

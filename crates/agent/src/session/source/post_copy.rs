//! Post-copy of a virtual machine: what rounds do not bring is left behind, and comes when the guest runs at the destination.
//!
//! ```text
//!  rounds, while they gain ─► which was written since (the guest runs; takes the destination a while)
//!                          ─► the rest of that (it stands still) ─► devices' state ─► the decision
//! ```
//!
//! What is left is kept ([`crate::behind`]) from when the guest stands still, since the devices' state is loaded with the help of it.

use anyhow::{Context, bail};
use tonic::transport::Channel;
use verbatim_tracking::Ranges;
use verbatim_vm::Rounds;

use super::Source;
use crate::memory::transport::Transport;
use crate::proto::LackRequest;
use crate::proto::peer_client::PeerClient;
use crate::protocol::POST_COPY;
use crate::session::told;

/// So many ranges are told in one message.
const RANGES: usize = 64 << 10;

impl Source {
    /// An error if post-copy was asked for and cannot be.
    pub(super) fn may_leave_behind(&self) -> anyhow::Result<()> {
        if !self.request.post_copy {
            return Ok(());
        }
        let to = &self.request.destination;
        match &self.record().machine {
            None => bail!(
                "post-copy is for virtual machines, and {} is a container; move it without --post-copy",
                self.instance.name()
            ),
            Some(guest) if guest.is_domain() => bail!(
                "post-copy is not for domains of libvirt's, which starts their QEMU; move {} without --post-copy",
                self.instance.name()
            ),
            Some(_) if !self.agent.peers.can(to, POST_COPY) => {
                bail!("the agent of {to} does not know post-copy; upgrade it, or move without --post-copy")
            }
            Some(_) => Ok(()),
        }
    }

    /// Rounds gain nothing: from now on what is written is left behind.
    pub(super) fn begin_to_leave_behind(&mut self) {
        self.left_behind = Some(Ranges::default());
        self.note(
            "rounds gain nothing: what is written from now on comes when the guest runs at the destination",
        );
    }

    /// What [`leave_some_behind`] does, when the guest stands still: the rest. The RAM is kept when this returns, and the destination may ask for what it lacks.
    pub(super) async fn leave_the_rest_behind(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        let machine = self.machine.as_mut().context("QEMU was not asked yet")?;
        let (ranges, behind) = of(&mut machine.rounds, Rounds::leave_last_behind).await?;
        self.agent.behinds.keep(self.session, &to, behind)?;
        self.left_behind.get_or_insert_default().union(&ranges);
        let last = Last {
            by_rdma: self.transport.transport == Transport::Rdma,
        };
        tell(self.session, &to, &ranges, Some(last), &mut self.destination()).await
    }
}

/// What was written since the last time is left behind; the guest runs.
pub(super) async fn leave_some_behind(
    (session, to): (u64, &str),
    rounds: &mut Option<Rounds>,
    left: &mut Ranges,
    destination: &mut PeerClient<Channel>,
) -> anyhow::Result<()> {
    let ranges = of(rounds, Rounds::leave_behind).await?;
    left.union(&ranges);
    tell(session, to, &ranges, None, destination).await
}

/// Asks the tracker something that takes a while. After an error nothing is tracked any more.
async fn of<T: Send + 'static>(
    rounds: &mut Option<Rounds>,
    ask: impl FnOnce(&mut Rounds) -> verbatim_vm::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let mut taken = rounds.take().context("the guest's RAM is not tracked")?;
    let asked = tokio::task::spawn_blocking(move || {
        let answer = ask(&mut taken);
        (taken, answer)
    });
    let (taken, answer) = asked.await.context("looking at the RAM panicked")?;
    let answer = answer?;
    *rounds = Some(taken);
    Ok(answer)
}

/// What is said with the last of what is left behind.
struct Last {
    /// It may be read by one-sided RDMA.
    by_rdma: bool,
}

async fn tell(
    session: u64,
    to: &str,
    ranges: &Ranges,
    last: Option<Last>,
    destination: &mut PeerClient<Channel>,
) -> anyhow::Result<()> {
    let all: Vec<_> = ranges.iter().collect();
    // An empty last one says at least that it is the last.
    let pieces = all.len().div_ceil(RANGES).max(usize::from(last.is_some()));
    for piece in 0..pieces {
        let of_piece = all.iter().skip(piece * RANGES).take(RANGES);
        let request = LackRequest {
            session,
            ranges: of_piece
                .flat_map(|range| [range.start, range.end - range.start])
                .collect(),
            complete: last.is_some() && piece + 1 == pieces,
            by_rdma: last.as_ref().is_some_and(|last| last.by_rdma),
        };
        told(to, "know what it lacks", destination.lack(request).await)?;
    }
    Ok(())
}

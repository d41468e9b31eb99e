//! Which requests of a connection that was stopped in the middle of them were executed.
//!
//! Both ends are stopped, so nothing is executed any more, and both say where they stand to the packet. The responder
//! executes in the order of PSNs: a request whose last PSN lies before the one that it expects is executed, any other is
//! not, or only in part. So each request that has no completion meets one of these fates:
//!
//! | request | executed | not, or in part |
//! | --- | --- | --- |
//! | SEND, WRITE, with immediate or invalidation or not, ATOMIC WRITE | completed | posted again, whole |
//! | ATOMIC | completed with the value that the responder still has; without it nobody can say | posted again |
//! | READ | posted again: its data is not here, and it may be executed twice (IBA §9.7.5) | posted again |
//! | BIND_MW, LOCAL_INV | completed | posted again |
//!
//! What comes of a message in part is not seen by the other end's program: its RECV is not complete, and memory that is
//! being written is undefined until then.
//!
//! Messages that consume RECVs are counted at both ends, by other means than PSNs; where the counts do not fit, nothing is
//! certain. An end in ERR executes nothing any more, and neither will its successor: what it has not executed may be posted
//! again without harm, and fails as it would have.

use verbatim_channel::QpProgress;
use verbatim_device::control::{QpPosition, QpState};
use verbatim_device::layout::{WR_ATOMIC_WRITE, WR_BIND_MW, WR_LOCAL_INV};

use crate::work::SendOpcode;

/// What becomes of a request that has no completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is posted again.
    Replay,
    /// It is only completed; of an ATOMIC, with what was in memory before it.
    Complete(Option<u64>),
}

/// Why the fates are not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Uncertain {
    #[error(
        "an ATOMIC (PSN {psn:#x}) was executed, and its original value is neither here nor at the other end any more"
    )]
    AtomicAnswer { psn: u32 },
    #[error(
        "the other end expects PSN {expected:#x}, which is not between the acknowledged {acknowledged:#x} and the \
         unsent {sent:#x}"
    )]
    Position {
        expected: u32,
        acknowledged: u32,
        sent: u32,
    },
    #[error(
        "of {sent} messages, {received} were received and {unexecuted} not executed, which does not fit together"
    )]
    Counts {
        sent: u64,
        received: u64,
        unexecuted: u64,
    },
    #[error("the RNIC and the guest library do not have the same requests")]
    Requests,
    #[error("nothing is known of the other end")]
    NoPeer,
}

/// PSNs have 24 bits: how far `psn` is behind `from`, negative if it is before it.
fn distance(psn: u32, from: u32) -> i32 {
    (psn.wrapping_sub(from) << 8) as i32 >> 8
}

/// Where an end stands, without those of its requests that are `decided`: an earlier stop found them executed, and they only
/// wait for their turn to be completed. They have no PSNs any more that could tell it once more.
pub fn undecided(own: &QpPosition, decided: &[bool]) -> Result<QpPosition, Uncertain> {
    if own.requests.len() > decided.len() {
        return Err(Uncertain::Requests);
    }
    let requests = own.requests.iter().zip(decided);
    let open = requests.filter(|(_, decided)| !**decided);
    Ok(QpPosition {
        requests: open.map(|(request, _)| *request).collect(),
        ..own.clone()
    })
}

/// What becomes of the requests with these opcodes, which are all that have no completion at the end that stands at `own`,
/// and that has sent so many messages in all.
pub fn fates(own: &QpPosition, opcodes: &[u8], sent: u64, peer: &QpProgress) -> Result<Vec<Fate>, Uncertain> {
    if own.requests.len() > opcodes.len() {
        return Err(Uncertain::Requests);
    }
    // One that was never in RTS has not sent anything, and has no PSNs to speak of.
    let sends = !matches!(own.state, QpState::Reset | QpState::Init | QpState::Rtr);
    let executed = distance(peer.expected_psn, own.acknowledged_psn);
    let plausible = (0..=distance(own.sent_psn, own.acknowledged_psn)).contains(&executed);
    if sends && !plausible && !peer.failed {
        return Err(Uncertain::Position {
            expected: peer.expected_psn,
            acknowledged: own.acknowledged_psn,
            sent: own.sent_psn,
        });
    }
    let mut fates = Vec::with_capacity(opcodes.len());
    for (index, opcode) in opcodes.iter().enumerate() {
        // Those behind them the RNIC has never looked at.
        let Some(request) = own.requests.get(index) else {
            fates.push(Fate::Replay);
            continue;
        };
        let end = distance(request.first_psn, own.acknowledged_psn) + request.packets as i32;
        let is_executed = match *opcode {
            WR_LOCAL_INV | WR_BIND_MW => request.executed,
            _ => plausible && request.packets > 0 && end <= executed,
        };
        fates.push(match SendOpcode::from_raw((*opcode).into()) {
            _ if !is_executed => Fate::Replay,
            Some(SendOpcode::Read) => Fate::Replay,
            Some(SendOpcode::CompareSwap | SendOpcode::FetchAdd) => {
                // The latest, since there may be one from before the PSNs went round.
                let mut latest = peer.atomics.iter().rev();
                let answer = latest.find(|(psn, _)| *psn == request.first_psn);
                match answer {
                    Some((_, Some(value))) => Fate::Complete(Some(*value)),
                    _ if peer.failed => Fate::Replay,
                    _ => {
                        let psn = request.first_psn;
                        return Err(Uncertain::AtomicAnswer { psn });
                    }
                }
            }
            Some(_) => Fate::Complete(None),
            // The RNIC would have refused it.
            None => return Err(Uncertain::Requests),
        });
    }
    let is_message = |opcode: &u8| {
        let known = SendOpcode::from_raw((*opcode).into());
        known.is_some_and(SendOpcode::is_two_sided)
    };
    let pairs = opcodes.iter().zip(&fates);
    let unexecuted = pairs
        .filter(|(opcode, fate)| is_message(opcode) && **fate == Fate::Replay)
        .count() as u64;
    if !peer.failed && peer.received + unexecuted != sent {
        return Err(Uncertain::Counts {
            sent,
            received: peer.received,
            unexecuted,
        });
    }
    Ok(fates)
}

const _: () = assert!(WR_ATOMIC_WRITE == SendOpcode::AtomicWrite as u8);

//! The states of a queue pair and why a change between them may be refused.

use serde::{Deserialize, Serialize};

use super::AttrMask;

/// `enum ibv_qp_state` (IBA §10.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum QpState {
    /// Just created, or brought back to that.
    #[default]
    Reset = 0,
    /// RECVs may be posted; nothing is sent or received.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drain: no new request is started.
    Sqd = 4,
    /// Send queue error: what is posted to send is flushed (never for RC).
    Sqe = 5,
    /// All requests are flushed.
    Err = 6,
}

impl QpState {
    /// Every state, by number.
    pub const ALL: [QpState; 7] = [
        QpState::Reset,
        QpState::Init,
        QpState::Rtr,
        QpState::Rts,
        QpState::Sqd,
        QpState::Sqe,
        QpState::Err,
    ];

    /// The state with this number of `enum ibv_qp_state`.
    pub fn from_code(code: u32) -> Option<QpState> {
        QpState::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// `enum ibv_qp_type`, those that there are rules for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
}

/// Why a modify was refused; the queue pair is as before. All of them are `EINVAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ModifyError {
    #[error("a queue pair cannot go from {from:?} to {to:?}")]
    NoSuchTransition { from: QpState, to: QpState },
    #[error("the queue pair is in {actual:?}, not in {claimed:?} as the request claims")]
    WrongCurrentState { claimed: QpState, actual: QpState },
    #[error("going from {from:?} to {to:?} needs also {missing:?}")]
    MissingAttributes {
        from: QpState,
        to: QpState,
        missing: AttrMask,
    },
    #[error("going from {from:?} to {to:?} does not take {unexpected:?}")]
    UnexpectedAttributes {
        from: QpState,
        to: QpState,
        unexpected: AttrMask,
    },
    #[error(
        "requests are still under way, so only RESET and ERR can follow, not {to:?}: wait for the queue to drain"
    )]
    Draining { to: QpState },
    #[error("{attribute:?} is {value}, and at most {max} is allowed")]
    ValueTooLarge {
        attribute: AttrMask,
        value: u32,
        max: u32,
    },
}

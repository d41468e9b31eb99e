//! How a new queue pair is taken to the state of another (IBA Vol 1 §11.2.5.2, table 91): which attributes go with which
//! step.

use crate::control::{QpAttrMask, QpState, QpType};

/// From RESET to INIT.
pub fn to_init(qp_type: QpType) -> QpAttrMask {
    let all = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    match qp_type {
        QpType::Rc | QpType::Uc => all | QpAttrMask::ACCESS_FLAGS,
        QpType::Ud => all | QpAttrMask::QKEY,
    }
}

/// From INIT to RTR, which connects it if it is of a connection.
pub fn to_rtr(qp_type: QpType) -> QpAttrMask {
    let connected =
        QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    match qp_type {
        QpType::Rc => connected | QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER,
        QpType::Uc => connected,
        QpType::Ud => QpAttrMask::STATE,
    }
}

/// From RTR to RTS.
pub fn to_rts(qp_type: QpType) -> QpAttrMask {
    let all = QpAttrMask::STATE | QpAttrMask::SQ_PSN;
    match qp_type {
        QpType::Rc => {
            all | QpAttrMask::TIMEOUT
                | QpAttrMask::RETRY_CNT
                | QpAttrMask::RNR_RETRY
                | QpAttrMask::MAX_QP_RD_ATOMIC
        }
        QpType::Uc | QpType::Ud => all,
    }
}

/// The way of a queue pair from RESET to `state`. There is none to SQE, which only an error leads to.
pub fn steps(qp_type: QpType, state: QpState) -> Option<Vec<(QpState, QpAttrMask)>> {
    let whole = [
        (QpState::Init, to_init(qp_type)),
        (QpState::Rtr, to_rtr(qp_type)),
        (QpState::Rts, to_rts(qp_type)),
        (QpState::Sqd, QpAttrMask::STATE),
    ];
    let count = match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts => 3,
        QpState::Sqd => 4,
        QpState::Err => return Some(vec![(QpState::Err, QpAttrMask::STATE)]),
        QpState::Sqe => return None,
    };
    Some(whole[..count].to_vec())
}

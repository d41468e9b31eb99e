//! Why something was refused.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a REJ was sent (IBA §12.6.7.2, table 109). Linux has the same numbers as the status of `RDMA_CM_EVENT_REJECTED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RejectReason(pub u16);

#[allow(missing_docs, reason = "the names are those of the table")]
impl RejectReason {
    pub const NO_QP: RejectReason = RejectReason(1);
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// The sender does not wait any more. Additional information: its CA GUID.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    pub const INVALID_COMM_ID: RejectReason = RejectReason(6);
    pub const INVALID_SERVICE_ID: RejectReason = RejectReason(8);
    pub const INVALID_TRANSPORT: RejectReason = RejectReason(9);
    /// The queue pair of the message is connected already.
    pub const STALE_CONNECTION: RejectReason = RejectReason(10);
    pub const INVALID_MTU: RejectReason = RejectReason(26);
    /// By the program.
    pub const CONSUMER: RejectReason = RejectReason(28);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            RejectReason::NO_QP => "no queue pair",
            RejectReason::NO_RESOURCES => "no resources",
            RejectReason::TIMEOUT => "timeout",
            RejectReason::INVALID_COMM_ID => "invalid communication ID",
            RejectReason::INVALID_SERVICE_ID => "invalid service ID",
            RejectReason::INVALID_TRANSPORT => "invalid transport service type",
            RejectReason::STALE_CONNECTION => "stale connection",
            RejectReason::INVALID_MTU => "invalid path MTU",
            RejectReason::CONSUMER => "consumer reject",
            RejectReason(other) => return write!(f, "reason {other}"),
        };
        f.write_str(text)
    }
}

/// What a SIDR_REP says (IBA §12.11.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SidrStatus(pub u8);

#[allow(missing_docs, reason = "the names are those of the table")]
impl SidrStatus {
    pub const VALID: SidrStatus = SidrStatus(0);
    pub const UNSUPPORTED_SERVICE: SidrStatus = SidrStatus(1);
    pub const REJECTED: SidrStatus = SidrStatus(2);
    pub const NO_QP: SidrStatus = SidrStatus(3);
    pub const REDIRECT: SidrStatus = SidrStatus(4);
    pub const UNSUPPORTED_VERSION: SidrStatus = SidrStatus(5);
}

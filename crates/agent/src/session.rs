//! Migration sessions.
//!
//! The source drives ([`source`]); the destination ([`destination`]) and the hosts of the partners ([`partner`]) do what
//! it asks and keep just enough to undo it. Up to the commit everything can be undone, by any of them failing.
//!
//! ```text
//!  source                          destination                      partners
//!  describe, open ───────────────► folder, sockets, network
//!  pre-copy ─────────────────────► files
//!  pre-setup ────────────────────► standby contexts, runc+CRIU      standby QPs
//!  suspend, drain                                                   suspend, drain
//!  (past its limit: stop, settle                                    stop, settle)
//!  (or, by the other method: stop and dump, nothing at the partners but their RNICs' knowing)
//!  quiesce, freeze, dump
//!  last pages, images ───────────► files; restore
//!  ── commit ────────────────────► resume, attach, gate             
//!  claim, switch ────────────────► claim                            switch
//!  resume ───────────────────────► resume                           resume
//!  reclaim, forwarding entry
//! ```

pub mod behind;
pub mod control;
pub mod deep;
pub mod destination;
pub mod driver;
pub mod made_again;
pub mod members;
pub mod open_files;
pub mod outcome;
pub mod partner;
pub mod recovery;
pub mod rnics;
pub mod source;
pub mod volumes;
pub mod watched;
mod writer;

use std::time::Duration;

use verbatim_channel::KeyPair;

use crate::agent::Changed;
use crate::peers::reason;
use crate::quotas;

/// The remote keys of each process of an instance, by PID.
pub type ProcessKeys = Vec<(u32, Vec<KeyPair>)>;

/// What came of letting requests reach the RNIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct Resumed {
    /// How many had been intercepted.
    pub intercepted: u64,
    /// An RNIC of these processes died on the way: they have lost their connections there.
    pub lost_rnic: bool,
}

impl Resumed {
    /// Both.
    pub fn and(self, other: Self) -> Self {
        Self {
            intercepted: self.intercepted + other.intercepted,
            lost_rnic: self.lost_rnic || other.lost_rnic,
        }
    }
}

/// How long a guest library may take for an order that waits for nothing.
const ORDER_TIMEOUT: Duration = Duration::from_secs(20);

/// The pause before another host is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// A call's failure in words, with whom it concerned; [`Changed`] if it was that there.
pub fn told<T>(
    who: &str,
    what: &str,
    result: Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<T> {
    match result {
        Ok(response) => Ok(response.into_inner()),
        Err(status) if status.code() == tonic::Code::Aborted => {
            let who = format!("a program on {who}");
            Err(Changed { who }.into())
        }
        Err(status) => anyhow::bail!("{who} could not {what}: {}", reason(&status)),
    }
}

/// Waits for an order's answer within [`ORDER_TIMEOUT`].
pub async fn in_time<T>(what: &str, order: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(ORDER_TIMEOUT, order)
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("{what} took longer than {ORDER_TIMEOUT:?}")))
}

/// Encodes what travels as bytes in a gRPC message.
pub fn encode<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("plain data can always be encoded")
}

/// Decodes it, if it takes no more memory than such a message may.
pub fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> anyhow::Result<T> {
    let most = verbatim_bounded::memory_of(bytes.len()).min(quotas::MESSAGE_MEMORY);
    verbatim_bounded::from_bytes(bytes, most).map_err(|error| {
        anyhow::anyhow!("a malformed message from another agent: {error}; are the versions equal?")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::status;

    #[test]
    fn what_a_program_has_changed_on_another_host_is_known_as_that() {
        let of = |error: anyhow::Error| told::<()>("peer", "prepare its connections", Err(status(&error)));
        let who = "process 1".to_owned();
        let changed = of(Changed { who }.into()).unwrap_err();
        assert!(changed.is::<Changed>(), "{changed}");
        assert!(changed.to_string().contains("a program on peer"), "{changed}");
        let other = of(anyhow::anyhow!("queue pair 5 does not exist")).unwrap_err();
        assert!(!other.is::<Changed>(), "{other}");
        assert!(other.to_string().contains("queue pair 5"), "{other}");
    }
}

//! Conformance: what others have written to test an RNIC with.
//!
//! | module | what runs |
//! | --- | --- |
//! | `suite` | rdma-core's own test suite, compared with what is expected and with the kernel's rxe |
//! | `pingpong` | the five `ibv_*_pingpong` |
//! | `perftest` | perftest's programs in all connection types |
//! | `by_address` | libfabric and QEMU, which connect by rdma_cm |
//! | `wire` | `tshark` decodes what they send |
//!
//! Cases that take long are marked as ignored; `make conformance` runs them too. docs/conformance.md tells more.

mod by_address;
mod perftest;
mod pingpong;
mod suite;
mod wire;

use crate::Test;

/// All of them.
pub fn tests() -> Vec<Test> {
    [
        suite::tests(),
        by_address::tests(),
        pingpong::tests(),
        perftest::tests(),
        wire::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

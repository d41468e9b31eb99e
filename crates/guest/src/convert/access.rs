//! `enum ibv_access_flags`.
//!
//! Hints (`IBV_ACCESS_OPTIONAL_RANGE`, relaxed ordering among them) may be ignored by their definition, and so may
//! `IBV_ACCESS_HUGETLB`, which promises something. Paging on demand is refused: `ibv_query_device_ex` says that it is not
//! there.

use verbatim_verbs::Access;

use crate::abi::*;
use crate::ffi::{Errno, unsupported};

fn known(access: u32) -> Result<Access, Errno> {
    Access::from_bits(access & !IBV_ACCESS_OPTIONAL_RANGE)
        .ok_or_else(|| unsupported("access flags beyond those of regions, windows and queue pairs"))
}

/// What the keys of a region may allow.
pub fn region_access(access: u32) -> Result<Access, Errno> {
    if access & IBV_ACCESS_ON_DEMAND != 0 {
        return Err(unsupported("paging on demand"));
    }
    known(access & !IBV_ACCESS_HUGETLB)
}

/// What the key of a window may allow.
pub fn window_access(access: u32) -> Result<Access, Errno> {
    known(access)
}

/// What a queue pair may let its peer do.
pub fn qp_access(access: u32) -> Result<Access, Errno> {
    known(access)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_ignored_and_paging_on_demand_is_refused() {
        let hints = (1 << 20) | IBV_ACCESS_HUGETLB;
        assert_eq!(
            region_access(IBV_ACCESS_LOCAL_WRITE | hints),
            Ok(Access::LOCAL_WRITE)
        );
        assert_eq!(region_access(IBV_ACCESS_ON_DEMAND), Err(Errno::NOT_SUPPORTED));
        assert_eq!(region_access(1 << 8), Err(Errno::NOT_SUPPORTED));
    }
}

//! Nothing but load, for `VERBATIM_SWAP_MINUTES` (1) each: on one and on two processors, where what is on the way of a page and who waits for it run
//! by turns, or at once. The kernel's detector of hung tasks and the programs' beats on the console decide.

use crate::guest::Test;
use crate::{guest, host};

const VARIABLE: &str = "VERBATIM_SWAP_MINUTES";

/// All of them.
pub const ALL: &[Test] = &[
    ("storm::guest_1", || guest::storm(1, seconds()?)),
    ("storm::guest_2", || guest::storm(2, seconds()?)),
    ("storm::host_1", || host::storm(1, seconds()?)),
    ("storm::host_2", || host::storm(2, seconds()?)),
];

fn seconds() -> anyhow::Result<u32> {
    let minutes = std::env::var(VARIABLE).ok().map(|text| text.parse::<u32>());
    Ok(minutes.transpose()?.unwrap_or(1) * 60)
}

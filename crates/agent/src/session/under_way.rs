//! How long what is under way takes: what wait-before-stop would wait for.

use std::time::Duration;

use futures_util::future::try_join_all;
use verbatim_channel::{Answer, Order, Scope};

use super::in_time;
use crate::guests::{Guest, unexpected};

/// The longest of these, in microseconds; `None` if it is longer than the limit.
pub async fn longest(
    ends: impl Iterator<Item = (&Guest, Scope)>,
    limit_ms: u32,
) -> anyhow::Result<Option<u64>> {
    let measured = ends.map(|(guest, scope)| async move {
        let order = guest.order(Order::MeasureDrain { scope, limit_ms }, Vec::new());
        match in_time("looking at what is under way", order).await?.0 {
            Answer::DrainMeasured { us } => Ok(us),
            other => Err(unexpected(&other, "DrainMeasured")),
        }
    });
    Ok(longest_of(try_join_all(measured).await?))
}

/// The same of several hosts.
pub fn longest_of(measured: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    measured
        .into_iter()
        .try_fold(0, |longest, us| Some(longest.max(us?)))
}

/// For a limit that is passed on in milliseconds.
pub fn in_milliseconds(limit: Duration) -> u32 {
    u32::try_from(limit.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_takes_too_long_is_longest() {
        assert_eq!(longest_of([]), Some(0));
        assert_eq!(longest_of([Some(3), Some(5), Some(4)]), Some(5));
        assert_eq!(longest_of([Some(3), None, Some(4)]), None);
    }
}

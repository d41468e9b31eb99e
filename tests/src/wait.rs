//! Waiting for what has no event.

use std::time::{Duration, Instant};

use anyhow::bail;

/// How often a condition is looked at. Looking is cheap, and two cores have better things to do.
const INTERVAL: Duration = Duration::from_millis(5);

/// Names how much more time everything takes here than on an ordinary machine: a number, for an emulated one.
const PATIENCE_VARIABLE: &str = "VERBATIM_TEST_PATIENCE";

/// What is `limit` on an ordinary machine, here.
pub fn patience(limit: Duration) -> Duration {
    let times = std::env::var(PATIENCE_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    limit * times.unwrap_or(1)
}

/// Looks until `look` finds something. After `limit` it fails and says that `what` has not come.
pub fn eventually<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {limit:?}");
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_late_is_found_and_what_never_comes_is_named() {
        let mut looks = 0;
        let found = eventually("the third look", Duration::from_secs(10), || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        });
        assert_eq!(found.unwrap(), 3);
        let never = eventually("a miracle", Duration::from_millis(1), || Ok(None::<()>));
        assert!(never.unwrap_err().to_string().contains("a miracle"));
    }
}

//! Limits for waits.

use std::time::Duration;

use crate::error::{Error, Result};

/// Waits for something, but not for longer than `limit`.
pub(crate) async fn in_time<T>(
    what: &str,
    limit: Duration,
    future: impl Future<Output = Result<T>>,
) -> Result<T> {
    let silent = || Error::Silent {
        what: what.to_owned(),
        limit,
    };
    tokio::time::timeout(limit, future).await.map_err(|_| silent())?
}

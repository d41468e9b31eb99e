//! Troubles of a virtual machine that is there, for its listing.
//!
//! QEMU is asked only for a listing. It serves one connection at a time, so it is asked seldom and briefly,
//! and other users of the connection wait no longer than that.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::{leaving, locks, qemu, standing};
use crate::instances::Instance;

/// Limit for QEMU's answer.
const LIMIT: Duration = Duration::from_secs(1);

/// Lifetime of an answer.
const FRESH: Duration = Duration::from_secs(1);

/// The last findings, and their time.
#[derive(Debug, Default)]
pub struct Seen(Mutex<Option<(Instant, Vec<String>)>>);

/// The troubles, in words. `asks`: QEMU may be asked now. Without an answer there are none.
pub async fn of(instance: &Instance, asks: bool) -> Vec<String> {
    let paths = &instance.home.paths;
    if instance.home.record.machine.is_none() {
        return Vec::new();
    }
    if let Some(why) = standing::why(paths) {
        // An operator may have let it run.
        let mended = standing::runs_already(paths, instance.init_pid());
        if !asks || !matches!(timeout(LIMIT, mended).await, Ok(Ok(true))) {
            return vec![format!("stands still: {why}")];
        }
    }
    let Ok(mut seen) = instance.troubles.0.try_lock() else {
        return Vec::new();
    };
    match &*seen {
        Some((since, troubles)) if since.elapsed() < FRESH => return troubles.clone(),
        _ => {}
    }
    // A move has the connection to QEMU, and waits for an answer.
    if !asks || !matches!(leaving::ran(paths), Ok(None)) {
        return Vec::new();
    }
    let asked = async {
        let machine = qemu::connect(paths, instance.init_pid()).await?;
        let mut troubles = machine.troubles().await?;
        if machine.status().await?.running {
            troubles.extend(locks::unprotected(paths, &machine)?);
        }
        anyhow::Ok(troubles)
    };
    let troubles = match timeout(LIMIT, asked).await {
        Ok(Ok(troubles)) => troubles,
        Ok(Err(error)) => {
            let error = format!("{error:#}");
            tracing::debug!(
                instance = instance.name(),
                error,
                "whether its guest is well is not known"
            );
            Vec::new()
        }
        Err(_) => Vec::new(),
    };
    *seen = Some((Instant::now(), troubles.clone()));
    troubles
}

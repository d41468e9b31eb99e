//! What is wrong with a virtual machine that is there, for whoever lists it.
//!
//! QEMU is asked when it is listed and not in between. It serves one connection, so it is asked seldom and for a moment; who asks for something else waits no
//! longer than that.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::{leaving, locks, qemu, standing};
use crate::instances::Instance;

/// How long QEMU may take to say it.
const LIMIT: Duration = Duration::from_secs(1);

/// How long it counts.
const FRESH: Duration = Duration::from_secs(1);

/// What was found last, and when.
#[derive(Debug, Default)]
pub struct Seen(Mutex<Option<(Instant, Vec<String>)>>);

/// What is wrong, in words. `asks`: nobody else has to do with its QEMU now. One that does not answer says nothing.
pub async fn of(instance: &Instance, asks: bool) -> Vec<String> {
    let paths = &instance.home.paths;
    if instance.home.record.machine.is_none() {
        return Vec::new();
    }
    if let Some(why) = standing::why(paths) {
        // Somebody may have let it run.
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
    // QEMU is being asked something already, and its answer is waited for.
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

//! A thread that lets go of connections: for that the RNIC is asked, which may hang, and the disk's thread must not wait for it.
//!
//! What is under way on a connection until the RNIC has heard that it is over harms nothing. READs land in a buffer that nobody reads any more. WRITEs
//! land at the server as long as its end is there, and the server takes that away before it makes the next one.

use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use super::Parts;

/// So many wait at most. While the RNIC hangs there is no new connection, so there are as many as servers, and those that a link had just made.
const MOST: usize = 16;

static REAPER: OnceLock<Option<SyncSender<Parts>>> = OnceLock::new();

/// Starts the thread, if there is none: before it is needed, when memory may be short.
pub(crate) fn start() {
    REAPER.get_or_init(|| {
        let (sender, receiver) = sync_channel::<Parts>(MOST);
        let started = std::thread::Builder::new()
            .name("reaper".to_owned())
            .stack_size(1 << 20)
            .spawn(move || receiver.into_iter().for_each(drop));
        match started {
            Ok(_) => Some(sender),
            Err(error) => {
                tracing::warn!("no thread to let go of connections: {error}");
                None
            }
        }
    });
}

/// Lets go of a connection, at once or later.
pub(crate) fn take(parts: Parts) {
    match REAPER.get() {
        Some(Some(reaper)) => match reaper.try_send(parts) {
            Ok(()) => {}
            // The RNIC takes them when this process ends.
            Err(TrySendError::Full(parts) | TrySendError::Disconnected(parts)) => std::mem::forget(parts),
        },
        _ => drop(parts),
    }
}

//! A thread that drops connections. A drop calls the RNIC, which may hang, and the disk's thread must not
//! wait for that.
//!
//! Requests that are in flight on a connection until the RNIC has closed it do no harm. READs land in a
//! buffer that is no longer read. WRITEs land at the server as long as its end of the connection exists, and
//! the server removes that end before it makes the next one.

use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use super::Parts;

/// Limit of the connections that wait. While the RNIC hangs no connection is made, so at most one per server
/// waits, and those that a link had just made.
const MOST: usize = 16;

static REAPER: OnceLock<Option<SyncSender<Parts>>> = OnceLock::new();

/// Starts the thread, if there is none: in time, since memory may be short later.
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
                tracing::warn!("no thread drops connections: {error}");
                None
            }
        }
    });
}

/// Drops a connection, in the thread if there is one.
pub(crate) fn take(parts: Parts) {
    match REAPER.get() {
        Some(Some(reaper)) => match reaper.try_send(parts) {
            Ok(()) => {}
            // The RNIC frees the resources when this process ends.
            Err(TrySendError::Full(parts) | TrySendError::Disconnected(parts)) => std::mem::forget(parts),
        },
        _ => drop(parts),
    }
}

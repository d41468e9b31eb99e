//! All volumes of a host, when its daemon starts: each is opened on a thread of its own.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::Daemon;
use crate::folder::Folder;

/// Limit for the start to wait for disks, all together. Slower disks are opened all the same, and other
/// volumes are served meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

impl Daemon {
    /// Opens all at once. A disk that hangs delays its own volume alone: orders about this volume, and other
    /// hosts that ask for it, wait for its lock.
    pub(super) async fn open_all(self: &Arc<Self>) -> anyhow::Result<()> {
        let mut opening = Vec::new();
        for name in Folder::names(&self.config.state_dir)? {
            let entry = self.entry(&name).await?;
            let (locked, is_locked) = oneshot::channel();
            let (opened, is_opened) = oneshot::channel();
            let (daemon, of, main) = (self.clone(), entry.clone(), Handle::current());
            let open = async move {
                let mut state = of.state.lock().await;
                // The receiver is gone if the daemon ends meanwhile.
                let _ = locked.send(());
                // A volume that fails leaves the others alone.
                daemon.take_up(&of, &mut state);
                drop(state);
                let _ = opened.send(());
            };
            match thread::Builder::new()
                .name("open".into())
                .spawn(move || main.block_on(open))
            {
                Ok(_) => {
                    // Orders find no volume before its thread has its lock.
                    is_locked.await?;
                    opening.push((entry, is_opened));
                }
                Err(error) => {
                    tracing::warn!("volume {name} has no thread to be opened by: {error}");
                    let mut state = entry.state.lock().await;
                    self.take_up(&entry, &mut state);
                }
            }
        }
        let end = Instant::now() + PATIENCE;
        for (entry, opened) in opening {
            let name = &entry.name;
            match timeout_at(end, opened).await {
                Ok(Ok(())) => {}
                // Without a look at it the volume would be taken for one that does not exist.
                Ok(Err(_)) => {
                    let mut state = entry.state.lock().await;
                    self.lose(&entry, &mut state, "the thread that opens it has panicked");
                }
                Err(_) => tracing::error!(
                    "volume {name} is not open after {} s: its disk does not answer, or has much to flush or to \
                     compare; the others are served, and this one is when that ends",
                    PATIENCE.as_secs()
                ),
            }
        }
        Ok(())
    }
}

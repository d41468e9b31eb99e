//! All volumes of a host, when its daemon starts: each is opened on a thread of its own.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::Daemon;
use crate::folder::Folder;

/// So long the start waits for disks, all together. Those that take longer are opened all the same, and the others are served meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

impl Daemon {
    /// Opens all at once. A disk that hangs holds up its own volume alone: orders about it, and other hosts that ask for it, wait for its lock.
    pub(super) async fn open_all(self: &Arc<Self>) -> anyhow::Result<()> {
        let mut opening = Vec::new();
        for name in Folder::names(&self.config.state_dir)? {
            let entry = self.entry(&name).await?;
            let (locked, is_locked) = oneshot::channel();
            let (opened, is_opened) = oneshot::channel();
            let (daemon, of, main) = (self.clone(), entry.clone(), Handle::current());
            let open = async move {
                let mut state = of.state.lock().await;
                // Nobody listens where the daemon ends meanwhile.
                let _ = locked.send(());
                // One that fails leaves the others alone.
                daemon.take_up(&of, &mut state);
                drop(state);
                let _ = opened.send(());
            };
            match thread::Builder::new()
                .name("open".into())
                .spawn(move || main.block_on(open))
            {
                Ok(_) => {
                    // Nobody finds a volume at which nobody has looked.
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
                // Nobody has looked at it, and it would be taken for a volume that is not there.
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

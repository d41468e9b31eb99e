//! What is asked of an instance's files and pages before it moves, and what is sent of them after CRIU's dump.

use std::sync::Arc;

use super::Source;
use crate::instances::Instance;
use crate::proto;

/// An image that CRIU writes where a file in use has lost the name by which it was opened.
const REMAPS: &str = "remap-fpath.img";

/// Huge pages of an instance's processes, as its destination is told.
pub async fn huge_pages(instance: &Arc<Instance>) -> anyhow::Result<Vec<proto::HugePages>> {
    if instance.home.record.machine.is_some() {
        return Ok(Vec::new());
    }
    let init = instance.init_pid();
    let pages = tokio::task::spawn_blocking(move || verbatim_container::huge_pages(init)).await?;
    // Who has ended has none.
    let pages = pages.unwrap_or_default().into_iter();
    Ok(pages
        .map(|(kib, pages)| proto::HugePages { kib, pages })
        .collect())
}

impl Source {
    /// Sends the names that CRIU's dump has given to files which had lost theirs.
    pub(super) async fn send_new_names(&mut self) -> anyhow::Result<()> {
        if self.instance.home.paths.images.join(REMAPS).exists() {
            let mut destination = self.destination();
            self.files.names(&mut destination).await?;
        }
        Ok(())
    }
}

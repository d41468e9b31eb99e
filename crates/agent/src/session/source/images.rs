//! CRIU's images, sent while CRIU writes them.
//!
//! Most of the bytes are in few files, the tasks' pages (`pages-N.img`). They leave while CRIU still writes others; what is left when
//! the last image is written are the small files. A file that is sent before it is complete is no harm: the last round compares all
//! of them with what was sent.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tonic::transport::Channel;

use super::pre_dump::PRE_DUMPS;
use crate::memory::send::Sender;
use crate::proto::file_part::Folder;
use crate::proto::peer_client::PeerClient;

/// A file of pages is sent when it is complete, and before that whenever the pages have grown by so many bytes.
const GROWN: u64 = 8 << 20;

/// The images of a dump: where they are, and what of them the destination has.
pub(super) struct Images {
    folder: PathBuf,
    sender: Sender,
    /// How many bytes of them were sent.
    pub(super) sent: u64,
}

impl Images {
    pub(super) fn new(session: u64, folder: &Path) -> Self {
        // Pre-dumps are there already.
        let mut sender =
            Sender::new(session, Folder::Images, folder.to_owned(), None).without(Path::new(PRE_DUMPS));
        sender.hurry();
        Self {
            folder: folder.to_owned(),
            sender,
            sent: 0,
        }
    }

    /// Sends pages while `dump` writes them; returns when it has ended, and with it what was begun to be sent.
    pub(super) async fn ahead<T>(
        &mut self,
        destination: &mut PeerClient<Channel>,
        dump: impl Future<Output = T>,
    ) -> (T, anyhow::Result<()>) {
        let mut written = match Written::watch(&self.folder) {
            Ok(written) => written,
            Err(error) => return (dump.await, Err(error)),
        };
        let ended = self.until_dumped(&mut written, destination, dump).await;
        // The last close of an inotify descriptor waits until no processor looks at its marks any more, some 10 ms.
        tokio::task::spawn_blocking(move || drop(written));
        ended
    }

    async fn until_dumped<T>(
        &mut self,
        written: &mut Written,
        destination: &mut PeerClient<Channel>,
        dump: impl Future<Output = T>,
    ) -> (T, anyhow::Result<()>) {
        tokio::pin!(dump);
        loop {
            let more = tokio::select! {
                biased;
                dumped = &mut dump => return (dumped, Ok(())),
                more = written.more() => more,
            };
            let sent = async {
                more?;
                self.rest(destination).await
            };
            tokio::pin!(sent);
            let (dumped, sent) = tokio::select! {
                biased;
                // What was begun is not cut off: the other side would take it for the end of its source.
                dumped = &mut dump => (Some(dumped), sent.await),
                sent = &mut sent => (None, sent),
            };
            match (dumped, sent) {
                (Some(dumped), sent) => return (dumped, sent),
                (None, Ok(())) => {}
                (None, Err(error)) => return (dump.await, Err(error)),
            }
        }
    }

    /// Sends what the destination does not have of what is there.
    pub(super) async fn rest(&mut self, destination: &mut PeerClient<Channel>) -> anyhow::Result<()> {
        self.sent += self.sender.round(destination).await?;
        Ok(())
    }
}

/// Tells what of the tasks' pages is written.
struct Written {
    folder: PathBuf,
    inotify: AsyncFd<OwnedFd>,
    /// How many bytes there were when it last said so.
    said: u64,
}

impl Written {
    fn watch(folder: &Path) -> anyhow::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let events = WatchFlags::CLOSE_WRITE | WatchFlags::MODIFY;
        inotify::add_watch(&inotify, folder, events).with_context(|| folder.display().to_string())?;
        // SAFETY: an owned descriptor stays open and the same until the registration, which is dropped first, is gone.
        let inotify = unsafe { AsyncFd::register(inotify) }?;
        Ok(Self {
            folder: folder.to_owned(),
            inotify,
            said: 0,
        })
    }

    /// Waits until a file of pages is complete, or all of them have grown by [`GROWN`] since the last time.
    async fn more(&mut self) -> anyhow::Result<()> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let mut buffer = [const { std::mem::MaybeUninit::uninit() }; 4096];
            let mut events = inotify::Reader::new(self.inotify.get_ref(), &mut buffer);
            let (mut is_complete, mut has_grown) = (false, false);
            loop {
                match events.next() {
                    Ok(event) => {
                        let name = event.file_name().map(std::ffi::CStr::to_bytes);
                        if name.is_some_and(|name| name.starts_with(b"pages-")) {
                            is_complete |= event.events().contains(ReadFlags::CLOSE_WRITE);
                            has_grown = true;
                        }
                    }
                    Err(Errno::WOULDBLOCK) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno).context("inotify"),
                }
            }
            ready.clear_ready();
            if !has_grown {
                continue;
            }
            let bytes = pages(&self.folder)?;
            if is_complete || bytes >= self.said + GROWN {
                self.said = bytes;
                return Ok(());
            }
        }
    }
}

/// How many bytes of pages there are in a folder of images.
fn pages(folder: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b"pages-") {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Duration;

    /// Whether more is told within some time.
    async fn tells(written: &mut Written, within: Duration) -> bool {
        tokio::time::timeout(within, written.more()).await.is_ok()
    }

    #[tokio::test]
    async fn pages_are_told_when_complete_or_grown_and_others_never() {
        const NEVER: Duration = Duration::from_millis(50);
        const LONG: Duration = Duration::from_secs(20);
        let folder = tempfile::tempdir().unwrap();
        let mut written = Written::watch(folder.path()).unwrap();
        std::fs::write(folder.path().join("core-1.img"), vec![1; 1 << 20]).unwrap();
        assert!(!tells(&mut written, NEVER).await);
        let mut file = std::fs::File::create(folder.path().join("pages-1.img")).unwrap();
        file.write_all(&[1; 4096]).unwrap();
        assert!(
            !tells(&mut written, NEVER).await,
            "it is neither complete nor large"
        );
        file.write_all(&vec![1; GROWN as usize]).unwrap();
        assert!(tells(&mut written, LONG).await);
        file.write_all(&[1; 4096]).unwrap();
        assert!(!tells(&mut written, NEVER).await, "it has not grown by much");
        drop(file);
        assert!(tells(&mut written, LONG).await);
        std::fs::write(folder.path().join("pages-2.img"), [2; 10]).unwrap();
        assert!(tells(&mut written, LONG).await);
    }
}

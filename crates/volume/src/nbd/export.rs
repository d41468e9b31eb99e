//! Exports that clients find at a server.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use crate::callers::{Place, Places};
use crate::volume::Volume;

/// One volume as a client finds it. An export may exist before the copy on this host serves: then a client is
/// welcomed, and its requests are not read until the copy serves.
#[derive(Clone)]
pub struct Export {
    length: u64,
    is_read_only: bool,
    connects_anew: bool,
    /// The size that the client was told.
    told: Option<u64>,
    /// Number of connections that were ended here and still carry out requests read before.
    ending: Arc<watch::Sender<usize>>,
    places: Option<Arc<Places>>,
    volume: watch::Receiver<Option<Arc<Volume>>>,
}

impl Export {
    /// An export of this length. Its volume comes later through the channel.
    pub fn later(length: u64, is_read_only: bool, volume: watch::Receiver<Option<Arc<Volume>>>) -> Self {
        Self {
            length,
            is_read_only,
            connects_anew: false,
            told: None,
            ending: Arc::new(watch::Sender::new(0)),
            places: None,
            volume,
        }
    }

    /// The same for clients that reconnect when their connection ends, and lose nothing by that.
    pub fn for_those_who_connect_anew(self) -> Self {
        Self {
            connects_anew: true,
            ..self
        }
    }

    /// The condition that ends the client's connection, if the client reconnects: another size. NBD tells a
    /// size only at the beginning of a connection.
    pub fn ends_unless(&self) -> Option<Ends> {
        let told = self.told.filter(|_| self.connects_anew)?;
        Some(Ends {
            told,
            ending: self.ending.clone(),
            is_counted: AtomicBool::new(false),
        })
    }

    /// The size in bytes; notes that the client was told.
    pub fn tell(&mut self) -> u64 {
        let length = self.length();
        self.told = Some(length);
        length
    }

    /// The size in bytes.
    pub fn length(&self) -> u64 {
        let volume = self.volume.borrow();
        volume.as_ref().map_or(self.length, |volume| volume.length())
    }

    /// The same, limited to as many clients as there are places.
    pub fn counted(self, places: Arc<Places>) -> Self {
        Self {
            places: Some(places),
            ..self
        }
    }

    /// A place for one more client; an error if none is left.
    pub fn place(&self, name: impl FnOnce() -> String) -> io::Result<Option<Place>> {
        match &self.places {
            None => Ok(None),
            Some(places) => match places.take(name) {
                Some(place) => Ok(Some(place)),
                None => Err(io::Error::other("there are too many clients of it")),
            },
        }
    }

    /// Whether clients may only read.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The volume as soon as it is served here; `None` if it never is.
    pub async fn served(mut self) -> Option<Arc<Volume>> {
        let served = self.volume.wait_for(Option::is_some).await;
        served.ok().and_then(|volume| volume.clone())
    }
}

/// A connection that ends when its volume gets another size.
///
/// The client resends its requests on a new connection, and may send later ones there once these are
/// answered. The new connection is therefore not read before the old one has handed its last request to the
/// volume: otherwise an old WRITE could undo a later one.
pub struct Ends {
    told: u64,
    ending: Arc<watch::Sender<usize>>,
    is_counted: AtomicBool,
}

impl Ends {
    /// Waits for the client's connections that have been ended before this one.
    pub async fn others_are_over(&self) {
        // The sender is part of self.
        let _ = self.ending.subscribe().wait_for(|ending| *ending == 0).await;
    }

    /// Returns when the connection has to end. From then on other connections wait until this is dropped.
    pub async fn is_due(&self, mut lengths: watch::Receiver<u64>) {
        let is_over = lengths.wait_for(|length| *length != self.told).await.is_err();
        if is_over {
            std::future::pending::<()>().await;
        }
        self.is_counted.store(true, Ordering::Relaxed);
        self.ending.send_modify(|ending| *ending += 1);
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if self.is_counted.load(Ordering::Relaxed) {
            self.ending.send_modify(|ending| *ending -= 1);
        }
    }
}

impl From<Arc<Volume>> for Export {
    fn from(volume: Arc<Volume>) -> Self {
        // The value stays in the channel when the sender is gone.
        let (_, receiver) = watch::channel(Some(volume));
        Self::later(0, false, receiver)
    }
}

/// The exports of a server.
pub trait Exports: Sync {
    /// The export of this name; the empty name is the default export.
    fn find(&self, name: &str) -> Option<Export>;
    /// All names.
    fn names(&self) -> Vec<String>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disks;
    use crate::store::Store;

    #[tokio::test]
    async fn a_connection_waits_for_those_that_were_ended_before_it() {
        let (grows, lengths) = watch::channel(4096_u64);
        let (_volume, later) = watch::channel(None);
        let mut export = Export::later(4096, false, later).for_those_who_connect_anew();
        assert!(export.ends_unless().is_none(), "nobody was told a size");
        assert_eq!(export.tell(), 4096);
        let first = export.ends_unless().expect("it was told");
        first.others_are_over().await;
        grows.send_replace(8192);
        first.is_due(lengths).await;
        let second = export.clone().ends_unless().expect("it was told");
        let moment = std::time::Duration::from_millis(20);
        let early = tokio::time::timeout(moment, second.others_are_over()).await;
        assert!(early.is_err(), "the first has requests still");
        drop(first);
        second.others_are_over().await;
    }

    #[tokio::test]
    async fn a_client_waits_until_its_volume_is_served_or_never_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 4096).expect("made");
        let volume = Volume::new(store, 4096, Disks::new(1), crate::faults::none);
        let at_once = Export::from(volume.clone());
        assert_eq!(at_once.length(), 4096);
        assert!(at_once.served().await.is_some());

        let (sender, receiver) = watch::channel(None);
        let later = Export::later(8192, false, receiver);
        assert_eq!(later.length(), 8192);
        let waiting = tokio::spawn(later.clone().served());
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        sender.send_replace(Some(volume.clone()));
        assert!(waiting.await.expect("it ends").is_some());
        assert_eq!(later.length(), 4096, "its own, from then on");

        let (sender, receiver) = watch::channel(None);
        let never = tokio::spawn(Export::later(8192, false, receiver).served());
        drop(sender);
        assert!(never.await.expect("it ends").is_none());
    }
}

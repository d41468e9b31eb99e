//! What clients find at a server.

use std::io;
use std::sync::Arc;

use tokio::sync::watch;

use crate::callers::{Place, Places};
use crate::volume::Volume;

/// One volume, as a client finds it. It may be there before its copy on this host serves: then the client is welcomed, and its requests
/// are not read before that.
#[derive(Clone)]
pub struct Export {
    length: u64,
    is_read_only: bool,
    connects_anew: bool,
    /// The size that the client was told.
    told: Option<u64>,
    places: Option<Arc<Places>>,
    volume: watch::Receiver<Option<Arc<Volume>>>,
}

impl Export {
    /// One of so many bytes, whose volume is yet to come from there.
    pub fn later(length: u64, is_read_only: bool, volume: watch::Receiver<Option<Arc<Volume>>>) -> Self {
        Self {
            length,
            is_read_only,
            connects_anew: false,
            told: None,
            places: None,
            volume,
        }
    }

    /// The same for clients that connect anew when their connection ends, and have nothing to lose by that.
    pub fn for_those_who_connect_anew(self) -> Self {
        Self {
            connects_anew: true,
            ..self
        }
    }

    /// The size that its client was told, if it connects anew. A size is said at the beginning of a connection alone: that one ends when it is another.
    pub fn ends_unless(&self) -> Option<u64> {
        self.told.filter(|_| self.connects_anew)
    }

    /// Its size in bytes, for a client that is told.
    pub fn tell(&mut self) -> u64 {
        let length = self.length();
        self.told = Some(length);
        length
    }

    /// Its size in bytes.
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

    /// A place for one more client; an error if there is none left.
    pub fn place(&self, name: impl FnOnce() -> String) -> io::Result<Option<Place>> {
        match &self.places {
            None => Ok(None),
            Some(places) => match places.take(name) {
                Some(place) => Ok(Some(place)),
                None => Err(io::Error::other("there are too many clients of it")),
            },
        }
    }

    /// Whether its clients may only read.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The volume as soon as it is served here; nothing if it never is.
    pub async fn served(mut self) -> Option<Arc<Volume>> {
        let served = self.volume.wait_for(Option::is_some).await;
        served.ok().and_then(|volume| volume.clone())
    }
}

impl From<Arc<Volume>> for Export {
    fn from(volume: Arc<Volume>) -> Self {
        // What was sent stays there when the sender is gone.
        let (_, receiver) = watch::channel(Some(volume));
        Self::later(0, false, receiver)
    }
}

/// What a client can see.
pub trait Exports: Sync {
    /// The export of that name; the empty name is the usual one.
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

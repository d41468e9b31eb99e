//! Ids that go, and ids that come.

use verbatim_roce::Time;

use super::Cm;
use crate::error::{AdoptError, Error};
use crate::image::IdImage;
use crate::num::{CommId, Gid, Owner};
use crate::talk::Kind;

impl Cm {
    /// Takes an id away: from now on it does nothing here, and what comes for it is [`crate::Outcome::Away`], until
    /// [`forget`](Cm::forget) or its return by [`adopt`](Cm::adopt).
    pub fn take(&mut self, now: Time, id: CommId) -> Result<IdImage, Error> {
        let image = self.image(now, id)?;
        if let Some(entry) = self.table.remove(id) {
            self.away.insert(id, entry.keys(), self.config.limits.away);
        }
        Ok(image)
    }

    /// An id as it would be taken; it stays.
    pub fn image(&self, now: Time, id: CommId) -> Result<IdImage, Error> {
        Ok(IdImage::of(now, id, self.owned(id)?))
    }

    /// Takes up an id, for this owner: it goes on where it was, timers included. `local` is the GID that it is to have here, if that
    /// is another; a listener that listens at one address then listens at that of `local`, too.
    pub fn adopt(
        &mut self,
        now: Time,
        owner: Owner,
        image: IdImage,
        local: Option<Gid>,
    ) -> Result<CommId, AdoptError> {
        let id = image.comm_id();
        if self.table.get(id).is_some() {
            return Err(AdoptError::Taken(id));
        }
        let entry = image.into_id(now, owner, local).map_err(AdoptError::Invalid)?;
        if self.has_room(owner).is_err() {
            return Err(AdoptError::TooManyIds);
        }
        if let Kind::Listener(listener) = &entry.kind
            && listener.all().iter().any(|listen| self.table.listens(listen))
        {
            return Err(AdoptError::InUse);
        }
        let keys = entry.keys();
        let peer = keys.peer.and_then(|(guid, remote)| self.table.peer(guid, remote));
        let asker = keys
            .asker
            .and_then(|(from, remote)| self.table.asker(from, remote));
        if let Some(holder) = peer.or(asker) {
            return Err(AdoptError::Taken(holder));
        }
        self.away.remove(id);
        let events = entry.events.len();
        self.table.insert(id, entry);
        self.notices.extend(std::iter::repeat_n(id, events));
        Ok(id)
    }

    /// The id that went away is not passed on to any more.
    pub fn forget(&mut self, id: CommId) {
        self.away.remove(id);
    }

    /// The peer of this id is at another GID now: what is sent goes there.
    pub fn peer_moved(&mut self, id: CommId, to: Gid) -> Result<(), Error> {
        self.owned_talk(id)?;
        self.table.update_talk(id, |talk, _| {
            talk.path.remote = to;
            if let Some(conn) = &mut talk.connection {
                conn.peer_moved = true;
            }
        });
        Ok(())
    }
}

//! Ids that go, and ids that come.

use verbatim_roce::Time;

use super::Cm;
use crate::error::{AdoptError, Error};
use crate::image::IdImage;
use crate::num::{CommId, Gid, Owner};
use crate::talk::{Id, Kind};

impl Cm {
    /// Takes an id away: from now on it does nothing here, and what comes for it is [`crate::Outcome::Away`], until
    /// [`forget`](Cm::forget) or its return by [`adopt`](Cm::adopt).
    pub fn take(&mut self, now: Time, id: CommId) -> Result<IdImage, Error> {
        let image = self.hold_one(now, id)?;
        self.away.let_go(id, None, self.config.limits.away);
        Ok(image)
    }

    fn hold_one(&mut self, now: Time, id: CommId) -> Result<IdImage, Error> {
        let image = self.image(now, id)?;
        if let Some(entry) = self.table.remove(id) {
            self.away.hold(id, entry.keys());
        }
        Ok(image)
    }

    /// All ids of an owner stand still: they do nothing here, and what comes for them is [`crate::Outcome::Away`], until they
    /// [return](Cm::give_back) or are [let go](Cm::let_go).
    pub fn hold(&mut self, now: Time, owner: Owner) -> Vec<IdImage> {
        let ids = self.ids_of(owner);
        let images = ids.into_iter().map(|id| self.hold_one(now, id));
        images.filter_map(Result::ok).collect()
    }

    /// Ids of [`Cm::hold`] go on where they were. What has been made meanwhile does not keep them from it, limits included.
    pub fn give_back(&mut self, now: Time, owner: Owner, images: impl IntoIterator<Item = IdImage>) {
        for image in images {
            let local = image.local();
            // Images of this place are valid.
            let _ = self.take_up_again(now, owner, image, local);
        }
    }

    /// Ids of [`Cm::hold`] do not come back; where to their messages are to be passed on, if that is known.
    pub fn let_go(&mut self, ids: impl IntoIterator<Item = CommId>, to: Option<Gid>) {
        for id in ids {
            self.away.let_go(id, to, self.config.limits.away);
        }
    }

    /// Where an id is that has gone away, if somebody has said so.
    pub fn place_of(&self, id: CommId) -> Option<Gid> {
        self.away.place(id)
    }

    /// Keeps a number free for an id that is to come. `Taken` if another id has it.
    pub fn reserve(&mut self, id: CommId) -> Result<(), AdoptError> {
        let free = self.table.get(id).is_none() && self.reserved.insert(id);
        if free { Ok(()) } else { Err(AdoptError::Taken(id)) }
    }

    /// The number may be given again.
    pub fn unreserve(&mut self, id: CommId) {
        self.reserved.remove(&id);
    }

    /// How many ids more this owner may have.
    pub fn room(&self, owner: Owner) -> usize {
        let limits = &self.config.limits;
        let of_all = limits.ids.saturating_sub(self.table.owned_count());
        let of_it = limits
            .ids_per_owner
            .saturating_sub(self.table.owned_count_by(owner));
        of_all.min(of_it)
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
        self.put_in(id, entry);
        Ok(id)
    }

    fn take_up_again(
        &mut self,
        now: Time,
        owner: Owner,
        image: IdImage,
        local: Option<Gid>,
    ) -> Result<(), AdoptError> {
        let id = image.comm_id();
        if self.table.get(id).is_some() {
            return Err(AdoptError::Taken(id));
        }
        let entry = image.into_id(now, owner, local).map_err(AdoptError::Invalid)?;
        self.put_in(id, entry);
        Ok(())
    }

    fn put_in(&mut self, id: CommId, entry: Id) {
        self.away.remove(id);
        self.reserved.remove(&id);
        let events = entry.events.len();
        self.table.insert(id, entry);
        self.notices.extend(std::iter::repeat_n(id, events));
    }

    /// The id that went away is not passed on to any more.
    pub fn forget(&mut self, id: CommId) {
        self.away.remove(id);
    }
}

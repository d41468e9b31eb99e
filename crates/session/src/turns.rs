//! Whose turn it is, where moves meet.
//!
//! Both ends of a connection may be asked to move at the same time. A connection has room for one session, so one waits
//! until the other has ended, and then goes on with the other end's new place:
//!
//! - a session that moves an instance *has* its connections from pre-setup to the end; so it has those that arrive;
//! - a session *joins* the instances at the other ends, each at its host, unless a session has one of them;
//! - to have an instance, a session waits until nobody has joined it.
//!
//! Of two that wait for each other, the one whose instance's name comes first [keeps](keeps) what it has; the other lets go of
//! everything and waits. So no ring of sessions can wait for each other: whoever keeps something waits only for a name that
//! comes later, and whoever lets go is in nobody's way.
//!
//! [`Turns`] is what one host knows of it. Who waits there asks again when something has changed.

use std::collections::{BTreeMap, BTreeSet};

/// A session that joined instances of this host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Part<Name> {
    /// The instance that moves.
    moving: Name,
    /// Those at the other ends.
    joined: BTreeSet<Name>,
}

/// All turns on one host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Turns<Name> {
    /// The sessions that have instances.
    having: BTreeMap<Name, u64>,
    parts: BTreeMap<u64, Part<Name>>,
}

impl<Name> Default for Turns<Name> {
    fn default() -> Self {
        Self {
            having: BTreeMap::new(),
            parts: BTreeMap::new(),
        }
    }
}

/// What became of the wish to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Joined<Name> {
    /// Nobody moves these instances while the session lasts.
    Yes,
    /// Another session has this one.
    Moving(Name),
}

/// Whether a session that moves `moving` keeps what it has while it waits for the one that moves `other`.
pub fn keeps<Name: Ord>(moving: &Name, other: &Name) -> bool {
    moving <= other
}

impl<Name: Ord + Clone> Turns<Name> {
    /// Has `instance` from now on, unless a session has it or has joined it.
    pub fn take(&mut self, instance: &Name, session: u64) -> bool {
        let is_free = !self.is_had(instance) && self.joined_by(instance).is_none();
        if is_free {
            self.have(instance, session);
        }
        is_free
    }

    /// Has an instance that nobody can have joined: it is just arriving here, or an earlier agent had begun to move it.
    pub fn have(&mut self, instance: &Name, session: u64) {
        self.having.insert(instance.clone(), session);
    }

    /// A session does not have `instance` any more.
    pub fn give_back(&mut self, instance: &Name, session: u64) {
        if self.having.get(instance) == Some(&session) {
            self.having.remove(instance);
        }
    }

    /// Joins `instances` on behalf of a session that moves `moving`.
    pub fn join(&mut self, session: u64, moving: &Name, instances: BTreeSet<Name>) -> Joined<Name> {
        let is_had = |instance: &&Name| self.having.get(instance).is_some_and(|other| *other != session);
        if let Some(instance) = instances.iter().find(is_had) {
            return Joined::Moving(instance.clone());
        }
        self.join_again(session, moving, instances);
        Joined::Yes
    }

    /// The same for a session of an earlier agent, which had joined them.
    pub fn join_again(&mut self, session: u64, moving: &Name, joined: BTreeSet<Name>) {
        let moving = moving.clone();
        self.parts.insert(session, Part { moving, joined });
    }

    /// A session has ended here, or lets go of what it has joined.
    pub fn leave(&mut self, session: u64) {
        self.parts.remove(&session);
    }

    /// The instance whose move has joined `instance`, or one of several.
    pub fn joined_by(&self, instance: &Name) -> Option<&Name> {
        let part = self.parts.values().find(|part| part.joined.contains(instance));
        part.map(|part| &part.moving)
    }

    /// An earlier session that moved `moving` and has not ended here.
    pub fn earlier(&self, session: u64, moving: &Name) -> Option<u64> {
        let mut others = self.parts.iter().filter(|(id, _)| **id != session);
        others.find(|(_, part)| part.moving == *moving).map(|(id, _)| *id)
    }

    /// Whether a session has `instance` here.
    pub fn is_had(&self, instance: &Name) -> bool {
        self.having.contains_key(instance)
    }

    /// An instance of this host that another session has.
    pub fn anyone(&self, session: u64) -> Option<&Name> {
        let mut others = self.having.iter().filter(|(_, other)| **other != session);
        others.next().map(|(instance, _)| instance)
    }

    /// Nobody has or has joined anything.
    pub fn is_empty(&self) -> bool {
        self.having.is_empty() && self.parts.is_empty()
    }
}

#[cfg(test)]
mod tests;

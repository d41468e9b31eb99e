//! A disk that goes to another host: the engine's state, for the engine there.

use crate::engine::Engine;
use crate::events::{Config, Quirk};
use crate::pages::Pages;

/// State of each page of a disk: whether it is zeros, and which copies have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map(Pages);

impl Map {
    /// The map of a disk of this many pages with unknown content: each page reads as an error until it is
    /// written.
    pub fn lost(pages: u64) -> Self {
        Self(Pages::lost(pages))
    }

    /// Length in bytes of the map of a disk with this many pages.
    pub fn bytes_of(pages: u64) -> u64 {
        3 * 8 * pages.div_ceil(64)
    }

    /// The same with the copies in exchanged order.
    pub fn exchanged(self) -> Self {
        Self(self.0.exchanged())
    }

    /// The bytes to send.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.words().flat_map(u64::to_le_bytes).collect()
    }

    /// Parses the bytes of [`Self::to_bytes`], for a disk of this many pages.
    pub fn from_bytes(pages: u64, bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
        let known = rest.is_empty().then(|| Pages::from_words(pages, &words))?;
        known.map(Self)
    }
}

impl Engine {
    /// Number of pages that only copies have that stay here. `goes`: whether each copy goes along.
    pub fn stays_behind(&self, goes: [bool; 2]) -> u64 {
        self.pages().only_elsewhere(goes)
    }

    /// The state for the engine of another host. `None` while a slot is in use, or if a page would stay
    /// behind.
    pub fn hand_over(&self, goes: [bool; 2]) -> Option<Map> {
        let is_careless = self.config().quirk == Some(Quirk::LeavesBehind);
        if !self.is_idle() || (self.stays_behind(goes) > 0 && !is_careless) {
            return None;
        }
        let mut pages = self.pages().clone();
        for copy in crate::Copy::BOTH.into_iter().filter(|copy| !goes[copy.index()]) {
            pages.forget(copy);
        }
        Some(Map(pages))
    }

    /// The engine of a disk that has come from another host. No copy is there yet. `map` is outdated once the
    /// other engine has gone on.
    pub fn taken_over(config: Config, map: Map) -> Self {
        assert_eq!(map.0.count(), config.pages, "the map of another disk");
        Self::with_pages(config, map.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Action, Copy, Event, Extent, Op};

    const CONFIG: Config = Config {
        pages: 70,
        slots: 4,
        slot_pages: 4,
        quirk: None,
    };

    fn write(engine: &mut Engine, page: u64, copies: &[Copy]) {
        let extent = Extent { page, count: 1 };
        let mut actions = Vec::new();
        let (slot, op) = (0, Op::Write);
        engine.handle(Event::Request { slot, op, extent }, &mut actions);
        for copy in Copy::BOTH {
            let result = if copies.contains(&copy) { Ok(()) } else { Err(28) };
            engine.handle(Event::WriteDone { slot, copy, result }, &mut actions);
        }
        assert!(
            actions
                .iter()
                .any(|action| matches!(action, Action::Release { .. }))
        );
    }

    fn both() -> Engine {
        let mut engine = Engine::new(CONFIG);
        for copy in Copy::BOTH {
            engine.handle(Event::Up { copy, kept: false }, &mut Vec::new());
        }
        engine
    }

    #[test]
    fn what_one_engine_knows_the_next_one_knows() {
        let mut engine = both();
        write(&mut engine, 3, &Copy::BOTH);
        write(&mut engine, 69, &[Copy::First]);
        let map = engine.hand_over([true, false]).expect("nothing stays behind");
        let bytes = map.to_bytes();
        assert_eq!(bytes.len() as u64, Map::bytes_of(CONFIG.pages));
        assert_eq!(Map::from_bytes(CONFIG.pages, &bytes), Some(map));
        for wrong in [&bytes[1..], &bytes[8..], &[]] {
            assert_eq!(Map::from_bytes(CONFIG.pages, wrong), None);
        }
        let map = Map::from_bytes(CONFIG.pages, &bytes).expect("as before");
        let counts = Engine::taken_over(CONFIG, map.clone().exchanged()).counts();
        assert_eq!((counts.zero, counts.second_only, counts.first_only), (68, 2, 0));
        let counts = Engine::taken_over(CONFIG, map).counts();
        assert_eq!((counts.zero, counts.first_only, counts.both), (68, 2, 0));
    }

    #[test]
    fn a_page_that_would_stay_behind_keeps_the_disk_here() {
        let mut engine = both();
        write(&mut engine, 5, &[Copy::Second]);
        assert_eq!(engine.stays_behind([true, false]), 1);
        assert_eq!(engine.hand_over([true, false]), None);
        assert!(engine.hand_over([true, true]).is_some());
        assert!(engine.hand_over([false, true]).is_some());
    }

    #[test]
    fn while_something_is_under_way_nothing_is_handed_over() {
        let mut engine = both();
        let extent = Extent { page: 0, count: 1 };
        let (slot, op) = (1, Op::Write);
        engine.handle(Event::Request { slot, op, extent }, &mut Vec::new());
        assert_eq!(engine.hand_over([true, true]), None);
    }

    #[test]
    fn of_what_is_not_known_nothing_is_zeros() {
        let counts = Engine::taken_over(CONFIG, Map::lost(CONFIG.pages)).counts();
        assert_eq!((counts.zero, counts.neither), (0, 70));
    }
}

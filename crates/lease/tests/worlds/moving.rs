//! A disk that goes to another host, when no slot is in use.

use verbatim_lease::{Copy, Engine, Map};

use super::steps::Memory;
use super::{Outside, PAGES, Rules, World};

impl World {
    /// Copies that go along.
    pub(super) fn goes(&self, rules: &Rules<'_>) -> [bool; 2] {
        Copy::BOTH.map(|copy| rules.is_server(copy) && self.copies[copy.index()].is_up)
    }

    fn map(&self, goes: [bool; 2]) -> Result<Map, String> {
        let is_there = [self.copies[0].is_up, self.copies[1].is_up];
        for page in 0..PAGES {
            if self.history.is_held(page, is_there) && !self.history.is_held(page, goes) {
                return Err(format!("page {page} stays behind"));
            }
        }
        let map = self.engine.hand_over(goes).ok_or("it cannot go")?;
        Map::from_bytes(PAGES, &map.to_bytes()).ok_or_else(|| "its map is not read".to_owned())
    }

    /// It goes; `lost` are servers that lose their memory before they give it to the next host.
    pub(super) fn moved(&mut self, lost: [bool; 2], rules: &Rules<'_>) -> Result<(), String> {
        self.moves -= 1;
        let goes = self.goes(rules);
        let map = self.map(goes)?;
        self.begins_there(goes, lost, map, rules)
    }

    fn begins_there(
        &mut self,
        goes: [bool; 2],
        lost: [bool; 2],
        map: Map,
        rules: &Rules<'_>,
    ) -> Result<(), String> {
        self.engine = Engine::taken_over(rules.config(), map);
        for copy in Copy::BOTH {
            let at = copy.index();
            self.copies[at].down(0, false);
            if goes[at] && !lost[at] {
                self.up(copy, Memory::Same, rules)?;
            } else if goes[at] || !rules.is_server(copy) {
                self.up(copy, Memory::New, rules)?;
            } else {
                // Its content does not count any more.
                self.history.memory_lost(at);
            }
        }
        Ok(())
    }

    /// The session is committed, and no server gives the disk to its next host.
    pub(super) fn lost(&mut self, rules: &Rules<'_>) -> Result<(), String> {
        self.moves -= 1;
        self.history.all_lost();
        self.engine = match rules.outside {
            Some(Outside::LostIsNew) => Engine::new(rules.config()),
            _ => Engine::taken_over(rules.config(), Map::lost(PAGES)),
        };
        for copy in Copy::BOTH {
            self.copies[copy.index()].down(0, false);
            self.up(copy, Memory::New, rules)?;
        }
        Ok(())
    }

    /// A server has lost its memory since the hand-over, and is adopted as if it had not. (Otherwise the move
    /// is rolled back, which is what a server that dies is without a move.)
    pub(super) fn adopts_lost(&mut self, copy: Copy, rules: &Rules<'_>) -> Result<(), String> {
        self.moves -= 1;
        let goes = self.goes(rules);
        let map = self.map(goes)?;
        self.down(copy, 0, rules)?;
        self.up(copy, Memory::New, rules)?;
        self.begins_there(goes, [false; 2], map, rules)
    }
}

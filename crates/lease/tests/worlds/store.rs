//! A copy: its pages, and its requests in flight.

use verbatim_lease::{Extent, SlotId};

use super::{Data, PAGES};

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Work {
    pub slot: SlotId,
    pub extent: Extent,
    /// The data of a write.
    pub data: Option<Data>,
}

#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Store {
    pub pages: [u64; PAGES as usize],
    /// Pages that cannot be read until they are written again.
    pub bad: [bool; PAGES as usize],
    pub is_up: bool,
    /// It is about to leave.
    pub leaves: bool,
    /// It was told that it may leave, and has not yet.
    pub may_leave: bool,
    /// It has left: the next one has other memory.
    pub has_left: bool,
    /// In the order in which they were given.
    pub work: Vec<Work>,
    /// Writes from before the copy was given up that may still land.
    pub late: Vec<Work>,
    /// Content from before the writes that are in a page cache only.
    pub cached: Vec<(u64, u64)>,
    /// Earlier content.
    pub old: Option<[u64; PAGES as usize]>,
}

impl Store {
    pub fn is_bad(&self, extent: Extent) -> bool {
        extent.pages().any(|page| self.bad[page as usize])
    }

    /// Writes the first `count` pages of the extent.
    pub fn write(&mut self, extent: Extent, data: &Data, count: u64) {
        for (page, version) in extent.pages().zip(data).take(count as usize) {
            self.pages[page as usize] = *version;
            self.bad[page as usize] = false;
        }
    }

    /// Notes the present content, for [`Self::forget_cached`].
    pub fn cache(&mut self, extent: Extent) {
        let pages = extent.pages().map(|page| (page, self.pages[page as usize]));
        self.cached.extend(pages);
    }

    /// The page cache drops pages that it could not write, and has the disk's content.
    pub fn forget_cached(&mut self) {
        for (page, before) in std::mem::take(&mut self.cached).into_iter().rev() {
            self.pages[page as usize] = before;
        }
    }

    /// Number of ways in which the writes in flight may end when the copy is down: of each write some of the
    /// first pages are written.
    pub fn ends(&self) -> u16 {
        let writes = self.work.iter().filter(|work| work.data.is_some());
        writes.map(|work| work.extent.count as u16 + 1).product()
    }

    /// The copy is down: its answers are lost, and its writes in flight have this one of [`Self::ends`]. Nobody
    /// reads the copy before it is up again, so that it is all the same when they land in between. Writes of
    /// which no page was written are kept if they may still land later.
    pub fn down(&mut self, mut end: u16, lands_late: bool) {
        self.is_up = false;
        (self.leaves, self.may_leave) = (false, false);
        for work in std::mem::take(&mut self.work) {
            let Some(data) = work.data else { continue };
            let ways = work.extent.count as u16 + 1;
            let count = u64::from(end % ways);
            end /= ways;
            self.write(work.extent, &data, count);
            if lands_late && count == 0 {
                self.late.push(work);
            }
        }
    }

    /// The copy is up, with the same memory or with other memory.
    pub fn up(&mut self, kept: bool) {
        self.is_up = true;
        self.has_left = false;
        if !kept {
            self.pages = Default::default();
            self.bad = Default::default();
        }
    }
}

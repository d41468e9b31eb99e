//! A copy: its pages, and its requests in flight.

use rand::Rng;
use rand::rngs::SmallRng;
use verbatim_lease::{Extent, SlotId};

pub struct Work {
    pub slot: SlotId,
    pub extent: Extent,
    pub is_write: bool,
    pub data: Vec<u64>,
}

pub struct Store {
    pub pages: Vec<u64>,
    pub is_up: bool,
    work: Vec<Work>,
    /// Writes from before the copy was given up: they may still land.
    late: Vec<Work>,
    /// Pages that cannot be read until they are written again.
    bad: Vec<bool>,
    /// Content from before the writes that are in a page cache only.
    cached: Vec<(u64, u64)>,
}

impl Store {
    pub fn new(pages: u64) -> Self {
        Self {
            pages: vec![0; pages as usize],
            is_up: false,
            work: Vec::new(),
            late: Vec::new(),
            bad: vec![false; pages as usize],
            cached: Vec::new(),
        }
    }

    pub fn is_bad(&self, extent: Extent) -> bool {
        extent.pages().any(|page| self.bad[page as usize])
    }

    /// The disk behind the copy fails there: some of the pages cannot be read any more.
    pub fn spoil(&mut self, extent: Extent, random: &mut SmallRng) {
        for page in extent.pages() {
            self.bad[page as usize] |= random.random::<bool>();
        }
    }

    /// The page cache drops pages that it could not write, and has the disk's content.
    pub fn forget_cached(&mut self) {
        for (page, before) in std::mem::take(&mut self.cached).into_iter().rev() {
            self.pages[page as usize] = before;
        }
    }

    /// Notes the present content, for [`Self::forget_cached`].
    pub fn cache(&mut self, extent: Extent) {
        let pages = extent.pages().map(|page| (page, self.pages[page as usize]));
        self.cached.extend(pages);
    }

    pub fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    pub fn begin(&mut self, slot: SlotId, extent: Extent, data: Option<Vec<u64>>) -> Result<(), String> {
        if !self.is_up {
            return Err(format!("slot {slot}: a copy that is down is used"));
        }
        self.work.push(Work {
            slot,
            extent,
            is_write: data.is_some(),
            data: data.unwrap_or_default(),
        });
        Ok(())
    }

    /// Takes any request in flight, which ends.
    pub fn take(&mut self, random: &mut SmallRng) -> Work {
        self.work.swap_remove(random.random_range(0..self.work.len()))
    }

    pub fn write(&mut self, page: u64, data: &[u64]) {
        self.pages[page as usize..][..data.len()].copy_from_slice(data);
        self.bad[page as usize..][..data.len()].fill(false);
    }

    /// The copy is down: its answers are lost. Some of the requests in flight have been done, some are done
    /// later, some never.
    pub fn down(&mut self, random: &mut SmallRng) {
        self.is_up = false;
        for work in std::mem::take(&mut self.work) {
            if work.is_write && random.random() {
                self.late.push(work);
            }
        }
        self.land_late(random);
    }

    pub fn land_late(&mut self, random: &mut SmallRng) {
        while !self.late.is_empty() && random.random() {
            let work = self.late.swap_remove(random.random_range(0..self.late.len()));
            let pages = random.random_range(0..=work.data.len());
            self.write(work.extent.page, &work.data[..pages]);
        }
    }

    /// The copy is up again. Its old queue pair is destroyed before: no write lands late, unless `is_open`.
    pub fn up(&mut self, kept: bool, is_open: bool) {
        if !is_open {
            self.late.clear();
        }
        self.is_up = true;
        if !kept {
            self.pages.fill(0);
        }
    }
}

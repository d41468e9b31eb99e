//! The promises about each page. Versions are numbers, in the order of the write requests; 0 is the initial
//! content.

use verbatim_lease::Extent;

#[derive(Default, Clone, PartialEq, Eq, Hash)]
struct Page {
    /// Latest version that was acknowledged, or seen.
    floor: u64,
    /// Versions of the page with their content, in the order in which they were requested.
    versions: Vec<(u64, u64)>,
    /// Copies that have confirmed the latest version, and still have it.
    holders: [bool; 2],
    /// The page is lost: it reads as an error.
    is_lost: bool,
}

impl Page {
    /// Latest version that was requested, and its content.
    fn newest(&self) -> (u64, u64) {
        *self.versions.last().expect("the initial content is there")
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct History {
    pages: Vec<Page>,
}

impl History {
    pub fn new(pages: u64) -> Self {
        let page = Page {
            versions: vec![(0, 0)],
            ..Page::default()
        };
        Self {
            pages: vec![page; pages as usize],
        }
    }

    pub fn floor(&self, page: u64) -> u64 {
        self.pages[page as usize].floor
    }

    /// Whether one of the available copies is known to have the page's latest version.
    pub fn is_held(&self, page: u64, is_there: [bool; 2]) -> bool {
        let page = &self.pages[page as usize];
        if page.is_lost {
            return false;
        }
        let (newest, content) = page.newest();
        let is_zero = content == 0 && page.floor == newest;
        is_zero || (0..2).any(|copy| page.holders[copy] && is_there[copy])
    }

    /// A copy leaves for good: the other copy has all that is known to be anywhere.
    pub fn leaves(&mut self, copy: usize, is_there: [bool; 2]) -> Result<(), String> {
        let mut others = is_there;
        others[copy] = false;
        for page in 0..self.pages.len() as u64 {
            if self.is_held(page, is_there) && !self.is_held(page, others) {
                return Err(format!("page {page} is lost with a copy that leaves"));
            }
        }
        self.memory_lost(copy);
        Ok(())
    }

    /// A copy has confirmed these pages.
    pub fn written(&mut self, copy: usize, extent: Extent, data: &[u64]) {
        for (page, version) in extent.pages().zip(data) {
            let page = &mut self.pages[page as usize];
            page.holders[copy] |= page.newest().0 == *version;
        }
    }

    pub fn issued(&mut self, version: u64, extent: Extent, is_zero: bool) {
        for page in extent.pages() {
            let content = if is_zero { 0 } else { version };
            let page = &mut self.pages[page as usize];
            page.versions.push((version, content));
            page.holders = [false; 2];
            page.is_lost = false;
        }
    }

    /// All pages are lost: no server gives the disk to its next host.
    pub fn all_lost(&mut self) {
        for page in &mut self.pages {
            (page.is_lost, page.holders) = (true, [false; 2]);
        }
    }

    pub fn done(&mut self, version: u64, extent: Extent) {
        for page in extent.pages() {
            let page = &mut self.pages[page as usize];
            page.floor = page.floor.max(version);
        }
    }

    pub fn memory_lost(&mut self, copy: usize) {
        for page in &mut self.pages {
            page.holders[copy] = false;
        }
    }

    /// A read that could not see less than `floor` has seen `content`.
    pub fn seen(&mut self, page: u64, floor: u64, content: u64) -> Result<(), String> {
        let of = &mut self.pages[page as usize];
        let newest = of
            .versions
            .iter()
            .filter(|(version, is)| *version >= floor && *is == content)
            .map(|(version, _)| *version)
            .max();
        match newest {
            // Zeros may come from several writes: only a certain version is held against later reads.
            Some(version) if content != 0 => {
                of.floor = of.floor.max(version);
                Ok(())
            }
            Some(_) => Ok(()),
            None => Err(format!(
                "page {page}: {content} is read, and {floor} was acknowledged"
            )),
        }
    }
}

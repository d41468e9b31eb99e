//! What one region costs must not grow with what else is mapped.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::maps::{self, LOOKED_AT};
use crate::region::Options;
use crate::{Adopter, Adoption};

/// Pages of anonymous memory, unmapped at the end.
struct Pages(usize, usize);

impl Pages {
    fn new(count: usize) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let length = count * rustix::param::page_size();
        // SAFETY: a new mapping disturbs nobody.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE) };
        Self(start.unwrap().expose_provenance(), length)
    }

    fn page(&self, index: usize) -> usize {
        self.0 + index * rustix::param::page_size()
    }

    /// Every second page apart from its neighbours, which are inaccessible.
    fn cut(&self) {
        for index in (0..self.1 / rustix::param::page_size()).step_by(2) {
            let page = std::ptr::with_exposed_provenance_mut(self.page(index));
            let none = rustix::mm::MprotectFlags::empty();
            // SAFETY: nobody touches the page.
            unsafe { rustix::mm::mprotect(page, rustix::param::page_size(), none) }.unwrap();
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: nobody touches the pages any more.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.0), self.1) }.unwrap();
    }
}

fn looked_at(work: impl FnOnce()) -> usize {
    let before = LOOKED_AT.get();
    work();
    LOOKED_AT.get() - before
}

/// How many mappings are looked at to adopt and to release that many regions of one page.
fn looks_for(regions: usize, step: usize) -> (usize, usize) {
    let shm = std::path::Path::new("/dev/shm");
    let dir = match shm.is_dir() {
        true => tempfile::tempdir_in(shm).unwrap(),
        false => tempfile::tempdir().unwrap(),
    };
    let adopter = Adopter::new(dir.path()).unwrap();
    adopter.set_options(Options {
        user_mode: true,
        ..Options::default()
    });
    let memory = Pages::new(regions * step);
    let page = rustix::param::page_size();
    let mut adoptions: Vec<Adoption> = Vec::new();
    let adopt = looked_at(|| {
        adoptions.extend((0..regions).map(|index| adopter.adopt(memory.page(index * step), page).unwrap()));
    });
    let release = looked_at(|| {
        for adoption in adoptions {
            assert_eq!(adoption.token.pieces.len(), 1, "adopted");
            assert_eq!(adopter.release(adoption.token).gone_bytes, 0);
        }
    });
    (adopt / regions, release / regions)
}

#[test]
fn a_region_costs_the_same_among_thousands_of_mappings() {
    let here = 0u8;
    if maps::covering(&((&raw const here).addr()..(&raw const here).addr() + 1)).is_none() {
        eprintln!("skipped: the kernel cannot be asked for a single mapping (Linux 6.11)");
        return;
    }
    let others = Pages::new(6000);
    others.cut();
    for step in [1, 2] {
        let (adopt, release) = looks_for(1000, step);
        // Each look at all of them is for hundreds of regions.
        assert!(adopt < 100, "adopt: {adopt} mappings for each region");
        assert!(release < 50, "release: {release} mappings for each region");
    }
}

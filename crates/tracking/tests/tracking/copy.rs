//! A copy of a program's memory, put together from what looks have found.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use verbatim_tracking::{Memory, PAGE, Ranges};

pub struct Copy {
    pid: u32,
    memory: Memory,
    pages: HashMap<u64, Vec<u8>>,
}

impl Copy {
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            memory: Memory::open(pid).expect("it is there"),
            pages: HashMap::new(),
        }
    }

    /// Reads these ranges.
    pub fn take(&mut self, ranges: &Ranges) {
        for range in ranges.iter() {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            for read in self
                .memory
                .read(range.clone(), &mut bytes)
                .expect("it lives")
                .iter()
            {
                for page in (read.start..read.end).step_by(PAGE as usize) {
                    let from = (page - range.start) as usize;
                    self.pages
                        .insert(page, bytes[from..from + PAGE as usize].to_vec());
                }
            }
        }
    }

    /// The program stands still: each page that it has is in the copy as it is, or is zero and was never found.
    pub fn must_be_all_of_it(&self) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).expect("it is there");
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.pid)).expect("it is there");
        let pagemap = std::fs::File::open(format!("/proc/{}/pagemap", self.pid)).expect("it is there");
        let (mut compared, mut wrong) = (0, Vec::new());
        for line in maps.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let is_anonymous = words[1].ends_with('p')
                && words
                    .get(5)
                    .is_none_or(|name| name.starts_with("[heap") || name.starts_with("[stack"));
            if !is_anonymous {
                continue;
            }
            let (start, end) = words[0].split_once('-').expect("a range");
            let address = |text| u64::from_str_radix(text, 16).expect("an address");
            for page in (address(start)..address(end)).step_by(PAGE as usize) {
                let mut entry = [0; 8];
                pagemap
                    .read_exact_at(&mut entry, page / PAGE * 8)
                    .expect("an entry");
                // In memory, or swapped out.
                if u64::from_le_bytes(entry) >> 62 == 0 {
                    continue;
                }
                let mut now = vec![0; PAGE as usize];
                memory.read_exact_at(&mut now, page).expect("a page");
                compared += 1;
                match self.pages.get(&page) {
                    Some(copied) if *copied == now => {}
                    None if now.iter().all(|byte| *byte == 0) => {}
                    found => wrong.push((page, line.to_owned(), found.is_some())),
                }
            }
        }
        assert!(compared > 100, "only {compared} pages were compared");
        assert!(
            wrong.is_empty(),
            "{} of {compared} pages are wrong: {:x?}",
            wrong.len(),
            &wrong[..wrong.len().min(4)]
        );
    }
}

//! The order in which pages are asked for.
//!
//! A page that a thread waits for comes first, with the pages behind it: neighbours are mostly wanted next.
//! The rest follows in ascending order from the last such page, and then from the beginning. (Hines and
//! Gopalan, *Post-copy based live virtual machine migration using adaptive pre-paging and dynamic
//! self-ballooning*, VEE 2009, §3.3.)

use std::ops::Range;

use verbatim_tracking::PAGE;

use super::bits::{Bits, bytes};

/// Bytes of one request when a thread waits.
pub const URGENT: u64 = 64 << 10;

/// Bytes of any other request. A page that a thread waits for comes behind earlier requests.
pub const AHEAD: u64 = 128 << 10;

/// Pages that were asked for, and are on their way.
#[derive(Debug)]
pub struct Order {
    asked: Bits,
    /// The page at which to go on.
    at: u64,
}

impl Order {
    /// Nothing was asked for yet, of this many pages.
    pub fn new(pages: u64) -> Self {
        Self {
            asked: Bits::none(pages),
            at: 0,
        }
    }

    /// A thread waits for a missing page. Returns the range to ask for in bytes; `None` if the page is on its
    /// way.
    pub fn urgent(&mut self, missing: &Bits, page: u64) -> Option<Range<u64>> {
        let run = missing.run_without(&self.asked, page, URGENT / PAGE)?;
        (run.start == page).then(|| self.ask(run))
    }

    /// The next range to ask for; `None` if all missing pages are on their way.
    pub fn next(&mut self, missing: &Bits) -> Option<Range<u64>> {
        let most = AHEAD / PAGE;
        let run = missing.run_without(&self.asked, self.at, most);
        let run = run.or_else(|| missing.run_without(&self.asked, 0, most))?;
        Some(self.ask(run))
    }

    fn ask(&mut self, run: Range<u64>) -> Range<u64> {
        self.asked.insert(run.clone());
        self.at = run.end;
        bytes(&run)
    }

    /// Pages that were asked for do not come.
    pub fn forget(&mut self) {
        self.asked = Bits::none(self.asked.pages());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 256;

    #[test]
    fn what_somebody_waits_for_comes_first_and_the_rest_goes_on_from_there() {
        let mut missing = Bits::none(PAGES);
        missing.insert(0..PAGES);
        missing.remove(110..120);
        let mut order = Order::new(PAGES);
        let pages = |range: Option<Range<u64>>| range.map(|range| range.start / PAGE..range.end / PAGE);
        assert_eq!(pages(order.next(&missing)), Some(0..32));
        assert_eq!(pages(order.urgent(&missing, 100)), Some(100..110));
        assert_eq!(pages(order.urgent(&missing, 105)), None, "it is on its way");
        assert_eq!(pages(order.next(&missing)), Some(120..152));
        assert_eq!(pages(order.urgent(&missing, 240)), Some(240..256));
        assert_eq!(pages(order.next(&missing)), Some(32..64), "from the beginning");
        order.forget();
        assert_eq!(pages(order.urgent(&missing, 105)), Some(105..110));
    }

    proptest! {
        /// Each missing page is asked for once, for any waits.
        #[test]
        fn all_is_asked_for_once(ranges in proptest::collection::vec((0..PAGES, 1u64..40), 1..8), waits in proptest::collection::vec(0..PAGES, 0..40)) {
            let mut missing = Bits::none(PAGES);
            for (start, length) in ranges {
                missing.insert(start..(start + length).min(PAGES));
            }
            let (mut order, mut asked) = (Order::new(PAGES), Bits::none(PAGES));
            let mut waits = waits.into_iter().filter(|page| missing.contains(*page));
            loop {
                let urgent = waits.next().and_then(|page| order.urgent(&missing, page));
                let Some(range) = urgent.or_else(|| order.next(&missing)) else { break };
                let before = asked.count();
                asked.insert(range.start / PAGE..range.end / PAGE);
                prop_assert_eq!(asked.count() - before, (range.end - range.start) / PAGE);
            }
            prop_assert_eq!(asked, missing);
        }
    }
}

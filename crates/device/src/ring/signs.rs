//! What the RNIC tells programs that poll, in one line of memory that nothing else is in: it is written when the answer
//! changes, and read often.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use crate::layout;

/// The program's side.
#[derive(Debug, Clone, Copy)]
pub struct Signs(NonNull<layout::Signs>);

// SAFETY: all fields of a layout::Signs are atomics.
unsafe impl Send for Signs {}
// SAFETY: as above.
unsafe impl Sync for Signs {}

impl Signs {
    /// # Safety
    /// `signs` points to a mapped, zero-initialised `layout::Signs` that stays mapped for as long as this is used.
    pub unsafe fn new(signs: NonNull<layout::Signs>) -> Self {
        Self(signs)
    }

    /// Whether the RNIC has to wait for a core.
    #[inline]
    pub fn is_starved(&self) -> bool {
        // SAFETY: the contract of `new`.
        unsafe { self.0.as_ref() }.starved.load(Relaxed) != 0
    }
}

/// The RNIC's side.
#[derive(Debug)]
pub struct SignsWriter(NonNull<layout::Signs>);

// SAFETY: as above.
unsafe impl Send for SignsWriter {}

impl SignsWriter {
    /// # Safety
    /// As for [`Signs::new`].
    pub unsafe fn new(signs: NonNull<layout::Signs>) -> Self {
        Self(signs)
    }

    /// Tells programs whether the RNIC has to wait for a core. Nothing else depends on when they see it.
    pub fn set_starved(&self, starved: bool) {
        // SAFETY: the contract of `new`.
        unsafe { self.0.as_ref() }.starved.store(starved.into(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::testing::Memory;

    #[test]
    fn a_program_sees_what_the_rnic_says_and_nothing_of_an_rnic_that_says_nothing() {
        let memory = Memory::zeroed(size_of::<layout::Signs>() as u64);
        // SAFETY: the memory outlives both ends, and starts as zeroes.
        let (signs, writer) = unsafe {
            (
                Signs::new(memory.base().cast()),
                SignsWriter::new(memory.base().cast()),
            )
        };
        assert!(!signs.is_starved());
        writer.set_starved(true);
        assert!(signs.is_starved());
        writer.set_starved(false);
        assert!(!signs.is_starved());
        assert!(memory.guard_is_intact());
    }
}

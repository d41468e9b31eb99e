//! Memory for the tests of the rings, with a guard behind it.

use std::alloc::Layout;
use std::ptr::NonNull;

const GUARD: usize = 4096;

/// Page-aligned zeroes, followed by a page that nobody may write.
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

impl Memory {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes + GUARD, 4096).expect("a small layout")
    }

    pub fn zeroed(bytes: u64) -> Self {
        let bytes = bytes as usize;
        // SAFETY: the layout's size is not 0.
        let base = unsafe { std::alloc::alloc_zeroed(Self::layout(bytes)) };
        Self {
            base: NonNull::new(base).expect("memory for a test"),
            bytes,
        }
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn guard_is_intact(&self) -> bool {
        // SAFETY: the guard is part of the allocation.
        let guard = unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.bytes), GUARD) };
        guard.iter().all(|byte| *byte == 0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), Self::layout(self.bytes)) };
    }
}

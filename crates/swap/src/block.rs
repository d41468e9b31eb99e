//! Buffers of requests, aligned for files that are read and written without the page cache.

/// A page of the disk.
pub const PAGE_BYTES: u64 = 4096;

/// Pages of a slot.
pub const SLOT_PAGES: u64 = 32;

/// Bytes of a slot.
pub const SLOT_BYTES: usize = (SLOT_PAGES * PAGE_BYTES) as usize;

/// The bytes of one slot.
#[repr(C, align(4096))]
pub struct Block([u8; SLOT_BYTES]);

impl Block {
    /// Zeros.
    pub fn new() -> Box<Self> {
        Box::new(Self([0; SLOT_BYTES]))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Where in a slot that begins at page `first` these pages lie.
pub fn place(first: u64, extent: verbatim_lease::Extent) -> std::ops::Range<usize> {
    let start = ((extent.page - first) * PAGE_BYTES) as usize;
    start..start + (extent.count * PAGE_BYTES) as usize
}

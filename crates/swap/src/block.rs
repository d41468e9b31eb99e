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
    /// A block of zeros.
    pub fn new() -> Box<Self> {
        Box::new(Self([0; SLOT_BYTES]))
    }

    /// The bytes of the block.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes of the block, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// The place of these pages in a slot that begins at page `first`.
pub fn place(first: u64, extent: verbatim_lease::Extent) -> std::ops::Range<usize> {
    let start = ((extent.page - first) * PAGE_BYTES) as usize;
    start..start + (extent.count * PAGE_BYTES) as usize
}

//! Page-aligned ranges of addresses.

use std::ops::Range;

use crate::error::AdoptError;

/// Bytes in transit at once: no thread waits for more, about a millisecond. A whole huge page,
/// so that none is torn apart.
pub const CHUNK_BYTES: usize = 2 << 20;

/// Divides a range at multiples of [`CHUNK_BYTES`].
pub fn chunks(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(range.end);
        let chunk = at..end;
        at = end;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// The page size in bytes.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// The pages that contain `[address, address + length)`.
pub fn covering(address: usize, length: usize) -> Result<Range<usize>, AdoptError> {
    let page = page_bytes();
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or(AdoptError::Range { address, length })?;
    Ok(address - address % page..end)
}

/// The part that two ranges share, if it is not empty.
pub fn overlap<T: Ord + Copy>(a: &Range<T>, b: &Range<T>) -> Option<Range<T>> {
    let shared = a.start.max(b.start)..a.end.min(b.end);
    (shared.start < shared.end).then_some(shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_out_to_pages_and_refuses_overflow() {
        let page = page_bytes();
        assert_eq!(covering(page + 1, 1).unwrap(), page..2 * page);
        assert_eq!(covering(page, page).unwrap(), page..2 * page);
        assert_eq!(covering(2 * page - 1, 2).unwrap(), page..3 * page);
        assert_eq!(covering(usize::MAX - 1, 1).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(covering(page, usize::MAX).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn overlap_is_empty_for_neighbours() {
        assert_eq!(overlap(&(0..4), &(4..8)), None);
        assert_eq!(overlap(&(0..5), &(4..8)), Some(4..5));
    }
}

//! Memory windows that go on with the tags that their program counts.

use verbatim_device::control::MwType;

use crate::backend::Device;
use crate::error::VerbsError;

/// Whether a program can go on with a window of the device's key `found` where it knows the key `known`. What is told to partners is the
/// index; the tag, the low eight bits, is the program's. A library binds a window of type 1 to the tag behind the one that it has, so
/// that has to be the program's. One of type 2 cannot be bound to the tag that it has, so that must not be the program's next one.
fn fits(mw_type: MwType, known: u32, found: u32) -> bool {
    match mw_type {
        MwType::One => found as u8 == known as u8,
        MwType::Two => found as u8 != (known as u8).wrapping_add(1),
    }
}

/// Tags are given at random, or one after the other.
const TRIES: usize = 4096;

/// The device's key of a new window, with which a program can go on that knows the key `known`.
pub(super) fn alloc_that_fits(
    device: &dyn Device,
    pd: u32,
    mw_type: MwType,
    known: u32,
) -> Result<u32, VerbsError> {
    for _ in 0..TRIES {
        let found = device.alloc_mw(pd, mw_type)?;
        if fits(mw_type, known, found) {
            return Ok(found);
        }
        device.dealloc_mw(found)?;
    }
    Err(VerbsError::Unsupported(format!(
        "the device gives no memory window whose key ends like {known:#x}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_goes_on_with_the_tags_that_the_program_counts() {
        let tags = |mw_type, known| -> Vec<u32> {
            let fitting = (0x4200..0x4300).filter(|found| fits(mw_type, known, *found));
            fitting.map(|found| found & 0xff).collect()
        };
        assert_eq!(tags(MwType::One, 0x17ff), [0xff]);
        let all_but = |tag| (0..0x100).filter(|found| *found != tag).collect::<Vec<_>>();
        assert_eq!(tags(MwType::Two, 0x17ff), all_but(0));
        assert_eq!(tags(MwType::Two, 0x1700), all_but(1));
    }
}

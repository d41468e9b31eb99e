//! Memory windows that go on with the tags that their program counts.

use verbatim_device::control::MwType;

use crate::backend::Device;
use crate::error::VerbsError;

/// How a window was that is made again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Was {
    /// The key that the program knows, with the tag of the last bind.
    pub rkey: u32,
    /// It will be bound again, to that key.
    pub bound: bool,
}

/// Whether a program can go on with a window of the device's key `found`. What is told to partners is the index; the tag, the low eight
/// bits, is the program's. A library binds a window of type 1 to the tag behind the one that it has. One of type 2 is bound to the tag that
/// is asked for, which must not be the one that it has; and RNICs look at the whole key that it had before.
fn fits(mw_type: MwType, was: Was, found: u32) -> bool {
    let (known, found) = (was.rkey as u8, found as u8);
    match (was.bound, mw_type) {
        (false, _) => found == known,
        (true, MwType::One) => found.wrapping_add(1) == known,
        (true, MwType::Two) => found != known,
    }
}

/// Tags are given at random, or one after the other.
const TRIES: usize = 4096;

/// The device's key of a new window, with which a program can go on that has one that was so.
pub(super) fn alloc_that_fits(
    device: &dyn Device,
    pd: u32,
    mw_type: MwType,
    was: Was,
) -> Result<u32, VerbsError> {
    for _ in 0..TRIES {
        let found = device.alloc_mw(pd, mw_type)?;
        if fits(mw_type, was, found) {
            return Ok(found);
        }
        device.dealloc_mw(found)?;
    }
    Err(VerbsError::Unsupported(format!(
        "the device gives no memory window that can take the place of {:#x}",
        was.rkey
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_goes_on_with_the_tags_that_the_program_counts() {
        let tags = |mw_type, rkey, bound| -> Vec<u32> {
            let fitting = (0x4200..0x4300).filter(|found| fits(mw_type, Was { rkey, bound }, *found));
            fitting.map(|found| found & 0xff).collect()
        };
        assert_eq!(tags(MwType::One, 0x17ff, false), [0xff]);
        assert_eq!(tags(MwType::One, 0x1700, true), [0xff]);
        assert_eq!(tags(MwType::Two, 0x17ff, false), [0xff]);
        let all_but_the_last: Vec<_> = (0..0xff).collect();
        assert_eq!(tags(MwType::Two, 0x17ff, true), all_but_the_last);
    }
}

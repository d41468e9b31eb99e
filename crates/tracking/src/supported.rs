//! Whether this kernel tracks as it must, tried once.

use std::sync::OnceLock;

use crate::error::Error;
use crate::sys::child::{Child, TABLE, page};
use crate::tracker::Tracker;
use crate::{PAGE, Ranges};

/// Why processes cannot be tracked on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(String);

/// Tries on a child whether what it writes is seen, what it only reads is not, and what it moves counts as written. Takes some
/// milliseconds the first time.
pub fn supported() -> Result<(), Unsupported> {
    static TRIED: OnceLock<Result<(), Unsupported>> = OnceLock::new();
    TRIED.get_or_init(attempt).clone()
}

fn attempt() -> Result<(), Unsupported> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Unsupported(
            "processes are tracked from outside on x86-64 only".to_owned(),
        ));
    }
    let failed = |error: &dyn std::fmt::Display| {
        Unsupported(format!(
            "this kernel does not track private memory from outside, as Linux 6.7 and newer can: {error}"
        ))
    };
    let mut child = Child::start().map_err(|error| failed(&error))?;
    let looks = |child: &mut Child| -> Result<[Ranges; 3], Error> {
        let mut tracker = Tracker::arm(child.pid())?;
        let first = tracker.look()?.written;
        child.step().map_err(Error::io("have a child write"))?;
        let last = tracker.last_look()?.written;
        let second = tracker.look()?.written;
        Ok([first, last, second])
    };
    let [first, last, second] = looks(&mut child).map_err(|error| failed(&error))?;
    let address = |page: usize| child.area + page as u64 * PAGE;
    let moved = child.moved_to..child.moved_to + TABLE as u64;
    let has_moved = |ranges: &Ranges| {
        let whole = Ranges::from_iter([moved.clone()]);
        ranges.intersection(&whole) == whole
    };
    let seen = [
        (
            "all is found at first",
            first.contains(address(page::LEFT)) && first.contains(address(page::WRITTEN)),
        ),
        (
            "what was written is found",
            second.contains(address(page::WRITTEN)),
        ),
        ("what is new is found", second.contains(address(page::NEW))),
        ("what was moved is found", has_moved(&second)),
        ("what was only read is not", !second.contains(address(page::READ))),
        (
            "what was left alone is not",
            !second.contains(address(page::LEFT)),
        ),
        (
            "a look without protection finds the same",
            last.contains(address(page::WRITTEN)) && has_moved(&last),
        ),
        (
            "and no more",
            !last.contains(address(page::READ)) && !last.contains(address(page::LEFT)),
        ),
    ];
    match seen.iter().find(|(_, is_so)| !is_so) {
        None => Ok(()),
        Some((what, _)) => Err(failed(&format!("it is not so that {what}"))),
    }
}

//! Rules for a copy whose disk has failed.
//!
//! Linux marks pages that it could not write as clean and leaves them in the cache: reads return the new
//! data, and the disk has the old. It reports the error once, to one flush. Later flushes succeed although
//! they write nothing. So the data in the cache are not durable, will not become durable, and may vanish. A
//! copy with a failed flush is *suspect*. Its sidecar says so before the failure is reported, and through
//! detach, restarts and moves.
//!
//! | a suspect copy | |
//! | --- | --- |
//! | serves | reads go on: the cache may have the only current data, and the daemon never drops it. Writes and flushes fail. |
//! | moves | only by a rescue, which reads everything through the cache into a copy that is not suspect |
//! | is filled | no data are compared or kept: all are written again, so that all pages are dirty. After their flush it is a sound copy. |
//! | is left after a move | it stays suspect |
//! | is accepted | by an operator who has checked it: it is sound again |
//!
//! Flushes of one file go one after the other, and the failure of one is known before the next begins. Of two
//! simultaneous flushes one might report the failure, and the other succeed.
//!
//! A process may be killed between the failure and the note. Then nobody has heard of it, the cache is wrong, and the next flush succeeds. So it is
//! noted, before each flush, that one is under way, in something that lives as long as the page cache does (a byte of a file in the runtime folder), and taken back when
//! its result is dealt with. A process that finds the note compares the cache with the disk ([`first`]). It drops nothing: the cache may have the only current data.
//! The cache of a block device goes with its last descriptor. Where nobody has kept one, an equal cache proves nothing ([`stays_sound`]).

use crate::decision::{Here, Sidecar};
use crate::engine::{Failure, Op};

/// The sidecar of a copy after a failed flush. `None` if it is suspect already. It becomes durable before the
/// failure is reported.
pub fn failed(here: &Sidecar) -> Option<Sidecar> {
    (!here.suspect).then(|| Sidecar {
        suspect: true,
        ..here.clone()
    })
}

/// The sidecar of a copy that serves and that an operator has accepted. `None` if it is not suspect, or does
/// not serve: a copy to be filled is written again anyway.
pub fn accepted(here: &Sidecar) -> Option<Sidecar> {
    (here.suspect && here.may_serve()).then(|| Sidecar {
        suspect: false,
        ..here.clone()
    })
}

/// Whether the old data may be compared with the source's instead of being written again (`has_old` of a
/// welcome). `before`: the state before [`crate::decision::prepare`].
pub fn may_compare(before: Here<'_>) -> bool {
    matches!(before, Here::Copy(here) if !here.suspect)
}

/// The first action on data that a process opens, before anything is read or compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// No action.
    Nothing,
    /// A flush, and a comparison of the page cache with the disk. A flush that fails, a difference, or a comparison
    /// that cannot be made marks the copy as suspect. The note stays until that mark is written.
    FlushAndCompare,
}

/// The first action. `was_cut_off`: a flush was in flight when the previous process ended, and the machine
/// has not been restarted since. The cache of a suspect copy is left alone.
pub fn first(here: &Sidecar, was_cut_off: bool) -> First {
    match was_cut_off && !here.suspect {
        true => First::FlushAndCompare,
        false => First::Nothing,
    }
}

/// Whether the copy stays sound after [`First::FlushAndCompare`]. `were_kept`: the pages have been in the cache since the
/// flush that was cut off. `is_same`: they equal the disk; `None` if that cannot be determined.
pub fn stays_sound(were_kept: bool, is_same: Option<bool>) -> bool {
    were_kept && is_same == Some(true)
}

/// The reason why a copy cannot move in this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotMoved {
    /// The copy is suspect, and this is not a rescue.
    Suspect,
    /// The copy is not suspect: there is nothing to rescue.
    Sound,
}

/// Whether a copy that serves may be moved. Checked at the beginning, and again when it is held: a flush may
/// have failed in between.
pub fn may_move(here: &Sidecar, is_rescue: bool) -> Result<(), NotMoved> {
    match (here.suspect, is_rescue) {
        (true, false) => Err(NotMoved::Suspect),
        (false, true) => Err(NotMoved::Sound),
        _ => Ok(()),
    }
}

/// The treatment of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum May {
    /// The request is carried out.
    Go,
    /// The request waits until the failure is noted durably.
    Wait,
    /// The request fails.
    Fail(Failure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Sound,
    /// The note that the copy is suspect is being written.
    Failing,
    Suspect,
}

/// The trust in a copy that serves, in the process that has it open: one value for all its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Trust {
    state: State,
}

/// An I/O error.
const FAILED: Failure = Failure::Disk(5);

impl Trust {
    /// The trust in a copy that is opened.
    pub fn new(here: &Sidecar) -> Self {
        Self::of(here.suspect)
    }

    /// The same, from the sidecar's mark.
    pub const fn of(is_suspect: bool) -> Self {
        let state = match is_suspect {
            true => State::Suspect,
            false => State::Sound,
        };
        Self { state }
    }

    /// The treatment of a request, before it goes to the disk.
    pub fn may(&self, op: Op) -> May {
        match (self.state, op) {
            (_, Op::Read) | (State::Sound, _) => May::Go,
            (State::Failing, _) => May::Wait,
            (State::Suspect, _) => May::Fail(FAILED),
        }
    }

    /// Notes a failed flush. Returns `true` the first time: the caller then makes [`failed`] durable and
    /// calls [`Self::noted`]. Until then no flush ends.
    pub fn has_failed(&mut self) -> bool {
        let is_first = self.state == State::Sound;
        if is_first {
            self.state = State::Failing;
        }
        is_first
    }

    /// The failure is noted durably: all waiting requests fail.
    pub fn noted(&mut self) {
        self.state = State::Suspect;
    }

    /// An operator has accepted the copy, and that is durable.
    pub fn is_accepted(&mut self) {
        self.state = State::Sound;
    }

    /// The answer to a flush that has succeeded: another flush may have got the error.
    pub fn flushed(&self) -> May {
        self.may(Op::Flush)
    }

    /// Whether no failure is known, not even one that is still being noted.
    pub fn is_sound(&self) -> bool {
        self.state == State::Sound
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;
    use crate::decision::{Role, VolumeId};

    #[test]
    fn nobody_hears_of_a_failure_before_it_is_written_down() {
        let here = Sidecar::new(VolumeId(7), 4096);
        let change = Op::Change(Extent { offset: 0, length: 1 });
        let mut trust = Trust::new(&here);
        assert_eq!(trust.may(change), May::Go);
        assert!(trust.has_failed());
        assert!(!trust.has_failed(), "it is being written");
        assert_eq!((trust.may(change), trust.flushed()), (May::Wait, May::Wait));
        trust.noted();
        for op in [change, Op::Flush] {
            assert_eq!(trust.may(op), May::Fail(FAILED));
        }
        assert_eq!(trust.may(Op::Read), May::Go);
        let suspect = failed(&here).expect("it was not");
        assert_eq!(
            Trust::new(&suspect).may(Op::Flush),
            May::Fail(FAILED),
            "restarted"
        );
        assert_eq!(accepted(&suspect), Some(here));
    }

    #[test]
    fn suspect_copies_are_never_compared_and_stay_suspect_when_they_are_left() {
        let suspect = failed(&Sidecar::new(VolumeId(7), 4096)).expect("it was not");
        let moved = suspect.with(Role::Moved { to: "b".into() });
        assert!(moved.suspect);
        assert!(!may_compare(Here::Copy(&moved)));
        assert_eq!(may_move(&suspect, false), Err(NotMoved::Suspect));
        assert_eq!(may_move(&suspect, true), Ok(()));
    }
}

//! What a copy may do whose disk has failed.
//!
//! Linux marks pages that it could not write as clean and leaves them in the cache: whoever reads gets what was written, and the disk has something
//! else. It says so once, to one flush; later ones succeed, although they write nothing. So what is in the cache is neither durable, nor becomes so,
//! nor stays. A copy of which a flush has failed is *suspect*: in its sidecar, before anybody hears of the failure, and through detach, restarts and moves.
//!
//! | a suspect copy | |
//! | --- | --- |
//! | serves | reads go on: the cache may have the only current data, and is never dropped by us. Writes and flushes fail. It moves by a rescue only, which takes everything through the cache to a copy that is not suspect |
//! | is filled | nothing that is there counts, and nothing is compared: all is written again, which makes all of it dirty. When that is flushed, it is a copy as any |
//! | stays behind after a move | it stays suspect |
//! | is accepted | by an operator, who has looked at it: it is not suspect any more |
//!
//! Flushes of one file go one after the other, and the failure of one is known before the next begins: of two at once one may hear of the
//! failure, and the other succeed.
//!
//! A process may be killed between the failure and the note. Then nobody has heard of it, the cache is wrong, and the next flush succeeds. So it is
//! noted, before each flush, that one is under way, in something that lives as long as the page cache does (a byte of a file in the runtime folder), and taken back when
//! its result is dealt with. A process that finds the note believes the disk alone ([`first`]).

use crate::decision::{Here, Sidecar};
use crate::engine::{Failure, Op};

/// What a failed flush makes of a copy. Nothing if it is so already. Durable before anybody hears of the failure.
pub fn failed(here: &Sidecar) -> Option<Sidecar> {
    (!here.suspect).then(|| Sidecar {
        suspect: true,
        ..here.clone()
    })
}

/// What an operator's word makes of a copy that serves. Nothing if it is not suspect, or does not serve: what is to be filled is written again, which needs no word.
pub fn accepted(here: &Sidecar) -> Option<Sidecar> {
    (here.suspect && here.may_serve()).then(|| Sidecar {
        suspect: false,
        ..here.clone()
    })
}

/// Whether what is there may be compared with what the source has, in place of being written (`has_old` of a welcome). `before`: what was here before
/// [`crate::decision::prepare`].
pub fn may_compare(before: Here<'_>) -> bool {
    matches!(before, Here::Copy(here) if !here.suspect)
}

/// Whether what this process has acknowledged before a connection was lost may count on the next one.
pub fn may_keep(here: &Sidecar, is_poisoned: bool) -> bool {
    !here.suspect && !is_poisoned
}

/// What a process does with data that it opens, before anything is read or compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// Nothing.
    Nothing,
    /// It flushes. What is read afterwards is what the disk has: what is clean in the cache is compared with it, or dropped. A flush that fails, or a difference, makes
    /// it suspect.
    FlushAndDrop,
}

/// `was_cut_off`: a flush was under way when the process before this one ended, and the machine has not been started since. The cache of a suspect copy is left alone.
pub fn first(here: &Sidecar, was_cut_off: bool) -> First {
    match was_cut_off && !here.suspect {
        true => First::FlushAndDrop,
        false => First::Nothing,
    }
}

/// Why a copy does not move as another would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotMoved {
    /// It is suspect, and this is no rescue.
    Suspect,
    /// It is not suspect, and there is nothing to rescue.
    Sound,
}

/// Whether a copy that serves may be moved. Asked at the beginning, and again when it is held: a flush may have failed in between.
pub fn may_move(here: &Sidecar, is_rescue: bool) -> Result<(), NotMoved> {
    match (here.suspect, is_rescue) {
        (true, false) => Err(NotMoved::Suspect),
        (false, true) => Err(NotMoved::Sound),
        _ => Ok(()),
    }
}

/// What may be done with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum May {
    /// It is carried out.
    Go,
    /// It waits until the failure is written down.
    Wait,
    /// It fails.
    Fail(Failure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Sound,
    /// That it is suspect is being written down.
    Failing,
    Suspect,
}

/// Of a copy that serves, in the process that has it open: one for all descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Trust {
    state: State,
}

/// An I/O error.
const FAILED: Failure = Failure::Disk(5);

impl Trust {
    /// Of a copy that is opened.
    pub fn new(here: &Sidecar) -> Self {
        Self::of(here.suspect)
    }

    /// The same, where it is known whether it is suspect.
    pub const fn of(is_suspect: bool) -> Self {
        let state = match is_suspect {
            true => State::Suspect,
            false => State::Sound,
        };
        Self { state }
    }

    /// Before a request goes to the disk.
    pub fn may(&self, op: Op) -> May {
        match (self.state, op) {
            (_, Op::Read) | (State::Sound, _) => May::Go,
            (State::Failing, _) => May::Wait,
            (State::Suspect, _) => May::Fail(FAILED),
        }
    }

    /// A flush has failed. True the first time: [`failed`] is made durable, and then [`Self::noted`] called. Its end, and those of all flushes, wait for that.
    pub fn has_failed(&mut self) -> bool {
        let is_first = self.state == State::Sound;
        if is_first {
            self.state = State::Failing;
        }
        is_first
    }

    /// It is written down: all that waits fails.
    pub fn noted(&mut self) {
        self.state = State::Suspect;
    }

    /// An operator has accepted the copy, and that is durable.
    pub fn is_accepted(&mut self) {
        self.state = State::Sound;
    }

    /// What is answered to a flush that has succeeded: another one may have heard of the failure.
    pub fn flushed(&self) -> May {
        self.may(Op::Flush)
    }

    /// Whether a failure is known, written down or not.
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
        assert!(!may_compare(Here::Copy(&moved)) && !may_keep(&moved, false));
        assert_eq!(may_move(&suspect, false), Err(NotMoved::Suspect));
        assert_eq!(may_move(&suspect, true), Ok(()));
    }
}

//! Failures in words.

use std::io;

use verbatim_mirror::{Ended, Failure, HoldFailure};

/// An error of a disk.
fn disk(errno: i32) -> String {
    match errno {
        libc::ENOSPC => "it is full (No space left on device)".to_owned(),
        libc::EDQUOT => "its quota is used up".to_owned(),
        _ => format!("it has failed: {}", io::Error::from_raw_os_error(errno)),
    }
}

/// The reason why a request has failed.
pub fn failure(failure: &Failure) -> String {
    match failure {
        Failure::Disk(errno) => format!("the disk here: {}", disk(*errno)),
        Failure::Moved => "the volume has moved to another host".to_owned(),
    }
}

/// The reason why a migration to that host has ended.
pub fn ended(why: &Ended, to: &str) -> String {
    match why {
        Ended::Cancelled => "the move was given up".to_owned(),
        Ended::DestinationFailed(Failure::Disk(errno)) => format!("the disk of {to}: {}", disk(*errno)),
        Ended::DestinationFailed(Failure::Moved) => format!("{to} does not take it any more"),
        Ended::SourceFailed(why) => failure(why),
    }
}

/// The reason why requests are no longer held.
pub fn hold(why: &HoldFailure, to: &str) -> String {
    match why {
        HoldFailure::NotMirrored => format!("{to} does not have everything (any more)"),
        HoldFailure::TooLong => format!("{to}, or the disk here, took too long for what was under way"),
    }
}

//! Failures in words.

use std::io;

use verbatim_mirror::decision::Answer;
use verbatim_mirror::{Ended, Failure, HoldFailure};

use crate::wire::ToSource;

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

/// An answer of that host's daemon to another question than the one that was asked.
pub fn unasked(host: &str, answer: &ToSource) -> String {
    let said = match answer {
        ToSource::Welcome { .. } => "that the volume may be copied there",
        ToSource::Refused(why) => return format!("{host} refuses: {why}"),
        ToSource::Done(..) => "that something was written or flushed",
        ToSource::Differs(_) => "that something there differs",
        ToSource::Answer(Answer::Committed) => "that the move was committed there",
        ToSource::Answer(Answer::NotCommitted) => "that the move was not committed there",
        ToSource::Answer(Answer::NotKnown) => "that it knows nothing of the move",
        ToSource::Promised => "that its copy is promised",
        ToSource::Taken(_) => "that it has read from the RNIC here",
        ToSource::Again(..) => "that it has not read a chunk from the RNIC here",
        ToSource::WouldTake => "that it would take the volume",
    };
    format!(
        "{host} answers {said}, which was not asked: are the volume daemons of both hosts of releases that work together?"
    )
}

/// The reason why requests are no longer held.
pub fn hold(why: &HoldFailure, to: &str) -> String {
    match why {
        HoldFailure::NotMirrored => format!("{to} does not have everything (any more)"),
        HoldFailure::TooLong => format!("{to}, or the disk here, took too long for what was under way"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Tag;

    #[test]
    fn an_answer_that_was_not_asked_is_said_in_words() {
        let answers = [
            ToSource::Done(Tag::Chunk(9), 28),
            ToSource::Differs(Tag::Change(1)),
            ToSource::Answer(Answer::NotKnown),
            ToSource::Promised,
            ToSource::Taken(7),
            ToSource::Again(Tag::Chunk(9), "no".to_owned()),
            ToSource::WouldTake,
        ];
        for answer in answers {
            let said = unasked("b", &answer);
            assert!(said.starts_with("b answers that "), "{said}");
            let debug = format!("{answer:?}");
            assert!(
                !said.contains(debug.split(['(', ' ']).next().expect("a name")),
                "{said}"
            );
        }
        assert_eq!(
            unasked("b", &ToSource::Refused("no room".to_owned())),
            "b refuses: no room"
        );
    }
}

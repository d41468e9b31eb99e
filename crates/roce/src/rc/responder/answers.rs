//! What is to be answered, in the order of PSNs.

use std::collections::VecDeque;

use crate::{Psn, Rkey};

/// One answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Everything up to this PSN is executed.
    Ack { psn: Psn },
    /// The data of a READ.
    Read(ReadAnswer),
}

/// The data of a READ that is still to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadAnswer {
    /// PSN of the next packet.
    pub psn: Psn,
    /// Packets still to come.
    pub packets: u32,
    /// Where their data is.
    pub addr: u64,
    pub rkey: Rkey,
    /// Length of it in bytes.
    pub len: u32,
    /// Was a packet sent already?
    pub started: bool,
    /// Is it executed again?
    pub again: bool,
}

impl Answer {
    fn last_psn(&self) -> Psn {
        match self {
            Answer::Ack { psn } => *psn,
            Answer::Read(read) => read.psn.add(read.packets - 1),
        }
    }
}

/// The answers, oldest first. Between two READs there is at most one acknowledgement, so their number is bounded by
/// the number of READs, which the callers bound.
#[derive(Debug, Default)]
pub(super) struct Answers(VecDeque<Answer>);

impl Answers {
    pub fn front(&self) -> Option<&Answer> {
        self.0.front()
    }

    pub fn front_mut(&mut self) -> Option<&mut Answer> {
        self.0.front_mut()
    }

    pub fn pop(&mut self) {
        self.0.pop_front();
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Acknowledges everything up to `psn`.
    pub fn acknowledge(&mut self, psn: Psn) {
        match self.0.back_mut() {
            Some(Answer::Ack { psn: last }) => *last = psn,
            _ => self.0.push_back(Answer::Ack { psn }),
        }
    }

    /// Lets an acknowledgement that waits to be sent say more.
    pub fn extend_acknowledgement(&mut self, psn: Psn) {
        if let Some(Answer::Ack { psn: last }) = self.0.back_mut() {
            *last = psn;
        }
    }

    /// Adds a READ.
    pub fn read(&mut self, read: ReadAnswer) {
        self.0.push_back(Answer::Read(read));
    }

    /// How many READs there are that were not asked for again.
    pub fn new_reads(&self) -> usize {
        self.0
            .iter()
            .filter(|answer| matches!(answer, Answer::Read(read) if !read.again))
            .count()
    }

    /// How many READs there are.
    pub fn reads(&self) -> usize {
        self.0
            .iter()
            .filter(|answer| matches!(answer, Answer::Read(_)))
            .count()
    }

    /// Takes away the answers that say something about `psn` or later.
    pub fn forget_from(&mut self, psn: Psn) {
        while self
            .0
            .back()
            .is_some_and(|answer| answer.last_psn().distance_from(psn) >= 0)
        {
            self.0.pop_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(psn: u32, packets: u32) -> ReadAnswer {
        let (addr, rkey) = (0, Rkey(1));
        ReadAnswer {
            psn: Psn::new(psn),
            packets,
            addr,
            rkey,
            len: 1,
            started: false,
            again: false,
        }
    }

    #[test]
    fn acknowledgements_merge_but_not_across_reads() {
        let mut answers = Answers::default();
        answers.acknowledge(Psn::new(1));
        answers.acknowledge(Psn::new(2));
        answers.read(read(3, 4));
        answers.acknowledge(Psn::new(7));
        answers.extend_acknowledgement(Psn::new(8));
        assert_eq!(answers.front(), Some(&Answer::Ack { psn: Psn::new(2) }));
        answers.pop();
        assert_eq!(answers.front(), Some(&Answer::Read(read(3, 4))));
        answers.pop();
        assert_eq!(answers.front(), Some(&Answer::Ack { psn: Psn::new(8) }));
    }

    #[test]
    fn a_retry_takes_away_what_it_asks_for_again() {
        let mut answers = Answers::default();
        answers.acknowledge(Psn::new(0xff_fffe));
        answers.read(read(0xff_ffff, 4));
        answers.acknowledge(Psn::new(3));
        answers.forget_from(Psn::new(1));
        assert_eq!(
            answers.0,
            [Answer::Ack {
                psn: Psn::new(0xff_fffe)
            }]
        );
    }
}

//! What is to be answered, in the order of PSNs.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::{Psn, Rkey};

/// Room for answers that a queue pair keeps when it has none to give.
const MOST_IDLE_ANSWERS: usize = 8;

/// One answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Everything up to this PSN is executed.
    Ack { psn: Psn },
    /// The data of a READ.
    Read(ReadAnswer),
    /// What was there before an atomic operation.
    Atomic(AtomicAnswer),
}

/// The result of an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AtomicAnswer {
    pub psn: Psn,
    /// What was there before; nothing is said of it for an atomic WRITE.
    pub value: Option<u64>,
    /// Is it answered again?
    pub again: bool,
}

/// The data of a READ that is still to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
            Answer::Atomic(atomic) => atomic.psn,
        }
    }
}

/// The answers, oldest first. Between two READs there is at most one acknowledgement, so their number is bounded by
/// the number of READs and atomics, which the callers bound.
#[derive(Debug, Default)]
pub(super) struct Answers(VecDeque<Answer>);

impl From<VecDeque<Answer>> for Answers {
    fn from(answers: VecDeque<Answer>) -> Answers {
        Answers(answers)
    }
}

impl Answers {
    /// All of them, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Answer> {
        self.0.iter()
    }

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

    /// Is there one answer, and it an acknowledgement?
    pub fn is_only_acknowledgement(&self) -> bool {
        self.0.len() == 1 && matches!(self.0[0], Answer::Ack { .. })
    }

    /// Acknowledges everything up to `psn`.
    pub fn acknowledge(&mut self, psn: Psn) {
        match self.0.back_mut() {
            Some(Answer::Ack { psn: last }) if psn.distance_from(*last) <= 0 => {}
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

    /// Adds a READ that came again, in its place among what waits, instead of what waits for the same PSNs.
    pub fn read_again(&mut self, read: ReadAnswer) {
        let end = read.psn.add(read.packets);
        self.0.retain(|answer| match answer {
            Answer::Read(waiting) => {
                let before = waiting.psn.add(waiting.packets).distance_from(read.psn) <= 0;
                before || waiting.psn.distance_from(end) >= 0
            }
            Answer::Ack { .. } | Answer::Atomic(_) => true,
        });
        let earlier = self.earlier_than(read.psn);
        self.0.insert(earlier, Answer::Read(read));
    }

    /// How many answers are for PSNs before this one.
    fn earlier_than(&self, psn: Psn) -> usize {
        self.0
            .iter()
            .take_while(|answer| answer.last_psn().distance_from(psn) < 0)
            .count()
    }

    /// Adds a READ.
    pub fn read(&mut self, read: ReadAnswer) {
        self.0.push_back(Answer::Read(read));
    }

    /// Adds the result of an atomic operation.
    pub fn atomic(&mut self, atomic: AtomicAnswer) {
        self.0.push_back(Answer::Atomic(atomic));
    }

    /// Adds the result of one that came again, in its place among what waits.
    pub fn atomic_again(&mut self, psn: Psn, value: Option<u64>) {
        let earlier = self.earlier_than(psn);
        let again = Answer::Atomic(AtomicAnswer {
            psn,
            value,
            again: true,
        });
        match self.0.get(earlier) {
            Some(Answer::Atomic(waiting)) if waiting.psn == psn => {}
            // A READ that was cut in the middle is not there: it ends before this or begins after it.
            _ => self.0.insert(earlier, again),
        }
    }

    /// How many READs and atomics there are that were not asked for again.
    pub fn new_reads_and_atomics(&self) -> usize {
        let is_new = |answer: &&Answer| match answer {
            Answer::Ack { .. } => false,
            Answer::Read(read) => !read.again,
            Answer::Atomic(atomic) => !atomic.again,
        };
        self.0.iter().filter(is_new).count()
    }

    /// How many READs and atomics there are.
    pub fn reads_and_atomics(&self) -> usize {
        self.0
            .iter()
            .filter(|answer| !matches!(answer, Answer::Ack { .. }))
            .count()
    }

    /// Gives back memory that a burst has taken.
    pub fn shrink(&mut self) {
        if self.0.is_empty() && self.0.capacity() > MOST_IDLE_ANSWERS {
            self.0.shrink_to(MOST_IDLE_ANSWERS);
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
    fn an_atomic_that_comes_again_takes_its_place() {
        let mut answers = Answers::default();
        answers.acknowledge(Psn::new(1));
        answers.read(read(3, 2));
        answers.acknowledge(Psn::new(9));
        answers.atomic_again(Psn::new(7), Some(70));
        answers.atomic_again(Psn::new(7), Some(70));
        answers.atomic_again(Psn::new(2), None);
        let psns: Vec<_> = answers.0.iter().map(|answer| answer.last_psn().get()).collect();
        assert_eq!(psns, [1, 2, 4, 7, 9]);
        assert_eq!(
            (answers.reads_and_atomics(), answers.new_reads_and_atomics()),
            (3, 1)
        );
    }

    #[test]
    fn a_retry_takes_away_what_it_asks_for_again() {
        let mut answers = Answers::default();
        answers.acknowledge(Psn::new(0xff_fffe));
        answers.read(read(0xff_ffff, 4));
        answers.acknowledge(Psn::new(3));
        answers.read(read(4, 4));
        answers.read_again(ReadAnswer {
            again: true,
            ..read(1, 2)
        });
        let first: Vec<_> = answers.0.iter().map(|answer| answer.last_psn().get()).collect();
        assert_eq!(first, [0xff_fffe, 2, 3, 7]);
    }
}

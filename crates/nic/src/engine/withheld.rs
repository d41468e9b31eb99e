//! Acknowledgements that wait for the program's answer ([`verbatim_roce::RcQp::ack_deadline`]).
//!
//! All wait equally long, so they are due in the order in which they began: a queue is enough. An entry is spent when its
//! queue pair has another deadline, or none, by then.

use std::collections::VecDeque;

use verbatim_roce::Time;

use super::Nic;
use crate::objects::Objects;

/// Deadlines with the queue pairs that they are of.
#[derive(Debug, Default)]
pub struct Withheld(VecDeque<(Time, u32)>);

impl Withheld {
    /// The queue pair has transmitted; perhaps its acknowledgement waits since.
    #[inline]
    pub fn note(&mut self, qpn: u32, deadline: Option<Time>) {
        if let Some(deadline) = deadline
            && self.0.back() != Some(&(deadline, qpn))
        {
            self.0.push_back((deadline, qpn));
        }
    }

    /// The earliest deadline. Forgets those that are spent.
    pub fn next(&mut self, objects: &Objects) -> Option<Time> {
        while let Some((deadline, qpn)) = self.0.front() {
            let qp = objects.qps.get(*qpn);
            if qp.is_some_and(|qp| qp.transport.ack_deadline() == Some(*deadline)) {
                return Some(*deadline);
            }
            self.0.pop_front();
        }
        None
    }
}

impl Nic {
    /// Those whose time has come transmit in this turn.
    pub(super) fn release_due(&mut self, now: Time) {
        while self
            .withheld
            .next(&self.objects)
            .is_some_and(|deadline| deadline <= now)
        {
            self.release_first();
        }
    }

    /// All are sent now, and those that wait for a turn in the background: something may be taken away.
    pub(super) fn release_all(&mut self, now: Time) -> Result<(), crate::error::NicError> {
        if self.withheld.next(&self.objects).is_none() {
            return self.acknowledge_in_background(now);
        }
        while self.withheld.next(&self.objects).is_some() {
            self.release_first();
        }
        self.line_up(now);
        self.transmit(now)?;
        self.acknowledge_in_background(now)
    }

    fn release_first(&mut self) {
        let Some((_, qpn)) = self.withheld.0.pop_front() else {
            return;
        };
        if let Some(qp) = self.objects.qps.get_mut(qpn) {
            qp.transport.send_acknowledgement();
            self.touched.add(qpn, qp);
        }
    }
}

//! The destination's side: arrivals, the connection in which they count, and whether the copy is complete.
//!
//! A lost connection may have left writes in flight. The next one is welcomed only when they have ended, so
//! that none of them overtakes a write of the next one. Of several connections the last one counts.
//!
//! A failed write or flush poisons the receiver, on any connection: the cache may have data that the disk
//! lacks, and no later flush reports that ([`crate::trust`]). From then on nothing counts as flushed until a
//! new session writes everything again. A failed flush is answered to the source only when the sidecar
//! durably says that the copy is suspect.

use std::collections::BTreeMap;

/// A connection of the source; numbers grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Line(pub u64);

/// Name of an arrival: a write or a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arrival(pub u64);

/// An output of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Tell the source on this connection that it may begin.
    Welcome(Line),
    /// Write the arrival's data. Ends with [`Receiver::written`].
    Write(Arrival),
    /// Flush the disk. Ends with [`Receiver::flushed`].
    Flush(Arrival),
    /// Make it durable that the copy is suspect ([`crate::trust::failed`]), and repeat that until it
    /// succeeds. Ends with [`Receiver::suspected`].
    Suspect,
    /// Answer on this connection.
    Answer {
        /// The connection.
        line: Line,
        /// The arrival.
        arrival: Arrival,
        /// The write or flush has succeeded.
        is_good: bool,
    },
    /// Close this connection: another one has come.
    Close(Line),
}

/// One volume at the destination of its move.
#[derive(Debug, Clone, Default)]
pub struct Receiver {
    lines: u64,
    arrivals: u64,
    current: Option<Line>,
    is_welcome: bool,
    writes: BTreeMap<Arrival, Line>,
    flushes: BTreeMap<Arrival, (Line, bool)>,
    is_flushed: bool,
    poison: Poison,
    /// Answers that wait until the failure is noted durably.
    unsaid: Vec<(Line, Arrival)>,
    /// Number of sessions that write everything again.
    renewals: u64,
}

/// Whether a write or a flush has failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Poison {
    #[default]
    None,
    /// The note is being written.
    Unnoted,
    Noted,
}

impl Receiver {
    /// The source has connected.
    pub fn connected(&mut self, tasks: &mut Vec<Task>) -> Line {
        if let Some(line) = self.current.take() {
            tasks.push(Task::Close(line));
        }
        self.lines += 1;
        let line = Line(self.lines);
        (self.current, self.is_welcome, self.is_flushed) = (Some(line), false, false);
        self.welcome(tasks);
        line
    }

    /// A connection has ended.
    pub fn lost(&mut self, line: Line) {
        if self.current == Some(line) {
            self.current = None;
        }
    }

    /// Data, or a request to zero, has arrived. `None` if the connection no longer counts.
    pub fn write(&mut self, line: Line, tasks: &mut Vec<Task>) -> Option<Arrival> {
        let arrival = self.arrival(line)?;
        self.is_flushed = false;
        // A flush in progress need not cover this write.
        for (_, is_whole) in self.flushes.values_mut() {
            *is_whole = false;
        }
        self.writes.insert(arrival, line);
        tasks.push(Task::Write(arrival));
        Some(arrival)
    }

    /// The end of [`Task::Write`].
    pub fn written(&mut self, arrival: Arrival, is_good: bool, tasks: &mut Vec<Task>) {
        if let Some(line) = self.writes.remove(&arrival) {
            if !is_good {
                self.has_failed(tasks);
            }
            self.answer(line, arrival, is_good, tasks);
            self.welcome(tasks);
        }
    }

    /// The end of [`Task::Write`] when nothing was written, since the bytes to be fetched did not arrive. The
    /// source sends them again.
    pub fn dropped(&mut self, arrival: Arrival, tasks: &mut Vec<Task>) {
        if let Some(line) = self.writes.remove(&arrival) {
            self.answer(line, arrival, false, tasks);
            self.welcome(tasks);
        }
    }

    /// The source wants everything on the disk that was acknowledged to it as written.
    pub fn flush(&mut self, line: Line, tasks: &mut Vec<Task>) -> Option<Arrival> {
        let arrival = self.arrival(line)?;
        self.flushes.insert(arrival, (line, self.writes.is_empty()));
        tasks.push(Task::Flush(arrival));
        Some(arrival)
    }

    /// The end of [`Task::Flush`].
    pub fn flushed(&mut self, arrival: Arrival, is_good: bool, tasks: &mut Vec<Task>) {
        if let Some((line, is_whole)) = self.flushes.remove(&arrival) {
            if !is_good {
                self.has_failed(tasks);
            }
            match self.poison {
                Poison::None => {
                    self.is_flushed |= is_whole && self.current == Some(line);
                    self.answer(line, arrival, true, tasks);
                }
                Poison::Unnoted => self.unsaid.push((line, arrival)),
                Poison::Noted => self.answer(line, arrival, false, tasks),
            }
        }
    }

    /// The end of [`Task::Suspect`]: the note is durable.
    pub fn suspected(&mut self, tasks: &mut Vec<Task>) {
        if self.poison == Poison::Unnoted {
            self.poison = Poison::Noted;
        }
        for (line, arrival) in std::mem::take(&mut self.unsaid) {
            self.answer(line, arrival, false, tasks);
        }
    }

    /// Whether a write or a flush has failed. The session is over then: its source is refused.
    pub fn is_poisoned(&self) -> bool {
        self.poison != Poison::None
    }

    /// Called before a new session connects that compares nothing and keeps nothing: it writes everything
    /// again, so that all pages become dirty. Returns `false` and changes nothing while the note that the
    /// copy is suspect is not durable, or while earlier writes and flushes are in flight.
    pub fn renew(&mut self) -> bool {
        match self.poison {
            Poison::None => true,
            Poison::Noted if self.writes.is_empty() && self.flushes.is_empty() => {
                self.poison = Poison::None;
                self.is_flushed = false;
                self.renewals += 1;
                true
            }
            Poison::Noted | Poison::Unnoted => false,
        }
    }

    /// Number of such new sessions: acknowledgements from before the last one are void.
    pub fn renewals(&self) -> u64 {
        self.renewals
    }

    /// Whether the source has a connection.
    pub fn is_connected(&self) -> bool {
        self.current.is_some()
    }

    /// Whether everything that has come on this connection is on the disk. Without that, no commit.
    pub fn is_flushed(&self) -> bool {
        self.is_flushed
    }

    /// Nothing may be written to the volume any more. Returns whether no write is in flight.
    pub fn close(&mut self) -> bool {
        self.current = None;
        self.is_flushed = false;
        self.writes.is_empty()
    }

    fn has_failed(&mut self, tasks: &mut Vec<Task>) {
        self.is_flushed = false;
        if self.poison == Poison::None {
            self.poison = Poison::Unnoted;
            tasks.push(Task::Suspect);
        }
    }

    fn arrival(&mut self, line: Line) -> Option<Arrival> {
        if self.current != Some(line) || !self.is_welcome {
            return None;
        }
        self.arrivals += 1;
        Some(Arrival(self.arrivals))
    }

    fn answer(&self, line: Line, arrival: Arrival, is_good: bool, tasks: &mut Vec<Task>) {
        if self.current == Some(line) {
            tasks.push(Task::Answer {
                line,
                arrival,
                is_good,
            });
        }
    }

    fn welcome(&mut self, tasks: &mut Vec<Task>) {
        if let Some(line) = self.current
            && !self.is_welcome
            && self.writes.is_empty()
        {
            self.is_welcome = true;
            tasks.push(Task::Welcome(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected(receiver: &mut Receiver) -> Line {
        receiver.connected(&mut Vec::new())
    }

    /// Writes and flushes once. Returns the tasks of the flush's end.
    fn flush(receiver: &mut Receiver, line: Line, is_good: bool) -> Vec<Task> {
        let (mut tasks, mut ends) = (Vec::new(), Vec::new());
        let write = receiver.write(line, &mut tasks).expect("it counts");
        receiver.written(write, true, &mut tasks);
        let flush = receiver.flush(line, &mut tasks).expect("it counts");
        receiver.flushed(flush, is_good, &mut ends);
        ends
    }

    #[test]
    fn after_a_failed_flush_no_flush_counts_until_all_is_written_again() {
        let mut receiver = Receiver::default();
        let line = connected(&mut receiver);
        assert_eq!(flush(&mut receiver, line, false), [Task::Suspect]);
        assert!(!receiver.renew(), "it is not written down");
        let mut said = Vec::new();
        receiver.suspected(&mut said);
        assert!(matches!(said[..], [Task::Answer { is_good: false, .. }]));
        assert!(matches!(
            flush(&mut receiver, line, true)[..],
            [Task::Answer { is_good: false, .. }]
        ));
        let line = connected(&mut receiver);
        flush(&mut receiver, line, true);
        assert!(
            !receiver.is_flushed() && receiver.is_poisoned(),
            "another connection"
        );
        assert!(receiver.renew());
        let line = connected(&mut receiver);
        flush(&mut receiver, line, true);
        assert!(receiver.is_flushed());
        assert_eq!(receiver.renewals(), 1);
    }

    #[test]
    fn a_failure_of_an_old_connection_counts_on_each() {
        let mut receiver = Receiver::default();
        let old = connected(&mut receiver);
        let mut tasks = Vec::new();
        let late = receiver.flush(old, &mut tasks).expect("it counts");
        let line = connected(&mut receiver);
        flush(&mut receiver, line, true);
        assert!(receiver.is_flushed());
        receiver.flushed(late, false, &mut tasks);
        assert!(!receiver.is_flushed());
    }

    #[test]
    fn a_failed_write_is_answered_at_once_and_poisons() {
        let mut receiver = Receiver::default();
        let line = connected(&mut receiver);
        let (mut tasks, mut ends) = (Vec::new(), Vec::new());
        let write = receiver.write(line, &mut tasks).expect("it counts");
        receiver.written(write, false, &mut ends);
        assert!(matches!(
            ends[..],
            [Task::Suspect, Task::Answer { is_good: false, .. }]
        ));
        assert!(receiver.is_poisoned());
    }
}

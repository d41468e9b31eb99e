//! The destination's side: what arrives, in which connection it counts, and whether the copy is complete.
//!
//! A connection that was lost may have left writes under way. The next one is welcomed only when they have come to their end, so that
//! none of them overtakes what the next one brings. Of several connections the last one counts.

use std::collections::BTreeMap;

/// A connection of the source; numbers grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Line(pub u64);

/// Names something that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arrival(pub u64);

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Tell the source on that connection that it may begin.
    Welcome(Line),
    /// Write what arrived. Ends with [`Receiver::written`].
    Write(Arrival),
    /// Flush the disk. Ends with [`Receiver::flushed`].
    Flush(Arrival),
    /// Answer on that connection.
    Answer {
        /// The connection.
        line: Line,
        /// What.
        arrival: Arrival,
        /// It is on the disk.
        is_good: bool,
    },
    /// Close that connection: another one has come.
    Close(Line),
}

/// One volume at the host that it moves to.
#[derive(Debug, Clone, Default)]
pub struct Receiver {
    lines: u64,
    arrivals: u64,
    current: Option<Line>,
    is_welcome: bool,
    writes: BTreeMap<Arrival, Line>,
    flushes: BTreeMap<Arrival, (Line, bool)>,
    is_flushed: bool,
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

    /// Data, or a request to zero, has arrived. Nothing if the connection does not count any more.
    pub fn write(&mut self, line: Line, tasks: &mut Vec<Task>) -> Option<Arrival> {
        let arrival = self.arrival(line)?;
        self.is_flushed = false;
        // A flush that runs need not cover it.
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
            self.answer(line, arrival, is_good, tasks);
            self.welcome(tasks);
        }
    }

    /// The source wants everything on the disk that it was told is written.
    pub fn flush(&mut self, line: Line, tasks: &mut Vec<Task>) -> Option<Arrival> {
        let arrival = self.arrival(line)?;
        self.flushes.insert(arrival, (line, self.writes.is_empty()));
        tasks.push(Task::Flush(arrival));
        Some(arrival)
    }

    /// The end of [`Task::Flush`].
    pub fn flushed(&mut self, arrival: Arrival, is_good: bool, tasks: &mut Vec<Task>) {
        if let Some((line, is_whole)) = self.flushes.remove(&arrival) {
            self.is_flushed |= is_good && is_whole && self.current == Some(line);
            self.answer(line, arrival, is_good, tasks);
        }
    }

    /// Whether the source has a connection.
    pub fn is_connected(&self) -> bool {
        self.current.is_some()
    }

    /// Whether everything that has come on this connection is on the disk. Without that, no commit.
    pub fn is_flushed(&self) -> bool {
        self.is_flushed
    }

    /// The volume is not to be written to any more, by anyone. True when nothing is under way.
    pub fn close(&mut self) -> bool {
        self.current = None;
        self.is_flushed = false;
        self.writes.is_empty()
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

//! The hold: the last steps before the decision.

use super::Engine;
use super::types::{Action, Ended, Failure, HoldFailure, Report, Standing, Ticket};

/// Progress of a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Requests in flight have to end.
    Draining,
    /// The destination flushes.
    Flushing(Ticket),
    /// The destination has all data on its disk.
    Complete,
}

impl Engine {
    pub(super) fn begin_hold(&mut self, actions: &mut Vec<Action>) {
        if self.standing != Standing::Serving {
            return;
        }
        if self
            .migration
            .as_ref()
            .is_some_and(|migration| migration.is_mirrored)
        {
            self.standing = Standing::Holding;
            self.hold = Some((Step::Draining, self.now));
        } else {
            actions.push(Action::Report(Report::HoldFailed(HoldFailure::NotMirrored)));
        }
    }

    pub(super) fn advance_hold(&mut self, actions: &mut Vec<Action>) {
        let Some((step, since)) = self.hold else {
            return;
        };
        if step == Step::Complete {
            return;
        }
        let is_complete = self
            .migration
            .as_ref()
            .is_some_and(|migration| migration.is_complete());
        if self.requests.is_empty() && !is_complete {
            return self.fail_hold(HoldFailure::NotMirrored, actions);
        }
        if self.now >= since + self.config.hold {
            return self.fail_hold(HoldFailure::TooLong, actions);
        }
        if step == Step::Draining && self.requests.is_empty() {
            let ticket = self.ticket();
            self.hold = Some((Step::Flushing(ticket), since));
            actions.push(Action::FlushMirror { ticket });
        }
    }

    pub(super) fn mirror_flushed(
        &mut self,
        ticket: Ticket,
        result: Result<(), Failure>,
        actions: &mut Vec<Action>,
    ) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        let is_ahead = migration.ahead.is_some_and(|(ahead, _)| ahead == ticket);
        let is_last = matches!(self.hold, Some((Step::Flushing(last), _)) if last == ticket);
        if !is_ahead && !is_last {
            return;
        }
        if let Err(failure) = result {
            return self.end_migration(Ended::DestinationFailed(failure), actions);
        }
        if is_ahead {
            migration.flushed_ahead(self.now);
        } else if migration.is_complete() {
            self.hold = self.hold.map(|(_, since)| (Step::Complete, since));
            self.standing = Standing::Held;
            actions.push(Action::Report(Report::Held));
        }
    }

    fn fail_hold(&mut self, why: HoldFailure, actions: &mut Vec<Action>) {
        self.hold = None;
        self.standing = Standing::Serving;
        actions.push(Action::Report(Report::HoldFailed(why)));
        self.admit(actions);
    }

    pub(super) fn release(&mut self, actions: &mut Vec<Action>) {
        if matches!(self.standing, Standing::Holding | Standing::Held) {
            self.standing = Standing::Serving;
            self.hold = None;
            self.end_migration(Ended::Cancelled, actions);
        }
    }

    pub(super) fn moved(&mut self, actions: &mut Vec<Action>) {
        if self.standing != Standing::Held {
            return;
        }
        self.standing = Standing::Moved;
        self.hold = None;
        self.migration = None;
        for (id, _) in std::mem::take(&mut self.waiting) {
            let result = Err(Failure::Moved);
            actions.push(Action::Reply { id, result });
        }
        actions.push(Action::Disconnect);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::types::{Config, Event};
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// An engine with all data at its destination, after the request to flush them.
    fn copied() -> (Engine, Ticket) {
        let config = Config::default();
        let mut engine = Engine::new(config, config.chunk_bytes);
        let mut actions = Vec::new();
        let bytes_per_second = None;
        engine.handle(MS, Event::Migrate { bytes_per_second }, &mut actions);
        engine.handle(MS, Event::LinkUp { keeps: false }, &mut actions);
        let &[Action::ReadChunk { ticket, .. }] = &actions[..] else {
            panic!("{actions:?}")
        };
        let result = Ok(());
        engine.handle(MS, Event::ChunkRead { ticket, result }, &mut actions);
        actions.clear();
        engine.handle(MS, Event::ChunkSent { ticket, result }, &mut actions);
        let &[Action::FlushMirror { ticket }] = &actions[..] else {
            panic!("{actions:?}")
        };
        (engine, ticket)
    }

    /// Number of flushes, if the destination's flushes take this long, one after the other.
    fn flushes(took: &[u32]) -> usize {
        let (mut engine, mut ticket) = copied();
        let mut now = MS;
        for (number, took) in (1..).zip(took) {
            now += MS * *took;
            let mut actions = Vec::new();
            let result = Ok(());
            engine.handle(now, Event::MirrorFlushed { ticket, result }, &mut actions);
            match &actions[..] {
                [Action::FlushMirror { ticket: next }] => ticket = *next,
                [Action::Report(Report::Mirrored)] => return number,
                other => panic!("{other:?}"),
            }
        }
        panic!("it was never mirrored")
    }

    #[test]
    fn the_destination_flushes_until_that_takes_no_less_before_anybody_waits() {
        assert_eq!(flushes(&[3]), 1);
        assert_eq!(flushes(&[900, 4]), 2);
        assert_eq!(flushes(&[900, 300, 100, 90]), 4);
        assert_eq!(flushes(&[900, 1200]), 2);
    }
}

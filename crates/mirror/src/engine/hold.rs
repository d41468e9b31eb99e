//! The hold: the last steps before the decision.

use super::Engine;
use super::types::{Action, Ended, Failure, HoldFailure, Report, Standing, Ticket};

/// How far a hold is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Requests that are under way are brought to their end.
    Draining,
    /// The destination flushes.
    Flushing(Ticket),
    /// All is there.
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
            migration.ahead = None;
            migration.is_flushed_ahead = true;
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

//! Pause and resume (MigrOS §3.2 to §3.4): a connection is stopped at one end, goes on at another place, and the partner
//! waits meanwhile. Code points, diagrams and what an attacker can do are in `docs/wire-extension.md`.
//!
//! ```text
//!              halt                           "stopped" comes
//!   Running ─────────► Stopped      Running ────────────────► Paused
//!      ▲                  │            ▲                         │
//!      │ acknowledged     │ resume     └─────────────────────────┘
//!      └─── Resuming ◄────┘            RESUME comes
//! ```
//!
//! - *Stopped*: answers each request with NAK "stopped" and is silent else. It can be saved ([`super::image`]), and
//!   restored elsewhere, stopped.
//! - *Paused*: its partner is stopped. No request is sent, no retry is counted.
//! - *Resuming*: says RESUME, again and again, until the partner acknowledges it.
//!
//! None of them shows in `ibv_query_qp`. Running is what costs nothing: the others are phases of the shell of their own, so
//! that the way of a packet meets no question that was not there before.
//!
//! Without a secret that the RNICs of both ends share, none of this is ever sent: a partner that does not know the
//! extension never meets it. The queue pair is then silent while it is stopped.

mod counter;
mod messages;
mod secret;
mod states;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::counter::Counter;
pub use self::secret::{Secret, SecretEnd};
use crate::{MigrationCounters, Time};

/// RESUME is said again after this time, and then after twice as long each time, up to the longest.
const RESUME_INTERVAL: Duration = Duration::from_millis(1);
const LONGEST_RESUME_INTERVAL: Duration = Duration::from_millis(64);

/// Where a queue pair is between stop and resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Neither stopped nor waiting for one that is.
    #[default]
    Running,
    /// Stopped: it may be saved and go on elsewhere.
    Stopped,
    /// Its partner is stopped.
    Paused,
    /// It tells its partner where it goes on.
    Resuming,
}

/// What a queue pair knows of the migration of its ends.
#[derive(Debug, Default)]
pub(super) struct Migration {
    standing: Standing,
    secret: Option<Secret>,
    /// Of the latest message sent.
    sent: Counter,
    /// Of the latest message that was accepted.
    accepted: Counter,
    /// Stopped: a request has come.
    nak_due: bool,
    /// A RESUME with this counter has come.
    acknowledge: Option<Counter>,
    /// Resuming: when to say it (again), and after how long once more.
    resume_at: Option<Time>,
    resume_interval: Duration,
    /// Paused and resuming: when that has lasted too long. Stopped: when it goes on by itself.
    limit: Option<Time>,
    counters: MigrationCounters,
}

/// What is saved of it. Where it stands is not: who is restored is stopped, and asks its partner anew.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MigrationImage {
    secret: Option<Secret>,
    sent: Counter,
    accepted: Counter,
}

impl Migration {
    pub fn save(&self) -> MigrationImage {
        MigrationImage {
            secret: self.secret,
            sent: self.sent,
            accepted: self.accepted,
        }
    }

    pub fn restore(image: MigrationImage) -> Migration {
        Migration {
            secret: image.secret,
            sent: image.sent,
            accepted: image.accepted,
            ..Migration::default()
        }
    }

    /// Does the requester wait for the partner?
    fn is_waiting(&self) -> bool {
        matches!(self.standing, Standing::Paused | Standing::Resuming)
    }

    /// When to look at it again.
    fn alarm(&self) -> Option<Time> {
        let times = [self.resume_at, self.limit];
        times.into_iter().flatten().min()
    }

    /// Back to the start, but for what the ends have agreed on.
    pub fn run(&mut self) {
        self.standing = Standing::Running;
        self.nak_due = false;
        self.resume_at = None;
        self.limit = None;
    }

    /// The queue pair goes to RESET: the next connection has a secret of its own.
    pub fn forget(&mut self) {
        *self = Migration {
            counters: self.counters,
            ..Migration::default()
        };
    }
}

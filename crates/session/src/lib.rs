//! The core of a migration session, without I/O: what is decided, by whom, and in what order it becomes durable.
//!
//! - [`decision`]: one machine for each role. A machine takes an event and says what is to be done; it reads no clock, opens
//!   no file and sends nothing. So the agent and the simulated world run the very same code.
//! - [`record`]: what the journal keeps, and what follows from it.
//! - [`part`]: the same where records are missing.
//! - [`recovery`]: which tasks are a session's that an agent finds in its journal.
//! - [`fill`]: memory that still comes to an instance when it runs at its destination.
//! - [`behind`]: memory that its source keeps meanwhile, for a virtual machine that has left it there.
//! - [`authority`]: which party of a session may send which message.
//! - [`turns`]: which of two sessions waits that would move both ends of a connection.
//! - [`Phase`], [`Role`]: the words for where a session stands, and for a host's part in it.
//!
//! ```text
//!  events ──► machine ──► actions          the driver carries an action out and reports its end as another event
//!    ▲                       │
//!    └──────── driver ◄──────┘
//! ```
//!
//! What must never happen, whatever fails together: two copies of an instance that run; a copy that runs again at the source
//! after it has run at the destination; a partner that goes on with the old connection then.

pub mod authority;
pub mod behind;
pub mod decision;
pub mod fill;
pub mod part;
mod phase;
pub mod record;
pub mod recovery;
pub mod turns;

pub use phase::{Phase, Role};

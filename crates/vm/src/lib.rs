//! Virtual machines of unmodified QEMU: started so that they can move, and moved step by step.
//!
//! ```text
//!  source                                             destination
//!  Machine (runs)                                     Machine (started with -incoming defer -S)
//!  Rounds::round … ──── runs of the RAM ─────────────► Ram::write, Ram::clear
//!  leave ────────────┐                   ┌─────────── arrive
//!  stopped           │                   │
//!  Rounds::last ─────│── last runs ─────►│
//!  hand_over         └── device state ──►└─ loaded    (paused)
//!                       *decision*
//!  quit                                               run
//! ```
//!
//! The RAM is a file of tmpfs that QEMU shares ([`Ram`]), and QEMU leaves it out of its own migration stream
//! (`x-ignore-shared`). The guest's writes are tracked from outside ([`Rounds`], `verbatim_tracking`). QEMU
//! sends the rest, some hundred KiB of devices' state, over a socket of ours. The RAM is complete before this
//! state is loaded: virtio devices read their rings during the load.
//!
//! Until the decision the source's guest can go on ([`Outgoing::take_back`]): the destination's QEMU loads,
//! and does not run. This crate does not decide: the session does.
//!
//! A guest can run before all of its memory has come: the last written pages come when they are touched, or
//! later ([`PostCopy`]).
//!
//! A QEMU of libvirt is asked through libvirt, and started by libvirt at the destination ([`Domain`]);
//! everything else is the same.
//!
//! A machine that cannot move is refused before anything is changed: by its command line
//! ([`Arguments::parse`]), or by its present state ([`Machine::may_move`]).

mod arguments;
mod destination;
mod disk;
mod error;
mod graph;
mod libvirt;
mod limit;
mod locks;
mod machine;
mod made;
#[allow(unsafe_code, reason = "the one place for it")]
mod ofd;
mod post_copy;
mod processor;
mod qmp;
mod ram;
mod refusal;
mod running;
mod settings;
mod source;
mod trouble;
mod words;

pub use arguments::{Arguments, MEMORY};
pub use destination::Incoming;
pub use disk::NbdDisk;
pub use error::{Error, Result};
pub use graph::{Carried, File, Now, Remote, Server};
pub use libvirt::{Description, Domain};
pub use locks::Held;
pub use machine::{Machine, Status};
pub use post_copy::{AHEAD, PostCopy, URGENT};
pub use processor::{Offered, Processor};
pub use qmp::{Event, Qmp};
pub use ram::{Behind, RUN, Ram, Rounds, Run};
pub use running::USUAL_MAC;
pub use settings::Settings;
pub use source::Outgoing;
pub use words::last_words;

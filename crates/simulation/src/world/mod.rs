//! One session, its hosts, and what is under way between them.

pub mod destination;
mod faults;
pub mod partner;
pub mod source;

use std::fmt;

use strum::{EnumIter, IntoStaticStr, VariantArray};
use verbatim_session::decision::{Fact, Keep, Mark, Outcome, Written};
use verbatim_session::record::{self, Standing};

use crate::check::{self, Violation};
use crate::explore::Worlds;
use crate::simulated::{self, Simulated, What};

pub use destination::DestinationHost;
pub use partner::{End, PartnerHost};
pub use source::SourceHost;

/// Faults that were in the code once, put back into the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantArray, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Quirk {
    /// Only CRIU's ptrace holds the frozen source: its cgroup is not frozen.
    PtraceOnly,
    /// What cannot be looked at after a restart is taken for gone, and decided.
    UnknownIsGone,
    /// Any failure to let the tasks go is taken for evidence that they have not run.
    AnyErrorNotRun,
    /// The proxy leaves no marker.
    NoMarker,
    /// Whoever knows the session's number may send its messages.
    NoAuthority,
    /// A record that is written behind a torn one is glued to it, and lost.
    Glue,
    /// The journal lies in memory, and goes with the boot.
    VolatileJournal,
    /// A restarted RNIC does not get the instances' listeners back.
    LostListeners,
    /// A destination takes records that are missing for the one that says it was committed.
    DamageIsCommit,
}

/// The quirks of a world.
pub type Quirks = simulated::Quirks<Quirk>;

/// What can happen next.
pub type Step = simulated::Step<Who>;

type Steps<'a> = simulated::Steps<'a, World>;

/// A host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Who {
    /// The source.
    Source,
    /// The destination.
    Destination,
    /// The partner's.
    Partner,
    /// What happens between hosts.
    Network,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Partner => "partner",
            Self::Network => "network",
        })
    }
}

/// The instance's tasks on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tasks {
    /// There were none yet.
    None,
    /// CRIU has restored them, and holds them.
    Held,
    /// They are there. At the source CRIU or their cgroup may keep them still.
    Alive,
    /// There are none any more.
    Gone,
}

/// What every host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Common {
    /// What the journal says, on disk.
    pub journal: Option<Standing>,
    /// Records that are being written, in order.
    pub writes: [Option<Mark>; 4],
    /// The machine's timers that run, by their number.
    pub timers: u8,
    /// The host has booted since the session began.
    pub rebooted: bool,
    /// The RNIC is up.
    pub nic: bool,
    /// It listens for the programs of the instances, or will as soon as it is up.
    pub listeners: bool,
    /// A torn record is in the journal.
    pub torn: bool,
}

impl Common {
    fn new() -> Self {
        Self {
            journal: Some(Standing::Opened),
            writes: [None; 4],
            timers: 0,
            rebooted: false,
            nic: true,
            listeners: true,
            torn: false,
        }
    }

    /// The agent is gone, and with it what it waited for.
    fn forget(&mut self) {
        self.writes = [None; 4];
        self.timers = 0;
    }

    fn reboot(&mut self, quirks: Quirks) {
        self.forget();
        self.rebooted = true;
        self.nic = true;
        // The agent that starts with the host serves all instances' listeners: there are none yet.
        self.listeners = true;
        if quirks.has(Quirk::VolatileJournal) {
            self.journal = None;
        }
    }

    /// Records are missing behind those that there are.
    fn damage(&mut self) {
        self.journal = self.journal.map(Standing::damaged);
    }

    /// Timers that were set in an earlier state mean nothing to the machine.
    fn new_state(&mut self) {
        self.timers = 0;
    }

    fn write(&mut self, mark: Mark) {
        let slot = self.writes.iter_mut().find(|slot| slot.is_none());
        *slot.expect("a machine writes few records at once") = Some(mark);
    }

    /// The first record that is being written reaches the disk.
    fn written(&mut self, quirks: Quirks) -> Option<(Mark, Written)> {
        let mark = self.writes[0].take()?;
        self.writes.rotate_left(1);
        if self.torn && quirks.has(Quirk::Glue) {
            self.torn = false;
        } else {
            let before = self.journal.unwrap_or(Standing::Opened);
            self.journal = Some(before.after(&record::What::from(mark)));
        }
        Some((mark, Written::Durable))
    }

    /// It fails, and the journal does not have it.
    fn not_written(&mut self) -> Option<(Mark, Written)> {
        let mark = self.writes[0].take()?;
        self.writes.rotate_left(1);
        Some((mark, Written::Failed))
    }
}

/// One message may be under way of each of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr)]
pub enum Message {
    /// Source to partner: come to a stop.
    Quiesce,
    /// Source to destination: restore.
    Restore,
    /// Source to destination.
    Commit,
    /// Source to destination: give it up, and say what is the case.
    Settle,
    /// Source to partner: it was rolled back.
    Abort,
    /// Source to destination: claim and resume.
    Claim,
    /// Source to partner.
    Switch,
    /// Destination to partner, in the place of a source that is gone.
    SwitchInstead,
    /// A stranger to the destination.
    ForgedCommit,
}

/// The messages under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Mail(u16);

impl Mail {
    /// How many bits they are.
    pub const BITS: u32 = 9;

    /// A bit for each message.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// The reverse.
    pub fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Whether it is under way.
    pub fn has(self, message: Message) -> bool {
        self.0 & 1 << message as u16 != 0
    }

    /// It is sent.
    pub fn send(&mut self, message: Message) {
        self.0 |= 1 << message as u16;
    }

    /// It is lost, or arrives.
    pub fn take(&mut self, message: Message) {
        self.0 &= !(1 << message as u16);
    }
}

/// All of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    /// The source's host.
    pub source: SourceHost,
    /// The destination's.
    pub destination: DestinationHost,
    /// The partner's.
    pub partner: PartnerHost,
    /// What is under way.
    pub mail: Mail,
    /// The instance's tasks have run at the destination.
    pub ran_there: bool,
    /// An operator has forced a decision, and answers for it.
    pub forced: bool,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// A session was opened at all hosts.
    pub fn new() -> Self {
        Self {
            source: SourceHost::new(),
            destination: DestinationHost::new(),
            partner: PartnerHost::new(),
            mail: Mail::default(),
            ran_there: false,
            forced: false,
        }
    }

    /// Whoever has come to the end takes every message as if it had not come.
    fn drop_mail_for_ended(&mut self) {
        use verbatim_session::decision::{destination, partner};
        let there = self.destination.agent.map(|agent| agent.machine.state());
        if let Some(destination::State::Ended(_)) = there {
            for message in [
                Message::Restore,
                Message::Commit,
                Message::Settle,
                Message::Claim,
                Message::ForgedCommit,
            ] {
                self.mail.take(message);
            }
        }
        let partner = self.partner.agent.map(|agent| agent.machine.state());
        if let Some(partner::State::Ended(_)) = partner {
            for message in [
                Message::Quiesce,
                Message::Abort,
                Message::Switch,
                Message::SwitchInstead,
            ] {
                self.mail.take(message);
            }
        }
    }

    /// Whether the copy at the source runs.
    pub fn runs_here(&self) -> bool {
        self.source.runs()
    }

    /// Whether the copy at the destination runs.
    pub fn runs_there(&self) -> bool {
        self.destination.tasks == Tasks::Alive
    }

    /// What the source says to a partner that asks.
    fn source_says(&self) -> Option<Outcome> {
        match self.source.common.journal? {
            _ if self.source.agent.is_none() => None,
            Standing::RolledBack
            | Standing::Resolved(Keep::Source)
            | Standing::Closed(Outcome::RolledBack) => Some(Outcome::RolledBack),
            Standing::Ran
            | Standing::Cleared
            | Standing::Resolved(Keep::Destination)
            | Standing::Closed(Outcome::Committed) => Some(Outcome::Committed),
            _ => None,
        }
    }
}

impl Simulated for World {
    type Who = Who;
    type Quirk = Quirk;
    type Violation = Violation;
    type Known = Worlds;

    const FAULTS_WITHIN: u64 = 60;
    const HEALED_AFTER: usize = 120;

    fn of_seed(_: u64) -> Self {
        Self::new()
    }

    fn steps(&self, quirks: Quirks, what: What, found: &mut Vec<(Step, World)>) {
        let mut steps = Steps::new(self, quirks, what, Who::Source, found);
        source::steps(&mut steps);
        steps.who = Who::Destination;
        destination::steps(&mut steps);
        steps.who = Who::Partner;
        partner::steps(&mut steps);
        steps.who = Who::Network;
        faults::loss(&mut steps);
        faults::steps(&mut steps);
    }

    fn violation(&self, after: &Self) -> Option<Violation> {
        check::violation(self, after)
    }

    fn is_good_end(&self) -> bool {
        check::is_good_end(self)
    }

    fn has_moved(&self) -> bool {
        self.ran_there
    }

    fn tidy(&mut self) {
        self.drop_mail_for_ended();
    }
}

/// What a probe says where the RNIC is down: an agent cannot take an instance over without it.
fn blind(common: &Common, quirks: Quirks) -> Option<Fact> {
    if common.nic {
        return None;
    }
    Some(match quirks.has(Quirk::UnknownIsGone) {
        true => Fact::Gone { ran: false },
        false => Fact::Unknown,
    })
}

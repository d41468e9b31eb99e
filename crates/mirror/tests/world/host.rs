//! A host: its disk, its sidecar, and the process that may be there.

use std::collections::{BTreeMap, BTreeSet};

use verbatim_mirror::decision::{Ask, SessionId, Sidecar};
use verbatim_mirror::{Arrival, Extent, Receiver, RequestId, Standing, Ticket};

use super::disk::{Disk, Io, Value};
use super::paper::Machine;

/// Purpose of writing a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To take an offer that came on this connection.
    Prepare(usize),
    /// To hold the tenant for the decision.
    Deciding,
    /// To answer a question.
    Answer(Ask),
    /// To apply the answer to a source's question.
    Decided,
    /// The decision could not be begun.
    Undo,
}

/// A sidecar that is being written.
#[derive(Debug, Clone)]
pub struct Writing {
    pub sidecar: Sidecar,
    pub purpose: Purpose,
}

/// Origin of an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    Tenant(RequestId),
    /// A chunk of the engine with this number.
    Chunk(u64, Ticket),
    Arrival(Arrival),
}

/// The process' memory of a request.
#[derive(Debug, Clone)]
pub enum Data {
    Read {
        extent: Extent,
        promised: Vec<usize>,
        values: Vec<Value>,
    },
    Write {
        extent: Extent,
        values: Vec<Value>,
    },
    Flush {
        promised: Vec<usize>,
    },
}

/// An attempt to move the volume, at its source.
#[derive(Debug, Clone, Copy)]
pub struct Session {
    pub id: SessionId,
    pub to: usize,
    /// The connection that counts.
    pub connection: Option<usize>,
    /// The destination's process that has acknowledged everything so far.
    pub peer: Option<u64>,
    pub is_mirrored: bool,
}

/// Progress of a source's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    None,
    Writing,
    Asking,
}

pub struct Process {
    /// Unique number of the process.
    pub number: u64,
    pub engine: Option<Box<dyn Machine>>,
    pub engine_number: u64,
    pub io: Vec<(For, Io)>,
    pub requests: BTreeMap<RequestId, Data>,
    /// Requests without an answer.
    pub open: BTreeSet<RequestId>,
    pub chunks: BTreeMap<Ticket, (Extent, Vec<Value>)>,
    pub session: Option<Session>,
    pub stage: Stage,
    pub receiver: Receiver,
    /// The session of the receiver's last connection.
    pub receives: Option<SessionId>,
    /// The source's name of each arrival, and the connection on which it came.
    pub arrivals: BTreeMap<Arrival, (usize, super::network::Name)>,
    pub writing: Option<Writing>,
    /// The note that a write or a flush has failed is being written.
    pub is_suspecting: bool,
}

impl Process {
    pub fn new(number: u64) -> Self {
        Self {
            number,
            engine: None,
            engine_number: 0,
            io: Vec::new(),
            requests: BTreeMap::new(),
            open: BTreeSet::new(),
            chunks: BTreeMap::new(),
            session: None,
            stage: Stage::None,
            receiver: Receiver::default(),
            receives: None,
            arrivals: BTreeMap::new(),
            writing: None,
            is_suspecting: false,
        }
    }

    /// Whether the tenant may be answered here.
    pub fn serves(&self) -> bool {
        let standing = self.engine.as_ref().map(|engine| engine.standing());
        matches!(standing, Some(Standing::Serving | Standing::Holding))
    }
}

pub struct Host {
    pub disk: Disk,
    pub sidecar: Option<Sidecar>,
    pub process: Option<Process>,
    /// Power failed since a copy was last served here.
    pub has_lost_power: bool,
}

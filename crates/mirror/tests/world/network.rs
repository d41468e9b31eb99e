//! Connections, and questions beside them. Messages may arrive in any order, and late.

use verbatim_mirror::decision::{Answer, Ask, SessionId};
use verbatim_mirror::{Line, RequestId, Ticket};

use super::disk::Value;

/// The source's name of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    Request(RequestId),
    Chunk(Ticket),
    Flush(Ticket),
}

#[derive(Debug, Clone)]
pub enum ToDestination {
    Hello,
    Put {
        name: Name,
        offset: usize,
        values: Vec<Value>,
    },
    Flush {
        ticket: Ticket,
    },
}

#[derive(Debug, Clone, Copy)]
pub enum ToSource {
    Welcome,
    Done { name: Name, is_good: bool },
    Refused,
    Closed,
}

pub struct Connection {
    pub session: SessionId,
    pub from: usize,
    pub from_process: u64,
    pub to: usize,
    pub to_process: u64,
    pub line: Option<Line>,
    pub to_destination: Vec<ToDestination>,
    pub to_source: Vec<ToSource>,
}

#[derive(Debug, Clone, Copy)]
pub enum Letter {
    Ask { from: usize, to: usize, ask: Ask },
    Answer { to: usize, ask: Ask, answer: Answer },
}

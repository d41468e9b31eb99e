//! What a program does, and when it is moved.

use crate::testing::Patience;
use crate::{SEND_FENCE, SEND_SIGNALED, SendOpcode};

/// The length of three packets.
pub const LONG: u32 = 700;

/// `wr_id`s from here on are of RECVs.
pub const RECV: u64 = 1000;

/// A stretch of an end's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct At(pub usize, pub u32);

/// A send request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub end: usize,
    pub wr_id: u64,
    pub opcode: SendOpcode,
    pub flags: u32,
    pub inline: bool,
    pub local: At,
    /// Offset in the other end's memory.
    pub remote: usize,
    pub bad_lkey: bool,
    pub bad_rkey: bool,
}

/// A call of the program.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    Send(Request),
    Recv {
        end: usize,
        wr_id: u64,
        local: At,
    },
    /// Polls until an end has had so many completions in all.
    Await {
        end: usize,
        count: usize,
    },
    /// Takes the queue pair to ERR.
    Fail {
        end: usize,
    },
    /// Changes the bytes, as a program may with a buffer whose request is complete or was inline.
    Fill {
        end: usize,
        at: usize,
        value: u8,
    },
}

/// Who moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Who {
    One(usize),
    /// Both begin, and one has to wait for the other.
    Both,
}

/// How.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum How {
    /// All of it between two steps of the program.
    AtOnce,
    /// One step of the move after each step of the program.
    StepByStep,
    /// That too, and taken back after so many steps, if it is not too late then.
    TakenBack(usize),
}

/// A move that is to be made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    pub step: usize,
    pub who: Who,
    pub how: How,
    pub patience: Patience,
}

impl How {
    pub const ALL: [Self; 6] = [
        Self::AtOnce,
        Self::StepByStep,
        Self::TakenBack(0),
        Self::TakenBack(1),
        Self::TakenBack(3),
        Self::TakenBack(5),
    ];
}

pub fn post(wr_id: u64, opcode: SendOpcode, length: u32) -> Request {
    Request {
        end: 0,
        wr_id,
        opcode,
        flags: SEND_SIGNALED,
        inline: false,
        local: At(wr_id as usize * 8, length),
        remote: 1024 + wr_id as usize * 16,
        bad_lkey: false,
        bad_rkey: false,
    }
}

impl Request {
    pub fn unsignaled(mut self) -> Self {
        self.flags &= !SEND_SIGNALED;
        self
    }

    pub fn fenced(mut self) -> Self {
        self.flags |= SEND_FENCE;
        self
    }
}

pub fn recv(end: usize, number: u64, length: u32) -> Call {
    Call::Recv {
        end,
        wr_id: RECV + number,
        local: At(2048 + number as usize * 160, length),
    }
}

pub fn wait(end: usize, count: usize) -> Call {
    Call::Await { end, count }
}

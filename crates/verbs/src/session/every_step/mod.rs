//! A program on both ends of a connection, run call by call and packet by packet, with a move at one of its steps: what
//! the program sees must be what it sees without (MigrRDMA §5 moves at a few points; here it is at each).

mod calls;
mod random_tests;
mod tests;

pub use self::calls::{At, Call, How, Plan, RECV, Request, Who};
use crate::testing::{MEMORY, Move, Outcome, Pair, Shape};
use crate::{Body, QpAttr, RecvWr, SendWr, UdAddress, Wc};
use verbatim_device::control::{QpAttrMask, QpState};
use verbatim_device::layout::Sge;

/// A run that takes more steps does not end.
const MOST_STEPS: usize = 20_000;

/// A key that no region has.
const BAD_KEY: u32 = 0xdead_be00;

/// What a program sees.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// For each end, what it took off its completion queue: sends and RECVs, each in their order.
    pub completions: [[Vec<Wc>; 2]; 2],
    /// What is in its memory afterwards.
    pub memory: [Vec<u8>; 2],
}

impl Trace {
    /// As it is where it does not matter which of the send requests has failed, and why: if the answer that says so is lost,
    /// the other end's silence says it, also of requests that were executed before.
    pub fn with_any_failure(mut self) -> Self {
        for [sends, _] in &mut self.completions {
            for wc in sends {
                let wr_id = wc.wr_id;
                *wc = Wc {
                    wr_id,
                    ..Wc::default()
                };
            }
        }
        self
    }
}

#[derive(Debug, Default)]
enum Moving {
    #[default]
    No,
    /// And whether the other end follows.
    One(Move, Option<usize>),
    Both(Move, Move),
}

pub struct Run {
    pub pair: Pair,
    plans: Vec<Plan>,
    moving: Moving,
    /// Steps of the move under way until it is taken back.
    take_back_in: Option<usize>,
    pub steps: usize,
    /// Moves that were made.
    pub moves: usize,
    pub taken_back: usize,
    completions: [[Vec<Wc>; 2]; 2],
    count: [usize; 2],
}

impl Run {
    pub fn new(rnr_retry: u8, plans: &[Plan]) -> Self {
        let pair = Pair::with(Shape {
            rnr_retry,
            ..Shape::LONG
        });
        for end in 0..2 {
            let bytes: Vec<u8> = (0..MEMORY)
                .map(|at| (at % 251) as u8 ^ (end as u8 * 0x80))
                .collect();
            pair.wire.fill(end, 0, &bytes);
        }
        Self {
            pair,
            plans: plans.to_vec(),
            moving: Moving::No,
            take_back_in: None,
            steps: 0,
            moves: 0,
            taken_back: 0,
            completions: Default::default(),
            count: [0; 2],
        }
    }

    /// All calls in turn, and what is left to happen after them.
    pub fn run(mut self, calls: &[Call]) -> (Trace, Self) {
        for call in calls {
            self.step();
            self.call(call);
            self.pair.wire.step();
        }
        // Nothing may come late, or twice.
        loop {
            self.step();
            let worked = self.pair.wire.step();
            (0..2).for_each(|end| self.poll(end));
            let planned = self.plans.iter().any(|plan| plan.step >= self.steps);
            if !worked && matches!(self.moving, Moving::No) && !planned {
                break;
            }
        }
        let trace = Trace {
            completions: std::mem::take(&mut self.completions),
            memory: [0, 1].map(|end| self.pair.wire.ram(end)),
        };
        (trace, self)
    }

    /// Between two steps of the program.
    fn step(&mut self) {
        self.steps += 1;
        assert!(self.steps < MOST_STEPS, "it does not end");
        if let Some(plan) = self
            .plans
            .iter()
            .find(|plan| plan.step + 1 == self.steps)
            .copied()
        {
            self.begin(plan);
        } else if !matches!(self.moving, Moving::No) {
            self.advance();
        }
    }

    fn begin(&mut self, plan: Plan) {
        self.finish();
        self.pair.patience = plan.patience;
        self.moving = match plan.who {
            Who::One(mover) => Moving::One(self.pair.begin(mover), None),
            Who::Both => {
                let first = self.pair.begin(0);
                let second = self.pair.begin(1);
                Moving::Both(first, second)
            }
        };
        match plan.how {
            How::AtOnce => self.finish(),
            How::StepByStep => self.take_back_in = None,
            How::TakenBack(after) => self.take_back_in = Some(after),
        }
    }

    /// The moves under way to their ends.
    fn finish(&mut self) {
        self.take_back_in = None;
        while !matches!(self.moving, Moving::No) {
            self.advance();
        }
    }

    fn advance(&mut self) {
        self.moving = match std::mem::take(&mut self.moving) {
            Moving::No => Moving::No,
            Moving::Both(first, second) => self.advance_both(first, second),
            Moving::One(one, next) => {
                if self.take_back_in == Some(0) && one.can_be_taken_back() {
                    self.take_back_in = None;
                    self.taken_back += 1;
                    self.pair.take_back(one);
                    return;
                }
                self.take_back_in = self.take_back_in.map(|left| left.saturating_sub(1));
                match self.pair.advance(one) {
                    Outcome::Under(one) => Moving::One(one, next),
                    Outcome::Done => {
                        self.moves += 1;
                        next.map_or(Moving::No, |mover| Moving::One(self.pair.begin(mover), None))
                    }
                    Outcome::TakenBack => {
                        self.taken_back += 1;
                        Moving::No
                    }
                }
            }
        };
    }

    /// Both go on until they are drained; then the second has to give way, and begins again after the first.
    fn advance_both(&mut self, first: Move, second: Move) -> Moving {
        let go_on = |pair: &mut Pair, one: Move| match one.is_drained() {
            true => Ok(one),
            false => match pair.advance(one) {
                Outcome::Under(one) => Ok(one),
                Outcome::Done | Outcome::TakenBack => Err(()),
            },
        };
        match (go_on(&mut self.pair, first), go_on(&mut self.pair, second)) {
            (Ok(first), Ok(second)) if first.is_drained() && second.is_drained() => {
                self.pair.abort(second);
                Moving::One(first, Some(1))
            }
            (Ok(first), Ok(second)) => Moving::Both(first, second),
            (Ok(one), Err(())) | (Err(()), Ok(one)) => {
                self.taken_back += 1;
                Moving::One(one, None)
            }
            (Err(()), Err(())) => {
                self.taken_back += 2;
                Moving::No
            }
        }
    }

    pub fn call(&mut self, call: &Call) {
        match *call {
            Call::Send(ref request) => {
                let posted = self.post(request);
                posted.unwrap_or_else(|error| panic!("{call:?}: {error:?}"));
            }
            Call::Recv { end, wr_id, local } => {
                let sges = [self.sge(end, local, false)];
                let request = RecvWr { wr_id, sges: &sges };
                self.pair.ends[end].qp.post_recv([request]).unwrap();
            }
            Call::Await { end, count } => {
                while self.count[end] < count {
                    let before = self.count[end];
                    self.poll(end);
                    if self.count[end] == before {
                        let worked = self.pair.wire.step();
                        let idle = !worked && matches!(self.moving, Moving::No);
                        assert!(!idle, "completion {} of end {end} does not come", before + 1);
                        self.step();
                    }
                }
            }
            Call::Fail { end } => {
                // A control verb waits until the move is over.
                self.finish();
                let attr = QpAttr {
                    state: QpState::Err,
                    ..QpAttr::default()
                };
                self.pair.ends[end].qp.modify(QpAttrMask::STATE, &attr).unwrap();
            }
            Call::Fill { end, at, value } => self.pair.wire.fill(end, at, &[value; 64]),
        }
    }

    fn sge(&self, end: usize, At(at, length): At, bad: bool) -> Sge {
        let sge = self.pair.ends[end].sge(at as u64, length);
        Sge {
            lkey: if bad { BAD_KEY } else { sge.lkey },
            ..sge
        }
    }

    fn post(&mut self, request: &Request) -> Result<(), (usize, crate::PostError)> {
        let Request {
            end,
            wr_id,
            opcode,
            flags,
            inline,
            local,
            remote,
            bad_lkey,
            bad_rkey,
        } = *request;
        let (start, rkey) = self.pair.ends[end].remote;
        let sges = [self.sge(end, local, bad_lkey)];
        let bytes = self.pair.wire.ram(end);
        let bytes: [&[u8]; 1] = [&bytes[local.0..local.0 + local.1 as usize]];
        let request = SendWr {
            wr_id,
            opcode,
            flags,
            imm: wr_id as u32,
            remote_address: start + remote as u64,
            rkey: if bad_rkey { BAD_KEY } else { rkey },
            compare_add: 3,
            swap: u64::MAX - wr_id,
            ud: UdAddress::default(),
            body: match inline {
                true => Body::Inline(&bytes),
                false => Body::Sges(&sges),
            },
        };
        self.pair.ends[end].qp.post_send([request])
    }

    fn poll(&mut self, end: usize) {
        let Some(mut wc) = self.pair.ends[end].poll_one() else {
            return;
        };
        self.count[end] += 1;
        if wc.status != 0 {
            // Of an error, no more is told (ibv_poll_cq(3)).
            wc = Wc {
                wr_id: wc.wr_id,
                status: wc.status,
                qp_num: wc.qp_num,
                ..Wc::default()
            };
        }
        self.completions[end][usize::from(wc.wr_id >= RECV)].push(wc);
    }
}

/// Runs the calls over a network that loses some of the first packets.
pub fn run(calls: &[Call], rnr_retry: u8, plans: &[Plan], losses: &[bool]) -> (Trace, Run) {
    let run = Run::new(rnr_retry, plans);
    run.pair.wire.lose(losses.iter().copied());
    run.run(calls)
}

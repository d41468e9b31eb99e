//! Two connected programs, and moves of one or both, step by step.

use super::moves::{Move, Step};
use super::{End, Shape, Wire};

/// What is done when a drain does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// It is looked at so often, since the program may be the one that has to do something; then the move is taken back.
    Waits(usize),
    /// After the first look, the connection is stopped in the middle of its requests.
    Stops,
    /// There is no drain: the RNICs pause the connection between themselves.
    Pauses,
}

impl Patience {
    /// Enough for whatever is only on its way.
    pub const LONG: Self = Self::Waits(200);
}

/// What a step of a move has led to.
#[derive(Debug)]
pub enum Outcome {
    Under(Move),
    Done,
    /// Taken back, since the drain did not end.
    TakenBack,
}

/// Two ends.
pub struct Pair {
    pub wire: Wire,
    pub ends: [End; 2],
    pub(super) shape: Shape,
    pub(super) next_device: u8,
    pub(super) next_session: u64,
    pub patience: Patience,
    /// Requests that were posted again because their connection was stopped, and that were only completed.
    pub replayed: [u64; 2],
    /// Why the last move was taken back.
    pub refusal: Option<String>,
}

impl Pair {
    pub fn new() -> Self {
        Self::with(Shape::PLAIN)
    }

    /// Connected, with PSNs that wrap soon.
    pub fn with(shape: Shape) -> Self {
        let wire = Wire::new();
        if shape.made_again {
            [1, 2].iter().for_each(|device| wire.makes_again(*device, None));
        }
        if shape.reuses_numbers {
            wire.reuse_numbers();
        }
        let mut ends = [0, 1].map(|end| End::new(&wire, end, shape));
        let [one, two] = &mut ends;
        let psn = [0xff_fffd, 0xff_ffff];
        one.connect(two, psn, shape.rnr_retry);
        two.connect(one, [psn[1], psn[0]], shape.rnr_retry);
        Self {
            wire,
            ends,
            shape,
            next_device: 3,
            next_session: 1,
            patience: Patience::LONG,
            replayed: [0; 2],
            refusal: None,
        }
    }

    /// The next step.
    pub fn advance(&mut self, mut one: Move) -> Outcome {
        match one.step {
            Step::Prepared => self.suspend(&mut one),
            Step::Suspended if one.pauses => self.pause(&mut one),
            Step::Suspended => {
                let drained = self.drain(&mut one, 0);
                let gone_on = match self.patience {
                    _ if drained => Ok(()),
                    Patience::Waits(looks) if one.looks >= looks => Err(None),
                    Patience::Waits(_) => {
                        one.looks += 1;
                        Ok(())
                    }
                    Patience::Stops => self.stop(&mut one).map_err(Some),
                    Patience::Pauses => unreachable!("it does not look whether it is drained"),
                };
                if let Err(refusal) = gone_on {
                    self.refusal = refusal;
                    self.abort(one);
                    return Outcome::TakenBack;
                }
            }
            Step::Drained => self.quiesce(&mut one),
            Step::Quiesced => _ = self.claim(&mut one),
            Step::Claimed => _ = self.switch(&mut one),
            Step::Switched => {
                self.resume(one);
                return Outcome::Done;
            }
        }
        Outcome::Under(one)
    }

    /// All of it. For a network where everything arrives.
    pub fn migrate(&mut self, mover: usize) {
        let mut one = self.begin(mover);
        self.suspend(&mut one);
        assert!(self.drain(&mut one, 1000), "everything arrives");
        self.quiesce(&mut one);
        self.claim(&mut one);
        self.switch(&mut one);
        self.resume(one);
    }
}

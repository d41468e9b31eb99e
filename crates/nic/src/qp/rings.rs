//! A queue pair's rings, and what is needed to read them.

use verbatim_device::control::QpCap;
use verbatim_device::layout;
use verbatim_device::ring::SentWqe;

use crate::ends::QpEnds;

#[derive(Debug)]
pub struct Rings {
    pub ends: QpEnds,
    pub cap: QpCap,
    /// A ring index cannot be: the rings are not read any more, and the queue pair goes to ERR.
    pub broken: bool,
}

/// Where requests are copied to before they are looked at. One for all queue pairs, which run one after the other.
#[derive(Debug, Default)]
pub struct Scratch {
    pub wqe: SentWqe,
    pub sges: Vec<layout::Sge>,
}

impl Rings {
    pub fn new(ends: QpEnds, cap: QpCap) -> Self {
        Self {
            ends,
            cap,
            broken: false,
        }
    }

    /// Forgets everything, for RESET.
    pub fn reset(&mut self) {
        self.ends.send.reset();
        self.ends.recv.reset();
        self.broken = false;
    }
}

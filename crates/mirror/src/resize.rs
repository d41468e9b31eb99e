//! In which order a volume grows: its data, its sidecar, and only then what clients are told. So all that was ever written lies within a length that a
//! restart finds again; what was cut off leaves data that are longer than the sidecar says, which is harmless, since opening does not shorten them.

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The data get the length, durably. If that fails, all is as before.
    GrowData,
    /// The sidecar's length becomes durable. While it cannot be said whether it is, nothing is told, and nobody else's order waits.
    WriteSidecar,
    /// The engine, and then clients, hear of it.
    Announce,
    /// All have it.
    Done,
}

/// Lengths as they are, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Of the data.
    pub data: u64,
    /// In the durable sidecar.
    pub sidecar: u64,
    /// As clients know it.
    pub told: u64,
}

/// The next step to `wanted`. After a failure it is the same one again, or none: what is told is durable at each moment.
pub fn next(now: Lengths, wanted: u64) -> Step {
    if now.data < wanted {
        Step::GrowData
    } else if now.sidecar < wanted {
        Step::WriteSidecar
    } else if now.told < wanted {
        Step::Announce
    } else {
        Step::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_told_that_is_not_durable_wherever_it_is_cut_off() {
        for cut in 0..=3 {
            let mut now = Lengths {
                data: 10,
                sidecar: 10,
                told: 10,
            };
            for _ in 0..cut {
                match next(now, 20) {
                    Step::GrowData => now.data = 20,
                    Step::WriteSidecar => now.sidecar = 20,
                    Step::Announce => now.told = 20,
                    Step::Done => panic!("it is told"),
                }
                assert!(now.told <= now.sidecar && now.sidecar <= now.data);
            }
            // A restart tells what the sidecar says.
            now.told = now.sidecar;
            let is_whole = cut >= 2;
            assert_eq!(now.told == 20, is_whole);
            assert_eq!(next(now, 20) == Step::Done, is_whole);
        }
    }
}

//! The order in which a volume grows: its data, its sidecar, and only then the length that clients know. So
//! all bytes ever written lie within a length that a restart finds again. An interrupted resize leaves data
//! that are longer than the sidecar says. That is harmless, since opening does not shorten them.

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The data get the length, durably. If that fails, nothing has changed.
    GrowData,
    /// The sidecar's length becomes durable. While that is uncertain, clients are not told, and other orders
    /// do not wait.
    WriteSidecar,
    /// The engine, and then the clients, get the new length.
    Announce,
    /// The resize is complete.
    Done,
}

/// Present lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Length of the data.
    pub data: u64,
    /// Length in the durable sidecar.
    pub sidecar: u64,
    /// Length that clients know.
    pub told: u64,
}

/// The next step towards `wanted`. After a failure the same step is repeated, or none follows. The length
/// that clients know is durable at each moment.
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
            // After a restart clients get the sidecar's length.
            now.told = now.sidecar;
            let is_whole = cut >= 2;
            assert_eq!(now.told == 20, is_whole);
            assert_eq!(next(now, 20) == Step::Done, is_whole);
        }
    }
}

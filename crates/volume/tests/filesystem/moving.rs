//! A volume that goes to and fro between two daemons.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Lab, NAMES};

/// Moves the volume each `interval` until the end. Returns the number of moves, and the host of the volume.
pub fn to_and_fro(lab: &Lab, volume: &str, interval: Duration, is_over: &AtomicBool) -> (u64, usize) {
    let (mut moves, mut host) = (0, 0);
    let mut next = Instant::now() + interval;
    while !is_over.load(Ordering::Relaxed) {
        if Instant::now() < next {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        next = Instant::now() + interval;
        lab.order(host, &["migrate", volume, "--to", NAMES[1 - host]]);
        host = 1 - host;
        moves += 1;
    }
    (moves, host)
}

//! The rate of the time stamp counter, which an emulated processor (TCG) passes through.
//!
//! A kernel measures it against the timer chip while it boots. Where QEMU has to wait for a core just then, it measures nonsense (195 MHz instead
//! of 2596 was seen), does not believe the better measurement that follows, and its clock runs thirteen times too fast from then on: every
//! limit in the machine is over too early. So it is told the rate (`tsc_early_khz`).

use std::time::{Duration, Instant};

/// Between two looks at both clocks.
const BETWEEN: Duration = Duration::from_millis(20);

/// How often both are read at each look; what took the shortest time counts.
const TRIES: u32 = 16;

/// In kHz; `None` where there is no such counter.
pub(crate) fn khz() -> Option<u64> {
    let (first_ticks, first) = look()?;
    std::thread::sleep(BETWEEN);
    let (ticks, now) = look()?;
    let micros = now.duration_since(first).as_micros();
    let passed = u128::from(ticks.wrapping_sub(first_ticks));
    u64::try_from(passed * 1000 / micros).ok().filter(|khz| *khz > 0)
}

/// Both clocks at one moment.
fn look() -> Option<(u64, Instant)> {
    let one = |_| {
        let before = Instant::now();
        let ticks = ticks()?;
        Some((before.elapsed(), ticks, before))
    };
    let looks: Option<Vec<_>> = (0..TRIES).map(one).collect();
    let shortest = looks?.into_iter().min_by_key(|(took, ..)| *took)?;
    Some((shortest.1, shortest.2))
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> Option<u64> {
    // SAFETY: the instruction is there in 64-bit mode, and changes nothing.
    Some(unsafe { core::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_the_same_each_time() {
        let rates = [(); 3].map(|()| khz().unwrap());
        let (least, most) = (rates.iter().min().unwrap(), rates.iter().max().unwrap());
        assert!(*least > 100_000 && most - least < most / 100, "{rates:?}");
    }
}

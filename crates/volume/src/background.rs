//! Threads for what is copied, which run when no tenant's do, and yet run.
//!
//! A copy takes processors, not disks and networks alone: both hosts encrypt it, or look whether it is what was sent. Linux gives a thread of a lower
//! priority what the others leave, and never nothing (`setpriority(2)`: there a priority is a thread's). But that may be so little that a chunk is on its way for
//! seconds: beside four spinning processes a processor, one with `nice` 19 gets the 274th part of it. Changes wait 200 ms for a chunk, and then count as lacking: such a
//! copy comes no further.
//!
//! So each of these threads looks, after each chunk, how long it was kept waiting for a processor. After more than [`LONG`] all of them have the usual
//! priority, for a while; then it is tried again. Beside tenants alone that does not happen: copies that get so little of a processor would move less than
//! 10 MB/s.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{getpriority_process, setpriority_process};

/// 68 times less than what a thread gets by default, where both want a processor.
const NICE: i32 = 19;

/// Nine times less. Whoever reads or writes a file has its lock in the kernel meanwhile, and those of the daemon when it has done so: where such a thread is put
/// off, tenants may wait for it.
const NICE_WITH_LOCKS: i32 = 10;

/// Three times less: for threads that could not have the usual priority again (without CAP_SYS_NICE), or cannot know how long they wait.
const NICE_FOR_EVER: i32 = 5;

/// A thread that waits longer than this for a processor, all in all, while it has one chunk, has waited too long. A chunk passes four of them, and is to be
/// there within 200 ms.
const LONG: Duration = Duration::from_millis(25);

/// So long they have the usual priority after that; twice as long after the next time, up to the limit.
const HOLD: Duration = Duration::from_secs(10);
const LONGEST_HOLD: Duration = Duration::from_secs(80);

/// When the background was starved, by the clock of this process.
#[derive(Debug, Default)]
struct Floor {
    /// Until then all of them have the usual priority.
    until: Duration,
    hold: Duration,
}

impl Floor {
    /// One has waited so long for a processor. True if they have the usual priority from now on, and had not.
    fn waited(&mut self, now: Duration, waited: Duration) -> bool {
        if waited <= LONG || self.is_up(now) {
            return false;
        }
        // One that got along for as long is not starved all the time.
        self.hold = match now < self.until + self.hold {
            true => (2 * self.hold).min(LONGEST_HOLD),
            false => HOLD,
        };
        self.until = now + self.hold;
        true
    }

    fn is_up(&self, now: Duration) -> bool {
        now < self.until
    }
}

static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// One for all: where one thread is starved the others are, or will be.
static FLOOR: Mutex<Floor> = Mutex::new(Floor {
    until: Duration::ZERO,
    hold: Duration::ZERO,
});

/// A thread that is one of them.
struct Own {
    usual: i32,
    low: i32,
    is_up: bool,
    /// What the kernel says of this thread: the second number is how long it was ready and did not run, in nanoseconds.
    schedstat: File,
    waited: Duration,
}

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

impl Own {
    /// Nothing where the calling thread keeps its priority from now on.
    fn enter(low: i32) -> Option<Self> {
        let usual = getpriority_process(None).ok()?;
        let schedstat = File::open("/proc/thread-self/schedstat");
        let watched = schedstat.and_then(|schedstat| Ok((waited(&schedstat)?, schedstat)));
        // Lower is always allowed, and back only for some.
        let can_come_back = usual >= low || set(usual + 1) && set(usual);
        match watched {
            Ok((waited, schedstat)) if can_come_back => Some(Self {
                usual,
                low: usual.max(low),
                is_up: !set(usual.max(low)),
                schedstat,
                waited,
            }),
            _ => {
                set(usual.max(NICE_FOR_EVER));
                None
            }
        }
    }

    fn look(&mut self) {
        let Ok(waited) = waited(&self.schedstat) else {
            return;
        };
        let more = waited.saturating_sub(std::mem::replace(&mut self.waited, waited));
        let now = BEGAN.elapsed();
        let mut floor = FLOOR.lock().expect("no panic under this lock");
        let is_new = floor.waited(now, more);
        let (is_up, hold) = (floor.is_up(now), floor.hold);
        drop(floor);
        if is_up != self.is_up && set(if is_up { self.usual } else { self.low }) {
            self.is_up = is_up;
        }
        if is_new {
            tracing::info!(
                "a chunk of a copy has waited {} ms for a processor: copies have the usual priority for the next {} s",
                more.as_millis(),
                hold.as_secs()
            );
        }
    }
}

fn set(nice: i32) -> bool {
    setpriority_process(None, nice).is_ok()
}

fn waited(schedstat: &File) -> io::Result<Duration> {
    let mut text = [0; 96];
    let length = schedstat.read_at(&mut text, 0)?;
    let number = std::str::from_utf8(&text[..length])
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse().ok());
    let nanoseconds = number.ok_or(io::ErrorKind::InvalidData)?;
    Ok(Duration::from_nanos(nanoseconds))
}

/// The calling thread is one of them from now on, and takes no lock for which tenants wait.
pub fn enter() {
    lower(NICE);
}

/// The same for one that takes such locks.
pub fn enter_with_locks() {
    lower(NICE_WITH_LOCKS);
}

fn lower(nice: i32) {
    OWN.set(Own::enter(nice));
    // Those that were starved a moment ago are so again.
    look();
}

/// The calling thread has done with a chunk. For others than those of the background this does nothing.
pub fn look() {
    OWN.with_borrow_mut(|own| own.iter_mut().for_each(Own::look));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn own() -> i32 {
        getpriority_process(None).expect("it can be read")
    }

    #[test]
    fn only_its_own_threads_have_a_lower_priority() {
        let before = own();
        let there = [enter, enter_with_locks].map(|enter| {
            let there = std::thread::spawn(move || {
                enter();
                let is_up = OWN.with_borrow(|own| own.as_ref().map(|own| own.is_up));
                (own(), is_up)
            });
            there.join().expect("it does not panic")
        });
        assert_eq!(own(), before);
        for ((there, is_up), low) in there.into_iter().zip([NICE, NICE_WITH_LOCKS]) {
            let expected = match is_up {
                Some(false) => low,
                Some(true) => before,
                None => NICE_FOR_EVER,
            };
            assert_eq!(there, before.max(expected));
        }
    }

    #[test]
    fn who_is_starved_gets_the_usual_priority_for_a_while_and_longer_each_time() {
        let mut floor = Floor::default();
        assert!(!floor.waited(MS, LONG) && !floor.is_up(MS));
        let mut now = MS;
        for hold in [10, 20, 40, 80, 80].map(Duration::from_secs) {
            assert!(floor.waited(now, LONG + MS));
            assert!(!floor.waited(now + MS, 2 * LONG), "it is so already");
            assert!(floor.is_up(now + hold - MS));
            now += hold;
            assert!(!floor.is_up(now), "it is tried again");
        }
        // After a while in which it went well it begins anew.
        now += LONGEST_HOLD;
        assert!(floor.waited(now, LONG + MS));
        assert!(floor.is_up(now + HOLD - MS) && !floor.is_up(now + HOLD));
    }

    #[test]
    fn the_kernel_says_how_long_a_thread_has_waited() {
        let before = waited(&File::open("/proc/thread-self/schedstat").expect("opened")).expect("a number");
        let schedstat = File::open("/proc/thread-self/schedstat").expect("opened");
        std::thread::sleep(MS);
        assert!(waited(&schedstat).expect("a number") >= before);
    }
}

//! Threads of lower priority for copies: tenants' threads run first, and copies still make progress.
//!
//! A copy takes processors as well as disks and networks: both hosts encrypt its chunks, or compare them with
//! fingerprints. Linux gives a thread of a lower priority the processor time that other threads leave, and
//! always a minimum (`setpriority(2)`; on Linux a priority belongs to a thread). This minimum may be so small
//! that a chunk takes seconds: beside four spinning processes on one processor, a thread with `nice` 19 gets
//! 1/274 of it. Changes wait 200 ms for a chunk and then count as lacking, so such a copy makes no progress.
//!
//! Each of these threads therefore checks after each chunk how long it has waited for a processor. After more
//! than [`LONG`], all of them get the usual priority for a while; then the low priority is tried again.
//! Tenants alone do not cause this: a copy with so little processor time would move less than 10 MB/s.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{getpriority_process, setpriority_process};

/// A 68th of a default thread's share, where both want a processor.
const NICE: i32 = 19;

/// A ninth. A thread that reads or writes a file holds the file's lock in the kernel, and takes locks of the
/// daemon afterwards. Tenants may wait for these locks while the thread waits for a processor.
const NICE_WITH_LOCKS: i32 = 10;

/// A third: for threads that could not get the usual priority back (without CAP_SYS_NICE), or cannot measure
/// how long they wait.
const NICE_FOR_EVER: i32 = 5;

/// Limit for a thread's wait for a processor, in total for one chunk. A chunk passes four of these threads,
/// and has to arrive within 200 ms.
const LONG: Duration = Duration::from_millis(25);

/// Duration of the usual priority after such a wait; doubled each time it recurs, up to the limit.
const HOLD: Duration = Duration::from_secs(10);
const LONGEST_HOLD: Duration = Duration::from_secs(80);

/// State of all background threads, by the clock of this process.
#[derive(Debug, Default)]
struct Floor {
    /// End of the usual priority for all of them.
    until: Duration,
    hold: Duration,
}

impl Floor {
    /// A thread has waited this long for a processor. True if the usual priority begins now.
    fn waited(&mut self, now: Duration, waited: Duration) -> bool {
        if waited <= LONG || self.is_up(now) {
            return false;
        }
        // A thread that ran well for that long is not starved all the time.
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

/// One state for all threads: where one is starved, the others are or will be.
static FLOOR: Mutex<Floor> = Mutex::new(Floor {
    until: Duration::ZERO,
    hold: Duration::ZERO,
});

/// The calling thread, if it is one of the background.
struct Own {
    usual: i32,
    low: i32,
    is_up: bool,
    /// The kernel's statistics of this thread. The second number is its time in the run queue without
    /// running, in nanoseconds.
    schedstat: File,
    waited: Duration,
}

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

impl Own {
    /// `None` if the calling thread keeps its priority.
    fn enter(low: i32) -> Option<Self> {
        let usual = getpriority_process(None).ok()?;
        let schedstat = File::open("/proc/thread-self/schedstat");
        let watched = schedstat.and_then(|schedstat| Ok((waited(&schedstat)?, schedstat)));
        // Every thread may lower its priority; raising it back may need a privilege.
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

/// Makes the calling thread one of the background. It takes no lock for which tenants wait.
pub fn enter() {
    lower(NICE);
}

/// The same for a thread that takes such locks.
pub fn enter_with_locks() {
    lower(NICE_WITH_LOCKS);
}

fn lower(nice: i32) {
    OWN.set(Own::enter(nice));
    // If the others were starved a moment ago, this thread is too.
    look();
}

/// The calling thread has finished a chunk. Outside the background this does nothing.
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
        // After a while without starvation the duration starts again from the first.
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

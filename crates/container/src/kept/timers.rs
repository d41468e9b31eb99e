//! Timers and counters that are descriptors (`man 2 timerfd_create`, `man 2 eventfd`).
//!
//! CRIU takes what the kernel shows of a timerfd for what is left of it. A periodic one that has expired shows nothing until it is read,
//! and so ends; of an absolute one CRIU loses the part of a second. Here it is asked when it expires, by the container's clock, which
//! stands still with the container.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::fdinfo::line;

const SECOND: i128 = 1_000_000_000;

/// A timerfd. Times in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Timer {
    clock: i32,
    /// `TFD_TIMER_*`.
    flags: i32,
    /// Expiries that nobody has read.
    ticks: u64,
    interval: u64,
    /// When it expires next, by the container's clock; `None` if it is not set.
    expires: Option<i64>,
}

impl Timer {
    /// `pid`: a process whose clock it goes by.
    pub(super) fn read(timer: &OwnedFd, fdinfo: &str, pid: i32) -> anyhow::Result<Self> {
        // A periodic one that has expired goes on by this call, and keeps what nobody has read: the fdinfo of before lacks some of it.
        let (left, interval) = get(timer.as_fd())?;
        let number = |name: &str| line(fdinfo, name).and_then(|text| text.parse().ok());
        let flags = line(fdinfo, "settime flags:").and_then(|text| i32::from_str_radix(text, 8).ok());
        let mut read = Self {
            clock: number("clockid:").context("the kernel does not say a timer's clock")?,
            flags: flags.context("the kernel does not say how a timer was set")?,
            ticks: 0,
            interval,
            expires: None,
        };
        let now = read.now(pid)?;
        read.expires = (left > 0).then(|| now.saturating_add(left as i64));
        let own = fs::read_to_string(format!("/proc/self/fdinfo/{}", timer.as_raw_fd()))?;
        let ticks = line(&own, "ticks:").and_then(|text| text.parse().ok());
        read.ticks = ticks.context("the kernel does not say how often a timer has expired")?;
        Ok(read)
    }

    pub(super) fn put_back(&self, timer: BorrowedFd<'_>, pid: i32) -> io::Result<()> {
        let is_absolute = self.flags & libc::TFD_TIMER_ABSTIME != 0;
        let value = match self.expires {
            None => 0,
            Some(expires) if is_absolute => expires.saturating_sub(self.offset(pid)?).max(1),
            Some(expires) => expires.saturating_sub(self.now(pid)?).max(1),
        };
        // Of one that is not set it says only that.
        let flags = if value == 0 { 0 } else { self.flags };
        set(timer, flags, value as u64, self.interval)?;
        match self.ticks {
            0 => Ok(()),
            ticks => set_ticks(timer, ticks),
        }
    }

    /// The clock by which it expires: one that is relative never goes by the time of day.
    fn base(&self) -> libc::clockid_t {
        let is_absolute = self.flags & libc::TFD_TIMER_ABSTIME != 0;
        match self.clock {
            libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_ALARM if is_absolute => libc::CLOCK_REALTIME,
            libc::CLOCK_BOOTTIME | libc::CLOCK_BOOTTIME_ALARM => libc::CLOCK_BOOTTIME,
            _ => libc::CLOCK_MONOTONIC,
        }
    }

    /// What the container's clock shows beyond this process's, which may have one of its own, too.
    fn offset(&self, pid: i32) -> io::Result<i64> {
        let name = match self.base() {
            libc::CLOCK_MONOTONIC => "monotonic",
            libc::CLOCK_BOOTTIME => "boottime",
            _ => return Ok(0),
        };
        let of = |process: &str| match fs::read_to_string(format!("/proc/{process}/timens_offsets")) {
            Ok(offsets) => Ok(offset(&offsets, name).unwrap_or(0)),
            // A kernel without time namespaces.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        };
        Ok(of(&pid.to_string())? - of("self")?)
    }

    fn now(&self, pid: i32) -> io::Result<i64> {
        let mut now = MaybeUninit::<libc::timespec>::zeroed();
        // SAFETY: the kernel writes a timespec there.
        if unsafe { libc::clock_gettime(self.base(), now.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: all zeroes are a timespec, and the kernel has written one.
        let now = unsafe { now.assume_init() };
        Ok(nanoseconds(now) as i64 + self.offset(pid)?)
    }
}

/// An eventfd.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Count(u64);

impl Count {
    /// From its `fdinfo`.
    pub(super) fn of(fdinfo: &str) -> Option<Self> {
        let count = line(fdinfo, "eventfd-count:")?;
        u64::from_str_radix(count, 16).ok().map(Self)
    }

    /// CRIU gives the count to a call that takes 32 bits.
    pub(super) fn is_lost(&self) -> bool {
        u32::try_from(self.0).is_err()
    }

    pub(super) fn put_back(&self, event: &OwnedFd, now: Option<&Self>) -> io::Result<()> {
        let lacks = self.0.saturating_sub(now.map_or(0, |now| now.0));
        if lacks == 0 {
            return Ok(());
        }
        // A write that had to wait would wait for a program that stands still; there is room for what was there before.
        match rustix::io::write(event, &lacks.to_ne_bytes())? {
            8 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// A line of `timens_offsets`: a clock's name or number, seconds, nanoseconds.
fn offset(offsets: &str, clock: &str) -> Option<i64> {
    let number = match clock {
        "monotonic" => "1",
        _ => "7",
    };
    offsets.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        if name != clock && name != number {
            return None;
        }
        let (seconds, nanoseconds): (i64, i64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        seconds.checked_mul(SECOND as i64)?.checked_add(nanoseconds)
    })
}

fn nanoseconds(time: libc::timespec) -> u64 {
    let all = i128::from(time.tv_sec) * SECOND + i128::from(time.tv_nsec);
    u64::try_from(all.clamp(0, i64::MAX.into())).expect("it is within")
}

fn timespec(nanoseconds: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: (i128::from(nanoseconds) / SECOND) as libc::time_t,
        tv_nsec: (i128::from(nanoseconds) % SECOND) as libc::c_long,
    }
}

/// What is left, and the interval.
fn get(timer: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut value = MaybeUninit::<libc::itimerspec>::zeroed();
    // SAFETY: the descriptor is open, and the kernel writes an itimerspec.
    if unsafe { libc::timerfd_gettime(timer.as_raw_fd(), value.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeroes are an itimerspec, and the kernel has written one.
    let value = unsafe { value.assume_init() };
    Ok((nanoseconds(value.it_value), nanoseconds(value.it_interval)))
}

fn set(timer: BorrowedFd<'_>, flags: i32, value: u64, interval: u64) -> io::Result<()> {
    let value = libc::itimerspec {
        it_value: timespec(value),
        it_interval: timespec(interval),
    };
    // SAFETY: the descriptor is open, and the kernel reads an itimerspec.
    match unsafe { libc::timerfd_settime(timer.as_raw_fd(), flags, &raw const value, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_ticks(timer: BorrowedFd<'_>, ticks: u64) -> io::Result<()> {
    /// `linux/timerfd.h`: `_IOW('T', 0, __u64)`.
    const TFD_IOC_SET_TICKS: libc::c_ulong = 0x4008_5400;
    // SAFETY: the descriptor is open, and the kernel reads eight bytes.
    match unsafe { libc::ioctl(timer.as_raw_fd(), TFD_IOC_SET_TICKS as _, &raw const ticks) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;
    use std::time::Duration;

    use super::*;

    fn timer(clock: i32) -> OwnedFd {
        // SAFETY: the call has no memory to misuse.
        let raw = unsafe { libc::timerfd_create(clock, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        assert!(raw >= 0);
        // SAFETY: it was just made, and is nobody else's.
        unsafe { OwnedFd::from_raw_fd(raw) }
    }

    fn read(timer: &OwnedFd) -> Timer {
        let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", timer.as_raw_fd())).unwrap();
        Timer::read(timer, &fdinfo, std::process::id() as i32).unwrap()
    }

    const PERIOD: u64 = 20_000_000;

    #[test]
    fn a_periodic_timer_that_nobody_has_read_goes_on() {
        let (here, there) = (timer(libc::CLOCK_MONOTONIC), timer(libc::CLOCK_MONOTONIC));
        set(here.as_fd(), 0, PERIOD, PERIOD).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let kept = read(&here);
        assert!(kept.ticks >= 2, "{kept:?}");
        assert!(kept.expires.is_some(), "{kept:?}");
        kept.put_back(there.as_fd(), std::process::id() as i32).unwrap();
        let mut ticks = [0; 8];
        rustix::io::read(&there, &mut ticks).unwrap();
        assert!(u64::from_ne_bytes(ticks) >= kept.ticks);
        std::thread::sleep(Duration::from_millis(50));
        rustix::io::read(&there, &mut ticks).unwrap();
    }

    #[test]
    fn a_timer_keeps_its_time_to_the_nanosecond_where_it_is_absolute() {
        let own = std::process::id() as i32;
        for clock in [libc::CLOCK_MONOTONIC, libc::CLOCK_REALTIME, libc::CLOCK_BOOTTIME] {
            let (here, there) = (timer(clock), timer(clock));
            let mut now = MaybeUninit::<libc::timespec>::zeroed();
            // SAFETY: the kernel writes a timespec there, and all zeroes are one.
            let now = unsafe {
                libc::clock_gettime(clock, now.as_mut_ptr());
                now.assume_init()
            };
            let expires = nanoseconds(now) + 1000 * SECOND as u64 + 123_456_789;
            set(here.as_fd(), libc::TFD_TIMER_ABSTIME, expires, 0).unwrap();
            let kept = read(&here);
            kept.put_back(there.as_fd(), own).unwrap();
            assert!(read(&there).flags & libc::TFD_TIMER_ABSTIME != 0);
            let off = read(&there).expires.unwrap() - kept.expires.unwrap();
            assert!(off.abs() < 5_000_000, "{off} ns off");
        }
    }

    #[test]
    fn one_that_is_not_set_stays_so_with_what_nobody_has_read() {
        let (here, there) = (timer(libc::CLOCK_MONOTONIC), timer(libc::CLOCK_MONOTONIC));
        set(here.as_fd(), 0, 1, 0).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let kept = read(&here);
        assert_eq!((kept.ticks, kept.expires), (1, None));
        kept.put_back(there.as_fd(), std::process::id() as i32).unwrap();
        assert_eq!(read(&there).ticks, 1);
    }

    #[test]
    fn the_high_half_of_a_count_comes_back() {
        let made = |count: u64, flags| {
            let event = rustix::event::eventfd(0, flags).unwrap();
            rustix::io::write(&event, &count.to_ne_bytes()).unwrap();
            event
        };
        let fdinfo =
            |event: &OwnedFd| fs::read_to_string(format!("/proc/self/fdinfo/{}", event.as_raw_fd())).unwrap();
        const COUNT: u64 = 0xffff_ffff_ffff_fff0;
        let plain = rustix::event::EventfdFlags::empty();
        let here = made(COUNT, plain);
        let kept = Count::of(&fdinfo(&here)).unwrap();
        assert!(kept.is_lost());
        let there = made(COUNT & 0xffff_ffff, plain);
        kept.put_back(&there, Count::of(&fdinfo(&there)).as_ref())
            .unwrap();
        assert_eq!(Count::of(&fdinfo(&there)), Some(kept));
        assert!(!Count::of("eventfd-count:               64\n").unwrap().is_lost());
    }

    #[test]
    fn offsets_of_clocks_are_read_by_name_and_by_number() {
        const NAMED: &str = "monotonic           -5         250\nboottime            10         0\n";
        assert_eq!(offset(NAMED, "monotonic"), Some(-4_999_999_750));
        assert_eq!(offset(NAMED, "boottime"), Some(10_000_000_000));
        assert_eq!(offset("1 2 3\n7 4 5\n", "boottime"), Some(4_000_000_005));
        assert_eq!(offset("", "boottime"), None);
    }
}

//! Limits of processes (`RLIMIT_*`) where root may not ask the kernel for them.
//!
//! CRIU asks by prlimit(2), which the kernel allows for a process of another user only with `CAP_SYS_RESOURCE`. In many containers
//! and virtual machines root has not got that. What the kernel refuses is read from `/proc/PID/limits`, which root may read always.
//! CRIU makes the call by syscall(3), so that all of its calls of that function lead here ([`verbatim_got`]).

use std::ffi::{c_long, c_void};

use verbatim_got::Hook;

/// The names of the limits in `/proc/PID/limits`, by their numbers (`fs/proc/base.c`, `lnames`).
const NAMES: [&str; 16] = [
    "Max cpu time",
    "Max file size",
    "Max data size",
    "Max stack size",
    "Max core file size",
    "Max resident set",
    "Max processes",
    "Max open files",
    "Max locked memory",
    "Max address space",
    "Max file locks",
    "Max pending signals",
    "Max msgqueue size",
    "Max nice priority",
    "Max realtime priority",
    "Max realtime timeout",
];

type Call = unsafe extern "C" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

static HOOKS: [Hook; 1] = [Hook::new(c"syscall", call as Call as *const c_void)];

/// From now on CRIU's calls of syscall(3) come here, unless this process may ask the kernel itself. Where they cannot, prlimit(2) fails as it
/// would have.
pub fn stand_before() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !may_ask(&status) {
        let _ = verbatim_got::patch_program(&HOOKS);
    }
}

/// Whether a process with this `/proc/PID/status` has `CAP_SYS_RESOURCE`.
fn may_ask(status: &str) -> bool {
    /// `linux/capability.h`
    const SYS_RESOURCE: u64 = 1 << 24;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .is_some_and(|set| set & SYS_RESOURCE != 0)
}

/// syscall(3). All arguments are passed on: those that the call does not have are whatever was in the registers, as in that function.
///
/// # Safety
/// The system call's own.
unsafe extern "C" fn call(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
    sixth: c_long,
) -> c_long {
    // SAFETY: the caller's contract; this library's own calls do not come here.
    let result = unsafe { libc::syscall(number, first, second, third, fourth, fifth, sixth) };
    let is_asked = number == libc::SYS_prlimit64 && third == 0 && fourth != 0;
    if result != -1 || !is_asked || std::io::Error::last_os_error().raw_os_error() != Some(libc::EPERM) {
        return result;
    }
    match read(first, second) {
        Some((soft, hard)) => {
            // SAFETY: prlimit(2) was to write a `struct rlimit64` there.
            unsafe {
                (fourth as *mut libc::rlimit64).write(libc::rlimit64 {
                    rlim_cur: soft,
                    rlim_max: hard,
                });
            }
            0
        }
        None => {
            // SAFETY: this thread's errno.
            unsafe { *libc::__errno_location() = libc::EPERM };
            -1
        }
    }
}

fn read(pid: c_long, limit: c_long) -> Option<(u64, u64)> {
    let name = NAMES.get(usize::try_from(limit).ok()?)?;
    parse(
        &std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?,
        name,
    )
}

/// The soft and the hard limit of that name.
fn parse(table: &str, name: &str) -> Option<(u64, u64)> {
    let rest = table
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    let mut values = rest.split_ascii_whitespace().map(|value| match value {
        "unlimited" => Some(libc::RLIM64_INFINITY),
        number => number.parse().ok(),
    });
    Some((values.next()??, values.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_read_as_the_kernel_tells_it() {
        let own = std::process::id();
        for (number, name) in NAMES.iter().enumerate() {
            let mut told = libc::rlimit64 {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: the call writes to `told`.
            let asked = unsafe { libc::prlimit64(0, number as _, std::ptr::null(), &mut told) };
            assert_eq!(asked, 0);
            let read = read(own.into(), number as c_long);
            assert_eq!(read, Some((told.rlim_cur, told.rlim_max)), "{name}");
        }
        assert_eq!(read(own.into(), NAMES.len() as c_long), None);
    }

    #[test]
    fn who_has_the_capability_asks_the_kernel() {
        assert!(may_ask("CapPrm:\t0\nCapEff:\t000001ffffffffff\n"));
        assert!(!may_ask("CapEff:\t000001fffeffffff\nCapBnd:\t000001ffffffffff\n"));
        assert!(!may_ask(""));
    }

    #[test]
    fn a_name_that_begins_as_another_is_not_taken_for_it() {
        let table = "Max realtime timeout      5                    6                    us\nMax nice priority  1  unlimited\n";
        assert_eq!(parse(table, "Max realtime"), None);
        assert_eq!(
            parse(table, "Max nice priority"),
            Some((1, libc::RLIM64_INFINITY))
        );
    }
}

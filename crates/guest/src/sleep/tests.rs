//! The functions themselves, in threads that another process freezes as CRIU does it: this test program once more, as a
//! tracer.

use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::time::Instant;

use super::*;

/// For the tracer: process, thread, the number of the system call that it must be in, and a signal that comes meanwhile, or 0.
const TRACED: &str = "VERBATIM_TEST_TRACED";

/// What ptrace(2) shows of a call that the kernel would continue with what is left (ERESTART_RESTARTBLOCK).
const TO_BE_RESTARTED: i64 = -516;

const LENGTH: Duration = Duration::from_millis(400);

fn thread() -> libc::pid_t {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Starts the tracer of the calling thread.
fn freeze_in(call: libc::c_long, signal: c_int) -> Child {
    // SAFETY: plain values; without Yama it is refused, and not needed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sleep::tests::tracer", "--ignored", "--nocapture"])
        .env(
            TRACED,
            format!("{} {} {call} {signal}", std::process::id(), thread()),
        )
        .spawn()
        .unwrap()
}

/// Waits until a thread is in a system call.
fn until_in(pid: i64, thread: i64, call: i64) {
    let path = format!("/proc/{pid}/task/{thread}/syscall");
    let is_in = || {
        let now = std::fs::read_to_string(&path).unwrap_or_default();
        now.split(' ').next() == Some(call.to_string().as_str())
    };
    while !is_in() {
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "a part of other tests, which start it"]
fn tracer() {
    let told = std::env::var(TRACED).unwrap();
    let [pid, thread, call, signal] = told
        .split(' ')
        .map(|word| word.parse::<i64>().unwrap())
        .collect::<Vec<_>>()[..]
    else {
        panic!("{told:?}");
    };
    until_in(pid, thread, call);
    // So that a part of the time is over, which a wrong sum would count twice.
    std::thread::sleep(LENGTH / 4);
    let id = thread as libc::pid_t;
    // SAFETY: plain values, and room for what is asked for.
    unsafe {
        let nothing: *mut libc::c_void = null_mut();
        assert_eq!(libc::ptrace(libc::PTRACE_SEIZE, id, nothing, nothing), 0);
        assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, id, nothing, nothing), 0);
        let mut status = 0;
        assert_eq!(libc::waitpid(id, &mut status, libc::__WALL), id);
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        let at = &raw mut registers;
        assert_eq!(libc::ptrace(libc::PTRACE_GETREGS, id, nothing, at), 0);
        let (number, returned) = (registers.orig_rax as i64, registers.rax as i64);
        assert_eq!(number, call);
        assert!(
            [TO_BE_RESTARTED, -i64::from(libc::EINTR)].contains(&returned),
            "{returned}"
        );
        if signal != 0 {
            assert_eq!(libc::syscall(libc::SYS_tgkill, pid, thread, signal), 0);
        }
        // As CRIU does: no kernel remembers what was to be continued.
        (*at).rax = -i64::from(libc::EINTR) as u64;
        (*at).orig_rax = u64::MAX;
        assert_eq!(libc::ptrace(libc::PTRACE_SETREGS, id, nothing, at), 0);
        assert_eq!(libc::ptrace(libc::PTRACE_DETACH, id, nothing, nothing), 0);
    }
}

/// Calls `wait` in a thread that is frozen meanwhile; how long it took, and what it answered.
fn frozen<T: Send + 'static>(
    call: libc::c_long,
    signal: c_int,
    wait: impl FnOnce() -> T + Send + 'static,
) -> (Duration, T) {
    let waiter = move || {
        let mut tracer = freeze_in(call, signal);
        let started = Instant::now();
        let answer = wait();
        let took = started.elapsed();
        assert!(tracer.wait().unwrap().success(), "it was not frozen");
        (took, answer)
    };
    std::thread::spawn(waiter).join().unwrap()
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn an_epoll() -> std::os::fd::OwnedFd {
    rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap()
}

#[test]
fn what_is_frozen_waits_for_what_is_left() {
    let ms = LENGTH.as_millis() as c_int;
    let full = |(took, answer): (Duration, c_int)| {
        assert_eq!(answer, 0);
        assert!(took >= LENGTH, "{took:?}");
    };
    let sleep_number = libc::SYS_clock_nanosleep;
    // SAFETY: local variables, and descriptors that are open.
    unsafe {
        let (took, left) = frozen(sleep_number, 0, || sleep(1));
        assert!(took >= Duration::from_secs(1) && left == 0, "{took:?}, {left}");
        // One variable for what is to be slept and what is left.
        full(frozen(sleep_number, 0, || {
            let mut time = timespec_of(LENGTH);
            let at = &raw mut time;
            nanosleep(at, at)
        }));
        full(frozen(sleep_number, 0, || {
            nanosleep(&timespec_of(LENGTH), null_mut())
        }));
        full(frozen(sleep_number, 0, || usleep(LENGTH.as_micros() as c_uint)));
        full(frozen(sleep_number, 0, || {
            clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &timespec_of(LENGTH), null_mut())
        }));
        full(frozen(libc::SYS_poll, 0, move || poll(null_mut(), 0, ms)));
        full(frozen(libc::SYS_epoll_wait, 0, move || {
            let mut event = std::mem::zeroed();
            epoll_wait(an_epoll().as_raw_fd(), &mut event, 1, ms)
        }));
        full(frozen(libc::SYS_epoll_pwait, 0, move || {
            let mut event = std::mem::zeroed();
            epoll_pwait(an_epoll().as_raw_fd(), &mut event, 1, ms, std::ptr::null())
        }));
        full(frozen(libc::SYS_epoll_pwait2, 0, || {
            let mut event = std::mem::zeroed();
            epoll_pwait2(
                an_epoll().as_raw_fd(),
                &mut event,
                1,
                &timespec_of(LENGTH),
                std::ptr::null(),
            )
        }));
    }
}

/// That the tracer does what CRIU does: without us the call ends.
#[test]
fn without_us_it_would_end_early() {
    let (took, (returned, errno)) = frozen(libc::SYS_clock_nanosleep, 0, || {
        let length = timespec_of(Duration::from_secs(60));
        // SAFETY: a local variable.
        let returned = unsafe { libc::syscall(libc::SYS_clock_nanosleep, 1, 0, &length, 0) };
        (returned, errno())
    });
    assert_eq!((returned, errno), (-1, libc::EINTR));
    assert!(took < Duration::from_secs(30));
}

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn handle(_: c_int) {
    HANDLED.fetch_add(1, SeqCst);
}

/// Has a signal handled, on the alternate stack (which the threads of Rust have) or not.
fn handle_signal(signal: c_int, flags: c_int) {
    // SAFETY: a plain value, and a handler that counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &action, null_mut()), 0);
    }
}

/// Signals that the tests handle, each with its own stack and habit.
fn handled_signals() -> [c_int; 3] {
    let [plain, alternate, restarting] = [0, 1, 2].map(|index| libc::SIGRTMIN() + index);
    handle_signal(plain, 0);
    handle_signal(alternate, libc::SA_ONSTACK);
    // Which these calls do not heed (signal(7)).
    handle_signal(restarting, libc::SA_RESTART);
    [plain, alternate, restarting]
}

/// Calls `wait` in a thread that gets a signal meanwhile.
fn signalled<T: Send + 'static>(
    call: libc::c_long,
    signal: c_int,
    wait: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, told) = mpsc::channel();
    let waiter = std::thread::spawn(move || {
        sender.send(thread()).unwrap();
        wait()
    });
    let thread = told.recv().unwrap();
    until_in(std::process::id().into(), thread.into(), call);
    // SAFETY: a thread that lives until it is joined.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, signal) };
    assert_eq!(sent, 0);
    waiter.join().unwrap()
}

#[test]
fn a_handler_of_the_programs_own_ends_the_wait() {
    for signal in handled_signals() {
        assert!((1..=60).contains(&signalled(libc::SYS_clock_nanosleep, signal, || sleep(60))));
        let (answer, left) = signalled(libc::SYS_clock_nanosleep, signal, || {
            let mut left = timespec_of(Duration::ZERO);
            // SAFETY: local variables.
            let answer = unsafe { nanosleep(&timespec_of(Duration::from_secs(60)), &mut left) };
            ((answer, errno()), left.tv_sec)
        });
        assert_eq!(answer, (-1, libc::EINTR));
        assert!((50..=60).contains(&left), "{left}");
        let answer = signalled(libc::SYS_poll, signal, || {
            // SAFETY: no descriptors.
            (unsafe { poll(null_mut(), 0, 60_000) }, errno())
        });
        assert_eq!(answer, (-1, libc::EINTR));
        let answer = signalled(libc::SYS_epoll_wait, signal, || {
            // SAFETY: room for an event.
            let answer = unsafe { epoll_wait(an_epoll().as_raw_fd(), &mut std::mem::zeroed(), 1, -1) };
            (answer, errno())
        });
        assert_eq!(answer, (-1, libc::EINTR));
    }
}

#[test]
fn so_does_one_that_runs_when_a_freeze_ends() {
    for signal in handled_signals() {
        let before = HANDLED.load(SeqCst);
        let (took, left) = frozen(libc::SYS_clock_nanosleep, signal, || sleep(60));
        assert!(
            left > 0 && took < Duration::from_secs(30),
            "{left} left after {took:?}"
        );
        assert!(HANDLED.load(SeqCst) > before);
    }
}

#[test]
fn what_the_kernel_refuses_is_refused() {
    let wrong = timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000_000,
    };
    // SAFETY: the kernel checks them.
    unsafe {
        assert_eq!((nanosleep(&wrong, null_mut()), errno()), (-1, libc::EINVAL));
        assert_eq!(
            (nanosleep(std::ptr::null(), null_mut()), errno()),
            (-1, libc::EFAULT)
        );
        assert_eq!(
            clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &wrong, null_mut()),
            libc::EINVAL
        );
        assert_eq!(
            clock_nanosleep(libc::CLOCK_THREAD_CPUTIME_ID, 0, &wrong, null_mut()),
            libc::EINVAL
        );
        assert_eq!(
            (epoll_wait(-1, &mut std::mem::zeroed(), 1, 0), errno()),
            (-1, libc::EBADF)
        );
    }
}

/// A descriptor that is ready ends a wait, of course.
#[test]
fn events_come_through() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    let mut asked = pollfd {
        fd: reader.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: a local variable.
    assert_eq!(unsafe { poll(&mut asked, 1, -1) }, 1);
    assert_eq!(asked.revents, libc::POLLIN);
}

extern "C-unwind" fn sleep_long(told: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: what `a_thread_that_sleeps_can_be_cancelled` gives, which waits for the end of this thread.
    unsafe { &*told.cast::<AtomicU32>() }.store(thread() as u32, SeqCst);
    sleep(600);
    null_mut()
}

#[test]
fn a_thread_that_sleeps_can_be_cancelled() {
    unsafe extern "C" {
        fn pthread_create(
            thread: *mut libc::pthread_t,
            attributes: *const libc::pthread_attr_t,
            start: extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void,
            argument: *mut libc::c_void,
        ) -> c_int;
    }
    let told = AtomicU32::new(0);
    // SAFETY: the thread ends within the life of what it is given.
    unsafe {
        let mut id = 0;
        assert_eq!(
            pthread_create(
                &mut id,
                std::ptr::null(),
                sleep_long,
                (&raw const told).cast_mut().cast()
            ),
            0
        );
        while told.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        until_in(
            std::process::id().into(),
            told.load(SeqCst).into(),
            libc::SYS_clock_nanosleep,
        );
        assert_eq!(libc::pthread_cancel(id), 0);
        let mut ended = null_mut();
        assert_eq!(libc::pthread_join(id, &mut ended), 0);
        // PTHREAD_CANCELED
        assert_eq!(ended.addr(), usize::MAX);
    }
}

/// A semaphore of the C library's own, in memory of its own.
struct Semaphore(Box<std::cell::UnsafeCell<libc::sem_t>>);

// SAFETY: only ever used by the functions that are made for several threads.
unsafe impl Send for Semaphore {}
// SAFETY: as above.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    fn new(value: c_uint) -> Arc<Self> {
        // SAFETY: room for one.
        let this = Self(Box::new(unsafe { std::mem::zeroed() }));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sem_init(this.0.get(), 0, value) }, 0);
        Arc::new(this)
    }

    /// Waits so long; what it answered, and errno.
    fn wait(&self, length: Duration) -> (c_int, c_int) {
        let mut end = timespec_of(Duration::ZERO);
        // SAFETY: a semaphore, and local variables.
        unsafe {
            libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut end);
            let end = timespec_of(duration(&end) + length);
            (
                semaphore::sem_clockwait(self.0.get(), libc::CLOCK_MONOTONIC, &end),
                errno(),
            )
        }
    }

    fn post(&self) {
        // SAFETY: a semaphore.
        assert_eq!(unsafe { libc::sem_post(self.0.get()) }, 0);
    }

    /// Its value, and how many wait.
    fn words(&self) -> [u32; 2] {
        // SAFETY: as it is in memory; nobody else uses it.
        unsafe { self.0.get().cast::<[u32; 2]>().read_volatile() }
    }
}

#[test]
fn a_wait_for_a_semaphore_is_frozen_and_goes_on() {
    let one = Semaphore::new(0);
    let waiting = one.clone();
    let (took, answer) = frozen(libc::SYS_futex, 0, move || waiting.wait(LENGTH));
    assert_eq!(answer, (-1, libc::ETIMEDOUT));
    assert!(took >= LENGTH, "{took:?}");
    assert_eq!(one.words(), [0, 0], "a waiter is still counted");
    for signal in handled_signals() {
        let waiting = one.clone();
        let answer = signalled(libc::SYS_futex, signal, move || {
            waiting.wait(Duration::from_secs(60))
        });
        // The kernel starts this call again after a handler that says so, without a limit of time or with one.
        assert_eq!(answer, (-1, libc::EINTR));
        assert_eq!(one.words(), [0, 0]);
    }
}

/// The C library's own `sem_post` wakes, and what is posted is taken once.
#[test]
fn a_semaphore_is_shared_with_the_c_librarys_functions() {
    const EACH: usize = 2000;
    let one = Semaphore::new(0);
    let takers: Vec<_> = (0..4)
        .map(|_| {
            let one = one.clone();
            std::thread::spawn(move || {
                (0..EACH).for_each(|_| assert_eq!(one.wait(Duration::from_secs(60)).0, 0));
            })
        })
        .collect();
    (0..4 * EACH).for_each(|_| one.post());
    takers.into_iter().for_each(|taker| taker.join().unwrap());
    assert_eq!(one.words(), [0, 0]);
    assert_eq!(one.wait(Duration::from_millis(1)), (-1, libc::ETIMEDOUT));
    one.post();
    let past = timespec {
        tv_sec: -1,
        tv_nsec: 0,
    };
    let wrong = timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000_000,
    };
    let sem = one.0.get();
    // SAFETY: a semaphore, and local variables.
    unsafe {
        assert_eq!(
            (semaphore::sem_timedwait(sem, &wrong), errno()),
            (-1, libc::EINVAL)
        );
        let clock = libc::CLOCK_BOOTTIME;
        assert_eq!(
            (semaphore::sem_clockwait(sem, clock, &past), errno()),
            (-1, libc::EINVAL)
        );
        assert_eq!(semaphore::sem_timedwait(sem, &past), 0, "there is one");
        assert_eq!(
            (semaphore::sem_timedwait(sem, &past), errno()),
            (-1, libc::ETIMEDOUT)
        );
    }
}

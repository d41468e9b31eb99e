//! The program that is tracked.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What it is to do.
pub const WHAT: &str = "TRACKED";
/// What `shared` maps.
pub const FILE: &str = "TRACKED_FILE";
/// What `read` has.
pub const READ_BYTES: usize = 16 << 20;
/// So many are sent.
pub const SIGNALS: u32 = 300;
/// What `end` ends with.
pub const STATUS: i32 = 7;
/// What `calls` says of its system calls.
pub const CALLS: &[&str] = &["sleep", "poll", "wait", "read"];

pub fn say(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}")
        .and_then(|()| output.flush())
        .expect("somebody listens");
}

pub fn run(what: &str) -> ExitCode {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).expect("always");
    match what {
        "write" => write(),
        "map" => map(),
        "merge" => merge(),
        "kernel" => kernel(),
        "shared" => shared(),
        "writer" => writer(),
        "read" => read(),
        "calls" => calls(),
        "filter" => filter(),
        "speak" => speak(),
        "signals" => signals(),
        "execute" => execute(),
        "sequence" => sequence(),
        "faults" => crate::faults::child(),
        "end" => {
            say("ready");
            std::thread::sleep(Duration::from_millis(5));
            return ExitCode::from(STATUS as u8);
        }
        _ => panic!("what is {what}?"),
    }
    ExitCode::SUCCESS
}

/// A stream of numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

fn map_private(length: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}

/// Three threads write numbers at random places, with huge pages among them.
fn write() {
    const LENGTH: usize = 24 << 20;
    let area = map_private(LENGTH).expose_provenance();
    // SAFETY: advice about our own mapping.
    unsafe {
        libc::madvise(
            std::ptr::with_exposed_provenance_mut(area),
            LENGTH,
            libc::MADV_HUGEPAGE,
        )
    };
    for seed in 0..3 {
        std::thread::spawn(move || {
            let mut numbers = Numbers(seed);
            loop {
                let word = numbers.below(LENGTH / 8);
                // SAFETY: within the mapping, which stays; atomic, since all threads write.
                let word: &AtomicU64 =
                    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(area).add(word) };
                word.store(numbers.next(), Ordering::Relaxed);
            }
        });
    }
    say("ready");
    loop {
        std::thread::park();
    }
}

/// Two threads write numbers at random places of a shared file, and a third one does what takes pages out of page tables, or has the
/// kernel write: direct reads, which land in pages that were looked up before, are among it.
fn shared() {
    const PART: usize = 64 << 10;
    let path = std::env::var(FILE).expect("the file's path");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("it is there");
    let length = file.metadata().expect("it is open").len() as usize;
    // SAFETY: a fresh mapping.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    let area = mapped.expose_provenance();
    let at = move |offset: usize| std::ptr::with_exposed_provenance_mut::<u8>(area + offset);
    for seed in 0..2 {
        std::thread::spawn(move || {
            let mut numbers = Numbers(seed);
            loop {
                // SAFETY: within the mapping, which stays; atomic, since all threads write.
                let word = unsafe { &*at(numbers.below(length / 8) * 8).cast::<AtomicU64>() };
                word.store(numbers.next(), Ordering::Relaxed);
                if numbers.below(64) == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
    }
    let mut direct = std::env::current_exe().expect("our own path");
    direct = direct.canonicalize().expect("it is there");
    let direct = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(direct)
        .expect("this program lies on a disk");
    say("ready");
    let mut numbers = Numbers(99);
    loop {
        let part = at(numbers.below(length / PART) * PART).cast();
        // SAFETY: within the mapping. Other threads' stores there are atomic, and nobody minds which come first.
        unsafe {
            match numbers.below(4) {
                0 => _ = libc::madvise(part, PART, libc::MADV_DONTNEED),
                1 => _ = libc::getrandom(part, PART, 0),
                2 => {
                    let from = (numbers.below(64) * PART) as i64;
                    let read = libc::pread(direct.as_raw_fd(), part, PART, from);
                    assert!(read > 0, "{}", std::io::Error::last_os_error());
                }
                _ => _ = libc::madvise(part, PART, libc::MADV_POPULATE_READ),
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// One thread writes, unmaps, maps, moves, drops, grows and forks.
fn map() {
    const SIZE: usize = 1 << 20;
    const TABLE: usize = 2 << 20;
    let mut numbers = Numbers(7);
    let mut areas: Vec<(*mut u8, usize)> = (0..16).map(|_| (map_private(SIZE), SIZE)).collect();
    // For moves by whole page tables.
    areas.push((map_private(2 * TABLE), 2 * TABLE));
    let mut told = false;
    for turn in 0u64.. {
        let index = numbers.below(areas.len());
        let (area, length) = areas[index];
        for _ in 0..32 {
            // SAFETY: within a mapping that this thread alone has.
            unsafe {
                area.add(numbers.below(length / 8) * 8)
                    .cast::<u64>()
                    .write_volatile(numbers.next())
            };
        }
        // SAFETY: as above; what is unmapped or moved is not used by its old address again.
        unsafe {
            match numbers.below(8) {
                0 => {
                    libc::munmap(area.cast(), length);
                    areas[index] = (map_private(length), length);
                }
                1 | 2 => {
                    let to = map_private(length);
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    let moved = libc::mremap(area.cast(), length, length, flags, to);
                    assert_ne!(moved, libc::MAP_FAILED);
                    areas[index].0 = moved.cast();
                }
                3 => {
                    let at = numbers.below(length / 8192) * 4096;
                    libc::madvise(area.add(at).cast(), (length / 2) & !4095, libc::MADV_DONTNEED);
                }
                4 if turn % 16 == 0 => match libc::fork() {
                    0 => libc::_exit(0),
                    child => _ = libc::waitpid(child, std::ptr::null_mut(), 0),
                },
                5 => {
                    let (from, half) = (area.add(length / 2), length / 2);
                    libc::mprotect(from.cast(), half, libc::PROT_NONE);
                    libc::mprotect(from.cast(), half, libc::PROT_READ | libc::PROT_WRITE);
                }
                _ => {}
            }
        }
        if !told && turn == 100 {
            say("ready");
            told = true;
        }
    }
}

/// Half of a mapping moves away and back, and is merged with the other half again. The other half is written to at each time.
fn merge() {
    const HALF: usize = 1 << 20;
    let area = map_private(2 * HALF);
    let (home, away) = (area.wrapping_add(HALF), map_private(HALF));
    let mut numbers = Numbers(5);
    // SAFETY: the whole mapping, before anybody else has it.
    unsafe { area.write_bytes(1, 2 * HALF) };
    let mut write = || {
        for _ in 0..4 {
            // SAFETY: within the half that stays, which this thread alone has.
            unsafe {
                area.add(numbers.below(HALF / 8) * 8)
                    .cast::<u64>()
                    .write_volatile(numbers.next())
            };
            std::thread::sleep(Duration::from_micros(20));
        }
    };
    let go = |from: *mut u8, to: *mut u8| {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: one whole mapping goes where nobody has anything else.
        let moved = unsafe { libc::mremap(from.cast(), HALF, HALF, flags, to) };
        assert_ne!(moved, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    };
    say("ready");
    loop {
        go(home, away);
        write();
        go(away, home);
        write();
    }
}

/// The kernel writes to this program's memory: direct reads of its own, process_vm_writev of another one.
fn kernel() {
    const LENGTH: usize = 8 << 20;
    let area = map_private(LENGTH);
    // SAFETY: the whole mapping, before anybody else has it.
    unsafe { area.write_bytes(1, LENGTH) };
    let mut writer = std::process::Command::new(std::env::current_exe().expect("our own path"))
        .env(WHAT, "writer")
        .env("AREA", area.expose_provenance().to_string())
        .spawn()
        .expect("it can be started");
    let area = area.expose_provenance();
    std::thread::spawn(move || {
        use std::os::unix::fs::OpenOptionsExt;
        let path = std::env::current_exe().expect("our own path");
        let options = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path);
        let file = options
            .or_else(|_| std::fs::File::open(&path))
            .expect("it can be read");
        let mut numbers = Numbers(9);
        loop {
            let (to, from) = (
                numbers.below(LENGTH / 8 / 65536) * 65536,
                numbers.below(16) * 65536,
            );
            // SAFETY: the first eighth of the mapping is this thread's alone.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(
                    std::ptr::with_exposed_provenance_mut::<u8>(area).add(to),
                    65536,
                )
            };
            let _ = std::os::unix::fs::FileExt::read_at(&file, bytes, from as u64);
        }
    });
    say("ready");
    let _ = writer.wait();
    loop {
        std::thread::park();
    }
}

/// Writes to its parent's memory by process_vm_writev.
fn writer() {
    const LENGTH: usize = 8 << 20;
    let area: usize = std::env::var("AREA")
        .expect("it is set")
        .parse()
        .expect("an address");
    // SAFETY: always succeeds.
    let parent = unsafe { libc::getppid() };
    let mut numbers = Numbers(11);
    let mut bytes = vec![0u8; 256 << 10];
    loop {
        bytes.fill(numbers.next() as u8);
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let at = LENGTH / 8 + numbers.below((LENGTH - LENGTH / 8 - bytes.len()) / 4096) * 4096;
        let remote = libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(area + at),
            iov_len: bytes.len(),
        };
        // SAFETY: it reads from our own vector, and writes to memory of another process.
        let written =
            unsafe { libc::process_vm_writev(parent, &raw const local, 1, &raw const remote, 1, 0) };
        if written < 0 {
            return;
        }
    }
}

/// The children of a program that is tracked.
pub fn others(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Ends one of them, and returns when it writes no more.
pub fn end(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("not 0");
    let Ok(process) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        return;
    };
    let _ = rustix::process::pidfd_send_signal(&process, rustix::process::Signal::KILL);
    let mut ended = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut ended, None).expect("poll");
}

fn read() {
    let bytes: Vec<u8> = (0..READ_BYTES).map(|index| index as u8).collect();
    say("ready");
    loop {
        let sum: u64 = std::hint::black_box(&bytes)
            .iter()
            .map(|byte| u64::from(*byte))
            .sum();
        say(&sum.to_string());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Calls that take their time, one after the other, each of which must neither end early nor fail.
fn calls() {
    const TIME: Duration = Duration::from_millis(300);
    let (mut reader, mut pipe) = std::io::pipe().expect("a pipe");
    let before = descriptors();
    say("ready");
    let timed = |what: &str, call: &mut dyn FnMut() -> bool| {
        let begun = Instant::now();
        let is_good = call();
        let took = begun.elapsed();
        say(match is_good && took >= TIME && took < TIME * 4 {
            true => what.to_owned(),
            false => format!("{what}: {is_good} after {took:?}"),
        }
        .as_str());
    };
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: TIME.as_nanos() as i64,
    };
    // SAFETY: the calls get pointers to what lives longer than they last, or none.
    unsafe {
        timed("sleep", &mut || {
            libc::nanosleep(&raw const time, std::ptr::null_mut()) == 0
        });
        timed("poll", &mut || {
            libc::poll(std::ptr::null_mut(), 0, TIME.as_millis() as i32) == 0
        });
        let word = 0u32;
        timed("wait", &mut || {
            let waited = libc::syscall(
                libc::SYS_futex,
                &raw const word,
                libc::FUTEX_WAIT,
                0,
                &raw const time,
            );
            waited == -1 && *libc::__errno_location() == libc::ETIMEDOUT
        });
    }
    std::thread::spawn(move || {
        std::thread::sleep(TIME + Duration::from_millis(20));
        pipe.write_all(&[7]).expect("somebody reads");
        std::mem::forget(pipe);
    });
    timed("read", &mut || {
        let mut byte = [0];
        reader.read(&mut byte).is_ok_and(|read| read == 1) && byte == [7]
    });
    std::thread::sleep(TIME);
    say(&format!("descriptors {}", descriptors().abs_diff(before)));
    loop {
        std::thread::park();
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it is there").count()
}

/// Whoever makes a userfaultfd is killed.
fn filter() {
    let deny = libc::SYS_userfaultfd as u32;
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        instruction(0x20, 0, 0, 0),
        instruction(0x15, 0, 1, deny),
        instruction(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program is read in the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program
            ),
            0
        );
    }
    say("ready");
    std::thread::sleep(Duration::from_millis(300));
    say("alive");
    loop {
        std::thread::park();
    }
}

fn speak() {
    say("ready");
    loop {
        std::thread::sleep(Duration::from_millis(50));
        say("speaks");
    }
}

static GOT: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: i32) {
    GOT.fetch_add(1, Ordering::SeqCst);
}

/// Sends one more, which waits behind those before.
pub fn queue_signal(pid: u32) {
    let value = libc::sigval {
        sival_ptr: std::ptr::null_mut(),
    };
    // SAFETY: no pointer is used.
    let sent = unsafe { libc::sigqueue(pid.cast_signed(), libc::SIGRTMIN(), value) };
    assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
}

/// Counts what comes by a handler, until another signal says that no more will.
fn signals() {
    // SAFETY: the handler does nothing but count.
    unsafe {
        libc::signal(libc::SIGRTMIN(), count as *const () as libc::sighandler_t);
        let mut last: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut last, libc::SIGUSR1);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const last, std::ptr::null_mut());
        say("ready");
        let mut signal = 0;
        while libc::sigwait(&raw const last, &raw mut signal) != 0 || signal != libc::SIGUSR1 {}
    }
    // Those that were sent before are delivered before this returns to the program.
    std::thread::sleep(Duration::from_millis(50));
    say(&format!("got {}", GOT.load(Ordering::SeqCst)));
    loop {
        std::thread::park();
    }
}

static EPOCH: AtomicU64 = AtomicU64::new(0);
static ASKED: AtomicU64 = AtomicU64::new(0);

extern "C" fn ask(_: i32) {
    ASKED.store(1, Ordering::SeqCst);
}

unsafe extern "C" {
    /// Where the C library has a thread's `struct rseq`, from the thread's pointer on (glibc 2.35 and newer).
    static __rseq_offset: isize;
}

/// Goes through restartable sequences that take longer than it takes to be armed, one after the other. Each reads at its beginning and at its end how often
/// it was armed: who was armed in between must not come to the end.
fn sequence() {
    let mut counts = [0u64; 3];
    // SAFETY: the handler stores a number; the rest is described at `one_sequence`.
    unsafe {
        libc::signal(libc::SIGUSR1, ask as *const () as libc::sighandler_t);
        say("ready");
        say(&EPOCH.as_ptr().expose_provenance().to_string());
        while ASKED.load(Ordering::SeqCst) == 0 {
            match one_sequence() {
                None => counts[1] += 1,
                Some([first, last]) => {
                    counts[0] += 1;
                    // Armed from the beginning to the end of that, both times outside of it.
                    counts[2] += u64::from(first % 2 == 0 && last % 2 == 0 && first != last);
                }
            }
        }
    }
    say(&counts.map(|count| count.to_string()).join(" "));
    loop {
        std::thread::park();
    }
}

/// One sequence: what it read first and last, or nothing if it was given up.
///
/// # Safety
///
/// The thread is registered by the C library with the signature that the C library uses on x86-64 (0x53053053).
unsafe fn one_sequence() -> Option<[u64; 2]> {
    let (first, last, given_up): (u64, u64, u64);
    // SAFETY: the sequence reads a static number and writes registers, and the descriptor of the sequence to the thread's own
    // `struct rseq`, from which it is taken away at the end.
    unsafe {
        std::arch::asm!(
            ".pushsection .data.rel.sequence, \"aw\"",
            ".balign 32",
            "23:",
            ".long 0, 0",
            ".quad 20f, 21f - 20f, 22f",
            ".popsection",
            "lea {scratch}, [rip + 23b]",
            "mov qword ptr fs:[{offset} + 8], {scratch}",
            "20:",
            "mov {first}, qword ptr [{epoch}]",
            "mov {scratch}, 2000000",
            "24:",
            "dec {scratch}",
            "jnz 24b",
            "mov {last}, qword ptr [{epoch}]",
            "21:",
            "xor {given_up:e}, {given_up:e}",
            "jmp 25f",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "22:",
            "mov {given_up:e}, 1",
            "25:",
            "mov qword ptr fs:[{offset} + 8], 0",
            offset = in(reg) __rseq_offset,
            epoch = in(reg) EPOCH.as_ptr(),
            scratch = out(reg) _,
            first = out(reg) first,
            last = out(reg) last,
            given_up = out(reg) given_up,
        );
    }
    (given_up == 0).then_some([first, last])
}

/// Becomes another program when it is told to.
fn execute() {
    // SAFETY: plain sets of signals.
    unsafe {
        let mut told: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut told, libc::SIGUSR1);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const told, std::ptr::null_mut());
        say("ready");
        let mut signal = 0;
        libc::sigwait(&raw const told, &raw mut signal);
    }
    let error = std::process::Command::new(std::env::current_exe().expect("our own path"))
        .env(WHAT, "speak")
        .exec();
    panic!("{error}");
}

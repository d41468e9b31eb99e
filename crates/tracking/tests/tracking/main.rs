//! Real processes that are tracked while they do to their memory whatever programs do.
//!
//! The program that is tracked is this one, started again with the name of what it is to do ([`child`]). Each case ends it, also when
//! it fails: it dies with this one.

mod child;
mod copy;
mod faults;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use verbatim_tracking::{
    Error, FileTracker, Ranges, Tracker, pinned_writers, shared_by_fork, stand_still_once, supported,
};

use copy::Copy;

/// No case takes as long.
const LIMIT: Duration = Duration::from_secs(60);

type Case = (&'static str, fn());

const CASES: [Case; 15] = [
    ("every_write_is_seen", || is_seen("write", 40)),
    ("every_write_is_seen_whatever_becomes_of_mappings", || {
        is_seen("map", 40)
    }),
    ("every_write_beside_a_mapping_that_comes_and_goes_is_seen", || {
        is_seen("merge", 100)
    }),
    ("what_the_kernel_writes_for_others_is_seen", || {
        is_seen("kernel", 40)
    }),
    ("every_write_to_a_shared_file_is_seen", || {
        a_shared_file_is_seen(24 << 20, 60)
    }),
    ("every_write_to_a_file_with_holes_is_seen", || {
        a_shared_file_is_seen(256 << 20, 20)
    }),
    ("what_is_only_read_stays_clean", what_is_only_read_stays_clean),
    ("system_calls_go_on", system_calls_go_on),
    ("a_filter_says_nothing", a_filter_says_nothing),
    ("a_stopped_process_stays_so", a_stopped_process_stays_so),
    (
        "signals_are_neither_lost_nor_repeated",
        signals_are_neither_lost_nor_repeated,
    ),
    ("another_program_is_noticed", another_program_is_noticed),
    (
        "a_restartable_sequence_is_given_up",
        a_restartable_sequence_is_given_up,
    ),
    ("an_end_is_left_to_the_parent", an_end_is_left_to_the_parent),
    ("who_waits_for_a_page_waits_on", faults::who_waits_waits_on),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(what) = std::env::var_os(child::WHAT) {
        return child::run(&what.into_string().expect("a name"));
    }
    if arguments.iter().any(|argument| argument == "--list") {
        CASES.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<_> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    if let Err(unsupported) = supported() {
        println!("skipped: {unsupported}");
        return ExitCode::SUCCESS;
    }
    end_in_time();
    let mut failed = 0;
    let mut passed = 0;
    for (name, case) in CASES {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let begun = Instant::now();
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(()) => passed += 1,
            Err(_) => failed += 1,
        }
        println!("case {name}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    println!("{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Ends this program when its cases have not ended in time, and the children with it.
fn end_in_time() {
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT * 2);
        eprintln!("a case hangs");
        std::process::exit(1);
    });
}

/// A program that is tracked; it is killed when this is dropped.
struct Tracked {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Tracked {
    /// Starts one, which has said that it is ready.
    fn start(what: &str) -> Self {
        Self::start_with(what, Path::new(""))
    }

    /// The same, which maps a file.
    fn start_with(what: &str, file: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("our own path"))
            .env(child::WHAT, what)
            .env(child::FILE, file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started");
        let output = BufReader::new(process.stdout.take().expect("it was piped"));
        let mut tracked = Self { process, output };
        assert_eq!(tracked.line(), "ready", "{what}");
        tracked
    }

    fn pid(&self) -> u32 {
        self.process.id()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it speaks");
        line.trim_end().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.number(), signal).expect("it lives");
    }

    fn number(&self) -> Pid {
        Pid::from_raw(self.pid().cast_signed()).expect("not 0")
    }

    /// Stops it, and returns when it stands still.
    fn freeze(&self) {
        self.signal(Signal::STOP);
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.number()), stopped).expect("it is our child");
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What is put together from many looks is the memory of the program, to the last byte.
fn is_seen(what: &str, looks: u32) {
    let program = Tracked::start(what);
    let pid = program.pid();
    let mut tracker = Tracker::arm(pid).expect("it can be tracked");
    let mut copy = Copy::new(pid);
    let mut bytes = 0;
    for number in 0..looks {
        let look = tracker.look().expect("a look");
        stand_still_once(&[&[pid], &child::others(pid)[..]].concat()).expect("they stand still");
        if number > 0 {
            bytes += look.written.bytes();
        }
        copy.take(&look.written);
    }
    assert!(bytes > 0, "nothing was written meanwhile");
    // Others write to it, too.
    child::others(pid).into_iter().for_each(child::end);
    program.freeze();
    let look = tracker.last_look().expect("the last look");
    copy.take(&look.written);
    println!(
        "  {looks} looks found {} KiB after the first, the last one {} KiB",
        bytes >> 10,
        look.written.bytes() >> 10
    );
    copy.must_be_all_of_it();
}

/// What is put together from many looks is the file, to the last byte; and while nobody writes, nothing is found. Where the file has no memory,
/// nothing is asked of the kernel: a file that is written here and there has new memory in each look.
fn a_shared_file_is_seen(length: usize, looks: u32) {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file of tmpfs");
    file.as_file().set_len(length as u64).expect("it can grow");
    let program = Tracked::start_with("shared", file.path());
    let pid = program.pid();
    let mut tracker = FileTracker::arm(pid, file.as_file()).expect("it can be tracked");
    let mut copy = vec![0; length];
    let mut take = |written: &Ranges| {
        for range in written.iter() {
            let part = &mut copy[range.start as usize..range.end as usize];
            file.as_file()
                .read_exact_at(part, range.start)
                .expect("it is ours");
        }
    };
    let mut data = memory_of(file.as_file());
    let (mut bytes, mut more) = (0, 0);
    for number in 0..looks {
        let written = tracker.look(&data).expect("a look");
        stand_still_once(&[pid]).expect("it stands still");
        match number {
            // But for what left the page tables just then.
            0 => assert!(written.bytes() > data.bytes() * 9 / 10, "{}", written.bytes()),
            _ => bytes += written.bytes(),
        }
        let now = memory_of(file.as_file());
        more += now.bytes() - data.bytes();
        data = now;
        take(&written.intersection(&data));
    }
    program.freeze();
    data = memory_of(file.as_file());
    let last = tracker.last_look(&data).expect("the last look");
    take(&last);
    println!(
        "  found {} KiB after the first, the last one {} KiB; {} of {} KiB are memory, {} since the first look",
        bytes >> 10,
        last.bytes() >> 10,
        data.bytes() >> 10,
        length >> 10,
        more >> 10
    );
    assert!(bytes > 0, "nothing was written meanwhile");
    let now = std::fs::read(file.path()).expect("it is ours");
    let differs = |page: &usize| now[*page..page + 4096] != copy[*page..page + 4096];
    let wrong: Vec<usize> = (0..length).step_by(4096).filter(differs).collect();
    assert!(wrong.is_empty(), "pages differ: {wrong:x?}");
    tracker.look(&data).expect("a look at what stands still");
    assert_eq!(tracker.look(&data).expect("a look").bytes(), 0, "nobody writes");
    assert_eq!(
        tracker.last_look(&data).expect("a look").bytes(),
        0,
        "nobody writes"
    );
}

/// Where a file of tmpfs has memory.
fn memory_of(file: &std::fs::File) -> Ranges {
    use rustix::fs::{SeekFrom, seek};
    let (mut data, mut from) = (Ranges::default(), 0);
    while let Ok(start) = seek(file, SeekFrom::Data(from)) {
        from = seek(file, SeekFrom::Hole(start)).expect("the end is a hole");
        data.insert(start..from);
    }
    data
}

fn what_is_only_read_stays_clean() {
    let mut program = Tracked::start("read");
    let mut tracker = Tracker::arm(program.pid()).expect("it can be tracked");
    let first = tracker.look().expect("a look").written;
    assert!(first.bytes() >= child::READ_BYTES as u64);
    program.line();
    program.line();
    let second = tracker.look().expect("a look").written;
    assert!(second.bytes() < 1 << 20, "{} KiB", second.bytes() >> 10);
    assert_eq!(pinned_writers(program.pid()).expect("it is there"), None);
    assert!(shared_by_fork(&[program.pid()]).expect("it is there") < 1 << 20);
}

/// Armed and let go again and again, a program's system calls take as long as they should, and return what they should.
fn system_calls_go_on() {
    let mut program = Tracked::start("calls");
    let pid = program.pid();
    let begun = Instant::now();
    let mut armed = 0;
    while begun.elapsed() < Duration::from_millis(1500) {
        drop(Tracker::arm(pid).expect("it can be tracked"));
        stand_still_once(&[pid]).expect("it stands still");
        armed += 1;
    }
    assert!(armed > 50);
    for call in child::CALLS {
        assert_eq!(program.line(), *call);
    }
    assert_eq!(program.line(), "descriptors 0");
}

fn a_filter_says_nothing() {
    let mut program = Tracked::start("filter");
    for _ in 0..20 {
        let mut tracker = Tracker::arm(program.pid()).expect("it can be tracked");
        tracker.look().expect("a look");
    }
    assert_eq!(program.line(), "alive");
}

fn a_stopped_process_stays_so() {
    let mut program = Tracked::start("speak");
    program.freeze();
    let mut tracker = Tracker::arm(program.pid()).expect("it can be tracked");
    tracker.look().expect("a look");
    stand_still_once(&[program.pid()]).expect("it stands still");
    // On its way back there it runs in the kernel for a moment.
    let begun = Instant::now();
    let status = || std::fs::read_to_string(format!("/proc/{}/status", program.pid())).expect("it is there");
    while !status().contains("State:\tT") {
        assert!(begun.elapsed() < LIMIT, "{}", status());
        std::thread::yield_now();
    }
    program.signal(Signal::CONT);
    assert_eq!(program.line(), "speaks");
}

fn signals_are_neither_lost_nor_repeated() {
    let mut program = Tracked::start("signals");
    let pid = program.pid();
    for _ in 0..child::SIGNALS {
        child::queue_signal(pid);
        drop(Tracker::arm(pid).expect("it can be tracked"));
        stand_still_once(&[pid]).expect("it stands still");
    }
    program.signal(Signal::USR1);
    assert_eq!(program.line(), format!("got {}", child::SIGNALS));
}

/// A thread that is armed within a restartable sequence must not come to the sequence's end as if nobody had interrupted it.
fn a_restartable_sequence_is_given_up() {
    use std::os::unix::fs::FileExt;
    let mut program = Tracked::start("sequence");
    let pid = program.pid();
    let line = program.line();
    let epoch: u64 = line.parse().unwrap_or_else(|_| panic!("{line}"));
    let memory = std::fs::File::options()
        .write(true)
        .open(format!("/proc/{pid}/mem"));
    let memory = memory.expect("it is ours");
    let tell = |number: u64| {
        memory
            .write_all_at(&number.to_ne_bytes(), epoch)
            .expect("it lives")
    };
    for turn in 1..=200 {
        // Odd while it is being armed.
        tell(2 * turn - 1);
        drop(Tracker::arm(pid).expect("it can be tracked"));
        tell(2 * turn);
        // Time for a sequence that was armed in its middle to come to its end, and for another one to begin.
        std::thread::sleep(Duration::from_millis(2));
    }
    program.signal(Signal::USR1);
    let said = program.line();
    let numbers: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [ended, given_up, wrong] = numbers[..] else {
        panic!("{said}")
    };
    println!("  {ended} sequences ended, {given_up} were given up");
    assert!(ended > 0 && given_up > 0, "{said}");
    assert_eq!(
        wrong, 0,
        "of {ended} sequences that ended, so many were interrupted"
    );
}

/// The tracker may be the parent of what it tracks: who waits for the end hears of it all the same.
fn an_end_is_left_to_the_parent() {
    for _ in 0..60 {
        let mut program = Tracked::start("end");
        let pid = program.pid();
        loop {
            let armed = Tracker::arm(pid).and_then(|mut tracker| tracker.look());
            match armed.and_then(|_| stand_still_once(&[pid])) {
                Ok(()) => {}
                Err(Error::Gone) => break,
                Err(error) => panic!("{error}"),
            }
        }
        let status = program.process.wait().expect("it is our child");
        assert_eq!(status.code(), Some(child::STATUS));
    }
}

fn another_program_is_noticed() {
    let mut program = Tracked::start("execute");
    let pid = program.pid();
    let mut tracker = Tracker::arm(pid).expect("it can be tracked");
    tracker.look().expect("a look");
    program.signal(Signal::USR1);
    assert_eq!(program.line(), "ready");
    assert!(matches!(tracker.look(), Err(Error::Changed)));
    let mut tracker = Tracker::arm(pid).expect("it can be tracked");
    tracker.look().expect("a look");
    let _ = program.process.kill();
    let _ = program.process.wait();
    assert!(matches!(tracker.look(), Err(Error::Gone)));
    assert!(matches!(Tracker::arm(pid), Err(Error::Gone)));
    stand_still_once(&[pid]).expect("nobody is waited for");
}

//! A process without rights that waits for pages of a file that it shares.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Signal, set_parent_process_death_signal};
use verbatim_tracking::{DEVICE, Error, FileFaults, PAGE, Ranges, not_missing};

use crate::child::{FILE, WHAT, say};

const PAGES: usize = 64;
const PAGE_BYTES: usize = PAGE as usize;
/// What comes, and what the process writes itself.
const CAME: u8 = 7;
const WRITTEN: u8 = 8;
/// How long nothing happens where nothing is to happen, and until it must have happened.
const SILENT: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(20);
/// Nobody.
const USER: u32 = 65534;

/// Does as it is told, line by line, and says of each what came of it.
pub fn child() {
    let device = File::options().read(true).write(true).open(DEVICE);
    let file = std::env::var_os(FILE).expect("a file");
    let file = File::options()
        .read(true)
        .write(true)
        .open(file)
        .expect("it is there");
    let own = File::open(std::env::current_exe().expect("our own path")).expect("it is there");
    let (rights, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a fresh mapping.
    let memory = unsafe { mmap(std::ptr::null_mut(), PAGES * PAGE_BYTES, rights, shared, &file, 0) };
    let memory = memory.expect("it can be mapped").cast::<u8>();
    // SAFETY: changes the user of this process, which has one thread.
    assert_eq!(unsafe { libc::setresuid(USER, USER, USER) }, 0);
    set_parent_process_death_signal(Some(Signal::KILL)).expect("always");
    assert!(device.is_ok(), "{DEVICE} is open, and nothing else is allowed");
    say("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("somebody speaks");
        let (what, page) = line.split_once(' ').expect("two words");
        let page: usize = page.parse().expect("a number");
        assert!(page + 4 <= PAGES);
        // SAFETY: within the mapping.
        let at = unsafe { memory.add(page * PAGE_BYTES) };
        match what {
            // SAFETY: within the mapping, of which nobody has a reference.
            "touch" => say(&unsafe { at.read_volatile() }.to_string()),
            "write" => {
                // SAFETY: the same.
                unsafe { at.write_volatile(WRITTEN) };
                say("written");
            }
            // The kernel touches it.
            "read" => {
                // SAFETY: four pages of the mapping, of which nobody has a reference meanwhile.
                let four = unsafe { std::slice::from_raw_parts_mut(at, 4 * PAGE_BYTES) };
                say(&format!(
                    "{:?}",
                    own.read_at(four, 0).map_err(|error| error.raw_os_error())
                ));
            }
            _ => panic!("what is {what}?"),
        }
    }
}

struct Waiter {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Waiter {
    fn start(file: &std::path::Path) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("our own path"))
            .env(WHAT, "faults")
            .env(FILE, file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started");
        let output = BufReader::new(process.stdout.take().expect("it was piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut all = output.lines().map_while(Result::ok);
            while all.next().is_some_and(|line| sender.send(line).is_ok()) {}
        });
        let input = process.stdin.take().expect("it was piped");
        let waiter = Self {
            process,
            input,
            lines,
        };
        assert_eq!(waiter.says(), "ready");
        waiter
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").expect("it listens");
    }

    fn says(&self) -> String {
        self.lines.recv_timeout(LIMIT).expect("it goes on")
    }

    fn waits(&self) {
        assert_eq!(self.lines.recv_timeout(SILENT), Err(RecvTimeoutError::Timeout));
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let (Ok(()) | Err(_)) = self.process.kill();
        let (Ok(_) | Err(_)) = self.process.wait();
    }
}

fn waited_for(faults: &FileFaults) -> u64 {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec::try_from(LIMIT).expect("it is short");
    let mut ready = [PollFd::new(faults, PollFlags::IN)];
    assert_eq!(poll(&mut ready, Some(&limit)), Ok(1), "somebody waits");
    faults.next().expect("it can be read").expect("somebody waits") / PAGE
}

/// Also where a page is wanted by the kernel, and where nobody is there to answer.
pub fn who_waits_waits_on() {
    let Ok(device) = File::options().read(true).write(true).open(DEVICE) else {
        println!("skipped: {DEVICE} cannot be opened");
        return;
    };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = folder.path().join("file");
    let file = File::create_new(&path).expect("it is new");
    file.set_len((PAGES * PAGE_BYTES) as u64).expect("room");
    let mut waiter = Waiter::start(&path);
    let pid = waiter.process.id();
    let faults = FileFaults::put_in(pid, &device, &file).expect("it gets a userfaultfd");
    waiter.tell("touch 60");
    assert_eq!(waiter.says(), "0", "not before it is begun");
    faults.begin().expect("all of it is mapped");
    let at = |page: u64| page * PAGE;

    waiter.tell("touch 5");
    assert_eq!(waited_for(&faults), 5);
    waiter.waits();
    faults.copy(at(5), &[CAME; PAGE_BYTES]).expect("it is missing");
    assert_eq!(waiter.says(), CAME.to_string());

    // Who was told of it is gone, and no other is there yet.
    waiter.tell("read 8");
    assert_eq!(waited_for(&faults), 8);
    let number = faults.number();
    drop(faults);
    waiter.waits();
    let faults = FileFaults::take(pid, number, &file)
        .expect("it is there")
        .expect("it is one");
    for page in 8..12 {
        assert_eq!(waited_for(&faults), page);
        faults.copy(at(page), &[CAME; PAGE_BYTES]).expect("it is missing");
    }
    assert_eq!(
        waiter.says(),
        format!("Ok({})", 4 * PAGE_BYTES),
        "the kernel waits, too"
    );

    // What comes again takes nothing back; what is around it comes.
    waiter.tell("write 10");
    assert_eq!(waiter.says(), "written");
    faults
        .copy(at(7), &[CAME; 6 * PAGE_BYTES])
        .expect("a part is missing");
    for (page, found) in [(7, CAME), (10, WRITTEN), (12, CAME)] {
        waiter.tell(&format!("touch {page}"));
        assert_eq!(waiter.says(), found.to_string(), "page {page}");
    }
    waiter.tell("touch 30");
    assert_eq!(waited_for(&faults), 30);
    faults.zero(at(30)..at(31)).expect("it is missing");
    assert_eq!(waiter.says(), "0");
    // Told of before it came by another way.
    waiter.tell("touch 31");
    assert_eq!(waited_for(&faults), 31);
    file.write_all_at(&[CAME; PAGE_BYTES], at(31))
        .expect("there is room");
    faults.zero(at(31)..at(32)).expect("it is there");
    assert_eq!(waiter.says(), CAME.to_string());

    let whole = 0..at(PAGES as u64);
    let all = Ranges::from_iter([whole]);
    let there: Vec<_> = not_missing(&file, &all).expect("tmpfs says").iter().collect();
    // 60 was touched before.
    assert_eq!(
        there,
        [at(5)..at(6), at(7)..at(13), at(30)..at(32), at(60)..at(61)]
    );

    faults.end().expect("it was begun");
    faults.close().expect("it is open there");
    waiter.tell("touch 40");
    assert_eq!(waiter.says(), "0", "nobody need answer");
    assert!(FileFaults::take(pid, number, &file).expect("a process").is_none());

    // What is missing for good is noticed.
    let private = File::create_new(folder.path().join("other")).expect("it is new");
    private.set_len(PAGE).expect("room");
    assert!(
        FileFaults::put_in(pid, &device, &private).is_err(),
        "it maps no such file"
    );
    drop(waiter);
    let gone = FileFaults::take(pid, number, &file);
    assert!(matches!(gone, Err(Error::Gone)), "{gone:?}");
}

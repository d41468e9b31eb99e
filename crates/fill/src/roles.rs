//! The processes: one that starts the others and ends, the guardian, and the worker.
//!
//! Guardian and worker have one table of descriptors and one region of shared memory. The worker does everything. The guardian
//! waits for its end, and starts another one. A worker whose guardian has died makes another guardian. So the last descriptor of
//! a task's userfaultfd is closed only when both die at once.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitOptions, getpid, getppid, pidfd_open, setsid, waitpid};
use verbatim_seqpacket::Listener;

use crate::config::Config;
use crate::numbers::Numbers;
use crate::sys::descriptors;
use crate::sys::process::{self, Cloned};
use crate::sys::region::Region;
use crate::worker::{End, Worker};

/// Between two starts of workers that end by themselves: first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(1)];

/// Makes the sockets, and starts the guardian, which has no parent that waits for it.
pub fn start(config: &Config) -> ExitCode {
    match prepare(config) {
        Ok(region) => match process::fork() {
            Ok(false) => ExitCode::SUCCESS,
            Ok(true) => {
                if let Err(error) = detach(config) {
                    say(&format!("standard output and error stay where they are: {error}"));
                }
                become_guardian(config, &region)
            }
            Err(error) => failed(&format!("no process can be made: {error}")),
        },
        Err(error) => failed(&error),
    }
}

fn failed(error: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "{error}");
    ExitCode::FAILURE
}

/// A line for the log.
pub fn say(text: &str) {
    let _ = writeln!(
        std::io::stderr(),
        "verbatim-fill[{}]: {text}",
        getpid().as_raw_nonzero()
    );
}

fn prepare(config: &Config) -> Result<Region, String> {
    let region = Region::new().map_err(|error| format!("no shared memory: {error}"))?;
    region.lock();
    let numbers = Numbers::choose();
    numbers.save(region.header());
    let place = |fd: OwnedFd, to| descriptors::place(fd, to).map_err(|error| format!("dup3: {error}"));
    let criu = config.lazy_pages_socket();
    place(
        stream_listener(&criu).map_err(|error| format!("{}: {error}", criu.display()))?,
        numbers.listener(),
    )?;
    let control = Listener::bind(&config.control);
    let control = control.map_err(|error| format!("{}: {error}", config.control.display()))?;
    let _ = control.set_nonblocking(true);
    let control = control
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| format!("dup: {error}"))?;
    place(control, numbers.control())?;
    let _ = std::fs::remove_file(Config::filled_mark(&config.control));
    Ok(region)
}

fn stream_listener(path: &std::path::Path) -> std::io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let _ = std::fs::remove_file(path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, 8)?;
    Ok(socket)
}

/// Nothing of who started it is left: no session, no terminal, no files.
fn detach(config: &Config) -> std::io::Result<()> {
    let _ = setsid();
    process::ignore_signals();
    let _ = std::env::set_current_dir("/");
    // As low as is allowed: the kernel should end anybody else when memory is short.
    for score in ["-1000", "0"] {
        if std::fs::write("/proc/self/oom_score_adj", score).is_ok() {
            break;
        }
    }
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    let log = std::fs::File::options()
        .append(true)
        .create(true)
        .open(&config.log);
    let log = log.as_ref().unwrap_or(&null);
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(log)?;
    rustix::stdio::dup2_stderr(log)?;
    Ok(())
}

fn become_guardian(config: &Config, region: &Region) -> ! {
    region
        .header()
        .guardian
        .store(getpid().as_raw_nonzero().get(), Ordering::SeqCst);
    let mut pause = PAUSES[0];
    loop {
        let started = Instant::now();
        match process::clone_with_files() {
            Ok(Cloned::Child) => work(config, region),
            Ok(Cloned::Parent(pid)) => {
                let by_itself = wait_for_child(pid);
                end_if_all_is_over(region);
                region.header().restarts.fetch_add(1, Ordering::SeqCst);
                // A worker that cannot live must not take the processor from the tasks.
                if by_itself && started.elapsed() < PAUSES[1] {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSES[1]);
                }
            }
            Err(error) => {
                say(&format!("no worker can be started: {error}"));
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES[1]);
            }
        }
    }
}

fn end_if_all_is_over(region: &Region) {
    if region.header().ending.load(Ordering::SeqCst) != 0 {
        process::exit_now(0);
    }
}

/// Whether it ended by itself, and was not killed.
fn wait_for_child(pid: i32) -> bool {
    let pid = Pid::from_raw(pid);
    loop {
        match waitpid(pid, WaitOptions::empty()) {
            Ok(Some((_, status))) => {
                say(&format!("the worker has ended: {status:?}"));
                return status.terminating_signal() != Some(libc::SIGKILL);
            }
            Err(rustix::io::Errno::INTR) | Ok(None) => {}
            Err(_) => return true,
        }
    }
}

/// A guardian that the worker has made: its child.
fn guard_parent(config: &Config, region: &Region, numbers: Numbers) -> ! {
    region
        .header()
        .guardian
        .store(getpid().as_raw_nonzero().get(), Ordering::SeqCst);
    let worker = descriptors::at(numbers.worker());
    while poll(&mut [PollFd::new(&worker, PollFlags::IN)], None).is_err() {}
    end_if_all_is_over(region);
    region.header().restarts.fetch_add(1, Ordering::SeqCst);
    become_guardian(config, region)
}

/// The worker's whole life.
fn work(config: &Config, region: &Region) -> ! {
    region
        .header()
        .worker
        .store(getpid().as_raw_nonzero().get(), Ordering::SeqCst);
    let numbers = Numbers::load(region.header());
    let mut worker = Worker::new(config, region, numbers, say);
    let mut guardian = of_parent(region);
    loop {
        let Some(watched) = guardian else {
            guardian = new_guardian(config, region, numbers);
            if guardian.is_none() {
                say("no guardian can be started; trying again");
                std::thread::sleep(PAUSES[0]);
            }
            continue;
        };
        match worker.run(watched.as_fd()) {
            End::Over => {
                region.header().ending.store(1, Ordering::SeqCst);
                worker.clear();
                process::exit_now(0)
            }
            End::GuardianDied => {
                say("the guardian has died");
                guardian = None;
                // It may have been our child.
                while matches!(waitpid(None, WaitOptions::NOHANG), Ok(Some(_))) {}
            }
        }
    }
}

/// The guardian that started this worker, unless it has died meanwhile.
fn of_parent(region: &Region) -> Option<OwnedFd> {
    let pid = Pid::from_raw(region.header().guardian.load(Ordering::SeqCst))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // As long as it is the parent the number was its own.
    (getppid() == Some(pid)).then_some(pidfd)
}

fn new_guardian(config: &Config, region: &Region, numbers: Numbers) -> Option<OwnedFd> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).ok()?;
    descriptors::copy_to(own.as_raw_fd(), numbers.worker()).ok()?;
    match process::clone_with_files().ok()? {
        Cloned::Child => guard_parent(config, region, numbers),
        Cloned::Parent(pid) => {
            region.header().guardian.store(pid, Ordering::SeqCst);
            // It is our child, and nobody has waited for it: the number is its own, whether or not it still runs.
            pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
        }
    }
}

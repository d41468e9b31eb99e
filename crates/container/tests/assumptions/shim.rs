//! A process between the proxy and CRIU that stops at CRIU's notifications, so that somebody can be killed there.
//!
//! It is as good as not there: what one side says it passes to the other, and when one side is gone so is its own end to the
//! other. For the proxy it is CRIU, for CRIU it is the proxy.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use verbatim_seqpacket::Socket;

/// The name under which the program is the shim.
pub const NAME: &str = "criu-under-test";

/// The variable that names CRIU.
pub const REAL: &str = "VERBATIM_TEST_REAL_CRIU";

/// Where the case listens, if it wants to know.
pub const CONTROL: &str = "/run/control";

/// The shim's own descriptors are above this number: CRIU is told numbers of the proxy's and looks them up here.
const ABOVE: i32 = 200;

/// Where the shim is found.
pub fn path() -> String {
    format!("/run/{NAME}")
}

/// What CRIU's protocol is to us (`images/rpc.proto`).
const NOTIFY: u64 = 6;

pub fn run(arguments: &[String]) -> ExitCode {
    let real = std::env::var_os(REAL).expect("the test names CRIU");
    if arguments != ["swrk", "3"] {
        let error = Command::new(real).args(arguments).exec();
        panic!("CRIU cannot be started: {error}");
    }
    // SAFETY: `swrk 3` says that descriptor 3 is open and ours.
    let proxy = high(unsafe { OwnedFd::from_raw_fd(3) });
    let proxy_pid = rustix::process::getppid()
        .expect("the proxy")
        .as_raw_nonzero()
        .get();
    let _directories = same_directories(proxy_pid);
    let (ours, theirs) = Socket::pair().expect("a pair of sockets");
    let (criu, theirs) = (high(ours.into_fd()), high(theirs.into_fd()));
    let number = theirs.as_raw_fd();
    let mut command = Command::new(real);
    command.args(arguments);
    // SAFETY: between fork and exec only `dup2` is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || match libc::dup2(number, 3) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.spawn().expect("CRIU can be started");
    drop(theirs);
    let pids = format!(
        "{} {proxy_pid} {} {}",
        child.id(),
        parent_of(proxy_pid),
        std::process::id()
    );
    let number = rustix::process::Pid::from_raw(child.id() as i32).expect("a number");
    let process =
        rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).expect("our child");
    relay(
        Socket::from_fd(criu),
        Socket::from_fd(proxy),
        &high(process),
        &pids,
    );
    let status = child.wait().expect("CRIU is our child");
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(code as u8)
}

/// Passes messages on until one side is gone; both sockets are closed when it returns.
fn relay(criu: Socket, proxy: Socket, process: &OwnedFd, pids: &str) {
    let mut notified = None;
    loop {
        let mut ends = [
            PollFd::new(&criu, PollFlags::IN),
            PollFd::new(&proxy, PollFlags::IN),
            PollFd::new(process, PollFlags::IN),
        ];
        retry_on_intr(|| poll(&mut ends, None)).expect("poll");
        let [from_criu, from_proxy, ended] = ends.map(|end| !end.revents().is_empty());
        if ended && !from_criu {
            return;
        }
        let ends: [&dyn AsFd; 3] = [&criu, &proxy, process];
        if from_criu {
            let Ok(message) = criu.recv_bytes() else { return };
            notified = notification(&message.message);
            if let Some(name) = &notified
                && !stop(name, "before", pids, ends)
            {
                return;
            }
            let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
            if proxy.send_bytes(&message.message, &fds).is_err() {
                return;
            }
        }
        if from_proxy {
            let Ok(message) = proxy.recv_bytes() else { return };
            if let Some(name) = notified.take()
                && !stop(&name, "after", pids, ends)
            {
                return;
            }
            if criu.send_bytes(&message.message, &[]).is_err() {
                return;
            }
        }
    }
}

/// Tells the case where CRIU is, and waits until it says a word; whether both sides are still there.
fn stop(name: &str, phase: &str, pids: &str, [criu, proxy, process]: [&dyn AsFd; 3]) -> bool {
    let Ok(mut control) = UnixStream::connect(CONTROL) else {
        // Nobody wants to know.
        return true;
    };
    if control
        .write_all(format!("{name} {phase} {pids}\n").as_bytes())
        .is_err()
    {
        return true;
    }
    let mut watched = [
        PollFd::new(&control, PollFlags::IN),
        PollFd::from_borrowed_fd(criu.as_fd(), PollFlags::empty()),
        PollFd::from_borrowed_fd(proxy.as_fd(), PollFlags::empty()),
        PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN),
    ];
    retry_on_intr(|| poll(&mut watched, None)).expect("poll");
    if watched[1..].iter().any(|end| !end.revents().is_empty()) {
        return false;
    }
    let _ = control.read(&mut [0]);
    true
}

/// The name in a notification.
fn notification(message: &[u8]) -> Option<String> {
    let fields = fields(message);
    if !fields.contains(&(1, Value::Number(NOTIFY))) {
        return None;
    }
    let notify = fields.into_iter().find(|(number, _)| *number == 5)?.1;
    let Value::Bytes(notify) = notify else { return None };
    self::fields(notify).into_iter().find_map(|field| match field {
        (1, Value::Bytes(name)) => Some(String::from_utf8_lossy(name).into_owned()),
        _ => None,
    })
}

#[derive(PartialEq)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message of CRIU's, which has numbers and bytes only.
fn fields(mut message: &[u8]) -> Vec<(u64, Value<'_>)> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = number(&mut message);
        let value = match key & 7 {
            0 => Value::Number(number(&mut message)),
            2 => {
                let length = number(&mut message) as usize;
                let (bytes, rest) = message.split_at(length);
                message = rest;
                Value::Bytes(bytes)
            }
            other => panic!("a field of kind {other} from CRIU"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn number(message: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = message[0];
        *message = &message[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// Opens each directory that the proxy has open, under the same number.
fn same_directories(proxy: i32) -> Vec<OwnedFd> {
    let mut opened = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{proxy}/fd"))
        .expect("the proxy's descriptors")
        .flatten()
    {
        let number: i32 = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .expect("a number");
        if number <= 3 || !entry.path().is_dir() {
            continue;
        }
        let directory = high(std::fs::File::open(entry.path()).expect("a directory").into());
        // SAFETY: plain numbers; what had this number is nobody's here, since all of our own are above.
        let same = unsafe { libc::dup2(directory.as_raw_fd(), number) };
        assert_eq!(same, number);
        // SAFETY: the call above has made it, and it is owned here.
        opened.push(unsafe { OwnedFd::from_raw_fd(same) });
    }
    opened
}

/// The same under a high number.
fn high(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&fd, ABOVE).expect("a descriptor")
}

/// proc_pid_stat(5), field 4.
pub fn parent_of(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, rest) = stat.rsplit_once(')').expect("a name");
    rest.split_whitespace()
        .nth(1)
        .expect("a parent")
        .parse()
        .expect("a number")
}

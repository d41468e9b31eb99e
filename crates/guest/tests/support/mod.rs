//! Two hosts on one machine: two software RNICs on loopback addresses, each with its own runtime folder.

pub mod build;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;
use verbatim_nic::{Nic, NicConfig, Port};

/// How long a program may take: a hundred times what it needs.
const LIMIT: Duration = Duration::from_secs(60);

/// A program of the distribution, or why its test is skipped.
pub fn installed(name: &str) -> Option<PathBuf> {
    let path = Path::new("/usr/bin").join(name);
    if !path.exists() {
        eprintln!("skipped: {name} is not installed (packages ibverbs-utils, perftest)");
        return None;
    }
    Some(path)
}

/// Where programs run: a runtime folder, with or without an RNIC at work in it.
pub struct Host {
    folder: TempDir,
    pub address: Ipv4Addr,
    rnic: Option<(OwnedFd, JoinHandle<()>)>,
}

impl Host {
    pub fn without_rnic() -> Self {
        // Registered memory is adopted into files of the runtime folder, which is memory on a real host, too.
        let folder = tempfile::Builder::new()
            .prefix("verbatim-guest-")
            .tempdir_in("/dev/shm");
        Self {
            folder: folder.expect("a folder on tmpfs"),
            address: Ipv4Addr::UNSPECIFIED,
            rnic: None,
        }
    }

    /// With an RNIC, at an address that nobody else has.
    pub fn start() -> Self {
        Self::with_rnic(next_address())
    }

    fn with_rnic(address: Ipv4Addr) -> Self {
        let mut host = Self::without_rnic();
        let config = NicConfig {
            port: Port::Address(address.into()),
            ..NicConfig::new(host.folder.path())
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let for_thread = stop.try_clone().unwrap();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut rnic = Nic::new(config).expect("an RNIC on a loopback address");
            ready.send(()).expect("the test waits for it");
            rnic.run(&for_thread).expect("the RNIC works until it is stopped");
        });
        is_ready.recv().expect("the RNIC has started");
        host.address = address;
        host.rnic = Some((stop, thread));
        host
    }

    /// Makes a program run here, with our library in front of the system's.
    pub fn prepare(&self, mut command: Command) -> Command {
        let test = std::env::current_exe().unwrap();
        command
            .env("LD_PRELOAD", test.with_file_name("libverbatim.so"))
            .env("VERBATIM_RUNTIME", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Ends the RNIC; its programs see what they would see if it were killed.
    pub fn end_rnic(&mut self) {
        if let Some((stop, thread)) = self.rnic.take() {
            let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
            let _ = thread.join();
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end_rnic();
    }
}

/// A server and a client.
pub struct Pair {
    pub server: Host,
    pub client: Host,
    /// One pair of programs at a time: they poll, and the machine may have two cores.
    turn: Mutex<()>,
}

impl Pair {
    pub fn start() -> Self {
        Self {
            server: Host::start(),
            client: Host::start(),
            turn: Mutex::new(()),
        }
    }

    /// Runs a program against itself; what both said.
    pub fn play(&self, program: &Path, arguments: &[&str]) -> [String; 2] {
        self.play_at("-p", program, arguments)
    }

    /// As [`Self::play`], for programs whose option for a TCP port has another name.
    pub fn play_at(&self, port_option: &str, program: &Path, arguments: &[&str]) -> [String; 2] {
        let outcomes = self.run_both(port_option, program, arguments);
        let [server, client] = &outcomes;
        assert!(
            server.code == Some(0) && client.code == Some(0),
            "{} {arguments:?}\nserver: {server}\nclient: {client}",
            program.display()
        );
        outcomes.map(|outcome| outcome.text)
    }

    /// As [`Self::play`], for programs that are not to succeed; their exit codes, none if one crashed or hung.
    pub fn play_badly(&self, program: &Path, arguments: &[&str]) -> [Option<i32>; 2] {
        self.run_both("-p", program, arguments)
            .map(|outcome| outcome.code)
    }

    fn run_both(&self, port_option: &str, program: &Path, arguments: &[&str]) -> [Outcome; 2] {
        let _turn = self
            .turn
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let port = free_port().to_string();
        let command = || {
            let mut command = Command::new(program);
            command.args(arguments).args([port_option, &port]);
            command
        };
        let server = Running::start(self.server.prepare(command()));
        server.wait_for_listener(&port);
        let mut command = command();
        command.arg("127.0.0.1");
        let client = Running::start(self.client.prepare(command));
        [server, client].map(Running::finish)
    }
}

/// An address of the loopback network that nobody else has: no other test run, and no host of this one, the last of which may be
/// about to go.
fn next_address() -> Ipv4Addr {
    static HOSTS: AtomicU8 = AtomicU8::new(1);
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    Ipv4Addr::new(127, HOSTS.fetch_add(1, Relaxed), high, low)
}

/// A port that nobody listens at now.
fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.local_addr().unwrap().port()
}

/// Runs a program alone; what it said.
pub fn run(command: Command) -> String {
    let outcome = Running::start(command).finish();
    assert_eq!(outcome.code, Some(0), "{outcome}");
    outcome.text
}

/// A program that runs beside others.
pub struct Background(Running);

/// Starts a program that is to run beside others.
pub fn start(command: Command) -> Background {
    Background(Running::start(command))
}

impl Background {
    /// Waits for its end; what it said.
    pub fn finish(self) -> String {
        let outcome = self.0.finish();
        assert_eq!(outcome.code, Some(0), "{outcome}");
        outcome.text
    }
}

/// As [`run`]; calls `when_ready` once when the program has said "ready" on a line of its own.
pub fn run_until_ready(command: Command, when_ready: impl FnOnce()) -> String {
    let mut running = Running::spawn(command);
    let mut stdout = BufReader::new(running.child.stdout.take().expect("piped"));
    let mut said = String::new();
    stdout.read_line(&mut said).expect("a pipe");
    if said == "ready\n" {
        when_ready();
    }
    running.readers = vec![reader(Some(stdout)), reader(running.child.stderr.take())];
    let outcome = running.finish();
    let text = said + &outcome.text;
    assert_eq!(outcome.code, Some(0), "{}\n{text}", outcome.status);
    text
}

/// How a program ended.
struct Outcome {
    /// None if a signal or we ended it.
    code: Option<i32>,
    status: String,
    text: String,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n{}", self.status, self.text)
    }
}

/// A program at work, ended when it takes too long or nobody waits for it any more.
struct Running {
    child: Child,
    pidfd: OwnedFd,
    readers: Vec<JoinHandle<String>>,
    deadline: Instant,
}

impl Running {
    fn start(command: Command) -> Self {
        let mut running = Self::spawn(command);
        let child = &mut running.child;
        running.readers = vec![reader(child.stdout.take()), reader(child.stderr.take())];
        running
    }

    /// Without anybody who reads what it says.
    fn spawn(mut command: Command) -> Self {
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("the child is ours");
        Self {
            child,
            pidfd,
            readers: Vec::new(),
            deadline: Instant::now() + LIMIT,
        }
    }

    /// Returns when the program listens at a TCP port, or has ended. There is no event for the former.
    fn wait_for_listener(&self, port: &str) {
        let port: u16 = port.parse().unwrap();
        let listening = || {
            ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
                let table = fs::read_to_string(table).unwrap_or_default();
                // "sl local_address rem_address st …": an address is HEX:PORT, state 0A is LISTEN
                table.lines().any(|line| {
                    let words: Vec<_> = line.split_whitespace().collect();
                    words.len() > 3 && words[1].ends_with(&format!(":{port:04X}")) && words[3] == "0A"
                })
            })
        };
        while !listening() && Instant::now() < self.deadline && !self.ended(Duration::from_millis(5)) {}
    }

    /// Waits for the end, but not for longer.
    fn ended(&self, limit: Duration) -> bool {
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0)
    }

    fn finish(mut self) -> Outcome {
        let in_time = self.ended(self.deadline.saturating_duration_since(Instant::now()));
        if !in_time {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
        let status = self.child.wait().unwrap();
        let text = self
            .readers
            .drain(..)
            .map(|reader| reader.join().unwrap())
            .collect();
        let status_text = if in_time {
            status.to_string()
        } else {
            format!("took longer than {LIMIT:?}")
        };
        Outcome {
            code: status.code(),
            status: status_text,
            text,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Ended already unless a test has failed.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = self.child.wait();
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    let mut pipe = pipe.expect("piped");
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

//! What is left of a program that dies, who owns a connection that was handed over, and what a truncated file does.
//!
//! Here the RNIC and the programs are processes: this binary, started again with the name of a part.

mod support;

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use support::program::{ALL_ACCESS, CAP, write};
use support::{End, Program, Server, pair, wait_for};
use verbatim_device::control::{Backing, QpState, QpType, Reply, Request, SOCKET_NAME};
use verbatim_nic::{NicConfig, Port, STATS_NAME, StatsReader};
use verbatim_seqpacket::{Listener, Socket};

const NIC_ADDRESS: [u8; 4] = [127, 7, 30, 1];
const SUCCESS: u32 = 0;
const REM_ACCESS_ERR: u32 = 10;
const PAGES: u64 = 16 * 4096;
/// Where the program that takes over a context has its memory.
const AGREED_ADDRESS: u64 = 0x5000_0000_0000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["part", "nic", folder] => nic_part(folder),
        ["part", "doomed", socket] => doomed_part(Path::new(socket)),
        ["part", "heir"] => heir_part(),
        _ => {
            let tests: [(&str, fn()); 5] = [
                (
                    "a_killed_program_leaves_nothing_behind",
                    a_killed_program_leaves_nothing_behind,
                ),
                (
                    "a_connection_lives_as_long_as_someone_holds_it",
                    a_connection_lives_as_long_as_someone_holds_it,
                ),
                (
                    "process_memory_follows_the_owner",
                    process_memory_follows_the_owner,
                ),
                (
                    "a_truncated_file_costs_its_own_context",
                    a_truncated_file_costs_its_own_context,
                ),
                (
                    "listeners_are_added_by_root_only_and_end",
                    listeners_are_added_by_root_only_and_end,
                ),
            ];
            let wanted = arguments.iter().find(|argument| !argument.starts_with('-'));
            for (name, test) in tests {
                if wanted.is_none_or(|wanted| name.contains(wanted.as_str())) {
                    test();
                    println!("test {name} ... ok");
                }
            }
        }
    }
}

/// A part in a process of its own, killed at the end if it still runs.
struct Part {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Part {
    fn start(arguments: &[&str], stdin: Stdio) -> Self {
        let program = std::env::current_exe().expect("this binary");
        let mut command = Command::new(program);
        let mut child = command
            .arg("part")
            .args(arguments)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the part starts");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { child, lines }
    }

    fn expect_line(&mut self, expected: &str) {
        let line = self.lines.next().expect("a line").expect("a line");
        assert_eq!(line, expected);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("the starter listens");
}

fn nic_part(folder: &str) {
    let mut config = NicConfig::new(folder);
    config.port = Port::Address(NIC_ADDRESS.into());
    config.jailed = !support::is_sanitized();
    verbatim_nic::run(config).expect("the RNIC runs");
    say("ended");
}

/// Makes one of everything, keeps the wire busy, and waits for its end.
fn doomed_part(socket: &Path) {
    let program = Program::connect(socket, "doomed");
    let mut queue = program.cq(256);
    let (mut a, b) = (program.qp(&queue, CAP), program.qp(&queue, CAP));
    program.connect_qp(&a, NIC_ADDRESS, b.qpn);
    program.connect_qp(&b, NIC_ADDRESS, a.qpn);
    let (from, to) = (
        program.adopted(PAGES, ALL_ACCESS),
        program.adopted(PAGES, ALL_ACCESS),
    );
    let _private = program.private(PAGES, ALL_ACCESS);
    let datagrams = program.qp_with(&queue, CAP, QpType::Ud, None);
    program.call(Request::AttachMcast {
        qpn: datagrams.qpn,
        gid: support::program::gid([239, 7, 30, 1].into()),
    });
    for n in 0.. {
        program.post(&mut a, write(n, &to, 0), &[from.sge(0, PAGES as u32)]);
        if n >= 8 {
            assert_eq!(queue.wait().status, SUCCESS);
        }
        if n == 100 {
            say("busy");
        }
    }
}

#[derive(Debug)]
struct Footprint {
    descriptors: usize,
    shared_mappings: usize,
}

impl Footprint {
    fn of(process: u32) -> Self {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd"))
            .expect("its descriptors")
            .count();
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("its mappings");
        let is_shared = |line: &&str| {
            line.split_whitespace()
                .nth(1)
                .is_some_and(|rights| rights.ends_with('s'))
        };
        Self {
            descriptors,
            shared_mappings: maps.lines().filter(is_shared).count(),
        }
    }
}

fn a_killed_program_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_str().expect("a plain path");
    let socket: PathBuf = folder.path().join(SOCKET_NAME);
    let mut nic = Part::start(&["nic", path], Stdio::null());
    let probe = wait_for("the control socket", || Socket::connect(&socket).ok());
    let stats = StatsReader::open(&folder.path().join(STATS_NAME)).expect("statistics");
    let ask = Request::QueryStatistics { from_qpn: 0 };
    probe.call::<_, Reply>(&ask, &[]).expect("an answer");
    let probed = Footprint::of(nic.child.id());
    drop(probe);
    let before = wait_for("the probe's end", || {
        let now = Footprint::of(nic.child.id());
        (now.descriptors < probed.descriptors).then_some(now)
    });
    for _ in 0..2 {
        let mut doomed = Part::start(&["doomed", socket.to_str().expect("a plain path")], Stdio::null());
        doomed.expect_line("busy");
        let counters = stats.read();
        assert_eq!(
            (
                counters.contexts,
                counters.qps,
                counters.mrs,
                counters.cqs,
                counters.groups
            ),
            (1, 3, 3, 1, 1)
        );
        let during = Footprint::of(nic.child.id());
        assert!(during.descriptors > before.descriptors && during.shared_mappings > before.shared_mappings);
        doomed.child.kill().expect("it can be killed");
        doomed.child.wait().expect("it ends");
        let killed = Instant::now();
        wait_for("an empty RNIC", || (stats.read().contexts == 0).then_some(()));
        assert!(
            killed.elapsed() < Duration::from_secs(1),
            "{:?}",
            killed.elapsed()
        );
        let counters = stats.read();
        assert_eq!(
            (
                counters.qps,
                counters.mrs,
                counters.cqs,
                counters.pds,
                counters.groups
            ),
            (0, 0, 0, 0, 0)
        );
        let after = Footprint::of(nic.child.id());
        // Fewer is right, too: a connection of before may have been on its way out then.
        assert!(
            after.descriptors <= before.descriptors && after.shared_mappings <= before.shared_mappings,
            "descriptors and shared mappings of the RNIC: {after:?}, before {before:?}"
        );
    }
    let pid = rustix::process::Pid::from_child(&nic.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
    nic.expect_line("ended");
    assert!(nic.child.wait().expect("it ends").success());
    assert!(!socket.exists(), "it takes its socket with it");
}

fn a_connection_lives_as_long_as_someone_holds_it() {
    let (a, b) = (Server::start([127, 7, 31, 1]), Server::start([127, 7, 31, 2]));
    let (mut left, right) = pair(&a, &b);
    let parked = rustix::io::dup(right.program.socket.as_fd()).expect("a descriptor");
    let memory = right.program.adopted(PAGES, ALL_ACCESS);
    // The program lets go of everything; its memory stays registered, since the file is.
    drop(right);
    left.program.post(&mut left.qp, write(1, &memory, 0), &[]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    let heir = Program::attach(Socket::from_fd(parked));
    assert_eq!(heir.device.name, "verbatim0");
    assert_eq!(b.stats.read().contexts, 1);
    drop(heir);
    b.wait_for("the end of the context", |counters| {
        (counters.contexts, counters.qps, counters.mrs) == (0, 0, 0)
    });
}

/// Takes over the context whose connection is its standard input, and tells what was written into its memory.
fn heir_part() {
    let bytes = PAGES as usize;
    // SAFETY: nothing is mapped at the agreed address of this small process.
    let base = unsafe {
        rustix::mm::mmap_anonymous(
            AGREED_ADDRESS as *mut _,
            bytes,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::FIXED_NOREPLACE,
        )
    }
    .expect("the agreed address is free");
    let connection: OwnedFd = rustix::io::dup(std::io::stdin().as_fd()).expect("a descriptor");
    let _program = Program::attach(Socket::from_fd(connection));
    say("attached");
    // SAFETY: inside the mapping made above.
    let last = || unsafe { base.cast::<u8>().add(bytes - 1).read_volatile() };
    wait_for("a byte", || (last() == 0x5a).then_some(()));
    say("written");
}

fn process_memory_follows_the_owner() {
    let (a, b) = (Server::start([127, 7, 32, 1]), Server::start([127, 7, 32, 2]));
    let (mut left, right) = pair(&a, &b);
    // This process, as an agent would, registers memory that only the heir will have.
    let key = right
        .program
        .register(AGREED_ADDRESS, PAGES, ALL_ACCESS, Backing::Process, &[], None);
    let mut from = left.program.adopted(PAGES, ALL_ACCESS);
    from.fill(|_| 0x5a);
    let connection = rustix::io::dup(right.program.socket.as_fd()).expect("a descriptor");
    let mut heir = Part::start(&["heir"], Stdio::from(connection));
    heir.expect_line("attached");
    let mut request = write(1, &from, 0);
    (request.remote_address, request.rkey) = (AGREED_ADDRESS, key);
    left.program
        .post(&mut left.qp, request, &[from.sge(0, PAGES as u32)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    heir.expect_line("written");
    // The owner is gone, though the connection is held here: its memory is out of reach, and nobody else's is touched.
    assert!(heir.child.wait().expect("it ends").success());
    left.program
        .post(&mut left.qp, request, &[from.sge(0, PAGES as u32)]);
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);
}

fn a_truncated_file_costs_its_own_context() {
    let (a, b) = (Server::start([127, 7, 33, 1]), Server::start([127, 7, 33, 2]));
    let (mut left, right) = pair(&a, &b);
    let (mut bystander, partner) = pair(&a, &b);
    let other_qp = right.program.qp(&right.queue, CAP);
    let from = left.program.adopted(PAGES, ALL_ACCESS);
    let to = right.program.adopted(PAGES, ALL_ACCESS);
    let unharmed = partner.program.adopted(PAGES, ALL_ACCESS);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, PAGES as u32)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    rustix::fs::ftruncate(to.file.as_ref().expect("adopted"), 4096).expect("the program may do this");
    left.program
        .post(&mut left.qp, write(2, &to, 0), &[from.sge(0, PAGES as u32)]);
    assert_ne!(left.queue.wait().status, SUCCESS);
    b.wait_for("the discovery", |counters| counters.truncated_files > 0);
    for qp in [&right.qp, &other_qp] {
        wait_for("the error state", || {
            (right.program.state(qp) == QpState::Err).then_some(())
        });
    }
    let again = Request::CreateQp {
        pd: right.program.pd,
        send_cq: right.queue.cq,
        recv_cq: right.queue.cq,
        qp_type: verbatim_device::control::QpType::Rc,
        cap: CAP,
        srq: None,
        qpn: None,
    };
    assert_eq!(right.program.errno(again), libc::EIO);
    bystander
        .program
        .post(&mut bystander.qp, write(3, &unharmed, 0), &[]);
    assert_eq!(bystander.queue.wait().status, SUCCESS);
}

fn listeners_are_added_by_root_only_and_end() {
    let server = Server::start([127, 7, 34, 1]);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(SOCKET_NAME);
    let listener = Listener::bind(&path).expect("a listener");
    let add = |over: &Path, fd: &dyn AsFd| {
        let socket = Socket::connect(over).expect("the RNIC listens");
        socket
            .call::<_, Reply>(
                &Request::AddListener {
                    instance: "web".to_owned(),
                },
                &[fd.as_fd()],
            )
            .expect("an answer")
            .message
    };
    let errno = |reply: Reply| match reply {
        Reply::Error { errno, .. } => errno,
        other => panic!("not refused: {other:?}"),
    };
    assert_eq!(errno(add(&server.socket(), &std::io::stdout())), libc::EINVAL);
    let privileged = rustix::process::getuid().is_root();
    if !privileged {
        assert_eq!(errno(add(&server.socket(), &listener)), libc::EPERM);
        println!("skipped: adding a listener takes root");
        return;
    }
    assert!(matches!(add(&server.socket(), &listener), Reply::Done));
    assert_eq!(
        errno(add(&path, &listener)),
        libc::EPERM,
        "not over a listener that was added"
    );
    let end = Program::connect(&path, "over the added listener");
    server.wait_for("the context", |counters| counters.contexts == 1);
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).expect("it listens");
    drop(listener);
    wait_for("the end of the listener", || {
        Socket::connect(&path).is_err().then_some(())
    });
    assert!(
        matches!(end.call(Request::AllocPd), Reply::Pd { .. }),
        "its connections stay"
    );
    // A listener that is over must not keep it awake: it sleeps after each request, and wakes for no other reason.
    const REQUESTS: u64 = 50;
    let slept = server.stats.read().sleeps;
    for _ in 0..REQUESTS {
        end.call(Request::AllocPd);
    }
    server.wait_for("the RNIC to sleep", |counters| counters.sleeps > slept);
    let times = server.stats.read().sleeps - slept;
    assert!(times <= 4 * REQUESTS, "{times} sleeps for {REQUESTS} requests");
    let _still = End::new(&server);
}

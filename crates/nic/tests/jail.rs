//! An RNIC in its jail: what it still does, and what it does not.
//!
//! Here the RNIC and the program are processes: this binary, started again with the name of a part.

mod support;

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::program::{ALL_ACCESS, CAP, write};
use support::{Program, wait_for};
use verbatim_device::control::SOCKET_NAME;
use verbatim_nic::{NicConfig, Port, STATS_NAME};
use verbatim_seqpacket::Socket;

const NIC_ADDRESS: [u8; 4] = [127, 7, 90, 1];
const SUCCESS: u32 = 0;
const PAGES: u64 = 4 * 4096;
/// `nobody` of most systems.
const STRANGER: u32 = 65_534;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["part", "nic", folder] => nic_part(folder),
        ["part", "program", socket, user] => program_part(Path::new(socket), user.parse().expect("a number")),
        _ => {
            let name = "an_rnic_in_its_jail_works_and_does_nothing_else";
            let wanted = arguments.iter().find(|argument| !argument.starts_with('-'));
            if wanted.is_none_or(|wanted| name.contains(wanted.as_str())) && !support::is_sanitized() {
                an_rnic_in_its_jail_works_and_does_nothing_else();
                println!("test {name} ... ok");
            }
        }
    }
}

fn start(arguments: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    let mut child = command
        .arg("part")
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the part starts");
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    (child, lines)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn an_rnic_in_its_jail_works_and_does_nothing_else() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("it is ours");
    let path = folder.path().to_str().expect("a plain path");
    let socket = folder.path().join(SOCKET_NAME);
    let (mut nic, lines) = start(&["nic", path]);
    drop(wait_for("the control socket", || Socket::connect(&socket).ok()));

    // Its own memory, and that of another user, which no file has.
    let mut users = vec![rustix::process::geteuid().as_raw()];
    if is_root() {
        users.push(STRANGER);
    }
    for user in users {
        let socket = socket.to_str().expect("a plain path");
        let (mut program, said) = start(&["program", socket, &user.to_string()]);
        let said: Vec<_> = said.map(|line| line.expect("a line")).collect();
        assert_eq!(said, ["written"], "by user {user}");
        assert!(program.wait().expect("it ends").success());
    }

    let status = std::fs::read_to_string(format!("/proc/{}/status", nic.id())).expect("it runs");
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.expect("the kernel tells it").trim().to_owned()
    };
    assert_eq!(
        (value("NoNewPrivs:"), value("Seccomp:")),
        ("1".to_owned(), "2".to_owned())
    );
    // CAP_DAC_OVERRIDE is number 1, CAP_SYS_PTRACE 19, CAP_SYS_RESOURCE 24.
    let own = std::fs::read_to_string("/proc/self/status").expect("this process");
    let own = own.lines().find_map(|line| line.strip_prefix("CapPrm:"));
    let own = u64::from_str_radix(own.expect("the kernel tells it").trim(), 16).expect("hexadecimal");
    let kept = format!("{:016x}", own & (1 << 1 | 1 << 19 | 1 << 24));
    assert_eq!((value("CapEff:"), value("CapPrm:")), (kept.clone(), kept));

    kill_process(Pid::from_child(&nic), Signal::TERM).expect("it runs");
    let said: Vec<_> = lines.map(|line| line.expect("a line")).collect();
    assert!(nic.wait().expect("it ends").success());
    let (last, attempts) = said.split_last().expect("it says something");
    assert_eq!(last, "ended");
    for attempt in attempts {
        assert!(attempt.ends_with("refused"), "{said:#?}");
    }
    assert_eq!(attempts.len(), 11, "{said:#?}");
    for left in [SOCKET_NAME, STATS_NAME] {
        assert!(!folder.path().join(left).exists(), "{left} is left there");
    }
}

fn nic_part(folder: &str) {
    // A directory that is open leads nowhere.
    let outside = std::fs::File::open("/").expect("it can be opened");
    let mut config = NicConfig::new(folder);
    config.port = Port::Address(NIC_ADDRESS.into());
    config.jailed = true;
    verbatim_nic::run(config).expect("the RNIC runs");
    let flags = rustix::fs::OFlags::RDONLY;
    let none = rustix::fs::Mode::empty();
    let mut attempts = vec![
        ("a program", Command::new("/bin/true").spawn().is_err()),
        ("a thread", std::thread::Builder::new().spawn(|| ()).is_err()),
        (
            "a path of an open directory",
            rustix::fs::openat(&outside, "etc", flags, none).is_err(),
        ),
        (
            "a TCP socket",
            std::net::TcpListener::bind("127.0.0.1:0").is_err(),
        ),
        (
            "a Unix socket",
            std::os::unix::net::UnixDatagram::unbound().is_err(),
        ),
        (
            "another's signal",
            kill_process(Pid::from_raw(1).expect("a number"), Signal::CONT).is_err(),
        ),
        ("another user", {
            // SAFETY: a plain number.
            unsafe { libc::syscall(libc::SYS_setuid, STRANGER) == -1 }
        }),
        ("memory with code", {
            let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::EXEC;
            let flags = rustix::mm::MapFlags::PRIVATE;
            // SAFETY: nothing is there.
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 4096, access, flags) }.is_err()
        }),
        ("a directory as its root", rustix::process::chroot("/").is_err()),
    ];
    // Without root it keeps its paths, and says so.
    let mut push_path = |what, paths: &[String]| {
        let is_refused = paths.iter().all(|path| std::fs::File::open(path).is_err());
        attempts.push((what, !is_root() || is_refused));
    };
    push_path(
        "a path of the host",
        &["/etc/passwd".to_owned(), "/tmp".to_owned()],
    );
    // Links of a procfs lead to any file system.
    let own = std::process::id();
    let links = [
        "/1/root/etc/passwd".to_owned(),
        "/1/task/1/root/etc/passwd".to_owned(),
        "/1/cwd".to_owned(),
        format!("/{own}/root/{own}/stat"),
        format!("/{own}/exe"),
        format!("/{own}/fd/{}/etc/passwd", outside.as_raw_fd()),
    ];
    push_path("a path behind a link", &links);
    for (what, is_refused) in attempts {
        println!("{what} is {}", if is_refused { "refused" } else { "there" });
    }
    println!("ended");
    std::io::stdout().flush().expect("the starter listens");
}

/// Writes from its memory into its memory, by the RNIC; neither lies in a file.
fn program_part(socket: &Path, user: u32) {
    // SAFETY: plain numbers; this process has one thread.
    unsafe {
        assert!(user == libc::geteuid() || libc::setresuid(user, user, user) == 0);
        // As of a process that was started by that user.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
    let program = Program::connect(socket, "of a user");
    let mut queue = program.cq(16);
    let (mut a, b) = (program.qp(&queue, CAP), program.qp(&queue, CAP));
    program.connect_qp(&a, NIC_ADDRESS, b.qpn);
    program.connect_qp(&b, NIC_ADDRESS, a.qpn);
    let (mut from, to) = (
        program.private(PAGES, ALL_ACCESS),
        program.private(PAGES, ALL_ACCESS),
    );
    from.fill(|_| 0x5a);
    program.post(&mut a, write(1, &to, 0), &[from.sge(0, PAGES as u32)]);
    assert_eq!(queue.wait().status, SUCCESS);
    assert!(to.as_slice().iter().all(|byte| *byte == 0x5a));
    println!("written");
}

//! Sockets, timers and the like after a move, and what `check` says of those that cannot move.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, PYTHON, Running, TestLab, bundle_of, eventually};

use crate::Test;
use crate::robustness::blockers;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const PORT: &str = "7000";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("sockets::not_accepted_are_reset", HOSTS, not_accepted_are_reset),
        Test::new("sockets::no_reset_rolls_back", HOSTS, no_reset_rolls_back),
        Test::new("sockets::a_server_that_accepts", HOSTS, a_server_that_accepts),
        Test::new("sockets::options_and_timers", &["src", "dst"], options_and_timers),
        Test::new("sockets::over_loopback", &["src", "dst"], over_loopback),
        Test::new("sockets::check_names_them", &["src", "dst"], check_names_them),
        Test::new("sockets::what_leads_outside", &["src", "dst"], what_leads_outside),
        Test::new(
            "sockets::what_is_taken_moves",
            &["src", "dst"],
            what_is_taken_moves,
        ),
    ]
}

fn python<'l>(
    lab: &'l TestLab,
    name: &str,
    program: &str,
    arguments: &[&str],
) -> anyhow::Result<Instance<'l>> {
    let argv = [&[PYTHON, "-u", "-c", program], arguments].concat();
    let instance = lab.instance("src", name, &argv)?;
    says(&instance, "ready")?;
    Ok(instance)
}

fn says(instance: &Instance<'_>, word: &str) -> anyhow::Result<()> {
    eventually(&format!("{word:?} of {}", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(!output.contains("Traceback"), "{output}");
        Ok(output.lines().any(|line| line == word).then_some(()))
    })
}

/// Accepts when it is interrupted, and not before.
const LATE: &str = r#"
import socket, sys, threading, time
listener = socket.create_server(('', int(sys.argv[1])), backlog=16)
print('ready')
try:
    while True: time.sleep(1000)
except KeyboardInterrupt: pass
print('accepting')
def answer(client): client.sendall(b'answer to ' + client.recv(100))
while True: threading.Thread(target=answer, args=(listener.accept()[0],)).start()
"#;

/// Three connections: two say something, and all wait for an answer.
const CLIENTS: &str = r#"
import socket, sys
clients = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(3)]
for client in clients[:2]: client.sendall(b'question')
print('connected', flush=True)
for client in clients:
    client.settimeout(40)
    try: print('got', client.recv(100), flush=True)
    except Exception as error: print('error', type(error).__name__, flush=True)
    client.close()
"#;

fn clients(lab: &TestLab, host: &str, server: &Instance<'_>) -> anyhow::Result<Running> {
    let clients = lab.start_plain(host, &[PYTHON, "-c", CLIENTS, &server.address()?, PORT])?;
    eventually("clients that are connected", LIMIT, || {
        Ok(clients.stdout()?.contains("connected").then_some(()))
    })?;
    Ok(clients)
}

/// Nobody hangs: those whose connection was not accepted are told, and the next ones are served.
fn not_accepted_are_reset(lab: &TestLab) -> anyhow::Result<()> {
    let server = python(lab, "server", LATE, &[PORT])?;
    let waiting = clients(lab, "peer", &server)?;
    let said = lab.verbatim(&["check", "server", "--to", "dst"])?.wait(LIMIT)?;
    ensure!(
        said.code == 0 && said.output().contains("3 TCP connections are not accepted yet"),
        "{}",
        said.output()
    );
    let moved = server.migrate("dst")?;
    moved.must_be_committed()?;
    ensure!(moved.reset_connections == 3, "{}", moved.reset_connections);
    let told = waiting.succeed(LIMIT)?.stdout;
    let resets = told.matches("error ConnectionResetError").count();
    ensure!(resets == 3, "{told}");
    server.interrupt()?;
    says(&server, "accepting")?;
    let served = clients_of_a_server(lab, &server)?;
    ensure!(served.matches("answer to").count() == 2, "{served}");
    Ok(())
}

/// What two clients of a server that accepts are told.
fn clients_of_a_server(lab: &TestLab, server: &Instance<'_>) -> anyhow::Result<String> {
    let program = CLIENTS
        .replace("clients[:2]", "clients")
        .replace("range(3)", "range(2)");
    let asked = lab.start_plain("peer", &[PYTHON, "-c", &program, &server.address()?, PORT])?;
    Ok(asked.succeed(LIMIT)?.stdout)
}

/// Where no connection may be reset, none is: the instance stays, and they are accepted and answered there.
fn no_reset_rolls_back(lab: &TestLab) -> anyhow::Result<()> {
    let server = python(lab, "server", LATE, &[PORT])?;
    let waiting = clients(lab, "peer", &server)?;
    let stays = server.migrate_with("dst", &["--no-reset"])?;
    stays.must_be_rolled_back(&["3 TCP connections", "would be reset"])?;
    ensure!(stays.reset_connections == 0, "{}", stays.reset_connections);
    server.interrupt()?;
    // New ones reach it again.
    let served = clients_of_a_server(lab, &server)?;
    ensure!(served.matches("answer to").count() == 2, "{served}");
    // So are those that waited; the one that has said nothing waits on.
    eventually("answers", LIMIT, || {
        let told = waiting.stdout()?;
        ensure!(!told.contains("ConnectionResetError"), "{told}");
        Ok((told.matches("answer to").count() == 2).then_some(()))
    })?;
    Ok(())
}

/// A thread for each connection, which it has for some requests, or for one.
const SERVER: &str = r#"
import socketserver, sys
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile: self.wfile.write(line)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 64
server = Server(('', int(sys.argv[1])), Handler)
print('ready')
server.serve_forever()
"#;

/// Until it is interrupted: threads that ask again and again, by a new connection every third time.
const LOAD: &str = r#"
import signal, socket, sys, threading, time
address = (sys.argv[1], int(sys.argv[2]))
end, served, errors = threading.Event(), [0] * 12, []
def load(me):
    connection = None
    while not end.is_set():
        try:
            if connection is None: connection = socket.create_connection(address, timeout=30)
            connection.settimeout(30)
            text = b'%d of %d\n' % (served[me], me)
            connection.sendall(text)
            heard = b''
            while not heard.endswith(b'\n'):
                part = connection.recv(100)
                if not part: raise EOFError()
                heard += part
            assert heard == text, (heard, text)
            served[me] += 1
            if served[me] % 3 == 0: connection = connection.close()
        except Exception as error:
            errors.append(repr(error))
            connection = None
        time.sleep(0.002)
signal.signal(signal.SIGINT, lambda *_: end.set())
threads = [threading.Thread(target=load, args=(me,)) for me in range(len(served))]
for thread in threads: thread.start()
print('loading', flush=True)
end.wait()
for thread in threads: thread.join()
print('served', min(served), 'errors', errors, flush=True)
"#;

/// No client of a server that accepts sees an error.
fn a_server_that_accepts(lab: &TestLab) -> anyhow::Result<()> {
    let server = python(lab, "server", SERVER, &[PORT])?;
    let load = lab.start_plain("peer", &[PYTHON, "-c", LOAD, &server.address()?, PORT])?;
    eventually("load", LIMIT, || {
        Ok(load.stdout()?.contains("loading").then_some(()))
    })?;
    for to in ["dst", "src", "dst", "src"] {
        let moved = server.migrate(to)?;
        moved.must_be_committed()?;
        ensure!(
            moved.reset_connections == 0,
            "{} were reset",
            moved.reset_connections
        );
    }
    load.signal(rustix::process::Signal::INT)?;
    let told = load.wait(LIMIT)?;
    ensure!(told.stdout.contains("errors []"), "{}", told.output());
    Ok(())
}

/// What CRIU does not keep: options of sockets, timers and counters, processors and timer slack of threads. When it is interrupted it says
/// what has changed.
const KEPT: &str = r#"
import ctypes, os, select, socket, struct, threading, time
library = ctypes.CDLL(None, use_errno=True)
listener = socket.create_server(('127.0.0.1', 0))
connection = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
for tcp in (listener, connection):
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 12345)
    tcp.setsockopt(socket.IPPROTO_TCP, 25, 4096)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b'reno')
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('', 5000))
udp.setsockopt(socket.IPPROTO_IP, 10, 2)
udp.setsockopt(socket.SOL_SOCKET, 29, 1)
udp.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 7)
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 33)
six.setsockopt(socket.SOL_SOCKET, 35, 1)
own = os.sched_getaffinity(0)
asked, slacks = threading.Event(), [library.prctl(30, 0, 0, 0, 0)]
def other():
    asked.wait()
    slacks.append(library.prctl(30, 0, 0, 0, 0))
thread = threading.Thread(target=other)
thread.start()
os.sched_setaffinity(0, {min(own)})
library.prctl(29, 123456, 0, 0, 0)

class Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ('interval_s', 'interval_ns', 'value_s', 'value_ns')]
def timer(clock, flags, value, interval=0):
    fd = library.timerfd_create(clock, os.O_NONBLOCK)
    times = Times(interval // 10**9, interval % 10**9, value // 10**9, value % 10**9)
    assert library.timerfd_settime(fd, flags, ctypes.byref(times), None) == 0
    return fd
def left(fd):
    times = Times()
    library.timerfd_gettime(fd, ctypes.byref(times))
    return times.value_s * 10**9 + times.value_ns
periodic = timer(1, 0, 50_000_000, 50_000_000)
at = {clock: time.clock_gettime_ns(clock) + 1000 * 10**9 + 987_654_321 for clock in (0, 1, 7)}
absolute = {clock: timer(clock, 1, at[clock]) for clock in at}
relative = timer(1, 0, 500 * 10**9 + 123_456_789)
relative_at = time.clock_gettime_ns(1) + left(relative)
expired = timer(1, 0, 1)
count = library.eventfd(0, os.O_NONBLOCK)
os.write(count, struct.pack('Q', 0xfffffffffffffff0))

def options():
    tcp = {}
    for name, socket_ in (('listener', listener), ('connection', connection)):
        for option in (18, 25, 7): tcp[name, option] = socket_.getsockopt(6, option)
        tcp[name, 'congestion'] = socket_.getsockopt(6, 13, 16).rstrip(b'\0')
    tcp['mtu'], tcp['stamp'], tcp['multicast'] = udp.getsockopt(0, 10), udp.getsockopt(1, 29), udp.getsockopt(0, 33)
    tcp['hops'], tcp['stamp ns'] = six.getsockopt(41, socket.IPV6_UNICAST_HOPS), six.getsockopt(1, 35)
    tcp['processors'], tcp['slack'] = os.sched_getaffinity(0), library.prctl(30, 0, 0, 0, 0)
    return tcp
before = options()
print('ready')
try:
    while True: time.sleep(1000)
except KeyboardInterrupt: pass
after = options()
wrong = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
asked.set()
thread.join()
if slacks[0] != slacks[1]: wrong['slack of another thread'] = slacks
ticks, = struct.unpack('Q', os.read(periodic, 8))
if ticks < 2: wrong['ticks'] = ticks
for _ in range(3):
    if not select.select([periodic], [], [], 5)[0]: wrong['periodic'] = 'ended'; break
    os.read(periodic, 8)
for clock in at:
    off = time.clock_gettime_ns(clock) + left(absolute[clock]) - at[clock]
    if abs(off) > 10_000_000: wrong['absolute', clock] = off
off = time.clock_gettime_ns(1) + left(relative) - relative_at
if abs(off) > 10_000_000: wrong['relative'] = off
if os.read(expired, 8) != struct.pack('Q', 1): wrong['expired'] = True
value, = struct.unpack('Q', os.read(count, 8))
if value != 0xfffffffffffffff0: wrong['count'] = hex(value)
print('wrong' if wrong else 'as it was', wrong or '')
time.sleep(1000)
"#;

/// After three moves each is as it was.
fn options_and_timers(lab: &TestLab) -> anyhow::Result<()> {
    let program = python(lab, "kept", KEPT, &[])?;
    for to in ["dst", "src", "dst"] {
        program.migrate(to)?.must_be_committed()?;
    }
    program.interrupt()?;
    eventually("what has changed", LIMIT, || {
        let output = program.output()?;
        ensure!(
            !output.contains("Traceback") && !output.contains("wrong"),
            "{output}"
        );
        Ok(output.contains("as it was").then_some(()))
    })
}

/// Data that was not sent, on connections within the instance, with windows that are open.
const LOOPBACK: &str = r#"
import hashlib, socket, sys, time
def pattern(length): return (hashlib.sha256(b'x').digest() * (length // 32 + 1))[:length]
ends = []
for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1'), (socket.AF_INET, sys.argv[1])):
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    for size in (1000, 131072, 400000):
        near = socket.socket(family)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        near.setblocking(False)
        far.setblocking(False)
        sent = []
        for end in (near, far):
            data, done = pattern(size), 0
            try:
                while done < size: done += end.send(data[done:])
            except BlockingIOError: pass
            sent.append(done)
        ends.append((near, far, sent))
print('ready')
try:
    while True: time.sleep(1000)
except KeyboardInterrupt: pass
for near, far, sent in ends:
    for end, length in ((far, sent[0]), (near, sent[1])):
        end.settimeout(30)
        heard = b''
        while len(heard) < length:
            part = end.recv(1 << 16)
            assert part, 'it ended'
            heard += part
        assert heard == pattern(length), 'other bytes'
    near.setblocking(True)
    near.sendall(b'q')
    assert far.recv(1) == b'q'
print('all heard')
time.sleep(1000)
"#;

fn over_loopback(lab: &TestLab) -> anyhow::Result<()> {
    let options = ["--name", "local", "--address", "10.77.1.91/16", "--"];
    let argv = [PYTHON, "-u", "-c", LOOPBACK, "10.77.1.91"];
    let local = Instance::run(lab, "src", &options, &argv)?;
    says(&local, "ready")?;
    for to in ["dst", "src"] {
        local.migrate(to)?.must_be_committed()?;
    }
    local.interrupt()?;
    says(&local, "all heard")?;
    // Nothing of ours stays in its namespace.
    let pid = local.row()?.pid.context("it has ended")?;
    let network = format!("--net=/proc/{pid}/ns/net");
    let rules = lab
        .start_plain("src", &["nsenter", &network, "nft", "list", "ruleset"])?
        .succeed(LIMIT)?;
    ensure!(!rules.stdout.contains("verbatim_"), "{}", rules.stdout);
    Ok(())
}

/// Of each kind that CRIU refuses one object, where this kernel has it: a line for each, of what `check` has to say.
const REFUSED: &str = r#"
import ctypes, os, socket, sys, time
library = ctypes.CDLL(None, use_errno=True)
kept = []
def expect(number, word): print('expect', number, word)
def made(family, kind, protocol, word):
    try: kept.append(socket.socket(family, kind, protocol))
    except OSError as error: print('lacks', word, error); return None
    expect(kept[-1].fileno(), word)
    return kept[-1]
if os.fork() == 0:
    # A session, whose leader ends.
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
expect(0, 'whose leader has ended')
if os.fork() == 0:
    # The first thread ends, and another goes on.
    import threading
    threading.Thread(target=time.sleep, args=(1000,)).start()
    library.syscall(60, 0)
expect(0, 'its first one has ended')
made(socket.AF_INET, socket.SOCK_STREAM, 262, 'MPTCP')
made(socket.AF_INET, socket.SOCK_STREAM, 132, 'SCTP')
made(40, socket.SOCK_STREAM, 0, 'VSOCK')
made(38, socket.SOCK_SEQPACKET, 0, 'ALG')
corked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
corked.connect(('127.0.0.1', 9))
corked.setsockopt(socket.IPPROTO_UDP, 1, 1)
corked.send(b'half')
expect(corked.fileno(), 'UDP_CORK')
semaphore = library.eventfd(5, 1)
if 'eventfd-semaphore' in open('/proc/self/fdinfo/%d' % semaphore).read(): expect(semaphore, 'EFD_SEMAPHORE')
listener = socket.socket(socket.AF_UNIX)
listener.bind('/tmp/listener')
listener.listen(4)
client = socket.socket(socket.AF_UNIX)
client.connect('/tmp/listener')
client.send(b'before it is accepted')
expect(listener.fileno(), '/tmp/listener')
print('ready')
time.sleep(1000)
"#;

fn check_names_them(lab: &TestLab) -> anyhow::Result<()> {
    let refused = python(lab, "refused", REFUSED, &[])?;
    let output = refused.output()?;
    let found = blockers(lab, "refused", "dst")?;
    let mut count = 0;
    for line in output.lines().filter_map(|line| line.strip_prefix("expect ")) {
        let (number, word) = line.split_once(' ').context("a line without a word")?;
        let descriptor = format!("descriptor {number} ");
        let names = |blocker: &&String| {
            blocker.contains(word)
                && (number == "0" || blocker.contains(&descriptor))
                && blocker.contains("python3")
        };
        ensure!(
            found.iter().filter(names).count() == 1,
            "{word}: {found:#?}\n{output}"
        );
        count += 1;
    }
    ensure!(count >= 5 && found.len() == count, "{found:#?}\n{output}");
    // A migration refuses all of it before anything stands still.
    let stays = refused.migrate("dst")?;
    let words: Vec<_> = found.iter().map(String::as_str).collect();
    stays.must_be_rolled_back(&words)?;
    ensure!(stays.service_blackout_ms == 0.0, "{}", stays.service_blackout_ms);
    Ok(())
}

/// Listens in a folder of the host's.
const SERVICE: &str = r#"
import socket, sys, time
stream = socket.socket(socket.AF_UNIX)
stream.bind(sys.argv[1] + '/stream')
stream.listen()
datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
datagrams.bind(sys.argv[1] + '/datagrams')
print('listening', flush=True)
connections = [stream.accept()]
time.sleep(1000)
"#;

/// Children in namespaces of their own, and sockets that lead to that service.
const OUTSIDE: &str = r#"
import ctypes, os, socket, time
library = ctypes.CDLL(None, use_errno=True)
for flag, word in ((0x04000000, 'UTS'), (0x08000000, 'IPC'), (0x40000000, 'network'), (0x02000000, 'cgroup'), (0x20000000, 'PID')):
    tell = os.pipe()
    if os.fork() == 0:
        os.write(tell[1], b'1' if library.unshare(flag) == 0 else b'0')
        os.close(tell[0]); os.close(tell[1])
        if flag == 0x20000000: os.fork()
        time.sleep(1000)
    print('expect' if os.read(tell[0], 1) == b'1' else 'lacks', word)
    os.close(tell[0]); os.close(tell[1])
stream = socket.socket(socket.AF_UNIX)
stream.connect('/outside/stream')
print('expect descriptor %d is connected' % stream.fileno())
datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
datagrams.connect('/outside/datagrams')
print('expect descriptor %d is connected' % datagrams.fileno())
print('ready')
time.sleep(1000)
"#;

/// `check` names the other end of a socket that leads out of the container, and namespaces within it.
fn what_leads_outside(lab: &TestLab) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let outside = folder.path().join("outside");
    let image = folder.path().join("image");
    for made in [&outside, &image] {
        std::fs::create_dir(made)?;
    }
    let outside = outside.display().to_string();
    let service = lab.start_plain("src", &[PYTHON, "-c", SERVICE, &outside])?;
    eventually("a service", LIMIT, || {
        Ok(service.stdout()?.contains("listening").then_some(()))
    })?;
    bundle_of(&image, &["sleep", "1000"], &lab.tools().library)?;
    let config = image.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    spec["process"]["args"] = serde_json::json!([PYTHON, "-u", "-c", OUTSIDE]);
    for set in ["bounding", "effective", "permitted"] {
        let capabilities = spec["process"]["capabilities"][set].as_array_mut();
        capabilities
            .context("no capabilities")?
            .push("CAP_SYS_ADMIN".into());
    }
    let mounts = spec["mounts"].as_array_mut().context("no mounts")?;
    for (from, to) in [("/usr", "/usr"), (outside.as_str(), "/outside")] {
        std::fs::create_dir_all(image.join("rootfs").join(&to[1..]))?;
        mounts.push(serde_json::json!(
            {"destination": to, "type": "bind", "source": from, "options": ["bind"]}
        ));
    }
    std::fs::write(&config, serde_json::to_vec_pretty(&spec)?)?;
    let outsider = lab.bundle("src", "outsider", &image)?;
    says(&outsider, "ready")?;
    let output = outsider.output()?;
    let found = blockers(lab, "outsider", "dst")?;
    let mut count = 0;
    for word in output.lines().filter_map(|line| line.strip_prefix("expect ")) {
        ensure!(
            found.iter().any(|blocker| blocker.contains(word)),
            "{word}: {found:#?}\n{output}"
        );
        count += 1;
    }
    ensure!(count >= 3, "{output}");
    let service = |blocker: &&String| blocker.contains("(python3) of the host");
    ensure!(found.iter().filter(service).count() == 2, "{found:#?}");
    Ok(())
}

/// Of kinds that look odd and are taken.
const TAKEN: &str = r#"
import os, select, socket, time
kept = [socket.socket(*what) for what in (
    (socket.AF_INET, socket.SOCK_STREAM, 0), (socket.AF_INET6, socket.SOCK_STREAM, 0),
    (socket.AF_INET, socket.SOCK_DGRAM, 0), (socket.AF_INET6, socket.SOCK_DGRAM, 0),
    (socket.AF_UNIX, socket.SOCK_STREAM, 0), (socket.AF_UNIX, socket.SOCK_DGRAM, 0),
    (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0), (socket.AF_NETLINK, socket.SOCK_RAW, 0))]
for what in ((socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP), (socket.AF_PACKET, socket.SOCK_RAW, 0),
             (socket.AF_INET, socket.SOCK_DGRAM, 136)):
    try: kept.append(socket.socket(*what))
    except OSError as error: print('lacks', what, error)
one, other = socket.socketpair()
one.send(b'queued')
kept += [select.epoll(), os.pidfd_open(os.getpid())]
print('ready')
time.sleep(1000)
"#;

fn what_is_taken_moves(lab: &TestLab) -> anyhow::Result<()> {
    let taken = python(lab, "taken", TAKEN, &[])?;
    let found = blockers(lab, "taken", "dst")?;
    ensure!(found.is_empty(), "{found:#?}");
    for to in ["dst", "src"] {
        taken.migrate(to)?.must_be_committed()?;
    }
    Ok(())
}

//! Two tenants of one RNIC: one takes everything that it can, with many processes and contexts, and the other still gets its
//! own; so does an instance that arrives.

mod support;

use std::os::fd::AsFd;

use support::program::{ALL_ACCESS, CAP};
use support::{Program, Server};
use verbatim_device::control::{Backing, QpType, Reply, Request, Segment, VERSION};
use verbatim_seqpacket::{Listener, Socket};

/// The sockets of instances.
struct Instances {
    agent: Socket,
    folder: tempfile::TempDir,
}

impl Instances {
    fn of(server: &Server) -> Self {
        Self {
            agent: Socket::connect(&server.socket()).expect("the RNIC listens"),
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    fn add(&self, instance: &str) -> std::path::PathBuf {
        let path = self.folder.path().join(instance);
        let listener = Listener::bind(&path).expect("a listener");
        let instance = instance.to_owned();
        let request = Request::AddListener { instance };
        let reply = self.agent.call::<_, Reply>(&request, &[listener.as_fd()]);
        assert!(matches!(reply.expect("an answer").message, Reply::Done));
        path
    }
}

fn refused<T>(answer: Result<T, (i32, String)>, what: &str) {
    let Err((errno, message)) = answer else {
        panic!("it was not refused: {what}")
    };
    assert!(errno == libc::ENOMEM && message.contains(what), "{message}");
}

fn qp(program: &Program, cq: u32) -> Request {
    Request::CreateQp {
        pd: program.pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: QpType::Rc,
        cap: CAP,
        srq: None,
        qpn: None,
    }
}

/// Registers a sparse file of so many bytes, which costs its owner nothing.
fn register(program: &Program, bytes: u64) -> Result<Reply, (i32, String)> {
    let file = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, bytes).expect("its length can be set");
    let backing = Backing::File {
        fd_index: 0,
        offset: 0,
    };
    let segments = vec![Segment {
        address: 0,
        length: bytes,
        backing,
    }];
    let request = Request::RegMr {
        pd: program.pd,
        address: 0,
        length: bytes,
        iova: 0,
        access: ALL_ACCESS,
        segments,
        key: None,
    };
    program.ask(&request, &[file.as_fd()])
}

/// As the case was found: four contexts of one program hold all bytes that the RNIC maps.
#[test]
fn memory_of_many_contexts_is_that_of_one_tenant() {
    const TIB: u64 = 1 << 40;
    let server = Server::start([127, 7, 71, 1]);
    let instances = Instances::of(&server);
    let (greedy, modest) = (instances.add("greedy"), instances.add("modest"));
    let programs: Vec<_> = (0..4).map(|_| Program::connect(&greedy, "greedy")).collect();
    let held: Vec<_> = programs
        .iter()
        .map(|program| register(program, 16 * TIB))
        .collect();
    let got = held.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(got, 2, "half of 64 TiB: {held:?}");
    refused(register(&programs[3], 4096), "instance greedy has 2 mapped files");
    for socket in [&modest, &server.socket()] {
        let program = Program::connect(socket, "modest");
        register(&program, 16 * TIB).expect("the other tenant has its own");
    }
    server.wait_for("the count", |counters| counters.tenant_refusals == 3);
    // What goes is given back.
    drop(programs);
    support::wait_for("the memory", || {
        register(&Program::connect(&greedy, "greedy"), 16 * TIB).ok()
    });
}

#[test]
fn queue_pairs_of_many_contexts_are_those_of_one_tenant() {
    let server = Server::start_with([127, 7, 71, 2], |config| {
        config.limits.max_qp = 100;
        config.limits.per_program.max_qp = 20;
    });
    let instances = Instances::of(&server);
    let (greedy, modest) = (instances.add("greedy"), instances.add("modest"));
    let take_all = |socket, name| {
        let mut taken = Vec::new();
        let mut why = String::new();
        for _ in 0..6 {
            let program = Program::connect(socket, name);
            let queue = program.cq(16);
            let mut count = 0;
            loop {
                match program.ask(&qp(&program, queue.cq), &[]) {
                    Ok(_) => count += 1,
                    Err((errno, message)) => {
                        assert_eq!(errno, libc::ENOMEM);
                        why = message;
                        break;
                    }
                }
            }
            taken.push((program, count));
        }
        (taken, why)
    };
    let sum = |taken: &[(Program, u32)]| taken.iter().map(|(_, count)| count).sum::<u32>();
    let (held, why) = take_all(&greedy, "greedy");
    assert_eq!(sum(&held), 50);
    assert!(why.contains("instance greedy has 50 queue pairs"), "{why}");
    let (others, why) = take_all(&modest, "modest");
    assert_eq!(sum(&others), 38, "what is left, less the reserve");
    assert!(why.contains("none is left for instance modest"), "{why}");
    // Root of the host makes what an instance finds that arrives, out of the reserve.
    let (arriving, _) = take_all(&server.socket(), "arriving");
    assert_eq!(sum(&arriving), 12);
    drop((held, others, arriving));
    server.wait_for("the end of all", |counters| counters.qps == 0);
    let program = Program::connect(&greedy, "greedy");
    let queue = program.cq(16);
    program.call(qp(&program, queue.cq));
}

/// What root of the host has opened for an instance counts for that instance.
#[test]
fn standby_contexts_are_the_instances_own() {
    let server = Server::start_with([127, 7, 71, 3], |config| {
        config.limits.max_cq = 20;
        config.limits.tenants.reserve_percent = 0;
    });
    let instances = Instances::of(&server);
    let web = instances.add("web");
    let standby = Program::connect(&server.socket(), "web");
    let _queues: Vec<_> = (0..6).map(|_| standby.cq(16)).collect();
    let program = Program::connect(&web, "any name");
    let _more: Vec<_> = (0..4).map(|_| program.cq(16)).collect();
    let create = || Request::CreateCq {
        entries: 16,
        channel: None,
        event: None,
    };
    let what = "instance web has 10 completion queues";
    refused(program.ask(&create(), &[]), what);
    refused(standby.ask(&create(), &[]), what);
    // Its name is the program's own word elsewhere, and charges nobody else.
    let other = Program::connect(&instances.add("other"), "web");
    other.call(create());
}

#[test]
fn connections_of_one_tenant_leave_room_for_others() {
    let server = Server::start_with([127, 7, 71, 4], |config| {
        config.limits.max_contexts = 16;
        config.limits.per_program.max_contexts = 16;
    });
    let instances = Instances::of(&server);
    let (greedy, modest) = (instances.add("greedy"), instances.add("modest"));
    let open = || Request::OpenContext {
        version: VERSION,
        name: "many".into(),
    };
    let connect = || {
        let socket = Socket::connect(&greedy).expect("the instance's socket is there");
        let answer = socket.call::<_, Reply>(&open(), &[]);
        (socket, answer)
    };
    let all: Vec<_> = (0..12).map(|_| connect()).collect();
    let is_open = |answer: &Result<_, _>| {
        let answer: &Result<verbatim_seqpacket::Received<Reply>, verbatim_seqpacket::Error> = answer;
        matches!(answer, Ok(received) if matches!(received.message, Reply::Context { .. }))
    };
    let opened = all.iter().filter(|(_, answer)| is_open(answer)).count();
    assert_eq!(opened, 8, "half of sixteen");
    Program::connect(&modest, "modest");
    Program::connect(&server.socket(), "of the host");
    server.wait_for("the count", |counters| counters.tenant_refusals == 4);
}

//! What a program can have, told by the device and enforced.

mod support;

use std::os::fd::{AsFd, BorrowedFd};

use support::objects::av;
use support::program::{ALL_ACCESS, CAP};
use support::{Program, Server, Srq};
use verbatim_device::control::{Access, Backing, MwType, QpCap, Reply, Request, Segment, SrqAttr, VERSION};
use verbatim_seqpacket::Socket;

fn server(last: u8) -> Server {
    Server::start_with([127, 7, 70, last], |config| {
        let one = &mut config.limits.per_program;
        one.max_pd = 3;
        one.max_qp = 3;
        one.max_cq = 3;
        one.max_cqes = 100;
        one.max_mr = 3;
        one.max_mw = 3;
        one.max_srq = 3;
        one.max_ah = 3;
        one.max_contexts = 2;
        one.max_mr_pieces = 10;
        one.max_mappings = 4;
        one.max_mcast_attach = 3;
        config.limits.max_qp = 5;
    })
}

#[test]
fn a_program_has_what_the_device_tells_and_no_more() {
    let server = server(1);
    let program = Program::connect(&server.socket(), "one");
    let device = &program.device;
    assert_eq!(
        [
            device.max_pd,
            device.max_qp,
            device.max_cq,
            device.max_mr,
            device.max_mw,
            device.max_srq,
            device.max_ah
        ],
        [3; 7]
    );
    assert_eq!(device.max_cqe, 100);
    assert!(
        device.max_srq_wr > 0 && device.max_srq_sge > 0 && device.max_mcast_grp > 0 && device.max_dm_size > 0
    );
    let pd = program.pd;
    let full = |request: Request| assert_eq!(program.errno(request), libc::ENOMEM);

    program.call(Request::AllocPd);
    program.call(Request::AllocPd);
    full(Request::AllocPd);
    let queue = program.cq(32);
    program.cq(32);
    full(Request::CreateCq {
        entries: 64,
        channel: None,
        event: None,
    });
    full(Request::ResizeCq {
        cq: queue.cq,
        entries: 100,
    });
    program.cq(32);
    full(Request::CreateCq {
        entries: 1,
        channel: None,
        event: None,
    });
    assert_eq!(
        program.errno(Request::CreateCq {
            entries: 101,
            channel: None,
            event: None,
        }),
        libc::EINVAL
    );

    let _memory: Vec<_> = (0..3).map(|_| program.adopted(4096, ALL_ACCESS)).collect();
    let attr = SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };
    for _ in 0..3 {
        program.qp(&queue, CAP);
        program.call(Request::AllocMw {
            pd,
            mw_type: MwType::One,
            rkey: None,
        });
        program.call(Request::CreateAh {
            pd,
            av: av(server.address),
        });
        Srq::new(&program, attr);
    }
    full(Request::AllocMw {
        pd,
        mw_type: MwType::Two,
        rkey: None,
    });
    full(Request::CreateAh {
        pd,
        av: av(server.address),
    });
    full(Request::CreateSrq { pd, attr });
    full(qp_request(&program, queue.cq, CAP));
    // Another program has its own share, of what is left.
    let other = Program::connect(&server.socket(), "two");
    let queue = other.cq(1);
    other.qp(&queue, CAP);
    let last = other.qp(&queue, CAP);
    assert_eq!(
        other.errno(qp_request(&other, queue.cq, CAP)),
        libc::ENOMEM,
        "five in all"
    );
    other.call(Request::DestroyQp { qpn: last.qpn });
    other.qp(&queue, CAP);
    let too_long = QpCap {
        max_send_wr: 1 << 20,
        ..CAP
    };
    assert_eq!(other.errno(qp_request(&other, queue.cq, too_long)), libc::EINVAL);

    // And a process no more than two contexts.
    let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
    let open = Request::OpenContext {
        version: VERSION,
        name: "three".into(),
    };
    let ask = || match socket.call::<_, Reply>(&open, &[]).expect("an answer").message {
        Reply::Error { errno, message } => Err((errno, message)),
        _ => Ok(()),
    };
    let (errno, message) = ask().unwrap_err();
    assert!(
        errno == libc::ENOMEM && message.contains("2 contexts"),
        "{message}"
    );
    drop(other);
    support::wait_for("room for another", || ask().ok());
}

#[test]
fn connections_that_ask_for_nothing_keep_nobody_out() {
    let server = Server::start_with([127, 7, 70, 2], |config| {
        config.limits.max_contexts = 8;
        config.limits.per_program.max_contexts = 4;
    });
    // Each is answered, so that the RNIC has seen it.
    let request = Request::QueryStatistics { from_qpn: 0 };
    let connect = || {
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let reply = socket.call::<_, Reply>(&request, &[]).expect("an answer").message;
        (socket, reply)
    };
    let idle: Vec<_> = (0..4).map(|_| connect()).collect();
    assert!(
        idle.iter()
            .all(|(_, reply)| matches!(reply, Reply::Statistics { .. }))
    );
    let turned_away = Socket::connect(&server.socket()).expect("the RNIC listens");
    let reply = turned_away.recv::<Reply>().expect("an answer").message;
    let Reply::Error { errno, message } = reply else {
        panic!("{reply:?}")
    };
    assert!(
        errno == libc::ENOMEM && message.contains("4 connections without a context"),
        "{message}"
    );
    drop(idle);
    support::wait_for("room for another", || {
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let open = Request::OpenContext {
            version: VERSION,
            name: "late".into(),
        };
        let reply = socket.call::<_, Reply>(&open, &[]).ok()?.message;
        matches!(reply, Reply::Context { .. }).then_some(())
    });
}

#[test]
fn regions_of_many_pieces_are_paid_for() {
    const PAGE: u64 = 4096;
    let server = server(3);
    let program = Program::connect(&server.socket(), "pieces");
    let register = |pieces: u64, backing: &dyn Fn(u64) -> Backing, fds: &[BorrowedFd<'_>]| {
        let segments = (0..pieces).map(|piece| Segment {
            address: piece * PAGE,
            length: PAGE,
            backing: backing(piece),
        });
        let request = Request::RegMr {
            pd: program.pd,
            address: 0,
            length: pieces * PAGE,
            iova: 0,
            access: Access::LOCAL_WRITE,
            segments: segments.collect(),
            key: None,
        };
        program.ask(&request, fds)
    };
    let refused = |reply: Result<Reply, (i32, String)>, what: &str| {
        let (errno, message) = reply.unwrap_err();
        assert!(errno == libc::ENOMEM && message.contains(what), "{message}");
    };
    let process = |_| Backing::Process;
    let Ok(Reply::Mr { lkey, .. }) = register(6, &process, &[]) else {
        panic!("no region")
    };
    refused(register(5, &process, &[]), "regions have 6, and may have 10");
    assert!(register(4, &process, &[]).is_ok());
    program.call(Request::DeregMr { lkey });

    let file = rustix::fs::memfd_create("pieces", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, 32 * PAGE).expect("a memfd can grow");
    // Every other page, so that no two are one mapping.
    let apart = |piece| Backing::File {
        fd_index: 0,
        offset: 2 * piece * PAGE,
    };
    refused(register(5, &apart, &[file.as_fd()]), "4 mapped files");
    assert!(
        register(4, &apart, &[file.as_fd()]).is_ok(),
        "those that were refused are gone"
    );
}

fn qp_request(program: &Program, cq: u32, cap: QpCap) -> Request {
    Request::CreateQp {
        pd: program.pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: verbatim_device::control::QpType::Rc,
        cap,
        srq: None,
        qpn: None,
    }
}

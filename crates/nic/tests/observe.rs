//! Statistics and capture, as a person's tool asks for them.

mod support;

use support::program::{ALL_ACCESS, send, write};
use support::{End, Server, pair, wait_for};
use verbatim_device::control::{
    Captured, MAX_OWNERS, QpOwner, QpState, QpStatistics, QpType, Reply, Request,
};
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{Flow, Packet};
use verbatim_seqpacket::Socket;

fn statistics(server: &Server, from_qpn: u32) -> (Vec<(String, u64)>, Vec<QpStatistics>, Option<u32>) {
    let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
    let reply = socket.call::<_, Reply>(&Request::QueryStatistics { from_qpn }, &[]);
    match reply.expect("an answer").message {
        Reply::Statistics { device, qps, next } => (device, qps, next),
        reply => panic!("unexpected answer {reply:?}"),
    }
}

fn value(counters: &[(String, u64)], name: &str) -> u64 {
    let found = counters.iter().find(|(known, _)| known == name);
    found.unwrap_or_else(|| panic!("there is no counter {name}")).1
}

#[test]
fn counters_are_told_by_device_and_queue_pair() {
    let (a, b) = (Server::start([127, 7, 60, 1]), Server::start([127, 7, 60, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let from = left.program.adopted(1 << 16, ALL_ACCESS);
    let into = right.program.adopted(1 << 16, ALL_ACCESS);
    left.program
        .post(&mut left.qp, write(1, &into, 0), &[from.sge(0, 10_000)]);
    left.queue.wait();
    // One that has to wait for its RECV.
    left.program.post(&mut left.qp, send(2), &[from.sge(0, 100)]);
    b.wait_for("an RNR NAK", |counters| counters.tx_rnr > 0);
    right.program.post_recv(&mut right.qp, 1, &[into.sge(0, 100)]);
    left.queue.wait();

    let (device, qps, next) = statistics(&a, 0);
    assert_eq!((qps.len(), next), (1, None));
    let qp = &qps[0];
    assert_eq!(
        (qp.qpn, qp.context.as_str(), qp.pid, qp.qp_type, qp.state),
        (
            left.qp.qpn,
            "test",
            std::process::id() as i32,
            QpType::Rc,
            QpState::Rts
        )
    );
    assert_eq!(qp.remote, Some((support::program::gid(b.address), right.qp.qpn)));
    assert!(value(&qp.counters, "sent_bytes") >= 10_100);
    assert!(value(&qp.counters, "rcvd_rnr_err") >= 1);
    assert_eq!(
        value(&qp.counters, "rcvd_rnr_err"),
        value(&device, "rcvd_rnr_err")
    );
    assert!(value(&device, "sent_pkts") >= 4 && value(&device, "qps") == 1);
    let (device, ..) = statistics(&b, 0);
    assert!(value(&device, "send_rnr_err") >= 1 && value(&device, "rx_icrc_encapsulated") == 0);

    // What a queue pair has counted stays in the sum.
    left.program.call(Request::DestroyQp { qpn: left.qp.qpn });
    let (device, qps, _) = statistics(&a, 0);
    assert!(qps.is_empty() && value(&device, "rcvd_rnr_err") >= 1);
}

#[test]
fn many_queue_pairs_come_in_pages() {
    let a = Server::start([127, 7, 61, 1]);
    let end = End::new(&a);
    let cap = verbatim_device::control::QpCap {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let mut made: Vec<_> = (0..200).map(|_| end.program.qp(&end.queue, cap).qpn).collect();
    made.push(end.qp.qpn);
    made.sort_unstable();
    let (mut seen, mut pages, mut next) = (Vec::new(), 0, Some(0));
    while let Some(from) = next {
        let (_, qps, more) = statistics(&a, from);
        seen.extend(qps.iter().map(|qp| qp.qpn));
        (next, pages) = (more, pages + 1);
    }
    assert_eq!(seen, made);
    assert!(pages > 2);
}

/// The UDP payload of a captured IPv4 packet whose headers are right.
fn payload(captured: &Captured) -> &[u8] {
    let bytes = &captured.bytes;
    assert_eq!(
        (bytes[0], bytes[9], &bytes[22..24]),
        (0x45, 17, &4791u16.to_be_bytes()[..])
    );
    assert_eq!(
        usize::from(u16::from_be_bytes([bytes[2], bytes[3]])),
        captured.length as usize
    );
    &bytes[28..]
}

#[test]
fn a_capture_has_every_packet_with_its_headers() {
    let (a, b) = (Server::start([127, 7, 62, 1]), Server::start([127, 7, 62, 2]));
    let (mut left, right) = pair(&a, &b);
    let (mut busy, other) = pair(&a, &b);
    let from = left.program.adopted(1 << 16, ALL_ACCESS);
    let into = right.program.adopted(1 << 16, ALL_ACCESS);
    let from_busy = busy.program.adopted(4096, ALL_ACCESS);
    let into_busy = other.program.adopted(4096, ALL_ACCESS);
    let capture = |snap_bytes, qpn| {
        let socket = Socket::connect(&a.socket()).expect("the RNIC listens");
        let reply = socket.call::<_, Reply>(&Request::StartCapture { snap_bytes, qpn }, &[]);
        match reply.expect("an answer").message {
            Reply::Done => Ok(socket),
            Reply::Error { errno, .. } => Err(errno),
            reply => panic!("unexpected answer {reply:?}"),
        }
    };
    assert_eq!(capture(63, None).unwrap_err(), libc::EINVAL);
    let all = capture(65_535, None).expect("a capture");
    let one = capture(64, Some(left.qp.qpn)).expect("a capture");
    busy.program
        .post(&mut busy.qp, write(1, &into_busy, 0), &[from_busy.sge(0, 8)]);
    busy.queue.wait();
    left.program
        .post(&mut left.qp, write(2, &into, 0), &[from.sge(0, 3 * 4096)]);
    left.queue.wait();

    let flow = |ends: &[u8]| {
        let end = |at: usize| {
            let address: [u8; 4] = ends[at..at + 4].try_into().expect("four bytes");
            std::net::SocketAddr::from((address, 4791))
        };
        Flow::new(end(0), end(4)).expect("one family")
    };
    let mut opcodes = Vec::new();
    while opcodes.len() < 6 {
        let captured = all.recv::<Captured>().expect("a packet").message;
        assert_eq!(
            (captured.missed, captured.bytes.len()),
            (0, captured.length as usize)
        );
        let datagram = payload(&captured);
        let identification = u16::from_be_bytes([captured.bytes[4], captured.bytes[5]]);
        let verdict = flow(&captured.bytes[12..20]).verify(datagram, identification);
        assert_eq!(
            verdict,
            verbatim_roce::Verdict::Expected,
            "the ICRC fits the rebuilt header"
        );
        opcodes.push(Packet::parse(datagram).expect("a packet").bth.opcode);
    }
    for expected in [0x0a, 0x06, 0x07, 0x08, 0x11] {
        assert!(
            opcodes.contains(&Opcode(expected)),
            "{expected:#x} in {opcodes:?}"
        );
    }
    let first = one.recv::<Captured>().expect("a packet").message;
    assert_eq!(first.bytes.len(), 64, "the busy one's short packet is not there");
    assert_eq!(
        (payload(&first)[0], first.length),
        (0x06, 28 + 12 + 16 + 4096 + 4)
    );
}

#[test]
fn a_capture_that_nobody_reads_misses_packets_and_stops_nothing() {
    let (a, b) = (Server::start([127, 7, 63, 1]), Server::start([127, 7, 63, 2]));
    let (mut left, right) = pair(&a, &b);
    let from = left.program.adopted(1 << 20, ALL_ACCESS);
    let into = right.program.adopted(1 << 20, ALL_ACCESS);
    let socket = Socket::connect(&a.socket()).expect("the RNIC listens");
    let start = Request::StartCapture {
        snap_bytes: 65_535,
        qpn: None,
    };
    socket.call::<_, Reply>(&start, &[]).expect("an answer");
    let mut run = |wr_id| {
        left.program
            .post(&mut left.qp, write(wr_id, &into, 0), &[from.sge(0, 1 << 20)]);
        assert_eq!(left.queue.wait().status, 0);
    };
    run(1);
    run(2);
    socket.set_nonblocking(true).expect("a socket");
    let mut read = 0;
    while socket.recv::<Captured>().is_ok() {
        read += 1;
    }
    assert!(read < 512, "a socket holds less than two messages");
    run(3);
    let next = socket.recv::<Captured>().expect("a packet").message;
    assert!(next.missed > 0);
    drop(socket);
    run(4);
    wait_for("the end of the capture", || {
        (Socket::connect(&a.socket()).is_ok() && a.stats.read().contexts == 1).then_some(())
    });
}

#[test]
fn owners_are_told_to_root_over_the_main_socket() {
    let server = Server::start([127, 7, 64, 1]);
    let end = End::new(&server);
    let ask = |qpns: Vec<u32>| {
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let reply = socket.call::<_, Reply>(&Request::QueryOwners { qpns }, &[]);
        reply.expect("an answer").message
    };
    let here = QpOwner::Process(std::process::id() as i32);
    let qpn = end.qp.qpn;
    match ask(vec![qpn ^ 1, qpn]) {
        Reply::Owners(owners) => assert_eq!(owners, [QpOwner::None, here]),
        // The tests do not run as root.
        Reply::Error {
            errno: libc::EPERM, ..
        } => return,
        reply => panic!("unexpected answer {reply:?}"),
    }
    let too_many = ask(vec![qpn; MAX_OWNERS + 1]);
    assert!(
        matches!(
            too_many,
            Reply::Error {
                errno: libc::EINVAL,
                ..
            }
        ),
        "{too_many:?}"
    );
    // As many as allowed, of large numbers, fit into a message both ways.
    match ask(vec![0x00ff_ffff; MAX_OWNERS]) {
        Reply::Owners(owners) => assert_eq!(owners.len(), MAX_OWNERS),
        reply => panic!("unexpected answer {reply:?}"),
    }
    let asked = end.program.errno(Request::QueryOwners { qpns: vec![qpn] });
    assert_eq!(asked, libc::EINVAL, "a connection with a context is a program's");
}

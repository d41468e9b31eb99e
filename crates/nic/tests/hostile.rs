//! A program that writes whatever it likes wherever it can, beside one that works.

mod support;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::program::{ALL_ACCESS, CAP, write};
use support::{Program, Server, pair, wait_for};
use verbatim_device::control::{
    Access, AddressVector, Backing, CmParameters, CmRequest, ForwardedQp, QpAttr, QpAttrMask, QpCap, QpClass,
    QpState, QpType, Request, RestoredQp, Segment, VERSION,
};
use verbatim_device::layout::{CONTEXT_BYTES, QpLayout};
use verbatim_roce::icrc::Flow;
use verbatim_seqpacket::Carried;

const SEED: u64 = 0x5eed;
const PAGES: u64 = 64 * 4096;

/// Random values, small ones more often than others: those get further.
fn any(rng: &mut StdRng) -> u32 {
    match rng.random_range(0..4) {
        0 => rng.random_range(0..8),
        1 => rng.random_range(0..1 << 16),
        2 => u32::MAX - rng.random_range(0..8),
        _ => rng.random(),
    }
}

fn any_state(rng: &mut StdRng) -> QpState {
    QpState::from_raw(rng.random_range(0..7)).expect("a state")
}

fn any_attr(rng: &mut StdRng) -> QpAttr {
    QpAttr {
        state: any_state(rng),
        cur_state: any_state(rng),
        path_mtu: any(rng) as u8,
        dest_qpn: any(rng),
        rq_psn: any(rng),
        sq_psn: any(rng),
        access: Access::from_bits_retain(any(rng)),
        av: AddressVector {
            dgid: rng.random(),
            port_num: any(rng) as u8,
            ..AddressVector::default()
        },
        port_num: any(rng) as u8,
        max_rd_atomic: any(rng) as u8,
        max_dest_rd_atomic: any(rng) as u8,
        timeout: any(rng) as u8,
        retry_cnt: any(rng) as u8,
        rnr_retry: any(rng) as u8,
        min_rnr_timer: any(rng) as u8,
        ..QpAttr::default()
    }
}

fn any_segment(rng: &mut StdRng) -> Segment {
    let backing = match rng.random() {
        true => Backing::Process,
        false => Backing::File {
            fd_index: any(rng),
            offset: u64::from(any(rng)) << 12,
        },
    };
    Segment {
        address: u64::from(any(rng)) << 12,
        length: u64::from(any(rng)),
        backing,
    }
}

fn any_request(rng: &mut StdRng, qpn: u32) -> Request {
    let id = any(rng);
    let qpn = if rng.random() { qpn } else { id };
    let qpns = vec![qpn; rng.random_range(0..2000)];
    match rng.random_range(0..20) {
        0 => Request::OpenContext {
            version: VERSION,
            name: "x".repeat(rng.random_range(0..400)),
        },
        1 => Request::AttachContext { version: VERSION },
        2 => Request::AddListener {
            instance: "web".to_owned(),
        },
        3 => Request::AllocPd,
        4 => Request::DeallocPd { pd: id },
        5 => Request::RegMr {
            pd: id,
            address: rng.random(),
            length: rng.random(),
            iova: rng.random(),
            access: Access::from_bits_retain(any(rng)),
            segments: (0..rng.random_range(0..5)).map(|_| any_segment(rng)).collect(),
            key: rng.random_bool(0.5).then(|| any(rng)),
        },
        6 => Request::DeregMr { lkey: id },
        7 => Request::CreateCq {
            entries: id,
            channel: None,
            event: None,
        },
        8 => Request::DestroyCq { cq: id },
        9 => Request::CreateQp {
            pd: any(rng),
            send_cq: any(rng),
            recv_cq: any(rng),
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: any(rng),
                max_recv_wr: any(rng),
                max_send_sge: any(rng),
                max_recv_sge: any(rng),
                max_inline_data: any(rng),
            },
            srq: None,
            qpn: rng.random_bool(0.5).then(|| any(rng)),
        },
        10 => Request::ModifyQp {
            qpn,
            mask: QpAttrMask::from_bits_retain(any(rng)),
            attr: any_attr(rng),
        },
        11 => Request::PauseQps {
            qpns,
            limit_s: rng.random_bool(0.5).then(|| any(rng)),
        },
        12 => Request::ResumeQps { qpns },
        13 => Request::QueryQps { qpns },
        14 => Request::DumpQps { qpns },
        15 => Request::RestoreQps {
            qps: qpns
                .iter()
                .map(|qpn| RestoredQp {
                    qpn: *qpn,
                    image_bytes: if rng.random_bool(0.5) { 8 } else { any(rng) },
                    sgid_index: any(rng) as u8,
                })
                .collect(),
            images: Carried::Here(vec![any(rng) as u8; 8 * qpns.len()]),
        },
        16 => Request::ForwardQps {
            qps: qpns
                .iter()
                .map(|qpn| ForwardedQp {
                    qpn: *qpn,
                    to_gid: rng.random(),
                    to_qpn: any(rng),
                })
                .collect(),
            seconds: any(rng),
        },
        17 => Request::SetQpClass {
            qpn,
            class: match rng.random() {
                true => QpClass::Background,
                false => QpClass::User,
            },
        },
        18 => Request::Cm(any_cm_request(rng)),
        _ => Request::QueryQp { qpn },
    }
}

fn any_cm_request(rng: &mut StdRng) -> CmRequest {
    let id = rng.random_range(0..4);
    let channel = rng.random_range(0..4);
    let address = SocketAddr::from(([127, 7, 96, any(rng) as u8], any(rng) as u16));
    let parameters = CmParameters {
        qp_num: any(rng),
        private_data: vec![7; rng.random_range(0..400)],
        retry_count: any(rng) as u8,
        ..CmParameters::default()
    };
    match rng.random_range(0..16) {
        0 => CmRequest::CreateChannel,
        1 => CmRequest::DestroyChannel { channel },
        2 => CmRequest::GetEvent { channel },
        3 => CmRequest::DestroyId { id },
        4 => CmRequest::Bind { id, address },
        5 => CmRequest::ResolveAddress {
            id,
            source: None,
            destination: address,
            timeout_ms: any(rng),
        },
        6 => CmRequest::ResolveRoute { id, timeout_ms: 0 },
        7 => CmRequest::Listen {
            id,
            backlog: any(rng),
        },
        8 => CmRequest::Connect { id, parameters },
        9 => CmRequest::Accept {
            id,
            uid: rng.random(),
            parameters: rng.random_bool(0.5).then_some(parameters),
        },
        10 => CmRequest::Reject {
            id,
            reason: any(rng) as u8,
            private_data: parameters.private_data,
        },
        11 => CmRequest::Disconnect { id },
        12 => CmRequest::MigrateId { id, channel },
        13 => CmRequest::SetOption {
            id,
            level: rng.random_range(0..2),
            name: rng.random_range(0..5),
            value: vec![1; rng.random_range(0..5)],
        },
        14 => CmRequest::JoinMulticast { id, uid: 1, address },
        _ => CmRequest::CreateId {
            channel,
            uid: rng.random(),
            port_space: if rng.random() { 0x0106 } else { 0x0111 },
            qp_type: any(rng) as u8,
        },
    }
}

/// Scribbles over doorbells, rings and control messages, and gives up nothing.
fn vandalise(server: &Server, partner: &Server, rng: &mut StdRng) {
    let program = Program::connect(&server.socket(), "hostile");
    let queue = program.cq(16);
    let victim = program.adopted(4096, ALL_ACCESS);
    for _ in 0..20 {
        let mut qp = program.qp(&queue, CAP);
        let connected = program.try_connect_qp_with(&qp, partner.address, qp.qpn, |attr| attr.retry_cnt = 0);
        if let Err(refused) = connected {
            // It has broken its own completion queue, and with that what completes there.
            assert_eq!(program.state(&qp), QpState::Err, "{refused:?}");
        }
        let layout = QpLayout::new(&qp.cap);
        for _ in 0..20 {
            // Anywhere in the queue pair, the completion queue, or the context page.
            let at = match rng.random_range(0..4) {
                0 => rng.random_range(0..CONTEXT_BYTES / 4) * 4,
                1 => CONTEXT_BYTES + rng.random_range(0..1280 / 4) * 4,
                2 => qp.offset + rng.random_range(0..64) * 4,
                _ => qp.offset + rng.random_range(0..layout.bytes / 4) * 4,
            };
            let value = any(rng);
            // SAFETY: inside the arena's mapping; the RNIC takes any bytes there.
            unsafe {
                program
                    .arena()
                    .add(at as usize)
                    .cast::<u32>()
                    .write_volatile(value)
            };
            if rng.random() {
                program.ring(&mut qp);
            }
        }
        // Requests that look right and are not.
        for wr_id in 0..8 {
            let mut request = write(wr_id, &victim, 0);
            request.opcode = rng.random_range(0..9);
            request.rkey ^= any(rng) & 1;
            request.flags = rng.random();
            let mut sge = victim.sge(0, any(rng));
            sge.address = sge.address.wrapping_add(any(rng).into());
            if qp.send.room() > 0 {
                program.post(&mut qp, request, &[sge]);
            }
        }
        for _ in 0..20 {
            let request = any_request(rng, qp.qpn);
            // Whatever the answer: there must be one.
            let _ = program.ask(&request, &[victim.file.as_ref().expect("adopted").as_fd()]);
        }
        let noise: Vec<u8> = (0..rng.random_range(1..200)).map(|_| rng.random()).collect();
        program
            .socket
            .send_bytes(&noise, &[])
            .expect("a packet can be sent");
        let _ = program
            .socket
            .recv::<verbatim_device::control::Reply>()
            .expect("an answer, even to noise");
    }
}

/// Sets it when dropped.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_hostile_program_harms_only_itself() {
    let (a, b) = (Server::start([127, 7, 20, 1]), Server::start([127, 7, 20, 2]));
    let (mut left, right) = pair(&a, &b);
    let mut from = left.program.adopted(PAGES, ALL_ACCESS);
    let to = right.program.adopted(PAGES, ALL_ACCESS);
    let stop = AtomicBool::new(false);
    println!("seed {SEED:#x}");
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut rounds = 0u64;
            while !stop.load(Relaxed) || rounds < 10 {
                let seed = rounds as usize;
                from.fill(|index| (index ^ (index >> 8)).wrapping_add(seed) as u8);
                left.program
                    .post(&mut left.qp, write(rounds, &to, 0), &[from.sge(0, PAGES as u32)]);
                let done = left.queue.wait();
                assert_eq!((done.wr_id, done.status), (rounds, 0));
                assert!(
                    to.as_slice() == from.as_slice(),
                    "round {rounds}: other bytes arrived"
                );
                rounds += 1;
            }
        });
        // Also where something here fails: the worker goes on until it is told.
        let _stops = Stops(&stop);
        let mut rng = StdRng::seed_from_u64(SEED);
        for _ in 0..5 {
            vandalise(&a, &b, &mut rng);
            vandalise(&b, &a, &mut rng);
        }
        stop.store(true, Relaxed);
        worker.join().expect("the worker was not disturbed");
    });
    for server in [&a, &b] {
        server.wait_for("the end of the hostile contexts", |counters| {
            (counters.contexts, counters.qps) == (1, 1)
        });
        assert!(
            server.stats.read().bad_indices > 0,
            "the test reaches the check of indices"
        );
    }
    drop((left, right));
    for server in [&a, &b] {
        wait_for("an empty RNIC", || (server.stats.read().mrs == 0).then_some(()));
    }
}

#[test]
fn a_program_that_reads_no_answers_is_dropped() {
    let server = Server::start([127, 7, 21, 1]);
    let silent = Program::connect(&server.socket(), "silent");
    let other = Program::connect(&server.socket(), "other");
    server.wait_for("both contexts", |counters| counters.contexts == 2);
    wait_for("the end of the connection", || {
        silent.socket.send(&Request::AllocPd, &[]).err()
    });
    server.wait_for("its objects to go", |counters| {
        (counters.contexts, counters.pds) == (1, 1)
    });
    assert!(matches!(
        other.call(Request::AllocPd),
        verbatim_device::control::Reply::Pd { .. }
    ));
}

#[test]
fn packets_that_are_not_the_partners_are_counted_and_dropped() {
    let (a, b) = (Server::start([127, 7, 22, 1]), Server::start([127, 7, 22, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let stranger = std::net::UdpSocket::bind("127.7.22.9:4791").expect("a free address");
    let partner = std::net::UdpSocket::bind((a.address, 0)).expect("the partner's address, another port");
    let to = (b.address, 4791);
    // A SEND Only without payload, headers as in IBA Vol 1 §9.2, and an ICRC that is wrong.
    let send_only = |qpn: u32| {
        let mut packet = vec![0x04, 0x40, 0xff, 0xff, 0];
        packet.extend(&qpn.to_be_bytes()[1..]);
        packet.extend([0x80, 0, 0, 1]);
        packet.extend([0; 4]);
        packet
    };
    right.program.post_recv(&mut right.qp, 1, &[]);
    stranger.send_to(b"too short", to).expect("sent");
    let changed = |at: usize, value: u8| {
        let mut packet = send_only(right.qp.qpn);
        packet[at] = value;
        stranger.send_to(&packet, to).expect("sent");
    };
    changed(0, 0x3f);
    changed(1, 0x4f);
    stranger.send_to(&[], to).expect("sent");
    stranger
        .send_to(&send_only(right.qp.qpn ^ 0x80_0000), to)
        .expect("sent");
    stranger.send_to(&send_only(right.qp.qpn), to).expect("sent");
    partner.send_to(&send_only(right.qp.qpn), to).expect("sent");
    // All is right with this one but who sends it.
    let mut forged = send_only(right.qp.qpn);
    forged.truncate(12);
    let from = stranger.local_addr().expect("an address");
    let flow = Flow::new(from, std::net::SocketAddr::from((b.address, 4791))).expect("both are IPv4");
    forged.extend(flow.icrc(&forged, 0).to_le_bytes());
    stranger.send_to(&forged, to).expect("sent");
    // And with this one, but for its partition key.
    let mut other_partition = send_only(right.qp.qpn);
    other_partition.truncate(12);
    other_partition[2..4].copy_from_slice(&[0x80, 0x01]);
    let from = partner.local_addr().expect("an address");
    let flow = Flow::new(from, std::net::SocketAddr::from((b.address, 4791))).expect("both are IPv4");
    other_partition.extend(flow.icrc(&other_partition, 0).to_le_bytes());
    partner.send_to(&other_partition, to).expect("sent");
    b.wait_for("the packets", |counters| {
        counters.rx_wrong_source == 1
            && counters.rx_malformed == 2
            && counters.rx_unknown_opcode == 1
            && counters.rx_wrong_version == 1
            && counters.rx_wrong_pkey == 1
            && counters.rx_unknown_qp == 1
            && counters.rx_icrc_errors == 2
    });
    assert!(right.queue.poll().is_none(), "nothing was delivered");
    left.program.post(&mut left.qp, support::program::send(2), &[]);
    assert_eq!((left.queue.wait().status, right.queue.wait().wr_id), (0, 1));
}

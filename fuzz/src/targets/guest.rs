//! What a program, or whoever took its place, says to its host's agent, and leaves in its runtime folder.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;
use verbatim_channel::{
    Answer, ContextRecord, CqRecord, Endpoint, Gate, Greeting, MrRecord, MwRecord, Order, PdRecord, QpCount,
    QpRecord, Resolved, RoadMap, SegmentRecord,
};
use verbatim_device::control::{Access, MwType, QpAttr, QpCap, QpType};
use verbatim_seqpacket::Socket;

use super::{encoded, folder, round_trip};

thread_local! {
    static SOCKETS: RefCell<(Socket, Socket)> = RefCell::new(Socket::pair().expect("a pair of sockets"));
}

/// `channel::message::Packet`, as a program could make it up.
#[derive(serde::Serialize)]
enum Packet<'a> {
    Here(&'a [u8]),
    InMemfd(u64),
}

fn memfd(content: &[u8]) -> OwnedFd {
    let memfd = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    let mut file = File::from(memfd);
    file.write_all(content).expect("it can be written");
    file.into()
}

/// Sends `bytes` in the way that `how` says, and takes them for a `T`.
fn receive<T: serde::Serialize + serde::de::DeserializeOwned>(how: u8, bytes: &[u8]) {
    SOCKETS.with_borrow(|(there, here)| {
        let sent = match how % 4 {
            0 => there.send_bytes(bytes, &[]),
            1 => there.send(&Packet::Here(bytes), &[]),
            2 => {
                let (length, content) = bytes.split_at(bytes.len().min(2));
                let length = length.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
                there.send(&Packet::InMemfd(length), &[memfd(content).as_fd()])
            }
            _ => there.send(&Packet::InMemfd(bytes.len() as u64), &[there.as_fd()]),
        };
        sent.expect("there is room for one message");
        if let Ok((message, _)) = verbatim_channel::recv::<T>(here) {
            round_trip(&message);
            verbatim_channel::send(there, &message, &[]).expect("what came can be sent");
            let (again, _) = verbatim_channel::recv::<T>(here).expect("and received");
            assert_eq!(encoded(&again), encoded(&message));
        }
    });
}

/// Every type that is read from such a socket, at both ends.
pub fn agent_messages(input: &[u8]) {
    let Some((how, bytes)) = input.split_first() else {
        return;
    };
    match how >> 2 & 3 {
        0 => receive::<Greeting>(*how, bytes),
        1 => receive::<Answer>(*how, bytes),
        2 => receive::<Order>(*how, bytes),
        _ => receive::<Resolved>(*how, bytes),
    }
}

/// A file of any content and length, which is cut off while it is mapped.
pub fn gate_file(content: &[u8]) {
    let path = folder::path("gate");
    std::fs::write(&path, content).expect("it can be written");
    let created = content.first().is_some_and(|byte| byte & 1 == 1);
    let Ok(gate) = Gate::open(&path, created) else {
        assert!(!created && content.len() < 4096);
        return;
    };
    let before = gate.generation();
    gate.open_up().expect("the word is there");
    assert_eq!(gate.generation(), before.wrapping_add(1));
    gate.wait(before);
    let file = File::options()
        .write(true)
        .open(&path)
        .expect("the file is there");
    file.set_len(0).expect("it can be cut off");
    assert!(gate.open_up().is_err());
}

/// A gate as it is, and files that are none.
pub fn gate_seeds() -> Vec<Vec<u8>> {
    vec![vec![0; 4096], vec![0xff; 4096], vec![1; 100], vec![2; 100]]
}

/// A road map with one of everything.
pub fn road_map() -> RoadMap {
    let cap = QpCap {
        max_send_wr: 4,
        ..QpCap::default()
    };
    let context = ContextRecord {
        id: 1,
        gids: vec![[1; 16]],
        handle_gids: Vec::new(),
        moves: 0,
        pds: vec![PdRecord { pd: 1 }],
        mws: vec![MwRecord {
            rkey: 0x700,
            physical_rkey: 0x700,
            pd: 1,
            mw_type: MwType::Two,
        }],
        mrs: vec![MrRecord {
            lkey: 7,
            rkey: 7,
            physical_lkey: 7,
            physical_rkey: 7,
            pd: 1,
            address: 0x7000,
            length: 100,
            iova: 0x7000,
            access: Access::all(),
            segments: vec![SegmentRecord {
                address: 0x7000,
                length: 4096,
                offset: Some(0),
            }],
        }],
        cqs: vec![CqRecord {
            cq: 1,
            entries: 16,
            channel: None,
        }],
        channels: Vec::new(),
        srqs: Vec::new(),
        qps: vec![QpRecord {
            qpn: 17,
            pd: 1,
            send_cq: 1,
            recv_cq: 1,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            attr: QpAttr::default(),
            groups: Vec::new(),
            physical_qpn: 17,
            paused: false,
            local_gid: Some([2; 16]),
            remote: Some(Endpoint { gid: [1; 16], qpn: 9 }),
        }],
    };
    RoadMap {
        pid: 1,
        version: 3,
        contexts: vec![context],
        blockers: vec!["none".to_owned()],
    }
}

/// One message of each kind, in each way.
pub fn seeds() -> Vec<Vec<u8>> {
    let messages = [
        encoded(&Greeting::Process {
            version: verbatim_channel::VERSION,
            pid: 1,
            program: "serve".to_owned(),
            generation: 0,
            quiesced: false,
        }),
        encoded(&Answer::Described(road_map())),
        encoded(&Order::Drain {
            session: 9,
            expected: vec![QpCount { qpn: 17, messages: 4 }],
            timeout_ms: 100,
            sends_only: false,
        }),
        encoded(&Resolved {
            endpoint: Endpoint { gid: [1; 16], qpn: 9 },
            keys: Vec::new(),
        }),
    ];
    let mut seeds = Vec::new();
    for (kind, message) in messages.iter().enumerate() {
        let head = |how: u8| vec![(kind as u8) << 2 | how];
        seeds.push([head(1), message.clone()].concat());
        let length = (message.len() as u16).to_be_bytes().to_vec();
        seeds.push([head(2), length, message.clone()].concat());
        seeds.push([head(0), encoded(&Packet::Here(message))].concat());
        seeds.push([head(3), message.clone()].concat());
    }
    seeds
}

//! What programs say to the RNIC, and what a hostile RNIC would say to programs, over a real socket.

use std::cell::RefCell;

use verbatim_device::control::{
    Access, AddressVector, AsyncEvent, Backing, Captured, CompletionEvent, QpAttr, QpAttrMask, QpCap,
    QpClass, QpType, Reply, Request, Segment, VERSION,
};
use verbatim_seqpacket::Socket;

use super::{encoded, round_trip};

thread_local! {
    static SOCKETS: RefCell<(Socket, Socket)> = RefCell::new(Socket::pair().expect("a pair of sockets"));
}

fn receive<T: serde::Serialize + serde::de::DeserializeOwned>(bytes: &[u8]) {
    SOCKETS.with_borrow(|(there, here)| {
        there
            .send_bytes(bytes, &[])
            .expect("there is room for one message");
        if let Ok(received) = here.recv::<T>() {
            round_trip(&received.message);
        }
    });
}

/// Every type that is read from such a socket.
pub fn control_messages(bytes: &[u8]) {
    receive::<Request>(bytes);
    receive::<Reply>(bytes);
    receive::<AsyncEvent>(bytes);
    receive::<CompletionEvent>(bytes);
    receive::<Captured>(bytes);
}

/// Some of each length.
pub fn seeds() -> Vec<Vec<u8>> {
    let segment = |backing| Segment {
        address: 0x7000_0000,
        length: 4096,
        backing,
    };
    let file = Backing::File {
        fd_index: 0,
        offset: 4096,
    };
    vec![
        encoded(&Request::OpenContext {
            version: VERSION,
            name: "program".to_owned(),
        }),
        encoded(&Request::AllocPd),
        encoded(&Request::RegMr {
            pd: 1,
            address: 0x7000_0000,
            length: 8192,
            iova: 0x7000_0000,
            access: Access::all(),
            segments: vec![segment(file), segment(Backing::Process)],
            key: None,
        }),
        encoded(&Request::CreateQp {
            pd: 1,
            send_cq: 2,
            recv_cq: 3,
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            srq: Some(4),
            qpn: None,
        }),
        encoded(&Request::ModifyQp {
            qpn: 17,
            mask: QpAttrMask::all(),
            attr: QpAttr {
                av: AddressVector {
                    dgid: [0xfe; 16],
                    ..AddressVector::default()
                },
                ..QpAttr::default()
            },
        }),
        encoded(&Request::SetQpClass {
            qpn: 17,
            class: QpClass::Background,
        }),
        encoded(&Reply::Error {
            errno: 22,
            message: "no such queue pair".to_owned(),
        }),
        encoded(&Reply::Statistics {
            device: vec![("tx_packets".to_owned(), 7)],
            qps: Vec::new(),
            next: Some(8),
        }),
        encoded(&Captured {
            time_ns: 1,
            length: 100,
            missed: 0,
            bytes: vec![0x45; 60],
        }),
    ]
}

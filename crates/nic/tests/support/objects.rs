//! Objects beyond queue pairs, completion queues and memory.

use std::net::IpAddr;
use std::os::fd::AsFd;

use verbatim_device::control::{
    AddressVector, AsyncEvent, AsyncEventType, CompletionEvent, QpAttr, QpAttrMask, QpCap, QpState, QpType,
    Reply, Request, SrqAttr,
};
use verbatim_device::layout::{RecvLayout, SendWqe, Sge};
use verbatim_device::ring::RecvProducer;
use verbatim_seqpacket::Socket;

use super::program::gid;
use super::{Program, Qp, Queue, Server, wait_for};

/// The end of a socket on which the RNIC tells about events.
pub struct Events(pub Socket);

impl Events {
    /// A program that is told about asynchronous events.
    pub fn program(server: &Server) -> (Program, Self) {
        let (ours, theirs) = Socket::pair().expect("sockets");
        ours.set_nonblocking(true).expect("a socket");
        let program = Program::connect_with(&server.socket(), "test", &[theirs.as_fd()]);
        (program, Self(ours))
    }

    /// The next asynchronous event.
    pub fn wait(&self) -> (AsyncEventType, u32) {
        let event: AsyncEvent = wait_for("an event", || Some(self.0.recv().ok()?.message));
        (event.event, event.object)
    }

    pub fn none(&self) -> bool {
        self.0.recv_bytes().is_err()
    }
}

/// A completion channel.
pub struct Channel {
    pub channel: u32,
    pub socket: Socket,
}

impl Channel {
    pub fn new(program: &Program) -> Self {
        let (ours, theirs) = Socket::pair().expect("sockets");
        ours.set_nonblocking(true).expect("a socket");
        let reply = program.ask(&Request::CreateCompChannel, &[theirs.as_fd()]);
        let Ok(Reply::CompChannel { channel }) = reply else {
            panic!("no channel: {reply:?}")
        };
        Self {
            channel,
            socket: ours,
        }
    }

    /// The completion queue of the next event.
    pub fn wait(&self) -> u32 {
        let event: CompletionEvent = wait_for("an event", || Some(self.socket.recv().ok()?.message));
        event.cq
    }

    pub fn none(&self) -> bool {
        self.socket.recv_bytes().is_err()
    }
}

/// A shared receive queue.
pub struct Srq {
    pub srq: u32,
    pub attr: SrqAttr,
    pub recv: RecvProducer,
}

impl Srq {
    pub fn new(program: &Program, attr: SrqAttr) -> Self {
        let Reply::Srq { srq, attr, offset } = program.call(Request::CreateSrq { pd: program.pd, attr })
        else {
            panic!("no srq")
        };
        // SAFETY: the RNIC put a queue of this layout there; this is its only producer.
        let recv = unsafe {
            let base = program.arena().add(offset as usize);
            RecvProducer::new(base, &RecvLayout::shared(&attr))
        };
        Self { srq, attr, recv }
    }

    pub fn post(&mut self, wr_id: u64, sges: &[Sge]) {
        self.recv.push(wr_id, sges);
        self.recv.publish();
    }
}

/// A program with a datagram queue pair.
pub struct Ud {
    pub program: Program,
    pub queue: Queue,
    pub qp: Qp,
}

pub const QKEY: u32 = 0x1234_5678;

impl Ud {
    pub fn new(server: &Server, cap: QpCap) -> Self {
        use QpAttrMask as M;
        let program = Program::connect(&server.socket(), "datagrams");
        let queue = program.cq(256);
        let qp = program.qp_with(&queue, cap, QpType::Ud, None);
        let mut attr = QpAttr {
            state: QpState::Init,
            port_num: 1,
            qkey: QKEY,
            ..QpAttr::default()
        };
        program.modify(&qp, M::STATE | M::PKEY_INDEX | M::PORT | M::QKEY, attr);
        attr.state = QpState::Rtr;
        program.modify(&qp, M::STATE, attr);
        attr.state = QpState::Rts;
        program.modify(&qp, M::STATE | M::SQ_PSN, attr);
        Self { program, queue, qp }
    }

    pub fn ah(&self, av: AddressVector) -> u32 {
        let Reply::Ah { ah } = self.program.call(Request::CreateAh {
            pd: self.program.pd,
            av,
        }) else {
            panic!("no address handle")
        };
        ah
    }

    pub fn ah_to(&self, address: IpAddr) -> u32 {
        self.ah(av(address))
    }

    pub fn send(&mut self, request: SendWqe, sge: Sge) {
        self.program.post(&mut self.qp, request, &[sge]);
    }
}

/// The way to an address, from the first GID.
pub fn av(address: IpAddr) -> AddressVector {
    AddressVector {
        dgid: gid(address),
        port_num: 1,
        ..AddressVector::default()
    }
}

/// A SEND of a datagram.
pub fn datagram(wr_id: u64, ah: u32, qpn: u32) -> SendWqe {
    SendWqe {
        wr_id,
        opcode: 2,
        ah,
        remote_qpn: qpn,
        remote_qkey: QKEY,
        ..SendWqe::default()
    }
}

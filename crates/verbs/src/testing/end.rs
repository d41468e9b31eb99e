//! A program with one of everything, and no agent: tests give it the orders of one.

use std::path::Path;
use std::sync::Arc;

use verbatim_channel::{Answer, Endpoint, Order, QpCount, Scope};
use verbatim_device::control::{Access, AddressVector, QpAttr, QpCap, QpType, SrqAttr};
use verbatim_device::layout::Sge;
use verbatim_device::transitions::steps;

use super::Wire;
use super::device::gid;
use super::memory::{MEMORY, memory};
use crate::session::Sessions;
use crate::{
    Ah, Body, Context, Cq, Mr, Pd, PostError, Process, Qp, QpInit, QpState, RecvWr, SEND_SIGNALED,
    SendOpcode, SendWr, Srq, UdAddress, Wc,
};

const REMOTE: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// Where messages go in an end's memory, and how long they may be.
const INBOX: (u64, u32) = (2048, 64);

/// What the ends of a pair have beside the least, and how they are connected.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub cap: QpCap,
    /// Their queue pairs take RECVs from a shared receive queue, of that length.
    pub srq: Option<u32>,
    /// Their completion queues have a channel, whose descriptor is non-blocking.
    pub channel: bool,
    pub qp_type: QpType,
    /// Their processes make their contexts again where they move to.
    pub made_again: bool,
    /// Their RNICs give numbers again, all the same ones.
    pub reuses_numbers: bool,
    pub rnr_retry: u8,
}

impl Shape {
    /// Short queues, which are soon full.
    pub const PLAIN: Self = Self {
        cap: QpCap {
            max_send_wr: 4,
            max_recv_wr: 8,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 16,
        },
        srq: None,
        channel: false,
        qp_type: QpType::Rc,
        made_again: false,
        reuses_numbers: true,
        rnr_retry: 7,
    };

    /// Queues in which whole programs find room.
    pub const LONG: Self = Self {
        cap: QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        },
        reuses_numbers: false,
        ..Self::PLAIN
    };
}

/// Connects a queue pair, whose first PSNs are given: what it sends, what it gets.
pub fn connect(qp: &Qp, to: Endpoint, [sq_psn, rq_psn]: [u32; 2], rnr_retry: u8) {
    let attr = QpAttr {
        path_mtu: 1,
        access: REMOTE,
        av: AddressVector {
            dgid: to.gid,
            port_num: 1,
            ..AddressVector::default()
        },
        port_num: 1,
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry,
        dest_qpn: to.qpn,
        sq_psn,
        rq_psn,
        ..QpAttr::default()
    };
    for (state, mask) in steps(qp.qp_type(), QpState::Rts).unwrap() {
        qp.modify(mask, &QpAttr { state, ..attr }).unwrap();
    }
}

/// The program.
pub struct End {
    pub sessions: Sessions,
    pub process: Arc<Process>,
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    pub mr: Arc<Mr>,
    pub cq: Arc<Cq>,
    /// What the queue pair takes its RECVs from, if not from an own queue.
    pub srq: Option<Arc<Srq>>,
    pub qp: Arc<Qp>,
    /// The device that it is on.
    pub device: u8,
    /// Where its memory starts.
    pub memory: u64,
    /// Where the other end lets it write and read, by what key.
    pub remote: (u64, u32),
}

impl End {
    /// On a device of its own, with its part of the memory.
    pub fn new(wire: &Wire, end: usize, shape: Shape) -> Self {
        let device = end as u8 + 1;
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(wire.device(device))).unwrap();
        let pd = context.alloc_pd().unwrap();
        let start = memory(end);
        let access = Access::LOCAL_WRITE | Access::MW_BIND | REMOTE;
        let mr = pd.reg_mr(start, MEMORY as u64, start, access).unwrap();
        let channel = shape.channel.then(|| context.create_comp_channel().unwrap());
        if let Some(channel) = &channel {
            rustix::io::ioctl_fionbio(channel.fd(), true).unwrap();
        }
        let cq = context.create_cq(64, channel.as_ref()).unwrap();
        let srq = shape.srq.map(|max_wr| SrqAttr {
            max_wr,
            max_sge: 2,
            limit: 0,
        });
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: shape.qp_type,
            cap: shape.cap,
            signal_all: false,
            srq: srq.map(|attr| pd.create_srq(&attr).unwrap()),
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            sessions: Sessions::new(process.clone()),
            process,
            context,
            pd,
            remote: (start, mr.rkey()),
            mr,
            cq,
            srq: init.srq,
            qp,
            device,
            memory: start,
        }
    }

    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            gid: gid(self.device),
            qpn: self.qp.control.lock().physical_qpn(),
        }
    }

    /// The other half is the other end's.
    pub fn connect(&mut self, to: &End, psns: [u32; 2], rnr_retry: u8) {
        connect(&self.qp, to.endpoint(), psns, rnr_retry);
        self.remote = (to.memory, to.mr.rkey());
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.memory + offset,
            length,
            lkey: self.mr.lkey(),
        }
    }

    /// An address handle of the host that `other` was opened on.
    pub fn handle_to(&self, other: &End) -> Arc<Ah> {
        let way = AddressVector {
            dgid: other.context.gid(0).unwrap(),
            ..AddressVector::default()
        };
        self.pd.create_ah(&way).unwrap()
    }

    /// Sends a datagram of that number to where `other` was when it was opened.
    pub fn send_datagram(&self, message: u32, ah: &Ah, other: &End) {
        let ud = UdAddress {
            ah: ah.number(),
            remote_qpn: other.qp.number(),
            remote_qkey: 0,
        };
        let sges = [self.sge(0, 8)];
        let request = self.request(message, SendOpcode::SendWithImm, SEND_SIGNALED);
        let body = Body::Sges(&sges);
        self.qp.post_send([SendWr { ud, body, ..request }]).unwrap();
    }

    /// That message in a line, not posted.
    pub fn request(&self, message: u32, opcode: SendOpcode, flags: u32) -> SendWr<'static> {
        let (remote_address, rkey) = self.remote;
        SendWr {
            wr_id: message.into(),
            opcode,
            flags,
            imm: message,
            remote_address,
            rkey,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: Body::Inline(&[b"in", b"line"]),
        }
    }

    /// Posts a message of that number, with the number as `wr_id`.
    pub fn send(
        &self,
        message: u32,
        opcode: SendOpcode,
        signaled: bool,
        inline: bool,
    ) -> Result<(), PostError> {
        let sges = [self.sge(0, 8)];
        let mut request = self.request(message, opcode, if signaled { SEND_SIGNALED } else { 0 });
        if !inline {
            request.body = Body::Sges(&sges);
        }
        self.qp.post_send([request]).map_err(|(_, error)| error)
    }

    pub fn recv(&self, wr_id: u64) -> Result<(), PostError> {
        let sges = [self.sge(INBOX.0, INBOX.1)];
        let request = RecvWr { wr_id, sges: &sges };
        let posted = match &self.srq {
            Some(srq) => srq.post_recv([request]),
            None => self.qp.post_recv([request]),
        };
        posted.map_err(|(_, error)| error)
    }

    /// Takes one completion.
    pub fn poll_one(&self) -> Option<Wc> {
        self.cq.poll_one().map(|completion| completion.wc)
    }

    /// Takes all completions that there are now, some at a time.
    pub fn poll(&self) -> Vec<Wc> {
        let mut taken = Vec::new();
        let mut wc = [Wc::default(); 3];
        loop {
            let count = self.cq.poll(&mut wc);
            if count == 0 {
                return taken;
            }
            taken.extend_from_slice(&wc[..count]);
        }
    }

    pub fn ask(&mut self, order: Order) -> Result<Answer, String> {
        match self.sessions.handle(order, Vec::new()) {
            Answer::Error { message } => Err(message),
            answer => Ok(answer),
        }
    }

    /// Gives an order that must be carried out.
    pub fn order(&mut self, order: Order) -> Answer {
        self.ask(order).unwrap_or_else(|message| panic!("{message}"))
    }

    pub fn suspend(&mut self, session: u64, scope: Scope) -> Vec<QpCount> {
        match self.order(Order::Suspend { session, scope }) {
            Answer::Suspended { sent, .. } => sent,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // In the middle of a session, which its verbs would wait for.
            return;
        }
        // There are thousands of them in a test.
        self.context.close().expect("a device in use");
        if let Some(helper) = &*self.process.helper.lock() {
            helper.stop(&self.process);
        }
    }
}

/// Of requests that were carried out.
pub fn wr_ids(completions: &[Wc]) -> Vec<u64> {
    assert!(completions.iter().all(|wc| wc.status == 0), "{completions:?}");
    completions.iter().map(|wc| wc.wr_id).collect()
}

/// Each with its status.
pub fn outcomes(completions: &[Wc]) -> Vec<(u64, u32)> {
    completions.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

//! What a transport sees of its RNIC.

use std::net::IpAddr;

use verbatim_device::control::{Access, AsyncEvent, AsyncEventType, QpType};
use verbatim_device::layout::{Cqe, SEND_EXECUTED, SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED, SendWqe};
use verbatim_roce::{
    AccessError, AccessFlags, AtomicOp, BadRequest, Bind, Completion, Destination, Event, Host, Immediate,
    Key, Lkey, LocalAccess, Location, Operation, Qpn, Queue, ReceiveRequest, RemoteAccess, Rkey, SendRequest,
};

use super::rnic::{Queues, Shared};
use super::wire::path;
use crate::work::SendOpcode;

pub struct Surroundings<'a> {
    pub(super) device: u8,
    pub(super) queues: &'a mut Queues,
    pub(super) shared: &'a mut Shared,
    pub(super) ram: &'a mut [u8],
    /// The device at the other end.
    pub(super) remote: &'a mut u8,
    pub(super) progress: &'a mut u64,
}

impl Surroundings<'_> {
    /// Where the bytes lie in the simulated memory.
    fn find(&self, key: Key, addr: u64, len: usize, writes: bool) -> Result<usize, AccessError> {
        let memory = &self.shared.memory;
        match (key, writes) {
            (Key::Local(lkey), false) => memory.local(lkey.0, addr, len, Access::empty()),
            (Key::Local(lkey), true) => memory.local(lkey.0, addr, len, Access::LOCAL_WRITE),
            (Key::Remote(rkey), false) => self.find_remote(rkey, addr, len, Access::REMOTE_READ),
            (Key::Remote(rkey), true) => self.find_remote(rkey, addr, len, Access::REMOTE_WRITE),
        }
    }

    fn find_remote(&self, rkey: Rkey, addr: u64, len: usize, rights: Access) -> Result<usize, AccessError> {
        let memory = &self.shared.memory;
        memory.remote(self.queues.qpn, rkey.0, addr, len, rights)
    }

    fn destination(&self, wqe: &SendWqe) -> Destination {
        Destination {
            path: path(self.device, self.shared.ahs[&wqe.ah]),
            qpn: Qpn::new(wqe.remote_qpn),
            qkey: wqe.remote_qkey,
        }
    }
}

fn operation(wqe: &SendWqe) -> Option<Operation> {
    let asked_for = asked_for(wqe)?;
    if wqe.flags & SEND_EXECUTED == 0 {
        return Some(asked_for);
    }
    Some(Operation::Executed {
        opcode: asked_for.wc_opcode(),
        value: matches!(asked_for, Operation::Atomic { .. }).then_some(wqe.compare_add),
    })
}

fn asked_for(wqe: &SendWqe) -> Option<Operation> {
    let imm = Some(Immediate(wqe.imm.to_ne_bytes()));
    let (remote_addr, rkey) = (wqe.remote_address, Rkey(wqe.rkey));
    let write = |imm| Operation::Write {
        remote_addr,
        rkey,
        imm,
    };
    let atomic = |op| Operation::Atomic {
        remote_addr,
        rkey,
        op,
    };
    Some(match SendOpcode::from_raw(wqe.opcode.into())? {
        SendOpcode::Write => write(None),
        SendOpcode::WriteWithImm => write(imm),
        SendOpcode::Send => Operation::Send { imm: None },
        SendOpcode::SendWithImm => Operation::Send { imm },
        SendOpcode::Read => Operation::Read { remote_addr, rkey },
        SendOpcode::CompareSwap => atomic(AtomicOp::CompareSwap {
            compare: wqe.compare_add,
            swap: wqe.swap,
        }),
        SendOpcode::FetchAdd => atomic(AtomicOp::FetchAdd { add: wqe.compare_add }),
        SendOpcode::AtomicWrite => Operation::AtomicWrite { remote_addr, rkey },
        SendOpcode::SendWithInvalidate => Operation::SendInvalidate { rkey: Rkey(wqe.imm) },
        SendOpcode::LocalInvalidate => Operation::LocalInvalidate { rkey: Rkey(wqe.imm) },
        SendOpcode::BindMw => Operation::Bind(Bind {
            window: rkey,
            rkey: Rkey(wqe.imm),
            lkey: Lkey(wqe.swap as u32),
            addr: remote_addr,
            len: wqe.compare_add,
            access: AccessFlags::from_bits_truncate((wqe.swap >> 32) as u32),
        }),
    })
}

impl Host for Surroundings<'_> {
    fn check_local(
        &mut self,
        lkey: Lkey,
        addr: u64,
        len: u32,
        access: LocalAccess,
    ) -> Result<(), AccessError> {
        let writes = access == LocalAccess::Write;
        self.find(Key::Local(lkey), addr, len as usize, writes).map(drop)
    }

    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError> {
        let writes = access == RemoteAccess::Write;
        self.find(Key::Remote(rkey), addr, len as usize, writes).map(drop)
    }

    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let at = self.find(key, addr, out.len(), false)?;
        out.copy_from_slice(&self.ram[at..at + out.len()]);
        Ok(())
    }

    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let at = self.find(key, addr, data.len(), true)?;
        self.ram[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn atomic(&mut self, rkey: Rkey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let at = self.find_remote(rkey, addr, 8, Access::REMOTE_ATOMIC)?;
        let word = self.ram[at..].first_chunk_mut::<8>().expect("it was found");
        let old = u64::from_ne_bytes(*word);
        *word = op.apply(old).to_ne_bytes();
        Ok(old)
    }

    fn invalidate_remote(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        self.shared.memory.invalidate(self.queues.qpn, rkey.0)
    }

    fn local_invalidate(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        self.shared.memory.invalidate(self.queues.qpn, rkey.0)
    }

    fn bind(&mut self, bind: &Bind) -> Result<(), AccessError> {
        self.shared.memory.bind(self.queues.qpn, bind)
    }

    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>> {
        let posted = self.queues.sends.pop_front()?;
        let wqe = posted.wqe;
        Some(Ok(SendRequest {
            wr_id: wqe.wr_id,
            operation: operation(&wqe).expect("no scenario posts another"),
            data: posted.data,
            signaled: wqe.flags & SEND_SIGNALED != 0,
            fence: wqe.flags & SEND_FENCE != 0,
            solicited: wqe.flags & SEND_SOLICITED != 0,
            destination: (self.queues.init.qp_type == QpType::Ud).then(|| self.destination(&wqe)),
        }))
    }

    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        match self.queues.init.srq {
            Some(srq) => self.shared.pop_shared(srq),
            None => self.queues.recvs.pop_front(),
        }
    }

    fn retire_sends(&mut self, count: u32) {
        self.queues.unfinished.drain(..count as usize);
        *self.progress += u64::from(count);
    }

    fn complete(&mut self, completion: Completion) {
        let cq = match completion.queue {
            Queue::Send => self.queues.init.send_cq,
            Queue::Receive => self.queues.init.recv_cq,
        };
        let entry = Cqe {
            wr_id: completion.wr_id,
            status: completion.status as u32,
            opcode: completion.opcode as u32,
            byte_len: completion.byte_len,
            imm: completion.imm_data(),
            qpn: self.queues.qpn,
            src_qpn: completion.source_qpn.get(),
            wc_flags: completion.flags.bits(),
            solicited: completion.solicited.into(),
            ..Cqe::default()
        };
        *self.progress += 1;
        self.shared.complete(cq, entry);
    }

    fn peer_moved(&mut self, to: &Location) -> bool {
        let IpAddr::V4(address) = to.address else {
            return false;
        };
        *self.remote = address.octets()[3];
        true
    }

    fn event(&mut self, event: Event) {
        let event = match event {
            Event::CommunicationEstablished => AsyncEventType::CommEst,
            Event::SendQueueDrained => AsyncEventType::SqDrained,
            Event::Fatal => AsyncEventType::QpFatal,
            Event::InvalidRequest => AsyncEventType::QpReqErr,
            Event::AccessError => AsyncEventType::QpAccessErr,
            Event::LastWqeReached => AsyncEventType::QpLastWqeReached,
        };
        let object = self.queues.qpn;
        self.shared.tell(AsyncEvent { event, object });
    }
}

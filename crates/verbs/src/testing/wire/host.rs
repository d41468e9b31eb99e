//! What a transport sees of its RNIC.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use verbatim_device::control::Access;
use verbatim_device::layout::{Cqe, SEND_EXECUTED, SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED, SendWqe};
use verbatim_roce::{
    AccessError, AtomicOp, BadRequest, Completion, Event, Host, Immediate, Key, Lkey, LocalAccess, Location,
    Operation, Queue, ReceiveRequest, RemoteAccess, Rkey, SendRequest,
};

use super::{Queues, Region, memory};
use crate::work::SendOpcode;

pub struct Surroundings<'a> {
    pub(super) queues: &'a mut Queues,
    pub(super) cqs: &'a mut BTreeMap<u32, VecDeque<Cqe>>,
    pub(super) regions: &'a BTreeMap<u32, Region>,
    pub(super) ram: &'a mut [u8],
    /// The device at the other end.
    pub(super) remote: &'a mut u8,
    pub(super) completions: &'a mut u64,
}

impl Surroundings<'_> {
    /// Where the bytes lie in the simulated memory.
    fn find(&self, key: u32, addr: u64, len: usize, rights: Access) -> Result<usize, AccessError> {
        let region = self.regions.get(&key).ok_or(AccessError)?;
        let end = addr.checked_add(len as u64).ok_or(AccessError)?;
        let inside = addr >= region.address && end <= region.address + region.length;
        match inside && region.access.contains(rights) {
            true => Ok((addr - memory(0)) as usize),
            false => Err(AccessError),
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
        SendOpcode::SendWithInvalidate | SendOpcode::LocalInvalidate | SendOpcode::BindMw => return None,
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
        let rights = match access {
            LocalAccess::Read => Access::empty(),
            LocalAccess::Write => Access::LOCAL_WRITE,
        };
        self.find(lkey.0, addr, len as usize, rights).map(|_| ())
    }

    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError> {
        let rights = match access {
            RemoteAccess::Read => Access::REMOTE_READ,
            RemoteAccess::Write => Access::REMOTE_WRITE,
        };
        self.find(rkey.0, addr, len as usize, rights).map(|_| ())
    }

    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let at = match key {
            Key::Local(lkey) => self.find(lkey.0, addr, out.len(), Access::empty()),
            Key::Remote(rkey) => self.find(rkey.0, addr, out.len(), Access::REMOTE_READ),
        }?;
        out.copy_from_slice(&self.ram[at..at + out.len()]);
        Ok(())
    }

    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let at = match key {
            Key::Local(lkey) => self.find(lkey.0, addr, data.len(), Access::LOCAL_WRITE),
            Key::Remote(rkey) => self.find(rkey.0, addr, data.len(), Access::REMOTE_WRITE),
        }?;
        self.ram[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn atomic(&mut self, rkey: Rkey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let at = self.find(rkey.0, addr, 8, Access::REMOTE_ATOMIC)?;
        let word = self.ram[at..].first_chunk_mut::<8>().expect("it was found");
        let old = u64::from_ne_bytes(*word);
        *word = op.apply(old).to_ne_bytes();
        Ok(old)
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
            destination: None,
        }))
    }

    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        self.queues.recvs.pop_front()
    }

    fn retire_sends(&mut self, count: u32) {
        self.queues.unfinished.drain(..count as usize);
    }

    fn complete(&mut self, completion: Completion) {
        let cq = match completion.queue {
            Queue::Send => self.queues.send_cq,
            Queue::Receive => self.queues.recv_cq,
        };
        let entry = Cqe {
            wr_id: completion.wr_id,
            status: completion.status as u32,
            opcode: completion.opcode as u32,
            byte_len: completion.byte_len,
            imm: completion.imm_data(),
            qpn: self.queues.qpn,
            wc_flags: completion.flags.bits(),
            solicited: completion.solicited.into(),
            ..Cqe::default()
        };
        *self.completions += 1;
        self.cqs
            .get_mut(&cq)
            .expect("a completion queue in use")
            .push_back(entry);
    }

    fn peer_moved(&mut self, to: &Location) -> bool {
        let IpAddr::V4(address) = to.address else {
            return false;
        };
        *self.remote = address.octets()[3];
        true
    }

    fn event(&mut self, _: Event) {}
}

//! The surroundings of a queue pair: memory as byte vectors, rings and completion queues as lists.

use std::collections::VecDeque;

use verbatim_roce::{
    AccessError, AccessFlags, AtomicOp, BadRequest, Bind, Completion, Event, HoldBudget, Host, Immediate,
    Key, Lkey, LocalAccess, Location, Operation, Queue, ReceiveRequest, RemoteAccess, Rkey, SendData,
    SendRequest, Sge, SgeList, WcStatus,
};

/// A memory region; lkey and rkey are the same number.
pub struct Region {
    pub key: u32,
    pub base: u64,
    pub bytes: Vec<u8>,
    pub access: AccessFlags,
}

/// Who invalidated a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Program,
    Partner,
}

#[derive(Default)]
pub struct TestHost {
    pub regions: Vec<Region>,
    pub sends: VecDeque<Result<SendRequest, BadRequest>>,
    pub receives: VecDeque<ReceiveRequest>,
    pub completions: Vec<Completion>,
    pub events: Vec<Event>,
    pub retired: u32,
    /// Every atomic operation that was executed, in order.
    pub atomics: Vec<(u64, AtomicOp)>,
    /// Every key that was invalidated, and by whom.
    pub invalidated: Vec<(Rkey, By)>,
    pub binds: Vec<Bind>,
    pub hold_budget: Option<HoldBudget>,
    /// Where the partner has gone on, until the way there is taken.
    pub peer: Option<Location>,
    /// What was granted was granted elsewhere, and nobody has told.
    pub trusting: bool,
    /// There is no way to any other place.
    pub no_way: bool,
    /// Ranges that were checked for remote access, and found good.
    granted: Vec<(Rkey, u64, u64, RemoteAccess)>,
}

impl TestHost {
    pub fn new() -> TestHost {
        TestHost::default()
    }

    /// Registers memory with every right.
    pub fn register(&mut self, key: u32, base: u64, bytes: Vec<u8>) {
        let access = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC;
        self.regions.push(Region {
            key,
            base,
            bytes,
            access,
        });
    }

    pub fn region(&mut self, key: u32) -> &mut Region {
        self.regions
            .iter_mut()
            .find(|region| region.key == key)
            .expect("the test has registered it")
    }

    pub fn bytes(&self, key: u32) -> &[u8] {
        &self
            .regions
            .iter()
            .find(|region| region.key == key)
            .expect("the test has registered it")
            .bytes
    }

    pub fn post(&mut self, wr_id: u64, operation: Operation, sges: &[Sge]) {
        self.post_with(
            wr_id,
            operation,
            SendData::Sges(SgeList::new(sges).expect("few enough")),
            |_| {},
        );
    }

    pub fn post_with(
        &mut self,
        wr_id: u64,
        operation: Operation,
        data: SendData,
        change: impl FnOnce(&mut SendRequest),
    ) {
        let mut request = SendRequest {
            wr_id,
            operation,
            data,
            signaled: true,
            fence: false,
            solicited: false,
            destination: None,
        };
        change(&mut request);
        self.sends.push_back(Ok(request));
    }

    pub fn post_receive(&mut self, wr_id: u64, sges: &[Sge]) {
        let sges = SgeList::new(sges).expect("few enough");
        self.receives.push_back(ReceiveRequest { wr_id, sges });
    }

    /// Status and `wr_id` of the completions of a queue.
    pub fn outcomes(&self, queue: Queue) -> Vec<(u64, WcStatus)> {
        let of_queue = self
            .completions
            .iter()
            .filter(|completion| completion.queue == queue);
        of_queue
            .map(|completion| (completion.wr_id, completion.status))
            .collect()
    }

    fn find(
        &mut self,
        key: u32,
        addr: u64,
        len: usize,
        needed: AccessFlags,
    ) -> Result<&mut [u8], AccessError> {
        let region = self
            .regions
            .iter_mut()
            .find(|region| region.key == key)
            .ok_or(AccessError)?;
        let start =
            usize::try_from(addr.checked_sub(region.base).ok_or(AccessError)?).map_err(|_| AccessError)?;
        let end = start.checked_add(len).ok_or(AccessError)?;
        if !region.access.contains(needed) {
            return Err(AccessError);
        }
        region.bytes.get_mut(start..end).ok_or(AccessError)
    }

    fn invalidate(&mut self, rkey: Rkey, by: By) -> Result<(), AccessError> {
        let before = self.regions.len();
        self.regions.retain(|region| region.key != rkey.0);
        if self.regions.len() == before {
            return Err(AccessError);
        }
        self.invalidated.push((rkey, by));
        Ok(())
    }

    /// A partner's access must lie within what was checked.
    fn assert_granted(&self, rkey: Rkey, addr: u64, len: usize, access: RemoteAccess) {
        let end = addr + len as u64;
        let granted = self
            .granted
            .iter()
            .any(|(key, from, to, right)| (*key, *right) == (rkey, access) && *from <= addr && end <= *to);
        assert!(
            granted || self.trusting,
            "{access:?} of {addr:#x}..{end:#x} with {rkey:?} was never checked"
        );
    }
}

impl Host for TestHost {
    fn check_local(
        &mut self,
        lkey: Lkey,
        addr: u64,
        len: u32,
        access: LocalAccess,
    ) -> Result<(), AccessError> {
        assert!(len > 0);
        let needed = match access {
            LocalAccess::Read => AccessFlags::empty(),
            LocalAccess::Write => AccessFlags::LOCAL_WRITE,
        };
        self.find(lkey.0, addr, len as usize, needed).map(|_| ())
    }

    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError> {
        assert!(len > 0);
        let needed = match access {
            RemoteAccess::Read => AccessFlags::REMOTE_READ,
            RemoteAccess::Write => AccessFlags::REMOTE_WRITE,
        };
        self.find(rkey.0, addr, len as usize, needed)?;
        let grant = (rkey, addr, addr + u64::from(len), access);
        if self.granted.last() != Some(&grant) {
            self.granted.push(grant);
        }
        Ok(())
    }

    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let (key, needed) = match key {
            Key::Local(lkey) => (lkey.0, AccessFlags::empty()),
            Key::Remote(rkey) => {
                self.assert_granted(rkey, addr, out.len(), RemoteAccess::Read);
                (rkey.0, AccessFlags::REMOTE_READ)
            }
        };
        out.copy_from_slice(self.find(key, addr, out.len(), needed)?);
        Ok(())
    }

    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let (key, needed) = match key {
            Key::Local(lkey) => (lkey.0, AccessFlags::LOCAL_WRITE),
            Key::Remote(rkey) => {
                self.assert_granted(rkey, addr, data.len(), RemoteAccess::Write);
                (rkey.0, AccessFlags::REMOTE_WRITE)
            }
        };
        self.find(key, addr, data.len(), needed)?.copy_from_slice(data);
        Ok(())
    }

    fn atomic(&mut self, rkey: Rkey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        assert!(addr.is_multiple_of(8));
        let bytes = self.find(rkey.0, addr, 8, AccessFlags::REMOTE_ATOMIC)?;
        let old = u64::from_ne_bytes(bytes[..].try_into().expect("eight bytes"));
        bytes.copy_from_slice(&op.apply(old).to_ne_bytes());
        self.atomics.push((addr, op));
        Ok(old)
    }

    fn invalidate_remote(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        self.invalidate(rkey, By::Partner)
    }

    fn local_invalidate(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        self.invalidate(rkey, By::Program)
    }

    /// A window is a region of its own here, with the bytes that it was bound to as they were then.
    fn hold_budget(&self) -> Option<&HoldBudget> {
        self.hold_budget.as_ref()
    }

    fn bind(&mut self, bind: &Bind) -> Result<(), AccessError> {
        let bytes = self
            .find(bind.lkey.0, bind.addr, bind.len as usize, AccessFlags::empty())?
            .to_vec();
        self.regions.push(Region {
            key: bind.rkey.0,
            base: bind.addr,
            bytes,
            access: bind.access,
        });
        self.binds.push(*bind);
        Ok(())
    }

    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>> {
        self.sends.pop_front()
    }

    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        self.receives.pop_front()
    }

    fn retire_sends(&mut self, count: u32) {
        self.retired += count;
    }

    fn complete(&mut self, completion: Completion) {
        self.completions.push(completion);
    }

    fn peer_moved(&mut self, to: &Location) -> bool {
        if !self.no_way {
            self.peer = Some(*to);
        }
        !self.no_way
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// Shorthand for a piece of memory.
pub fn sge(key: u32, addr: u64, len: u32) -> Sge {
    Sge {
        addr,
        len,
        lkey: Lkey(key),
    }
}

/// Shorthand for operations.
pub const SEND: Operation = Operation::Send { imm: None };

pub fn send_imm(imm: [u8; 4]) -> Operation {
    Operation::Send {
        imm: Some(Immediate(imm)),
    }
}

pub fn write(remote_addr: u64, rkey: u32) -> Operation {
    Operation::Write {
        remote_addr,
        rkey: Rkey(rkey),
        imm: None,
    }
}

pub fn write_imm(remote_addr: u64, rkey: u32, imm: [u8; 4]) -> Operation {
    Operation::Write {
        remote_addr,
        rkey: Rkey(rkey),
        imm: Some(Immediate(imm)),
    }
}

pub fn read(remote_addr: u64, rkey: u32) -> Operation {
    Operation::Read {
        remote_addr,
        rkey: Rkey(rkey),
    }
}

pub fn fetch_add(remote_addr: u64, rkey: u32, add: u64) -> Operation {
    Operation::Atomic {
        remote_addr,
        rkey: Rkey(rkey),
        op: AtomicOp::FetchAdd { add },
    }
}

pub fn compare_swap(remote_addr: u64, rkey: u32, compare: u64, swap: u64) -> Operation {
    Operation::Atomic {
        remote_addr,
        rkey: Rkey(rkey),
        op: AtomicOp::CompareSwap { compare, swap },
    }
}

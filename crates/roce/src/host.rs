//! What a queue pair sees of its surroundings.

use crate::{
    AtomicOp, BadRequest, Bind, Completion, HoldBudget, Lkey, Location, MigrationCounters, ReceiveRequest,
    Rkey, SendRequest,
};

/// The key by which memory is reached: which of the two decides which rights are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// By the program's own request.
    Local(Lkey),
    /// By a partner's request.
    Remote(Rkey),
}

/// What a local request wants with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalAccess {
    /// Gather: any valid region will do.
    Read,
    /// Scatter: the region needs `IBV_ACCESS_LOCAL_WRITE`.
    Write,
}

/// What a partner's request wants with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    /// The region needs `IBV_ACCESS_REMOTE_READ`.
    Read,
    /// The region needs `IBV_ACCESS_REMOTE_WRITE`.
    Write,
}

/// Memory that cannot be used so: no such key, another protection domain, out of range, or a missing right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory is not accessible with this key")]
pub struct AccessError;

/// Asynchronous events of a queue pair (`enum ibv_event_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `IBV_EVENT_COMM_EST`: the first packet came while the queue pair was in RTR.
    CommunicationEstablished,
    /// `IBV_EVENT_SQ_DRAINED`: in SQD, the last outstanding request is complete.
    SendQueueDrained,
    /// `IBV_EVENT_QP_FATAL`: the responder could not go on for a local reason.
    Fatal,
    /// `IBV_EVENT_QP_REQ_ERR`: the partner sent an invalid request.
    InvalidRequest,
    /// `IBV_EVENT_QP_ACCESS_ERR`: the partner asked for memory that it may not access.
    AccessError,
    /// `IBV_EVENT_QP_LAST_WQE_REACHED`: in the error state, with a shared receive queue: it takes no more from it.
    LastWqeReached,
}

/// The surroundings of one queue pair: implemented by the NIC for (context, protection domain, queue pair).
///
/// Every call may come with values that a program or a partner chose: the implementation checks key, protection
/// domain, range (beware of overflow) and rights on each of them, and the `read` and `write` calls check again, since
/// a region may go away in the middle of a message. Nothing here may block.
pub trait Host {
    /// May a local request use these bytes so? Never called with a length of zero.
    fn check_local(
        &mut self,
        lkey: Lkey,
        addr: u64,
        len: u32,
        access: LocalAccess,
    ) -> Result<(), AccessError>;

    /// May a partner use these bytes so? Never called with a length of zero.
    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError>;

    /// Fills `out` from memory (gather for a local key, an answer to a READ for a remote one).
    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError>;

    /// Stores `data` in memory (scatter for a local key, a partner's WRITE for a remote one).
    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError>;

    /// Executes a partner's atomic operation and gives the number that was there before. The region needs
    /// `IBV_ACCESS_REMOTE_ATOMIC`; `addr` is a multiple of eight. Atomic towards everything else that this NIC does
    /// (`IBV_ATOMIC_HCA`), and towards the program's own atomic instructions where the NIC advertises it. Called once
    /// per operation, however often its packet comes.
    fn atomic(&mut self, rkey: Rkey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let _ = (rkey, addr, op);
        Err(AccessError)
    }

    /// Stores eight bytes of a partner's atomic WRITE so that nobody sees half of them. The region needs
    /// `IBV_ACCESS_REMOTE_WRITE`; `addr` is a multiple of eight. This body is right where [`Host::write`] stores eight
    /// aligned bytes at once.
    fn atomic_write(&mut self, rkey: Rkey, addr: u64, data: [u8; 8]) -> Result<(), AccessError> {
        self.check_remote(rkey, addr, 8, RemoteAccess::Write)?;
        self.write(Key::Remote(rkey), addr, &data)
    }

    /// A SEND with invalidate has arrived: the key is not valid any more from now on. Comes before the completion.
    /// Refused for a key that is not valid, or not one that this queue pair's partner may invalidate (IBA §10.6.5).
    fn invalidate_remote(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        let _ = rkey;
        Err(AccessError)
    }

    /// The program invalidates a key (`IBV_WR_LOCAL_INV`); all earlier requests are complete.
    fn local_invalidate(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        let _ = rkey;
        Err(AccessError)
    }

    /// The program binds a memory window (`IBV_WR_BIND_MW`): whatever it sends later finds the window bound.
    fn bind(&mut self, bind: &Bind) -> Result<(), AccessError> {
        let _ = bind;
        Err(AccessError)
    }

    /// What all queue pairs together may take for packets that came too early, always the same; `None` is without limit.
    fn hold_budget(&self) -> Option<&HoldBudget> {
        None
    }

    /// Takes the next request off the send ring; called only when the queue pair can start on it, or flush it.
    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>>;

    /// Takes the next request off the receive ring (or the shared one); called only when a message needs it, or to
    /// flush it (never for a shared one).
    fn next_receive(&mut self) -> Option<ReceiveRequest>;

    /// `count` more send requests, in ring order, are complete: their slots are free. Comes before the completion of
    /// the last of them, and for unsignaled ones too.
    fn retire_sends(&mut self, count: u32);

    /// Adds an entry to a completion queue. Per queue, in the order of posting.
    fn complete(&mut self, completion: Completion);

    /// The partner has proved that it goes on there: from now on, packets go to that address (the number is the queue
    /// pair's affair), and those that come from there are its own. False: this RNIC has no way there, and nothing changes.
    fn peer_moved(&mut self, to: &Location) -> bool {
        let _ = to;
        false
    }

    /// A message of the partner's RNIC has come, by the secret that both share: the partner goes on there, and knows that this queue
    /// pair is its other end. `is_direct`: no other RNIC has passed the message on.
    fn partner_is_at(&mut self, partner: &Location, is_direct: bool) {
        let _ = (partner, is_direct);
    }

    /// So much more has been counted of pause and resume.
    fn count_migration(&mut self, counted: &MigrationCounters) {
        let _ = counted;
    }

    /// Reports an asynchronous event.
    fn event(&mut self, event: Event);
}

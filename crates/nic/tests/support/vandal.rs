//! The hostile program.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::sockopt;
use verbatim_device::control::{
    AddressVector, Backing, QpAttr, QpAttrMask, QpCap, QpState, QpType, Reply, Request, Segment, VERSION,
};
use verbatim_device::layout::{CONTEXT_BYTES, QpHeader, QpLayout, SendWqe};
use verbatim_seqpacket::{Error, Socket};

use crate::support::Server;
use crate::support::chance::Chance;
use crate::support::program::ALL_ACCESS;

/// Pages of the memory that it registers.
const PAGES: u64 = 16;
/// Where that memory is said to be.
const ADDRESS: u64 = 0x10_0000_0000;
/// `SendWqe` in words; the fields are where `verbatim_device::layout` has them.
const HEAD_WORDS: usize = size_of::<SendWqe>() / 4;
const QP_HEADER_BYTES: u64 = size_of::<QpHeader>() as u64;
/// Numbers that it remembers.
const MOST_KNOWN: usize = 64;

/// What it has done.
#[derive(Debug, Default, Clone, Copy)]
pub struct Done {
    pub messages: u64,
    pub accepted: u64,
    pub refused: u64,
    pub noise: u64,
    pub words: u64,
    pub requests: u64,
    pub connections: u64,
    /// Connections that the RNIC ended.
    pub dropped: u64,
}

struct Context {
    socket: Socket,
    eventfd: OwnedFd,
    arena: NonNull<u8>,
    arena_bytes: u64,
    /// Where queues are in the arena, and how long they are.
    queues: Vec<(u64, u64)>,
    /// Queue pairs that can send.
    live: Vec<Live>,
    /// Registered memory, and the protection domain that it is in.
    key: u32,
    pd: u32,
}

#[derive(Clone, Copy)]
struct Live {
    offset: u64,
    cap: QpCap,
    slot: u32,
    qpn: u32,
    /// Where its completion queue is.
    cq: u64,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this context's own mapping.
        let _ = unsafe { rustix::mm::munmap(self.arena.as_ptr().cast(), self.arena_bytes as usize) };
    }
}

pub struct Vandal<'a> {
    server: &'a Server,
    rng: StdRng,
    context: Option<Context>,
    known: Vec<u64>,
    memory: OwnedFd,
    other: OwnedFd,
    pub done: Done,
}

impl<'a> Vandal<'a> {
    pub fn new(server: &'a Server, rng: StdRng) -> Self {
        Self {
            server,
            rng,
            context: None,
            known: Vec::new(),
            memory: rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC).expect("a memfd"),
            other: rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            done: Done::default(),
        }
    }

    /// Does one thing.
    pub fn step(&mut self) {
        if self.context.is_none() {
            self.connect();
        }
        match self.rng.random_range(0..400) {
            0 => self.context = None,
            1..=4 => self.noise(),
            5..=8 => self.cut_memory(),
            9..=32 => self.live_qp(),
            33..=150 => {
                let request = self.chance().value();
                // Parked it would hear nothing any more.
                if !matches!(request, Request::ParkContext) || self.rng.random_range(0..16) == 0 {
                    self.ask(&request);
                }
            }
            151..=180 => self.scribble(),
            _ => self.post(),
        }
    }

    fn chance(&mut self) -> Chance<'_> {
        Chance {
            rng: &mut self.rng,
            known: &self.known,
            gid: gid(self.server),
        }
    }

    fn connect(&mut self) {
        self.done.connections += 1;
        self.known = vec![ADDRESS, ADDRESS + 4096, 4096, PAGES * 4096];
        let socket = Socket::connect(&self.server.socket()).expect("the RNIC listens");
        let patience = Some(Duration::from_secs(20));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, patience).expect("a limit can be set");
        // Sometimes something else comes first.
        if self.rng.random_range(0..16) == 0 {
            let request: Request = self.chance().value();
            let _ = socket.call::<_, Reply>(&request, &[]);
            return;
        }
        let open = Request::OpenContext {
            version: VERSION,
            name: "hostile".to_owned(),
        };
        let received = socket.call::<_, Reply>(&open, &[]).expect("an answer");
        let Reply::Context { arena_bytes, .. } = received.message else {
            panic!("no context: {:?}", received.message)
        };
        let [arena, eventfd] = <[OwnedFd; 2]>::try_from(received.fds).expect("two descriptors");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let arena = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(
                std::ptr::null_mut(),
                arena_bytes as usize,
                access,
                flags,
                &arena,
                0,
            )
        };
        self.context = Some(Context {
            socket,
            eventfd,
            arena: NonNull::new(arena.expect("it can be mapped").cast()).expect("not address 0"),
            arena_bytes,
            queues: vec![(0, CONTEXT_BYTES)],
            live: Vec::new(),
            key: 0,
            pd: 0,
        });
        self.cut_memory();
        self.ask(&Request::AllocPd);
        let pd = self.known.last().copied().unwrap_or(0) as u32;
        rustix::fs::ftruncate(&self.memory, PAGES * 4096).expect("its length can be set");
        let registered = self.ask_with_memory(&Request::RegMr {
            pd,
            address: ADDRESS,
            length: PAGES * 4096,
            iova: ADDRESS,
            access: ALL_ACCESS,
            segments: vec![Segment {
                address: ADDRESS,
                length: PAGES * 4096,
                backing: Backing::File {
                    fd_index: 0,
                    offset: 0,
                },
            }],
            key: None,
        });
        if let (Some(context), Some(Reply::Mr { lkey, .. })) = (&mut self.context, registered) {
            (context.key, context.pd) = (lkey, pd);
        }
    }

    /// Asks with random descriptors.
    fn ask(&mut self, request: &Request) -> Option<Reply> {
        let (there, _here) = Socket::pair().expect("sockets");
        let all = [
            self.memory.try_clone(),
            self.other.try_clone(),
            there.into_fd().try_clone(),
        ];
        let all: Vec<OwnedFd> = all.into_iter().flatten().collect();
        let count = self.rng.random_range(0..4);
        let fds: Vec<_> = (0..count)
            .map(|_| all[self.rng.random_range(0..all.len())].as_fd())
            .collect();
        self.call(request, &fds)
    }

    fn ask_with_memory(&mut self, request: &Request) -> Option<Reply> {
        let memory = self.memory.try_clone().expect("a descriptor");
        self.call(request, &[memory.as_fd()])
    }

    /// There must be an answer, or the end of the connection.
    fn call(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Option<Reply> {
        let context = self.context.as_mut()?;
        self.done.messages += 1;
        let reply = match context.socket.call::<_, Reply>(request, fds) {
            Ok(received) => received.message,
            Err(Error::Closed) => {
                self.done.dropped += 1;
                self.context = None;
                return None;
            }
            Err(error) => panic!("no answer to {request:?}: {error}"),
        };
        if matches!(reply, Reply::Error { .. }) {
            self.done.refused += 1;
        } else {
            self.done.accepted += 1;
        }
        if matches!(request, Request::StartCapture { .. }) && matches!(reply, Reply::Done) {
            // What comes now are packets.
            self.context = None;
            return Some(reply);
        }
        self.learn(&reply);
        Some(reply)
    }

    fn learn(&mut self, reply: &Reply) {
        let context = self.context.as_mut().expect("it has just answered");
        let mut know = |number: u32| {
            if self.known.len() == MOST_KNOWN {
                self.known.remove(4);
            }
            self.known.push(number.into());
        };
        match reply {
            Reply::Pd { pd } => know(*pd),
            Reply::Mr { lkey, rkey } => [*lkey, *rkey].into_iter().for_each(know),
            Reply::Mw { rkey } => know(*rkey),
            Reply::Ah { ah } => know(*ah),
            Reply::CompChannel { channel } => know(*channel),
            Reply::Cq { cq, offset, .. } => {
                know(*cq);
                context.queues.push((*offset, 1024));
            }
            Reply::Srq { srq, offset, .. } => {
                know(*srq);
                context.queues.push((*offset, 1024));
            }
            Reply::Qp { qpn, cap, offset, .. } => {
                know(*qpn);
                context.queues.push((*offset, QpLayout::new(cap).bytes));
            }
            _ => {}
        }
    }

    /// A message of bytes that are none.
    fn noise(&mut self) {
        let bytes: Vec<u8> = (0..self.rng.random_range(1..200))
            .map(|_| self.rng.random())
            .collect();
        let Some(context) = &self.context else { return };
        self.done.noise += 1;
        let sent = context.socket.send_bytes(&bytes, &[]);
        match sent.and_then(|()| context.socket.recv::<Reply>()) {
            // It may have been the message that starts a capture, for all we know.
            Ok(received) if matches!(received.message, Reply::Done) => self.context = None,
            Ok(_) => {}
            Err(Error::Closed) => {
                self.done.dropped += 1;
                self.context = None;
            }
            Err(error) => panic!("no answer to noise: {error}"),
        }
    }

    /// The file of registered memory gets another length under the RNIC.
    fn cut_memory(&mut self) {
        let bytes = self.rng.random_range(0..=PAGES * 4096);
        rustix::fs::ftruncate(&self.memory, bytes).expect("its length can be set");
    }

    /// A queue pair on its way to RTS as it should be, connected to itself: a road to everything behind it.
    fn live_qp(&mut self) {
        let qp_type = [QpType::Rc, QpType::Uc, QpType::Ud][self.rng.random_range(0..3)];
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let Some(Context { pd, .. }) = self.context else {
            return;
        };
        let create = Request::CreateCq {
            entries: 16,
            channel: None,
            event: None,
        };
        let Some(Reply::Cq {
            cq, offset: place, ..
        }) = self.ask(&create)
        else {
            return;
        };
        let create = Request::CreateQp {
            pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type,
            cap,
            srq: None,
            qpn: None,
        };
        let Some(Reply::Qp {
            qpn,
            cap,
            slot,
            offset,
        }) = self.ask(&create)
        else {
            return;
        };
        use QpAttrMask as M;
        let attr = QpAttr {
            access: ALL_ACCESS,
            path_mtu: 3,
            dest_qpn: qpn,
            qkey: 7,
            av: AddressVector {
                dgid: gid(self.server),
                hop_limit: 64,
                port_num: 1,
                ..AddressVector::default()
            },
            port_num: 1,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 10,
            retry_cnt: 1,
            rnr_retry: 1,
            ..QpAttr::default()
        };
        let init = M::STATE | M::PKEY_INDEX | M::PORT;
        let (init, rtr, rts) = match qp_type {
            QpType::Ud => (init | M::QKEY, M::STATE, M::STATE | M::SQ_PSN),
            QpType::Uc => (
                init | M::ACCESS_FLAGS,
                M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN,
                M::STATE | M::SQ_PSN,
            ),
            QpType::Rc => (
                init | M::ACCESS_FLAGS,
                M::STATE
                    | M::AV
                    | M::PATH_MTU
                    | M::DEST_QPN
                    | M::RQ_PSN
                    | M::MAX_DEST_RD_ATOMIC
                    | M::MIN_RNR_TIMER,
                M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
            ),
        };
        for (state, mask) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            let attr = QpAttr { state, ..attr };
            self.ask(&Request::ModifyQp { qpn, mask, attr });
        }
        if let Some(context) = &mut self.context {
            context.live.push(Live {
                offset,
                cap,
                slot,
                qpn,
                cq: place,
            });
        }
    }

    /// A random word into the context page or a queue, more often one of the counters at its front.
    fn scribble(&mut self) {
        let Some(context) = &self.context else { return };
        let (offset, bytes) = context.queues[self.rng.random_range(0..context.queues.len())];
        let word = match self.rng.random() {
            true => [0, 1, 32, 33, 63][self.rng.random_range(0..5)],
            false => self.rng.random_range(0..bytes / 4),
        };
        let arena = context.arena;
        let value = self.chance().number() as u32;
        self.done.words += 1;
        // SAFETY: inside of the arena; the RNIC takes any bytes there.
        unsafe {
            arena
                .add((offset + word * 4) as usize)
                .cast::<u32>()
                .write_volatile(value)
        };
        if self.rng.random() {
            self.wake();
        }
    }

    /// A request in the next slot of a queue pair that works, made visible as it should be: every second one is right,
    /// so that the others find something going on.
    fn post(&mut self) {
        let Some(context) = &self.context else { return };
        if context.live.is_empty() {
            return;
        }
        let live = context.live[self.rng.random_range(0..context.live.len())];
        let (arena, key) = (context.arena, context.key);
        let layout = QpLayout::new(&live.cap);
        let right = self.rng.random();
        let mut slot: Vec<u32> = (0..layout.send_stride / 4)
            .map(|_| self.chance().number() as u32)
            .collect();
        if right || self.rng.random() {
            let opcode: u32 = self.rng.random_range(0..if right { 7 } else { 16 });
            let flags: u32 = self.rng.random_range(0..if right { 4 } else { 32 });
            slot[2] = opcode | flags << 8;
            // One entry.
            slot[2] |= 1 << 16;
        }
        let mut put64 = |at: usize, value: u64| {
            slot[at] = value as u32;
            slot[at + 1] = (value >> 32) as u32;
        };
        if right {
            let remote = ADDRESS + self.rng.random_range(0..PAGES * 4096 - 8192) / 8 * 8;
            let local = ADDRESS + self.rng.random_range(0..PAGES * 4096 - 8192);
            put64(4, remote);
            put64(HEAD_WORDS, local);
            put64(HEAD_WORDS + 2, 8 | u64::from(key) << 32);
            if self.rng.random() {
                slot[HEAD_WORDS + 2] = self.rng.random_range(0..8192);
            }
            slot[6] = key;
            slot[12] = live.qpn;
            slot[13] = 7;
        }
        let is_recv = self.rng.random_range(0..4) == 0;
        self.done.requests += 1;
        // SAFETY: the queue pair was put there with this layout; the RNIC takes any bytes.
        unsafe {
            let base = arena.add(live.offset as usize).cast::<u32>();
            let producer = base.add(usize::from(is_recv));
            let count = producer.read_volatile();
            if is_recv {
                let recv = layout.recv;
                let at = recv.offset + u64::from(count % recv.slots) * recv.stride;
                let wqe = base.byte_add(at as usize);
                // `RecvWqe`, then the entry of the other kind's.
                wqe.add(2).write_volatile(if right { 1 } else { slot[0] });
                for index in 0..4 {
                    wqe.add(4 + index).write_volatile(slot[HEAD_WORDS + index]);
                }
            } else {
                let at = QP_HEADER_BYTES + u64::from(count % layout.send_slots) * layout.send_stride;
                let wqe = base.byte_add(at as usize);
                for (index, word) in slot.iter().enumerate() {
                    wqe.add(index).write_volatile(*word);
                }
            }
            producer.write_volatile(count.wrapping_add(1));
            // All completions so far count as read.
            let cq = arena.add(live.cq as usize).cast::<u32>();
            cq.add(32).write_volatile(cq.read_volatile());
            // Its doorbell bit, and that of the word (`layout::ContextPage`).
            let (word, summary) = (live.slot as usize / 64, live.slot as usize / 4096);
            let bells = arena.cast::<u64>();
            bells.add(24 + word).write_volatile(1 << (live.slot % 64));
            bells.add(8 + summary).write_volatile(1 << (word % 64));
        }
        self.wake();
    }

    fn wake(&self) {
        if let Some(context) = &self.context {
            let _ = rustix::io::write(&context.eventfd, &1u64.to_ne_bytes());
        }
    }
}

fn gid(server: &Server) -> [u8; 16] {
    match server.address {
        std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(address) => address.octets(),
    }
}

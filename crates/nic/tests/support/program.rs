//! A program's side of the device contract.

use std::ffi::c_void;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use verbatim_device::control::{
    Access, AddressVector, Backing, DeviceAttr, PortAttr, QpAttr, QpAttrMask, QpCap, QpState, QpType, Reply,
    Request, Segment, VERSION,
};
use verbatim_device::layout::{CqHeader, CqLayout, Cqe, QpLayout, SEND_SIGNALED, SIGNS_OFFSET, SendWqe, Sge};
use verbatim_device::ring::{Body, CqConsumer, Doorbell, RecvProducer, SendProducer};
use verbatim_seqpacket::Socket;

pub const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

pub const CAP: QpCap = QpCap {
    max_send_wr: 128,
    max_recv_wr: 128,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline_data: 128,
};

/// A shared mapping of a whole file.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process; what is in it is only reached through atomics, ring ends and raw bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: impl AsFd, bytes: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        };
        let base = base.expect("memory can be mapped");
        Self {
            base: NonNull::new(base.cast()).expect("not address 0"),
            bytes,
        }
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

/// A context.
pub struct Program {
    pub socket: Socket,
    pub device: DeviceAttr,
    pub port: PortAttr,
    pub pd: u32,
    arena: Mapping,
    arena_file: OwnedFd,
    bell: Doorbell,
    eventfd: OwnedFd,
}

/// A completion queue.
pub struct Queue {
    pub cq: u32,
    pub entries: u32,
    base: NonNull<u8>,
    consumer: CqConsumer,
}

// SAFETY: the base is only used to read an atomic.
unsafe impl Send for Queue {}

/// A queue pair.
pub struct Qp {
    pub qpn: u32,
    pub cap: QpCap,
    pub slot: u32,
    pub offset: u64,
    pub send: SendProducer,
    pub recv: RecvProducer,
}

/// Registered memory.
pub struct Memory {
    pub address: u64,
    pub bytes: u64,
    pub key: u32,
    /// Adopted memory has a file, other memory is a private mapping.
    pub file: Option<OwnedFd>,
    mapping: Option<Mapping>,
    private: Vec<u8>,
}

impl Memory {
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is mapped for as long as this lives. The RNIC may write it; tests look when it is done.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes as usize) }
    }

    pub fn fill(&mut self, f: impl Fn(usize) -> u8) {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes as usize) };
        bytes
            .iter_mut()
            .enumerate()
            .for_each(|(index, byte)| *byte = f(index));
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.address + offset,
            length,
            lkey: self.key,
        }
    }
}

impl Program {
    pub fn connect(path: &Path, name: &str) -> Self {
        Self::connect_with(path, name, &[])
    }

    /// With a socket for asynchronous events.
    pub fn connect_with(path: &Path, name: &str, fds: &[BorrowedFd<'_>]) -> Self {
        let socket = Socket::connect(path).expect("the RNIC listens");
        let request = Request::OpenContext {
            version: VERSION,
            name: name.to_owned(),
        };
        Self::open(socket, request, fds)
    }

    /// Takes over a connection.
    pub fn attach(socket: Socket) -> Self {
        Self::open(socket, Request::AttachContext { version: VERSION }, &[])
    }

    fn open(socket: Socket, request: Request, fds: &[BorrowedFd<'_>]) -> Self {
        let attached = matches!(request, Request::AttachContext { .. });
        let received = socket.call::<_, Reply>(&request, fds).expect("an answer");
        let Reply::Context {
            device,
            port,
            arena_bytes,
        } = received.message
        else {
            panic!("unexpected answer {:?}", received.message)
        };
        let [arena, eventfd] = <[OwnedFd; 2]>::try_from(received.fds).expect("two descriptors");
        let arena_file = arena;
        let arena = Mapping::new(&arena_file, arena_bytes as usize);
        // SAFETY: the context page is at the start of the arena, which lives as long as the program.
        let bell = unsafe { Doorbell::new(arena.base().cast()) };
        let mut program = Self {
            socket,
            device,
            port,
            pd: 0,
            arena,
            arena_file,
            bell,
            eventfd,
        };
        if !attached {
            let Reply::Pd { pd } = program.call(Request::AllocPd) else {
                panic!("no pd")
            };
            program.pd = pd;
        }
        program
    }

    pub fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Reply, (i32, String)> {
        let answer = self.ask_for_fds(request, fds);
        answer.map(|(reply, _)| reply)
    }

    /// The same, with the descriptors that come with the answer.
    pub fn ask_for_fds(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), (i32, String)> {
        let answer = self.socket.call::<_, Reply>(request, fds).expect("an answer");
        match answer.message {
            Reply::Error { errno, message } => Err((errno, message)),
            reply => Ok((reply, answer.fds)),
        }
    }

    pub fn call(&self, request: Request) -> Reply {
        self.ask(&request, &[])
            .unwrap_or_else(|error| panic!("{request:?} was refused: {error:?}"))
    }

    pub fn errno(&self, request: Request) -> i32 {
        self.ask(&request, &[]).expect_err("a refusal").0
    }

    /// Adopted memory: pages of a memfd.
    pub fn adopted(&self, bytes: u64, access: Access) -> Memory {
        self.adopted_as(None, bytes, access)
    }

    /// The same, with a key that is asked for.
    pub fn adopted_as(&self, key: Option<u32>, bytes: u64, access: Access) -> Memory {
        let file = rustix::fs::memfd_create("adopted", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&file, bytes).expect("its length can be set");
        let mapping = Mapping::new(&file, bytes as usize);
        let address = mapping.base().as_ptr() as u64;
        let backing = Backing::File {
            fd_index: 0,
            offset: 0,
        };
        let key = self.register(address, bytes, access, backing, &[file.as_fd()], key);
        Memory {
            address,
            bytes,
            key,
            file: Some(file),
            mapping: Some(mapping),
            private: Vec::new(),
        }
    }

    /// Memory that the RNIC reaches through the process.
    pub fn private(&self, bytes: u64, access: Access) -> Memory {
        let private = vec![0; bytes as usize];
        let address = private.as_ptr() as u64;
        let key = self.register(address, bytes, access, Backing::Process, &[], None);
        Memory {
            address,
            bytes,
            key,
            file: None,
            mapping: None,
            private,
        }
    }

    pub fn register(
        &self,
        address: u64,
        length: u64,
        access: Access,
        backing: Backing,
        fds: &[BorrowedFd<'_>],
        key: Option<u32>,
    ) -> u32 {
        let segments = vec![Segment {
            address,
            length,
            backing,
        }];
        let request = Request::RegMr {
            pd: self.pd,
            address,
            length,
            iova: address,
            access,
            segments,
            key,
        };
        let reply = self.ask(&request, fds).expect("the memory can be registered");
        let Reply::Mr { lkey, rkey } = reply else {
            panic!("unexpected answer {reply:?}")
        };
        assert_eq!(lkey, rkey);
        lkey
    }

    pub fn cq(&self, entries: u32) -> Queue {
        self.cq_with(entries, None)
    }

    pub fn cq_with(&self, entries: u32, channel: Option<u32>) -> Queue {
        self.queue_of(self.call(Request::CreateCq {
            entries,
            channel,
            event: None,
        }))
    }

    /// The same queue with another number of entries.
    pub fn resize(&self, queue: Queue, entries: u32) -> Queue {
        self.queue_of(self.call(Request::ResizeCq {
            cq: queue.cq,
            entries,
        }))
    }

    fn queue_of(&self, reply: Reply) -> Queue {
        let Reply::Cq { cq, entries, offset } = reply else {
            panic!("no cq")
        };
        // SAFETY: the RNIC put a queue of this layout there; it is used by this consumer only.
        let (base, consumer) = unsafe {
            let base = self.arena.base().add(offset as usize);
            (base, CqConsumer::new(base, &CqLayout::new(entries)))
        };
        Queue {
            cq,
            entries,
            base,
            consumer,
        }
    }

    pub fn qp(&self, queue: &Queue, cap: QpCap) -> Qp {
        self.qp_with(queue, cap, QpType::Rc, None)
    }

    pub fn qp_with(&self, queue: &Queue, cap: QpCap, qp_type: QpType, srq: Option<u32>) -> Qp {
        self.make_qp(Request::CreateQp {
            pd: self.pd,
            send_cq: queue.cq,
            recv_cq: queue.cq,
            qp_type,
            cap,
            srq,
            qpn: None,
        })
    }

    /// The queue pair of a request.
    pub fn make_qp(&self, wanted: Request) -> Qp {
        let Reply::Qp {
            qpn,
            cap,
            slot,
            offset,
        } = self.call(wanted)
        else {
            panic!("no qp")
        };
        let layout = QpLayout::new(&cap);
        // SAFETY: the RNIC put a queue pair of this layout there; these are its only producers.
        unsafe {
            let base = self.arena.base().add(offset as usize);
            let (send, recv) = (
                SendProducer::new(base, &layout),
                RecvProducer::new(base, &layout.recv),
            );
            Qp {
                qpn,
                cap,
                slot,
                offset,
                send,
                recv,
            }
        }
    }

    /// Memory that the arena takes. The RNIC says there that it has to wait for a core, whenever that is so, on a page on
    /// which there may be nothing else: that page counts from the start.
    pub fn arena_bytes(&self) -> u64 {
        // SAFETY: the signs are within the arena, which is mapped as long as this program lives; a byte may be anything.
        unsafe {
            self.arena
                .base()
                .add(SIGNS_OFFSET as usize)
                .as_ptr()
                .read_volatile()
        };
        let stat = rustix::fs::fstat(&self.arena_file).expect("the arena's file");
        stat.st_blocks as u64 * 512
    }

    /// The raw bytes of the arena, for a hostile program.
    pub fn arena(&self) -> NonNull<u8> {
        self.arena.base()
    }

    pub fn modify(&self, qp: &Qp, mask: QpAttrMask, attr: QpAttr) {
        self.call(Request::ModifyQp {
            qpn: qp.qpn,
            mask,
            attr,
        });
    }

    /// RESET to RTS, towards a queue pair at an address.
    pub fn connect_qp(&self, qp: &Qp, remote: impl Into<IpAddr>, remote_qpn: u32) {
        self.connect_qp_with(qp, remote, remote_qpn, |_| {});
    }

    pub fn connect_qp_with(
        &self,
        qp: &Qp,
        remote: impl Into<IpAddr>,
        remote_qpn: u32,
        adjust: impl Fn(&mut QpAttr),
    ) {
        let connected = self.try_connect_qp_with(qp, remote, remote_qpn, adjust);
        connected.unwrap_or_else(|error| panic!("connecting {:#x} was refused: {error:?}", qp.qpn));
    }

    /// The same, for who may be refused.
    pub fn try_connect_qp_with(
        &self,
        qp: &Qp,
        remote: impl Into<IpAddr>,
        remote_qpn: u32,
        adjust: impl Fn(&mut QpAttr),
    ) -> Result<(), (i32, String)> {
        use QpAttrMask as M;
        let qpn = qp.qpn;
        let modify = |mask, attr| self.ask(&Request::ModifyQp { qpn, mask, attr }, &[]).map(drop);
        let mut attr = QpAttr {
            access: ALL_ACCESS,
            path_mtu: self.port.active_mtu,
            dest_qpn: remote_qpn,
            rq_psn: remote_qpn & 0xff_ffff,
            sq_psn: qp.qpn & 0xff_ffff,
            av: AddressVector {
                dgid: gid(remote.into()),
                hop_limit: 64,
                port_num: 1,
                ..AddressVector::default()
            },
            port_num: 1,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 10,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        adjust(&mut attr);
        attr.state = QpState::Init;
        modify(M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS, attr)?;
        attr.state = QpState::Rtr;
        let rtr = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        modify(M::STATE | rtr, attr)?;
        attr.state = QpState::Rts;
        let rts = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
        modify(M::STATE | rts, attr)
    }

    /// RESET to RTS of an unreliable connection.
    pub fn connect_uc(&self, qp: &Qp, remote: impl Into<IpAddr>, remote_qpn: u32) {
        use QpAttrMask as M;
        let mut attr = QpAttr {
            access: ALL_ACCESS,
            path_mtu: self.port.active_mtu,
            dest_qpn: remote_qpn,
            av: AddressVector {
                dgid: gid(remote.into()),
                port_num: 1,
                ..AddressVector::default()
            },
            port_num: 1,
            state: QpState::Init,
            ..QpAttr::default()
        };
        self.modify(qp, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS, attr);
        attr.state = QpState::Rtr;
        self.modify(qp, M::STATE | M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN, attr);
        attr.state = QpState::Rts;
        self.modify(qp, M::STATE | M::SQ_PSN, attr);
    }

    pub fn state(&self, qp: &Qp) -> QpState {
        let Reply::QpAttr { attr, .. } = self.call(Request::QueryQp { qpn: qp.qpn }) else {
            panic!("no attributes")
        };
        attr.state
    }

    /// Tells the RNIC about what was pushed.
    pub fn ring(&self, qp: &mut Qp) {
        qp.send.publish();
        if self.bell.ring(qp.slot) {
            rustix::io::write(&self.eventfd, &1u64.to_ne_bytes()).expect("an eventfd takes a write");
        }
    }

    /// Posts one signaled request.
    pub fn post(&self, qp: &mut Qp, request: SendWqe, sges: &[Sge]) {
        let request = SendWqe {
            flags: request.flags | SEND_SIGNALED,
            num_sge: sges.len() as u16,
            ..request
        };
        qp.send.push(&request, Body::Sges(sges));
        self.ring(qp);
    }

    pub fn post_recv(&self, qp: &mut Qp, wr_id: u64, sges: &[Sge]) {
        qp.recv.push(wr_id, sges);
        qp.recv.publish();
    }
}

impl Queue {
    pub fn poll(&mut self) -> Option<Cqe> {
        self.consumer.pop()
    }

    /// Asks for an event; true: there are completions already.
    pub fn arm(&self, solicited_only: bool) -> bool {
        self.consumer.arm(solicited_only)
    }

    /// The event that was asked for is on its way.
    pub fn is_disarmed(&self) -> bool {
        // SAFETY: the queue's header lies at its base, mapped for as long as the program lives; it is atomics.
        let header = unsafe { self.base.cast::<CqHeader>().as_ref() };
        header.armed.load(std::sync::atomic::Ordering::SeqCst) == 0
    }

    pub fn wait(&mut self) -> Cqe {
        super::wait_for("a completion", || self.poll())
    }
}

/// The GID of an address.
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Requests, by the names of verbs.
pub fn write(wr_id: u64, remote: &Memory, offset: u64) -> SendWqe {
    SendWqe {
        wr_id,
        opcode: 0,
        remote_address: remote.address + offset,
        rkey: remote.key,
        ..SendWqe::default()
    }
}

pub fn write_with_imm(wr_id: u64, remote: &Memory, offset: u64, imm: u32) -> SendWqe {
    SendWqe {
        opcode: 1,
        imm,
        ..write(wr_id, remote, offset)
    }
}

pub fn send(wr_id: u64) -> SendWqe {
    SendWqe {
        wr_id,
        opcode: 2,
        ..SendWqe::default()
    }
}

pub fn read(wr_id: u64, remote: &Memory, offset: u64) -> SendWqe {
    SendWqe {
        opcode: 4,
        ..write(wr_id, remote, offset)
    }
}

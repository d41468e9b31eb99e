//! A program with one queue pair and one memory region.

use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use verbatim_verbs::{
    Access, AddressVector, Body, Context, Cq, Mr, Pd, PostError, Process, Qp, QpAttr, QpAttrMask, QpCap,
    QpInit, QpState, QpType, RecvWr, SEND_SIGNALED, SendOpcode, SendWr, Sge, UdAddress, Wc,
};

use super::Nic;

pub const REGION_BYTES: usize = 1 << 20;

pub const CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

/// Private anonymous memory, as a program's is.
pub struct Memory(NonNull<u8>);

// SAFETY: plain bytes; the tests order their accesses by completions.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                REGION_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self(NonNull::new(address.expect("memory").cast()).expect("not null"))
    }

    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn write_u64(&self, index: usize, value: u64) {
        assert!(index < REGION_BYTES / 8);
        // SAFETY: inside of the mapping, aligned.
        unsafe { self.0.as_ptr().cast::<u64>().add(index).write_volatile(value) };
    }

    pub fn read_u64(&self, index: usize) -> u64 {
        assert!(index < REGION_BYTES / 8);
        // SAFETY: inside of the mapping, aligned.
        unsafe { self.0.as_ptr().cast::<u64>().add(index).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), REGION_BYTES) };
    }
}

pub struct End {
    pub process: Arc<Process>,
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    pub mr: Arc<Mr>,
    pub cq: Arc<Cq>,
    pub qp: Arc<Qp>,
    pub memory: Memory,
}

impl End {
    pub fn new(nic: &Nic) -> Self {
        let process = Process::new(nic.path());
        let devices = process.devices();
        assert_eq!(devices.len(), 1);
        let context = process.open(&devices[0].name).unwrap();
        assert_eq!(context.gid(0), Some(nic.gid()));
        let pd = context.alloc_pd().unwrap();
        let memory = Memory::new();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let (address, length) = (memory.address(), REGION_BYTES as u64);
        let mr = pd.reg_mr(address, length, address, access).unwrap();
        let cq = context.create_cq(256, None).unwrap();
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: CAP,
            signal_all: false,
            srq: None,
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            process,
            context,
            pd,
            mr,
            cq,
            qp,
            memory,
        }
    }

    pub fn connect(&self, nic: &Nic, to: &End) {
        for (state, mask) in STEPS {
            let attr = connection_attr(state, nic.gid(), to.qp.number(), 0, 0);
            self.qp.modify(mask, &attr).unwrap();
        }
    }

    /// Posts a message of that number: immediate data and content tell it.
    pub fn send(&self, message: u32, signaled: bool) -> Result<(), PostError> {
        let index = message as usize % 1024;
        self.memory.write_u64(index, u64::from(message) << 16);
        self.post(SendOpcode::SendWithImm, message, index, 0, 0, signaled)
    }

    pub fn post(
        &self,
        opcode: SendOpcode,
        message: u32,
        index: usize,
        remote_address: u64,
        rkey: u32,
        signaled: bool,
    ) -> Result<(), PostError> {
        let sges = [self.sge(index)];
        let request = SendWr {
            wr_id: message.into(),
            opcode,
            flags: if signaled { SEND_SIGNALED } else { 0 },
            imm: message,
            remote_address,
            rkey,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: Body::Sges(&sges),
        };
        self.qp.post_send([request]).map_err(|(_, error)| error)
    }

    pub fn recv(&self, number: u64) -> Result<(), PostError> {
        let sges = [self.sge(2048 + number as usize % 1024)];
        let request = RecvWr {
            wr_id: number,
            sges: &sges,
        };
        self.qp.post_recv([request]).map_err(|(_, error)| error)
    }

    fn sge(&self, index: usize) -> Sge {
        Sge {
            address: self.memory.address() + 8 * index as u64,
            length: 8,
            lkey: self.mr.lkey(),
        }
    }

    /// The next completion, which must come soon.
    pub fn wait(&self) -> Wc {
        let start = std::time::Instant::now();
        let mut wc = [Wc::default()];
        while self.cq.poll(&mut wc) == 0 {
            assert!(start.elapsed().as_secs() < 20, "waited too long for a completion");
        }
        wc[0]
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // The region gives its pages back before the memory goes.
        let _ = self.qp.destroy();
        let _ = self.mr.dereg();
        let _ = self.context.close();
        self.process.cleanup();
    }
}

/// From RESET to RTS.
pub const STEPS: [(QpState, QpAttrMask); 3] = [
    (
        QpState::Init,
        QpAttrMask::STATE
            .union(QpAttrMask::PKEY_INDEX)
            .union(QpAttrMask::PORT)
            .union(QpAttrMask::ACCESS_FLAGS),
    ),
    (
        QpState::Rtr,
        QpAttrMask::STATE
            .union(QpAttrMask::AV)
            .union(QpAttrMask::PATH_MTU)
            .union(QpAttrMask::DEST_QPN)
            .union(QpAttrMask::RQ_PSN)
            .union(QpAttrMask::MAX_DEST_RD_ATOMIC)
            .union(QpAttrMask::MIN_RNR_TIMER),
    ),
    (
        QpState::Rts,
        QpAttrMask::STATE
            .union(QpAttrMask::TIMEOUT)
            .union(QpAttrMask::RETRY_CNT)
            .union(QpAttrMask::RNR_RETRY)
            .union(QpAttrMask::SQ_PSN)
            .union(QpAttrMask::MAX_QP_RD_ATOMIC),
    ),
];

pub fn connection_attr(state: QpState, dgid: [u8; 16], dest_qpn: u32, rq_psn: u32, sq_psn: u32) -> QpAttr {
    QpAttr {
        state,
        port_num: 1,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
        path_mtu: 3,
        dest_qpn,
        rq_psn,
        sq_psn,
        av: AddressVector {
            dgid,
            port_num: 1,
            hop_limit: 64,
            ..AddressVector::default()
        },
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        timeout: 10,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    }
}

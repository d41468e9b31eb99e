//! What the backend `rdma-core` costs: the objects of this crate above a libibverbs, and that library called directly.
//!
//! The library has a provider that completes at once (`tests/fake_ibverbs`), so that no RNIC's cost hides ours.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};

use super::{CAP, KEY};
use crate::backend::rdma_core::direct::Direct;
use crate::error::VerbsError;
use crate::tables::KeyTable;
use crate::{Cq, Process, Qp, QpInit};

const ENTRIES: u32 = 100;
const DEVICE: &str = "fake0";

/// `fake_receive` of the provider: a message of so many bytes arrives.
type Receive = unsafe extern "C" fn(*mut c_void, c_uint, c_int) -> c_int;

/// One queue pair with its completion queue through the objects, and one without.
pub struct System {
    /// Through the objects.
    pub qp: Arc<Qp>,
    /// Its completions.
    pub cq: Arc<Cq>,
    /// The other one, as the library has it.
    pub direct: Direct,
    /// The library's queue pair below `qp`.
    beneath: NonNull<c_void>,
    receive: Receive,
}

impl System {
    /// Makes it above the library in this file, which is loaded once.
    pub fn new(library: &Path) -> Result<Self, VerbsError> {
        static LOADED: OnceLock<Result<crate::backend::rdma_core::Loaded, VerbsError>> = OnceLock::new();
        let loaded = LOADED
            .get_or_init(|| crate::backend::rdma_core::load(library))
            .as_ref()
            .map_err(|error| VerbsError::Unsupported(error.to_string()))?;
        let device = loaded.open(DEVICE)?;
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(device.clone()))?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(ENTRIES, None)?;
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: CAP,
            signal_all: false,
            srq: None,
        };
        let qp = pd.create_qp(&init)?;
        for (state, mask) in [
            (QpState::Init, QpAttrMask::STATE),
            (QpState::Rtr, QpAttrMask::STATE),
            (QpState::Rts, QpAttrMask::STATE | QpAttrMask::SQ_PSN),
        ] {
            let attr = QpAttr {
                state,
                ..QpAttr::default()
            };
            qp.modify(mask, &attr)?;
        }
        let beneath = device.pointer(qp.number())?;
        let direct = Direct::new(&device, ENTRIES, CAP)?;
        let receive = loaded.symbol(c"fake_receive").ok_or_else(|| {
            VerbsError::Unsupported(format!("{} is no provider for measurements", library.display()))
        })?;
        Ok(Self {
            qp,
            cq,
            direct,
            beneath,
            // SAFETY: the provider's function of that name and type.
            receive: unsafe { std::mem::transmute::<NonNull<c_void>, Receive>(receive) },
        })
    }

    /// From now on keys are translated, as after a move of this process and of its peer.
    pub fn is_moved(&self) {
        let keys = Arc::new(KeyTable::new());
        keys.set(KEY, KEY);
        let mut send = self.qp.send.lock();
        send.set_local_keys(keys.clone());
        send.set_remote_keys(Some(keys.clone()));
        drop(send);
        self.qp.recv.lock().set_local_keys(keys);
    }

    /// All RECVs get their messages. What was sent has completed already.
    pub fn complete(&self) {
        for qp in [self.beneath, self.direct.qp()] {
            // SAFETY: the provider's queue pair, alive as long as the objects.
            while unsafe { (self.receive)(qp.as_ptr(), 64, 0) } == 0 {}
        }
    }
}

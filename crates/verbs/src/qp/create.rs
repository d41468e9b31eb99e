//! Making a queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use parking_lot::Mutex;
use verbatim_device::control::{QpAttr, QpCap, QpType};

use super::control::Control;
use super::shadow::{CompletionSide, Shadow};
use super::{Qp, RecvQueue, SendQueue};
use crate::backend::{Device, PhysicalQpInit, QpPlace};
use crate::context::Context;
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::lock;
use crate::pd::Pd;
use crate::process::Process;
use crate::session;
use crate::srq::Srq;
use crate::unacked::Unacked;
use crate::work::MAX_SGE;

/// How often a queue pair is made anew because its number is a virtual one.
const MAX_COLLISIONS: usize = 64;

/// What a queue pair is made of (`struct ibv_qp_init_attr`).
#[derive(Debug, Clone)]
pub struct QpInit {
    /// Where send completions go.
    pub send_cq: Arc<Cq>,
    /// Where receive completions go.
    pub recv_cq: Arc<Cq>,
    /// The transport.
    pub qp_type: QpType,
    /// What is asked for.
    pub cap: QpCap,
    /// Every send request makes a completion (`sq_sig_all`).
    pub signal_all: bool,
    /// Where RECVs come from, in place of an own queue; then `cap.max_recv_wr` and `cap.max_recv_sge` do not count.
    pub srq: Option<Arc<Srq>>,
}

impl QpInit {
    /// Whether all that it names is of this context, and its limits can be.
    fn check(&self, context: &Arc<Context>) -> Result<(), VerbsError> {
        if self.cap.max_send_sge.max(self.cap.max_recv_sge) as usize > MAX_SGE {
            return Err(VerbsError::Invalid(format!(
                "a request may have at most {MAX_SGE} scatter/gather entries"
            )));
        }
        for cq in [&self.send_cq, &self.recv_cq] {
            if !Arc::ptr_eq(cq.context(), context) {
                return Err(VerbsError::Invalid(
                    "the completion queue is another device's".to_owned(),
                ));
            }
        }
        let srq = self.srq.as_ref();
        if srq.is_some_and(|srq| !Arc::ptr_eq(srq.context(), context)) {
            return Err(VerbsError::Invalid(
                "the shared receive queue is another device's".to_owned(),
            ));
        }
        Ok(())
    }

    /// As the RNIC is asked for it.
    pub(crate) fn physical(&self, pd: &Pd) -> PhysicalQpInit {
        PhysicalQpInit {
            pd: pd.physical.load(SeqCst),
            send_cq: self.send_cq.physical(),
            recv_cq: self.recv_cq.physical(),
            srq: self.srq.as_ref().map(|srq| srq.physical()),
            qp_type: self.qp_type,
            cap: self.cap,
        }
    }
}

impl Qp {
    pub(crate) fn create(pd: &Arc<Pd>, init: &QpInit) -> Result<Arc<Self>, VerbsError> {
        let context = pd.context();
        let process = context.process();
        let _pass = process.control.enter();
        init.check(context)?;
        let device = context.device()?;
        let place = create_physically(process, context.is_movable(), &*device, &init.physical(pd))?;
        let number = match context.moves.load(SeqCst) {
            0 => place.qpn,
            _ => session::publish(context, place.qpn, init.qp_type),
        };
        Self::assemble(pd, init, &*device, number, place, place.cap, false)
    }

    /// As [`Self::create`], with that number, and limits that are exactly those of `init`. It waits for what was in its queues.
    /// The caller is alone with the context, or has entered its gate.
    pub(crate) fn create_as(pd: &Arc<Pd>, init: &QpInit, number: u32) -> Result<Arc<Self>, VerbsError> {
        let context = pd.context();
        init.check(context)?;
        let device = context.device()?;
        let place = device.create_qp_as(&init.physical(pd), number)?;
        let (given, wanted) = (&place.cap, &init.cap);
        let own = init.srq.is_none();
        let fits = given.max_send_wr >= wanted.max_send_wr
            && given.max_send_sge >= wanted.max_send_sge
            && given.max_inline_data >= wanted.max_inline_data
            && (!own || given.max_recv_wr >= wanted.max_recv_wr && given.max_recv_sge >= wanted.max_recv_sge);
        if place.qpn != number || !fits {
            let _ = device.destroy_qp(place.qpn);
            return Err(VerbsError::Invalid(format!(
                "the RNIC gave another queue pair than {number:#x} with {wanted:?}"
            )));
        }
        Self::assemble(pd, init, &*device, number, place, init.cap, true)
    }

    /// The object of a queue pair that the RNIC has made.
    fn assemble(
        pd: &Arc<Pd>,
        init: &QpInit,
        device: &dyn Device,
        number: u32,
        place: QpPlace,
        mut cap: QpCap,
        awaits_refill: bool,
    ) -> Result<Arc<Self>, VerbsError> {
        let context = pd.context().clone();
        let process = context.process().clone();
        let ends = device.qp_ends(&place)?;
        if init.srq.is_some() {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
        }

        let side = Arc::new(CompletionSide {
            qpn: number,
            send: Shadow::new(cap.max_send_wr),
            recv: match init.qp_type {
                QpType::Ud => Shadow::with_fronts(cap.max_recv_wr),
                QpType::Rc | QpType::Uc => Shadow::new(cap.max_recv_wr),
            },
            shared: init.srq.as_ref().map(|srq| srq.slots.clone()),
            datagrams: (init.qp_type == QpType::Ud).then(|| context.datagrams.clone()),
            windows: context.windows.clone(),
            received: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            backlog: AtomicBool::new(false),
        });
        let lkeys = context.moved_keys();
        let mut send = SendQueue::new(side.clone(), &init.send_cq, cap, init.signal_all, lkeys.clone());
        send.attach_again(ends.send);
        let mut recv = RecvQueue::new(side.clone(), &init.recv_cq, cap, lkeys);
        if init.srq.is_none() {
            recv.attach_new(ends.recv);
        }
        let qp = Arc::new(Self {
            context: context.clone(),
            pd: pd.clone(),
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            number,
            srq: init.srq.clone(),
            qp_type: init.qp_type,
            signal_all: init.signal_all,
            cap,
            side,
            control: Mutex::new(Control {
                awaits_refill,
                ..Control::new(place, QpAttr::default())
            }),
            send: Arc::new(lock::Mutex::new(send)),
            recv: lock::Mutex::new(recv),
            async_events: Unacked::default(),
            cookie: AtomicUsize::new(0),
        });
        qp.own(place.qpn);
        let mut objects = context.objects.lock();
        objects.qps.insert(qp.number, qp.clone());
        pd.users.fetch_add(1, SeqCst);
        init.send_cq.users.fetch_add(1, SeqCst);
        init.recv_cq.users.fetch_add(1, SeqCst);
        if let Some(srq) = &init.srq {
            srq.users.fetch_add(1, SeqCst);
        }
        drop(objects);
        if context.is_movable() {
            process.registry.lock().qps.insert(qp.number, qp.clone());
        }
        process.changed();
        Ok(qp)
    }

    /// Completions with that physical number are this queue pair's.
    pub(crate) fn own(&self, physical_qpn: u32) {
        let _numbers = self.context.numbers.lock();
        for cq in self.cqs() {
            cq.queue
                .lock()
                .add_owner(physical_qpn, self.side.clone(), self.send.clone());
        }
    }

    /// Completions with that physical number are nobody's.
    pub(crate) fn disown(&self, physical_qpn: u32) {
        for cq in self.cqs() {
            cq.queue.lock().remove_owner(physical_qpn);
        }
    }

    /// Its completion queues, each once.
    pub(crate) fn cqs(&self) -> impl Iterator<Item = &Arc<Cq>> {
        let same = Arc::ptr_eq(&self.send_cq, &self.recv_cq);
        std::iter::once(&self.send_cq).chain((!same).then_some(&self.recv_cq))
    }

    /// What it was made of, with the limits that it was given.
    pub fn init_attr(&self) -> QpInit {
        QpInit {
            send_cq: self.send_cq.clone(),
            recv_cq: self.recv_cq.clone(),
            qp_type: self.qp_type,
            cap: self.cap,
            signal_all: self.signal_all,
            srq: self.srq.clone(),
        }
    }
}

/// Makes queue pairs at the RNIC until one's number is not a live virtual one.
fn create_physically(
    process: &Process,
    is_movable: bool,
    device: &dyn Device,
    init: &PhysicalQpInit,
) -> Result<QpPlace, VerbsError> {
    let mut collided = Vec::new();
    let outcome = loop {
        match device.create_qp(init) {
            Ok(place) if !is_movable || process.qp(place.qpn).is_none() => break Ok(place),
            Ok(place) => collided.push(place.qpn),
            Err(error) => break Err(error),
        }
        if collided.len() == MAX_COLLISIONS {
            break Err(VerbsError::Refused {
                verb: "create_qp",
                errno: libc::ENOMEM,
                message: format!(
                    "{MAX_COLLISIONS} numbers in a row are those of queue pairs that have moved"
                ),
            });
        }
    };
    for qpn in collided {
        // Nobody has seen these; if the RNIC will not let go of one, it keeps it until the context is closed.
        let _ = device.destroy_qp(qpn);
    }
    outcome
}

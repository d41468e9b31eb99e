//! The control path: one verb of the library for each of ours.

use std::any::Any;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use verbatim_device::control::{
    AddressVector, AsyncEvent, DeviceAttr, MwState, MwType, PortAttr, QpAttr, QpAttrMask, SrqAttr,
};

use super::channel::{Channel, Source};
use super::completions::Completions;
use super::ffi;
use super::functions::Functions;
use super::library::Library;
use super::live::{Live, Opened};
use super::objects::{Ah, Comp, Objects, Qp};
use super::park::Rested;
use super::recvs::Recvs;
use super::sends::Sends;
use super::{convert, events, port};
use crate::backend::{
    CompletionRing, CqPlace, Device, EventChannel, MadeAgainBy, Parked, PhysicalMrChange, PhysicalMrInit,
    PhysicalQpInit, QpEnds, QpPlace, RecvRing, SrqPlace, Watched,
};
use crate::error::VerbsError;
use crate::tables::key_slot;

/// So many markers are under way to a completion queue at a time.
const HIDDEN_ENTRIES: u32 = 64;
/// A device whose completion queues cannot have so many entries gives one of them to markers.
const FEW_ENTRIES: u32 = 16 * HIDDEN_ENTRIES;

/// A device of the library.
#[derive(Debug)]
pub struct RdmaCoreDevice {
    pub name: String,
    device_attr: DeviceAttr,
    port_attr: PortAttr,
    gone: AtomicBool,
    /// Why restored threads could not ring its doorbells.
    no_doorbells: Option<String>,
    /// Entries of each completion queue that the program does not see ([`super::markers`]).
    pub hidden_entries: u32,
    /// What stands still while the device is parked.
    pub resting: Mutex<Vec<Rested>>,
    /// Queue pairs that lost their RECVs when it was parked last.
    pub lost_recvs: Mutex<Vec<u32>>,
    /// Before `opened`, which every object of it holds too.
    pub objects: Arc<Objects>,
    pub opened: Arc<Opened>,
}

impl RdmaCoreDevice {
    pub fn new(name: &str, opened: Opened, no_doorbells: Option<String>) -> Result<Self, VerbsError> {
        let mut device_attr = port::query_device(name, &opened)?;
        let port_attr = port::query_port(name, &opened)?;
        events::make_non_blocking(&opened)?;
        let hidden_entries = if device_attr.max_cqe < FEW_ENTRIES {
            1
        } else {
            HIDDEN_ENTRIES
        };
        device_attr.max_cqe = device_attr.max_cqe.saturating_sub(hidden_entries);
        device_attr.max_qp_wr = device_attr.max_qp_wr.saturating_sub(1);
        let own = port::way_to_itself(&port_attr);
        Ok(Self {
            name: name.to_owned(),
            device_attr,
            port_attr,
            gone: AtomicBool::new(false),
            no_doorbells,
            hidden_entries,
            resting: Mutex::default(),
            lost_recvs: Mutex::default(),
            objects: Arc::new(Objects::new(own)),
            opened: Arc::new(opened),
        })
    }

    pub fn library(&self) -> &Library {
        self.opened.library()
    }

    pub fn functions(&self) -> &Functions {
        self.library().functions()
    }

    pub fn modify(&self, qp: &Qp, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        const VERB: &str = "modify_qp";
        let mut attr = convert::qp_attr_to_c(attr);
        // SAFETY: the queue pair is held.
        let returned = unsafe {
            let qp = qp.live.get(VERB)?;
            (self.functions().ibv_modify_qp)(qp.as_ptr(), &mut attr, mask.bits() as c_int)
        };
        self.check(VERB, returned)
    }

    pub fn check(&self, verb: &'static str, returned: c_int) -> Result<(), VerbsError> {
        self.library().check(verb, returned)
    }
}

pub fn clamp(number: u32) -> c_int {
    number.min(c_int::MAX as u32) as c_int
}

impl Device for RdmaCoreDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.device_attr, &self.port_attr)
    }

    /// Pages of the memory file are pinned as others are, and what the RNIC writes to them is seen by whoever maps the file.
    fn adopts_memory(&self) -> bool {
        true
    }

    fn checks_memory(&self) -> bool {
        true
    }

    fn blocker(&self) -> Option<String> {
        if let Some(why) = &self.no_doorbells {
            return Some(format!("no restored thread could post to {}: {why}", self.name));
        }
        self.blocked_by_windows()
    }

    fn keeps_queue_pair(&self, qpn: u32) -> Option<String> {
        self.has_window_of(qpn).then(|| {
            format!(
                "a memory window of type 2 of {} is bound to it, which cannot be bound to the one that would take its place",
                self.name
            )
        })
    }

    fn made_again(&self) -> Option<MadeAgainBy> {
        Some(MadeAgainBy {
            name: self.name.clone(),
            driver: super::driver_of(&self.name),
        })
    }

    fn open_again(&self) -> Result<Arc<dyn Device>, VerbsError> {
        super::open(self.opened.shared_library(), &self.name)
    }

    fn watch(&self) -> Watched<'_> {
        Watched {
            connection: None,
            // The end of the RNIC is an event like others.
            events: Some(events::descriptor(&self.opened)),
        }
    }

    fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    fn next_async_event(&self) -> Option<AsyncEvent> {
        events::next(&self.opened, &self.gone)
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        let functions = self.functions();
        // SAFETY: the device is open.
        let pd = unsafe { (functions.ibv_alloc_pd)(self.opened.context()) };
        let pd = self.library().made("alloc_pd", pd)?;
        // SAFETY: just made.
        let live = unsafe { Live::new(self.opened.clone(), pd, functions.ibv_dealloc_pd) };
        let number = self.objects.next_number();
        self.objects.pds.insert(number, live);
        Ok(number)
    }

    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError> {
        self.objects.pds.destroy(pd, |pd| pd.destroy("dealloc_pd"))
    }

    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        self.register(init)
    }

    fn rereg_mr(&self, lkey: u32, change: &PhysicalMrChange<'_>) -> Result<(), VerbsError> {
        self.reregister(lkey, change)
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        self.objects.mrs.destroy(lkey, |mr| mr.live.destroy("dereg_mr"))
    }

    fn alloc_mw(&self, pd: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        self.make_mw(pd, mw_type)
    }

    fn dealloc_mw(&self, rkey: u32) -> Result<(), VerbsError> {
        self.objects
            .mws
            .destroy(key_slot(rkey), |mw| mw.live.destroy("dealloc_mw"))
    }

    fn query_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        self.state_of_mw(rkey)
    }

    /// One that is bound to nothing is as it was made.
    fn restore_mw(&self, state: &MwState) -> Result<(), VerbsError> {
        self.bind_again(state)
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        let functions = self.functions();
        // SAFETY: the device is open.
        let channel = unsafe { (functions.ibv_create_comp_channel)(self.opened.context()) };
        let channel = self.library().made("create_comp_channel", channel)?;
        // SAFETY: just made.
        let live = unsafe { Live::new(self.opened.clone(), channel, functions.ibv_destroy_comp_channel) };
        let number = self.objects.next_number();
        let source = Arc::new(Source::new(live, number)?);
        let shell = Channel::new()?;
        shell.attach(source.clone())?;
        let comp = Comp {
            source,
            shell: shell.downgrade().into(),
        };
        self.objects.channels.insert(number, comp);
        Ok(shell)
    }

    fn attach_comp_channel(&self, number: u32, channel: &dyn EventChannel) -> Result<(), VerbsError> {
        let comp = self.objects.channels.get(number)?;
        let shell = (channel as &dyn Any).downcast_ref::<Channel>().ok_or_else(|| {
            VerbsError::Invalid("a completion channel goes from a device to one of the same kind".to_owned())
        })?;
        let before = std::mem::replace(&mut *comp.shell.lock(), shell.downgrade());
        if let Some(before) = before.upgrade() {
            before.detach();
        }
        shell.attach(comp.source.clone())
    }

    /// It is closed when nobody waits in it any more.
    fn destroy_comp_channel(&self, channel: u32) -> Result<(), VerbsError> {
        self.objects.channels.get(channel)?;
        self.objects.channels.remove(channel);
        Ok(())
    }

    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        self.make_cq(entries, channel)
    }

    fn resize_cq(&self, cq: u32, entries: u32) -> Result<CqPlace, VerbsError> {
        const VERB: &str = "resize_cq";
        let object = self.objects.cqs.get(cq)?;
        let held = object.live.get(VERB)?;
        let with_hidden = clamp(entries.saturating_add(object.hidden));
        // SAFETY: the queue is held.
        let returned = unsafe { (self.functions().ibv_resize_cq)(held.as_ptr(), with_hidden) };
        self.check(VERB, returned)?;
        Ok(CqPlace {
            cq,
            // SAFETY: the queue is held.
            entries: unsafe { (*held.as_ptr()).cqe } as u32 - object.hidden,
            offset: 0,
        })
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.objects.cqs.destroy(cq, |cq| {
            cq.live.destroy("destroy_cq")?;
            if let Some(channel) = &cq.channel {
                channel.remove(cq.number);
            }
            Ok(())
        })
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        self.make_qp(init)
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        let qp = self.objects.qps.get(qpn)?;
        self.modify(&qp, mask, attr)?;
        qp.attr.lock().merge(attr, mask);
        Ok(())
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        const VERB: &str = "query_qp";
        let qp = self.objects.qps.get(qpn)?;
        let mut attr = ffi::ibv_qp_attr::default();
        let mut init = ffi::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: std::ptr::null_mut(),
            recv_cq: std::ptr::null_mut(),
            srq: std::ptr::null_mut(),
            cap: ffi::ibv_qp_cap::default(),
            qp_type: 0,
            sq_sig_all: 0,
        };
        // SAFETY: the queue pair is held; both structures are as the header has them.
        let returned = unsafe {
            let qp = qp.live.get(VERB)?;
            (self.functions().ibv_query_qp)(qp.as_ptr(), &mut attr, convert::every_attribute(), &mut init)
        };
        self.check(VERB, returned)?;
        Ok(convert::qp_attr_from_c(&attr))
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.objects.qps.destroy(qpn, |qp| {
            qp.disown();
            qp.live.destroy("destroy_qp").inspect_err(|_| qp.own())?;
            qp.forget_marks();
            qp.marker_ah.lock().take();
            Ok(())
        })
    }

    fn attach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        const VERB: &str = "attach_mcast";
        let qp = self.objects.qps.get(qpn)?;
        let gid = ffi::ibv_gid { raw: gid };
        // SAFETY: the queue pair is held. On Ethernet there is no LID.
        let returned = unsafe { (self.functions().ibv_attach_mcast)(qp.live.get(VERB)?.as_ptr(), &gid, 0) };
        self.check(VERB, returned)
    }

    fn detach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        const VERB: &str = "detach_mcast";
        let qp = self.objects.qps.get(qpn)?;
        let gid = ffi::ibv_gid { raw: gid };
        // SAFETY: as above.
        let returned = unsafe { (self.functions().ibv_detach_mcast)(qp.live.get(VERB)?.as_ptr(), &gid, 0) };
        self.check(VERB, returned)
    }

    fn create_srq(&self, pd: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        self.make_srq(pd, attr)
    }

    fn modify_srq(&self, srq: u32, limit: u32) -> Result<(), VerbsError> {
        const VERB: &str = "modify_srq";
        let srq = self.objects.srqs.get(srq)?;
        let mut attr = ffi::ibv_srq_attr {
            srq_limit: limit,
            ..ffi::ibv_srq_attr::default()
        };
        // SAFETY: the queue is held.
        let returned = unsafe {
            (self.functions().ibv_modify_srq)(srq.live.get(VERB)?.as_ptr(), &mut attr, ffi::SRQ_LIMIT)
        };
        self.check(VERB, returned)
    }

    fn query_srq(&self, srq: u32) -> Result<SrqAttr, VerbsError> {
        const VERB: &str = "query_srq";
        let srq = self.objects.srqs.get(srq)?;
        let mut attr = ffi::ibv_srq_attr::default();
        // SAFETY: the queue is held.
        let returned = unsafe { (self.functions().ibv_query_srq)(srq.live.get(VERB)?.as_ptr(), &mut attr) };
        self.check(VERB, returned)?;
        Ok(convert::srq_attr_from_c(&attr))
    }

    fn destroy_srq(&self, srq: u32) -> Result<(), VerbsError> {
        self.objects
            .srqs
            .destroy(srq, |srq| srq.live.destroy("destroy_srq"))
    }

    fn create_ah(&self, pd: u32, av: &AddressVector) -> Result<u32, VerbsError> {
        const VERB: &str = "create_ah";
        let functions = self.functions();
        let pd = self.objects.pds.get(pd)?;
        let mut attr = convert::av_to_c(av);
        // SAFETY: the protection domain is held.
        let ah = unsafe { (functions.ibv_create_ah)(pd.get(VERB)?.as_ptr(), &mut attr) };
        let ah = self.library().made(VERB, ah)?;
        let number = self.objects.next_number();
        // SAFETY: just made.
        let live = unsafe { Live::new(self.opened.clone(), ah, functions.ibv_destroy_ah) };
        self.objects.ahs.insert(number, Ah { live, _pd: pd });
        Ok(number)
    }

    fn destroy_ah(&self, ah: u32) -> Result<(), VerbsError> {
        self.objects.ahs.destroy(ah, |ah| ah.live.destroy("destroy_ah"))
    }

    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let qp = self.objects.qps.get(place.qpn)?;
        Ok(QpEnds {
            send: Box::new(Sends::new(qp.clone(), self.objects.clone())?),
            recv: Box::new(Recvs::of_qp(qp)?),
        })
    }

    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        Ok(Box::new(Completions::new(
            self.objects.cqs.get(place.cq)?,
            self.objects.clone(),
        )?))
    }

    fn srq_end(&self, place: &SrqPlace) -> Result<Box<dyn RecvRing>, VerbsError> {
        Ok(Box::new(Recvs::of_srq(self.objects.srqs.get(place.srq)?)))
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        self.rest()
    }

    fn lost_recvs(&self) -> Vec<u32> {
        self.lost_recvs.lock().clone()
    }

    fn abandon(self: Arc<Self>, dead: Option<BorrowedFd<'_>>) {
        self.cut_off(dead);
    }
}

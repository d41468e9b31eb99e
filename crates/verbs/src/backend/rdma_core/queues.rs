//! Making queues: of completions, of a pair, and shared ones.

use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;
use verbatim_device::control::SrqAttr;

use super::channel::Armed;
use super::convert;
use super::device::{RdmaCoreDevice, clamp};
use super::ffi;
use super::live::Live;
use super::markers::Marks;
use super::objects::{Cq, Qp, Srq};
use super::progress::{Progress, QpProgress};
use crate::backend::{CqPlace, PhysicalQpInit, QpPlace, SrqPlace};
use crate::error::VerbsError;
use crate::tables::Radix24;

impl RdmaCoreDevice {
    pub fn make_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let functions = self.functions();
        let (channel, event) = channel.unzip();
        let event = event.unwrap_or(0);
        let channel = channel
            .map(|channel| self.objects.channels.get(channel))
            .transpose()?;
        let number = self.objects.next_number();
        // SAFETY: the device is open and the channel alive. The library only gives the number back.
        let cq = unsafe {
            (functions.ibv_create_cq)(
                self.opened.context(),
                clamp(entries.saturating_add(self.hidden_entries)),
                number as usize as *mut c_void,
                channel
                    .as_ref()
                    .map_or(std::ptr::null_mut(), |channel| channel.source.pointer()),
                0,
            )
        };
        let cq = self.library().made("create_cq", cq)?;
        // SAFETY: just made.
        let entries = unsafe { (*cq.as_ptr()).cqe } as u32 - self.hidden_entries;
        let cq = Cq {
            // SAFETY: just made.
            live: unsafe { Live::new(self.opened.clone(), cq, functions.ibv_destroy_cq) },
            number,
            owners: Radix24::new().into(),
            owner_changes: 0.into(),
            armed: Arc::new(Armed::default()),
            channel: channel.map(|channel| channel.source.clone()),
            spare: self.hidden_entries.into(),
            hidden: self.hidden_entries,
            left: Mutex::default(),
        };
        if let Some(channel) = &cq.channel {
            channel.add(number, event, cq.armed.clone());
        }
        self.objects.cqs.insert(number, cq);
        Ok(CqPlace {
            cq: number,
            entries,
            offset: 0,
        })
    }

    pub fn make_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        const VERB: &str = "create_qp";
        let functions = self.functions();
        let pd = self.objects.pds.get(init.pd)?;
        let cqs = [
            self.objects.cqs.get(init.send_cq)?,
            self.objects.cqs.get(init.recv_cq)?,
        ];
        let srq = init.srq.map(|srq| self.objects.srqs.get(srq)).transpose()?;
        let [send_cq, recv_cq] = [cqs[0].live.get(VERB)?, cqs[1].live.get(VERB)?];
        let held_srq = srq.as_ref().map(|srq| srq.live.get(VERB)).transpose()?;
        let mut attr = ffi::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: send_cq.as_ptr(),
            recv_cq: recv_cq.as_ptr(),
            srq: held_srq.as_ref().map_or(std::ptr::null_mut(), |srq| srq.as_ptr()),
            cap: convert::cap_to_c(&init.cap),
            qp_type: init.qp_type as u32,
            // The objects above say it with each request.
            sq_sig_all: 0,
        };
        let held_pd = pd.get(VERB)?;
        // SAFETY: all objects are held.
        let create = |attr: &mut _| unsafe { (functions.ibv_create_qp)(held_pd.as_ptr(), attr) };
        attr.cap.max_send_wr = init.cap.max_send_wr.saturating_add(1);
        let mut qp = create(&mut attr);
        let mut hidden = 1;
        if qp.is_null() {
            // As large as can be: it goes without the slot for markers.
            (attr.cap, hidden) = (convert::cap_to_c(&init.cap), 0);
            qp = create(&mut attr);
        }
        let qp = self.library().made(VERB, qp)?;
        drop((send_cq, recv_cq, held_srq, held_pd));
        // SAFETY: just made.
        let number = unsafe { (*qp.as_ptr()).qp_num };
        let physical = attr.cap.max_send_wr;
        attr.cap.max_send_wr = physical.saturating_sub(hidden);
        let cap = convert::cap_from_c(&attr.cap);
        let qp = Qp {
            // SAFETY: just made.
            live: unsafe { Live::new(self.opened.clone(), qp, functions.ibv_destroy_qp) },
            number,
            qp_type: init.qp_type,
            cap,
            progress: Arc::new(QpProgress {
                send: Progress::default(),
                recv: srq.as_ref().map_or_else(Arc::default, |srq| srq.progress.clone()),
                recv_is_shared: srq.is_some(),
                marks: Marks::new(cap.max_send_wr, physical),
            }),
            cqs,
            srq,
            pd,
            attr: Mutex::default(),
            marker_ah: Mutex::default(),
        };
        self.objects.qps.insert(number, qp).own();
        Ok(QpPlace {
            qpn: number,
            cap,
            slot: 0,
            offset: 0,
        })
    }

    pub fn make_srq(&self, pd: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        const VERB: &str = "create_srq";
        let functions = self.functions();
        let pd = self.objects.pds.get(pd)?;
        let number = self.objects.next_number();
        let mut init = ffi::ibv_srq_init_attr {
            srq_context: number as usize as *mut c_void,
            attr: convert::srq_attr_to_c(attr),
        };
        // SAFETY: the protection domain is held. The library only gives the number back.
        let srq = unsafe { (functions.ibv_create_srq)(pd.get(VERB)?.as_ptr(), &mut init) };
        let srq = self.library().made(VERB, srq)?;
        let attr = convert::srq_attr_from_c(&init.attr);
        let srq = Srq {
            // SAFETY: just made.
            live: unsafe { Live::new(self.opened.clone(), srq, functions.ibv_destroy_srq) },
            attr,
            progress: Arc::default(),
            _pd: pd,
        };
        self.objects.srqs.insert(number, srq);
        Ok(SrqPlace {
            srq: number,
            attr,
            offset: 0,
        })
    }
}

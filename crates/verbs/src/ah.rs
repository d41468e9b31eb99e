//! Address handles: where a datagram goes.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::MutexGuard;
use verbatim_device::control::AddressVector;

use crate::backend::Device;
use crate::context::Objects;
use crate::error::VerbsError;
use crate::pd::Pd;
use crate::reach::{Patience, is_unanswered};
use crate::session;

/// An address handle.
#[derive(Debug)]
pub struct Ah {
    pd: Arc<Pd>,
    number: u32,
    attr: AddressVector,
}

impl Ah {
    pub(crate) fn create(pd: &Arc<Pd>, attr: &AddressVector) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        let context = &pd.context;
        if context.is_movable() {
            let ways = session::ways(process, attr.dgid)?;
            context.datagrams.learn(&ways);
        }
        let device = context.device()?;
        let there = AddressVector {
            sgid_index: context.physical_gid_index(attr.sgid_index)?,
            ..*attr
        };
        let physical = device.create_ah(pd.physical.load(SeqCst), &there)?;
        let objects = context.objects.lock();
        // The RNIC's number, unless it is that of a handle that has moved: then the last that is free.
        let free = (0..=physical).rev().chain((0..u32::MAX).rev());
        let number = free.into_iter().find(|number| !objects.ahs.contains_key(number));
        let number = number.expect("there are not so many");
        Ok(Self::assemble(pd, attr, &*device, objects, number, physical))
    }

    /// As [`Self::create`], with that number, which no other has. The caller is alone with the context, or has entered its gate.
    pub(crate) fn create_as(
        pd: &Arc<Pd>,
        attr: &AddressVector,
        number: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let context = &pd.context;
        let ways = session::ways(context.process(), attr.dgid)?;
        context.datagrams.learn(&ways);
        let device = context.device()?;
        let physical = device.create_ah(pd.physical.load(SeqCst), attr)?;
        let objects = context.objects.lock();
        Ok(Self::assemble(pd, attr, &*device, objects, number, physical))
    }

    fn assemble(
        pd: &Arc<Pd>,
        attr: &AddressVector,
        device: &dyn Device,
        mut objects: MutexGuard<'_, Objects>,
        number: u32,
        physical: u32,
    ) -> Arc<Self> {
        let context = &pd.context;
        let ah = Arc::new(Self {
            pd: pd.clone(),
            number,
            attr: *attr,
        });
        objects.ahs.insert(number, ah.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        context.datagrams.add_handle(number, attr.dgid, physical);
        ah.make_ways(device);
        ah
    }

    /// Makes the same way to the hosts where queue pairs behind it have moved to.
    pub(crate) fn make_ways(&self, device: &dyn Device) {
        let context = &self.pd.context;
        let datagrams = &context.datagrams;
        let Ok(sgid_index) = context.physical_gid_index(self.attr.sgid_index) else {
            return;
        };
        for gid in datagrams.wanted(self.number) {
            let there = AddressVector {
                dgid: gid,
                sgid_index,
                ..self.attr
            };
            // Without it, datagrams go where nobody is any more: they may be lost.
            if let Ok(physical) = device.create_ah(self.pd.physical.load(SeqCst), &there)
                && !datagrams.add_way(self.number, gid, physical)
            {
                let _ = device.destroy_ah(physical);
            }
        }
    }

    /// Makes it anew at the RNIC to which its context has moved. What is sent by it to a host that does not answer there fails.
    pub(crate) fn make_again(&self, device: &dyn Device, patience: &mut Patience) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        let Ok(sgid_index) = context.physical_gid_index(self.attr.sgid_index) else {
            // Made since it was looked at whether all have a way there: what is sent with it fails.
            return Ok(());
        };
        let there = AddressVector {
            sgid_index,
            ..self.attr
        };
        let made = patience.with(|| device.create_ah(self.pd.physical.load(SeqCst), &there));
        let physical = match made {
            Err(error) if is_unanswered(&error) => return Ok(()),
            made => made?,
        };
        let datagrams = &context.datagrams;
        datagrams.add_handle(self.number, self.attr.dgid, physical);
        self.make_ways(device);
        Ok(())
    }

    /// Its number, for [`crate::UdAddress::ah`].
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The way that it stands for.
    pub fn attr(&self) -> &AddressVector {
        &self.attr
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Destroys it. Requests that were posted with it before may fail.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        let _pass = context.process().control.enter();
        let removed = context.objects.lock().ahs.remove(&self.number);
        let removed = removed.ok_or_else(|| VerbsError::Gone {
            object: format!("address handle {}", self.number),
        })?;
        drop(removed);
        let mut outcome = Ok(());
        for physical in context.datagrams.remove_handle(self.number) {
            let destroyed = context.destroy_physically(|device| device.destroy_ah(physical));
            outcome = outcome.and(destroyed);
        }
        self.pd.users.fetch_sub(1, SeqCst);
        outcome
    }
}

//! Address handles: where a datagram goes.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_device::control::AddressVector;

use crate::error::VerbsError;
use crate::pd::Pd;

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
        let number = pd.context.device()?.create_ah(pd.physical.load(SeqCst), attr)?;
        let ah = Arc::new(Self {
            pd: pd.clone(),
            number,
            attr: *attr,
        });
        let mut objects = pd.context.objects.lock();
        objects.ahs.insert(number, ah.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        process.changed();
        Ok(ah)
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
        let outcome = context.destroy_physically(|device| device.destroy_ah(self.number));
        match outcome {
            Ok(()) => _ = self.pd.users.fetch_sub(1, SeqCst),
            Err(_) => _ = context.objects.lock().ahs.insert(self.number, removed),
        }
        context.process().changed();
        outcome
    }
}

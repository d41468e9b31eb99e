//! Memory regions.

use verbatim_device::control::Reply;

use super::Desk;
use crate::context::Context;
use crate::error::Refused;
use crate::memory::{Region, Registration};

impl Desk<'_> {
    pub(super) fn reg_mr(
        &mut self,
        wanted: &Registration<'_>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(wanted.pd, wanted.context)?;
        let region = Region::new(wanted, &mut context.mappings, &context.owner)?;
        let key = self
            .objects
            .regions
            .insert(region)
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no memory region is left"))?;
        self.use_pd(wanted.pd, wanted.context)?.users += 1;
        context.regions.insert(key);
        Ok(Reply::Mr { lkey: key, rkey: key })
    }

    pub(super) fn dereg_mr(&mut self, key: u32, context: &mut Context) -> Result<Reply, Refused> {
        if !context.regions.remove(&key) {
            return Err(Refused::no_such("memory region with key", key));
        }
        self.objects.remove_region(key);
        Ok(Reply::Done)
    }
}

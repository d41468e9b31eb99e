//! Address handles.

use verbatim_device::control::{AddressVector, Reply};

use super::{Desk, path};
use crate::context::Context;
use crate::error::Refused;
use crate::objects::Ah;

impl Desk<'_> {
    pub(super) fn create_ah(
        &mut self,
        id: u32,
        pd: u32,
        av: &AddressVector,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(pd, id)?;
        let path = path::resolve(self.device, av)?;
        context.ahs.check(self.device.limits.per_program.max_ah)?;
        let make = |_, _| Ah { pd, path };
        let ahs = &mut self.objects.shared.ahs;
        let ah = ahs
            .insert_with(make)
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no address handle is left"))?;
        context.ahs.insert(ah);
        self.use_pd(pd, id)?.users += 1;
        Ok(Reply::Ah { ah })
    }

    pub(super) fn destroy_ah(&mut self, ah: u32, context: &mut Context) -> Result<Reply, Refused> {
        if !context.ahs.remove(ah) {
            return Err(Refused::no_such("address handle", ah));
        }
        self.objects.remove_ah(ah);
        Ok(Reply::Done)
    }
}

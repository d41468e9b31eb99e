//! Protection domains.

use verbatim_device::control::Reply;

use super::Desk;
use crate::context::Context;
use crate::error::Refused;
use crate::objects::Pd;

impl Desk<'_> {
    pub(super) fn alloc_pd(&mut self, id: u32, context: &mut Context) -> Result<Reply, Refused> {
        let most = self.device.limits.per_program.max_pd;
        context.pds.check(most)?;
        let pd = self
            .objects
            .pds
            .insert_with(|_, _| Pd {
                context: id,
                users: 0,
            })
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no protection domain is left"))?;
        context.pds.insert(pd);
        Ok(Reply::Pd { pd })
    }

    pub(super) fn dealloc_pd(&mut self, pd: u32, context: &mut Context) -> Result<Reply, Refused> {
        if !context.pds.contains(&pd) {
            return Err(Refused::no_such("protection domain", pd));
        }
        let users = self.objects.pds.get(pd).map_or(0, |pd| pd.users);
        if users > 0 {
            return Err(Refused::new(
                libc::EBUSY,
                format!("{users} objects use protection domain {pd}"),
            ));
        }
        context.pds.remove(pd);
        self.objects.pds.remove(pd);
        Ok(Reply::Done)
    }

    /// The domain, if the context has it, for one more user.
    pub(super) fn use_pd(&mut self, pd: u32, id: u32) -> Result<&mut Pd, Refused> {
        let known = self.objects.pds.get_mut(pd).filter(|known| known.context == id);
        known.ok_or_else(|| Refused::no_such("protection domain", pd))
    }
}

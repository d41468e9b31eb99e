//! Memory windows: making and ending them. They are bound by work requests.

use verbatim_device::control::{MwType, Reply};

use super::{Desk, within};
use crate::context::Context;
use crate::error::Refused;
use crate::memory::Window;

impl Desk<'_> {
    pub(super) fn alloc_mw(
        &mut self,
        id: u32,
        pd: u32,
        mw_type: MwType,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(pd, id)?;
        within(
            context.windows.len(),
            self.device.limits.per_program.max_mw,
            "memory windows",
        )?;
        let regions = &mut self.objects.shared.regions;
        let rkey = regions
            .insert_window(Window::new(pd, mw_type))
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no memory window is left"))?;
        context.windows.insert(rkey >> 8);
        self.use_pd(pd, id)?.users += 1;
        Ok(Reply::Mw { rkey })
    }

    pub(super) fn dealloc_mw(&mut self, rkey: u32, context: &mut Context) -> Result<Reply, Refused> {
        let number = rkey >> 8;
        if !context.windows.remove(&number) {
            return Err(Refused::no_such("memory window with key", rkey));
        }
        self.objects.remove_window(number);
        Ok(Reply::Done)
    }
}

//! Memory windows: making and ending them, and those that come from another RNIC. They are bound by work requests.

use verbatim_device::control::{MwState, MwType, Reply};

use super::Desk;
use crate::context::Context;
use crate::error::Refused;
use crate::memory::{BindWanted, Domain, Window};

impl Desk<'_> {
    pub(super) fn alloc_mw(
        &mut self,
        id: u32,
        pd: u32,
        mw_type: MwType,
        rkey: Option<u32>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(pd, id)?;
        context.windows.check(self.device.limits.per_program.max_mw)?;
        let regions = &mut self.objects.shared.regions;
        let rkey = regions
            .insert_window(Window::new(pd, mw_type), rkey)
            .map_err(|why| Refused::number("memory window", rkey, why))?;
        context.windows.insert(rkey >> 8);
        self.use_pd(pd, id)?.users += 1;
        Ok(Reply::Mw { rkey })
    }

    pub(super) fn dealloc_mw(&mut self, rkey: u32, context: &mut Context) -> Result<Reply, Refused> {
        let number = rkey >> 8;
        if !context.windows.remove(number) {
            return Err(Refused::no_such("memory window with key", rkey));
        }
        self.objects.remove_window(number);
        Ok(Reply::Done)
    }

    pub(super) fn query_mw(&self, rkey: u32, context: &Context) -> Result<Reply, Refused> {
        let number = own_window(rkey, context)?;
        let state = self.objects.shared.regions.window_state(number);
        Ok(Reply::MwState(state.expect("the context has it")))
    }

    pub(super) fn restore_mw(
        &mut self,
        id: u32,
        state: &MwState,
        context: &Context,
    ) -> Result<Reply, Refused> {
        let number = own_window(state.rkey, context)?;
        let qpn = state.bound.and_then(|bound| bound.qpn);
        if let Some(qpn) = qpn {
            self.own_qp(qpn, id)?;
        }
        let regions = &mut self.objects.shared.regions;
        let window = regions.window(number).expect("the context has it");
        if state.bound.is_some() && qpn.is_some() != (window.mw_type == MwType::Two) {
            return Err(Refused::invalid(
                "windows of type 2, and only those, are bound to a queue pair",
            ));
        }
        let domain = Domain {
            pd: window.pd,
            qpn: qpn.unwrap_or(0),
        };
        regions.set_unbound(state.rkey);
        if let Some(bound) = &state.bound {
            let wanted = BindWanted {
                window: state.rkey,
                rkey: state.rkey,
                lkey: bound.lkey,
                start: bound.address,
                length: bound.length,
                access: bound.access,
            };
            let refused = |denied| Refused::invalid(format!("the window cannot be bound: {denied:?}"));
            regions.bind(domain, &wanted).map_err(refused)?;
        }
        Ok(Reply::Done)
    }
}

fn own_window(rkey: u32, context: &Context) -> Result<u32, Refused> {
    let number = rkey >> 8;
    match context.windows.contains(&number) {
        true => Ok(number),
        false => Err(Refused::no_such("memory window with key", rkey)),
    }
}

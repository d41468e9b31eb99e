//! Memory regions.

use std::os::fd::OwnedFd;

use verbatim_device::control::{Access, Reply, Translation};

use super::Desk;
use crate::context::Context;
use crate::error::Refused;
use crate::memory::{Region, Registration};

impl Desk<'_> {
    pub(super) fn reg_mr(
        &mut self,
        wanted: &Registration<'_>,
        key: Option<u32>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(wanted.pd, wanted.context)?;
        context.regions.check(self.device.limits.per_program.max_mr)?;
        let refused = |why| Refused::number("memory region", key, why);
        self.objects.shared.regions.check(key).map_err(refused)?;
        let region = Region::new(wanted, &mut context.mappings, &context.owner)?;
        let pieces = self.pieces_with(&region, 0, context)?;
        let key = self.objects.shared.regions.insert(region, key).map_err(refused)?;
        self.use_pd(wanted.pd, wanted.context)?.users += 1;
        context.regions.insert(key);
        context.pieces = pieces;
        Ok(Reply::Mr { lkey: key, rkey: key })
    }

    /// `ibv_rereg_mr`: whatever is not named stays, and the keys stay.
    #[allow(clippy::too_many_arguments, reason = "each is a field of the request")]
    pub(super) fn rereg_mr(
        &mut self,
        id: u32,
        key: u32,
        pd: Option<u32>,
        access: Option<Access>,
        translation: Option<&Translation>,
        fds: &[OwnedFd],
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let region = self.own_region(key, context)?;
        let (earlier_pd, earlier_access) = (region.pd, region.access);
        let earlier_pieces = region.pieces();
        let new_pd = pd.unwrap_or(earlier_pd);
        self.use_pd(new_pd, id)?;
        let access = access.unwrap_or(earlier_access);
        match translation {
            Some(translation) => {
                let wanted = Registration {
                    context: id,
                    pd: new_pd,
                    address: translation.address,
                    length: translation.length,
                    iova: translation.iova,
                    access,
                    segments: &translation.segments,
                    fds,
                };
                let anew = Region::new(&wanted, &mut context.mappings, &context.owner)?;
                context.pieces = self.pieces_with(&anew, earlier_pieces, context)?;
                *self.own_region(key, context)? = anew;
            }
            None => {
                let region = self.own_region(key, context)?;
                region.set_access(access)?;
                region.pd = new_pd;
            }
        }
        self.objects.release_pd(earlier_pd);
        self.use_pd(new_pd, id)?.users += 1;
        Ok(Reply::Mr { lkey: key, rkey: key })
    }

    pub(super) fn dereg_mr(&mut self, key: u32, context: &mut Context) -> Result<Reply, Refused> {
        let pieces = self.own_region(key, context)?.pieces();
        context.pieces -= pieces;
        context.regions.remove(key);
        self.objects.remove_region(key);
        Ok(Reply::Done)
    }

    /// How many pieces the context's regions have with that one, in place of one with `earlier` pieces.
    fn pieces_with(&self, region: &Region, earlier: usize, context: &Context) -> Result<usize, Refused> {
        let others = context.pieces - earlier;
        let most = self.device.limits.per_program.max_mr_pieces;
        let all = others + region.pieces();
        match all <= most as usize {
            true => Ok(all),
            false => Err(Refused::new(
                libc::ENOMEM,
                format!(
                    "{} pieces: this program's memory regions have {others}, and may have {most}",
                    region.pieces()
                ),
            )),
        }
    }

    /// The region, if the context has it and no window is bound to it.
    fn own_region(&mut self, key: u32, context: &Context) -> Result<&mut Region, Refused> {
        let known = match context.regions.contains(&key) {
            true => self.objects.shared.regions.get_mut(key),
            false => None,
        };
        let region = known.ok_or_else(|| Refused::no_such("memory region with key", key))?;
        if region.windows > 0 {
            return Err(Refused::new(
                libc::EBUSY,
                format!("{} memory windows are bound to region {key:#x}", region.windows),
            ));
        }
        Ok(region)
    }
}

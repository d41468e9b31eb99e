//! Shared receive queues.

use verbatim_device::control::{Reply, SrqAttr};
use verbatim_roce::MAX_SGE;

use super::Desk;
use crate::context::Context;
use crate::ends::SrqEnd;
use crate::error::Refused;
use crate::objects::Srq;

impl Desk<'_> {
    pub(super) fn create_srq(
        &mut self,
        id: u32,
        pd: u32,
        wanted: &SrqAttr,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(pd, id)?;
        let limits = &self.device.limits;
        if wanted.max_wr > limits.max_qp_wr || wanted.max_sge > MAX_SGE as u32 {
            return Err(Refused::invalid(format!(
                "{} requests of {} entries: a shared receive queue has at most {} of {MAX_SGE}",
                wanted.max_wr, wanted.max_sge, limits.max_qp_wr
            )));
        }
        context.srqs.check(limits.per_program.max_srq)?;
        let attr = SrqAttr {
            max_wr: wanted.max_wr.max(1),
            max_sge: wanted.max_sge.max(1),
            ..*wanted
        };
        check_limit(&attr, wanted.limit)?;
        let srqs = &mut self.objects.shared.srqs;
        if !srqs.has_room() {
            return Err(Refused::new(libc::ENOMEM, "no shared receive queue is left"));
        }
        let ring = SrqEnd::new(&context.arena, &attr)?;
        let offset = ring.offset();
        let queue = Srq {
            context: id,
            pd,
            users: 0,
            attr,
            ring,
            broken: false,
        };
        let srq = srqs.insert_with(|_, _| queue).expect("there was room");
        context.srqs.insert(srq);
        self.use_pd(pd, id)?.users += 1;
        Ok(Reply::Srq { srq, attr, offset })
    }

    pub(super) fn modify_srq(&mut self, id: u32, srq: u32, limit: u32) -> Result<Reply, Refused> {
        let queue = self.own_srq(srq, id)?;
        check_limit(&queue.attr, limit)?;
        queue.attr.limit = limit;
        Ok(Reply::Done)
    }

    pub(super) fn query_srq(&mut self, id: u32, srq: u32) -> Result<Reply, Refused> {
        let queue = self.own_srq(srq, id)?;
        Ok(Reply::Srq {
            srq,
            attr: queue.attr,
            offset: queue.ring.offset(),
        })
    }

    pub(super) fn destroy_srq(&mut self, id: u32, srq: u32, context: &mut Context) -> Result<Reply, Refused> {
        if self.own_srq(srq, id)?.users > 0 {
            return Err(Refused::new(
                libc::EBUSY,
                format!("queue pairs use shared receive queue {srq}"),
            ));
        }
        context.srqs.remove(srq);
        self.objects.remove_srq(srq);
        Ok(Reply::Done)
    }

    /// The queue, if the context has it.
    pub(super) fn own_srq(&mut self, srq: u32, id: u32) -> Result<&mut Srq, Refused> {
        let known = self
            .objects
            .shared
            .srqs
            .get_mut(srq)
            .filter(|known| known.context == id);
        known.ok_or_else(|| Refused::no_such("shared receive queue", srq))
    }
}

fn check_limit(attr: &SrqAttr, limit: u32) -> Result<(), Refused> {
    if limit <= attr.max_wr {
        return Ok(());
    }
    Err(Refused::invalid(format!(
        "a limit of {limit} for a shared receive queue of {} requests",
        attr.max_wr
    )))
}

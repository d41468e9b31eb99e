//! Completion queues.

use verbatim_device::control::Reply;
use verbatim_device::layout::CqLayout;

use super::Desk;
use crate::context::Context;
use crate::ends::CqEnd;
use crate::error::Refused;
use crate::objects::Cq;

impl Desk<'_> {
    pub(super) fn create_cq(
        &mut self,
        id: u32,
        entries: u32,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let most = self.device.limits.max_cqe;
        if entries == 0 || entries > most {
            return Err(Refused::invalid(format!(
                "{entries} entries: a completion queue has 1 to {most}"
            )));
        }
        if !self.objects.cqs.has_room() {
            return Err(Refused::new(libc::ENOMEM, "no completion queue is left"));
        }
        let layout = CqLayout::new(entries);
        let ring = CqEnd::new(&context.arena, &layout)?;
        let offset = ring.offset();
        let queue = Cq {
            context: id,
            users: 0,
            ring,
            overrun: false,
        };
        let cq = self
            .objects
            .cqs
            .insert_with(|_, _| queue)
            .expect("there was room");
        context.cqs.insert(cq);
        Ok(Reply::Cq {
            cq,
            entries: layout.entries,
            offset,
        })
    }

    pub(super) fn destroy_cq(&mut self, cq: u32, context: &mut Context) -> Result<Reply, Refused> {
        if !context.cqs.contains(&cq) {
            return Err(Refused::no_such("completion queue", cq));
        }
        if self.objects.cqs.get(cq).is_some_and(|queue| queue.users > 0) {
            return Err(Refused::new(
                libc::EBUSY,
                format!("queue pairs use completion queue {cq}"),
            ));
        }
        context.cqs.remove(&cq);
        self.objects.cqs.remove(cq);
        Ok(Reply::Done)
    }

    /// The queue, if the context has it.
    pub(super) fn own_cq(&mut self, cq: u32, id: u32) -> Result<&mut Cq, Refused> {
        let known = self.objects.cqs.get_mut(cq).filter(|known| known.context == id);
        known.ok_or_else(|| Refused::no_such("completion queue", cq))
    }
}

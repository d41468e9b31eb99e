//! Completion queues and their channels.

use std::os::fd::OwnedFd;

use verbatim_device::control::{AsyncEventType, Reply};
use verbatim_device::layout::CqLayout;

use super::Desk;
use crate::context::Context;
use crate::ends::CqEnd;
use crate::error::Refused;
use crate::objects::{Channel, Cq, News};
use crate::outbox::Outbox;

impl Desk<'_> {
    pub(super) fn create_channel(
        &mut self,
        fds: &mut Vec<OwnedFd>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let most = self.device.limits.per_program.max_cq;
        context.channels.check(most)?;
        let outbox = Outbox::new(fds)?;
        let make = |_, _| Channel { users: 0, outbox };
        let channel = self
            .objects
            .channels
            .insert_with(make)
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no completion channel is left"))?;
        context.channels.insert(channel);
        Ok(Reply::CompChannel { channel })
    }

    pub(super) fn attach_channel(
        &mut self,
        channel: u32,
        fds: &mut Vec<OwnedFd>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let outbox = Outbox::new(fds)?;
        let channel = self.own_channel(channel, context)?;
        let earlier = std::mem::replace(&mut channel.outbox, outbox);
        self.poller.remove(&earlier);
        Ok(Reply::Done)
    }

    pub(super) fn destroy_channel(&mut self, channel: u32, context: &mut Context) -> Result<Reply, Refused> {
        if self.own_channel(channel, context)?.users > 0 {
            return Err(Refused::new(
                libc::EBUSY,
                format!("completion queues use completion channel {channel}"),
            ));
        }
        context.channels.remove(channel);
        if let Some(gone) = self.objects.channels.remove(channel) {
            // The program may have this end too, so that closing it here does not end the watch.
            self.poller.remove(&gone.outbox);
        }
        Ok(Reply::Done)
    }

    fn own_channel(&mut self, channel: u32, context: &Context) -> Result<&mut Channel, Refused> {
        let known = match context.channels.contains(&channel) {
            true => self.objects.channels.get_mut(channel),
            false => None,
        };
        known.ok_or_else(|| Refused::no_such("completion channel", channel))
    }

    /// Whether a queue may have so many entries, beside those that its context has.
    fn check_entries(&self, entries: u32, others: u64) -> Result<CqLayout, Refused> {
        let most = self.device.attr.max_cqe;
        if entries == 0 || entries > most {
            return Err(Refused::invalid(format!(
                "{entries} entries: a completion queue has 1 to {most}"
            )));
        }
        let all = self.device.limits.per_program.max_cqes;
        let layout = CqLayout::new(entries);
        if others + u64::from(layout.entries) > all {
            return Err(Refused::new(
                libc::ENOMEM,
                format!("this program has {others} completion entries, and may have {all} in all"),
            ));
        }
        Ok(layout)
    }

    pub(super) fn create_cq(
        &mut self,
        id: u32,
        entries: u32,
        channel: Option<u32>,
        event: Option<u32>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let layout = self.check_entries(entries, context.cqes)?;
        let most = self.device.limits.per_program.max_cq;
        context.cqs.check(most)?;
        if let Some(channel) = channel {
            self.own_channel(channel, context)?;
        }
        if !self.objects.shared.cqs.has_room() {
            return Err(Refused::new(libc::ENOMEM, "no completion queue is left"));
        }
        let ring = CqEnd::new(&context.arena, &layout)?;
        let offset = ring.offset();
        let make = |number, _| Cq {
            event: event.unwrap_or(number),
            context: id,
            users: 0,
            ring,
            overrun: false,
            channel,
            news: News::Nothing,
            entries: layout.entries,
        };
        let cqs = &mut self.objects.shared.cqs;
        let cq = cqs.insert_with(make).expect("there was room");
        context.cqs.insert(cq);
        context.cqes += u64::from(layout.entries);
        if let Some(channel) = channel {
            self.own_channel(channel, context)?.users += 1;
        }
        Ok(Reply::Cq { cq, entries, offset })
    }

    pub(super) fn resize_cq(
        &mut self,
        id: u32,
        cq: u32,
        entries: u32,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let earlier = self.own_cq(cq, id)?.entries;
        let others = context.cqes - u64::from(earlier);
        let layout = self.check_entries(entries, others)?;
        let mut ring = CqEnd::new(&context.arena, &layout)?;
        let offset = ring.offset();
        let queue = self.own_cq(cq, id)?;
        if queue.overrun {
            return Err(Refused::invalid(format!("completion queue {cq} has overrun")));
        }
        if queue.ring.producer.unread() > entries || !queue.ring.producer.copy_to(&mut ring.producer) {
            return Err(Refused::invalid(format!(
                "completion queue {cq} holds more than {entries} completions"
            )));
        }
        queue.ring = ring;
        queue.entries = layout.entries;
        context.cqes = others + u64::from(layout.entries);
        Ok(Reply::Cq { cq, entries, offset })
    }

    pub(super) fn destroy_cq(&mut self, cq: u32, context: &mut Context) -> Result<Reply, Refused> {
        if !context.cqs.contains(&cq) {
            return Err(Refused::no_such("completion queue", cq));
        }
        if let Some(queue) = self.objects.shared.cqs.get(cq) {
            if queue.users > 0 {
                return Err(Refused::new(
                    libc::EBUSY,
                    format!("queue pairs use completion queue {cq}"),
                ));
            }
            context.cqes -= u64::from(queue.entries);
        }
        context.cqs.remove(cq);
        self.objects.remove_cq(cq);
        if let Some(events) = &mut context.events {
            events.forget(|event| event.event == AsyncEventType::CqErr && event.object == cq);
        }
        Ok(Reply::Done)
    }

    /// The queue, if the context has it.
    pub(super) fn own_cq(&mut self, cq: u32, id: u32) -> Result<&mut Cq, Refused> {
        let known = self
            .objects
            .shared
            .cqs
            .get_mut(cq)
            .filter(|known| known.context == id);
        known.ok_or_else(|| Refused::no_such("completion queue", cq))
    }
}

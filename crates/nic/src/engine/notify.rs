//! Telling programs: events of completion channels, and asynchronous events.

use verbatim_device::control::CompletionEvent;

use super::Nic;
use crate::objects::{News, Shared};
use crate::poller::Token;

impl Nic {
    /// Sends what this turn has given cause for, once per completion queue and event.
    pub(super) fn notify(&mut self) {
        let Self { objects, poller, .. } = self;
        let Shared { newsworthy, cqs, .. } = &mut objects.shared;
        for number in newsworthy.drain(..) {
            let Some(queue) = cqs.get_mut(number) else {
                continue;
            };
            let news = std::mem::replace(&mut queue.news, News::Nothing);
            if !queue.ring.producer.take_armed(news == News::Solicited) {
                continue;
            }
            let Some((id, channel)) = queue
                .channel
                .and_then(|id| Some((id, objects.channels.get_mut(id)?)))
            else {
                continue;
            };
            channel.outbox.send(CompletionEvent { cq: queue.event });
            poller.follow(&mut channel.outbox, Token::Channel(id));
        }
        for id in std::mem::take(&mut objects.cm.told) {
            if let Some(outbox) = objects.cm.outbox(id) {
                poller.follow(outbox, Token::CmChannel(id));
            }
        }
        for (id, event) in self.effects.events.drain(..) {
            tracing::debug!(context = id, ?event, "asynchronous event");
            let context = self.clients.context_mut(id);
            if let Some(outbox) = context.and_then(|context| context.events.as_mut()) {
                outbox.send(event);
                self.poller.follow(outbox, Token::Events(id));
            }
        }
    }

    /// A completion channel's socket has room again, or nobody reads it any more.
    pub(super) fn flush_channel(&mut self, id: u32) {
        if let Some(channel) = self.objects.channels.get_mut(id) {
            channel.outbox.flush();
            self.poller.follow(&mut channel.outbox, Token::Channel(id));
        }
    }

    /// The same for the socket of a channel of rdma_cm.
    pub(super) fn flush_cm_channel(&mut self, id: u32) {
        if let Some(outbox) = self.objects.cm.outbox(id) {
            outbox.flush();
            self.poller.follow(outbox, Token::CmChannel(id));
        }
    }

    /// The same for the socket of a context's asynchronous events.
    pub(super) fn flush_events(&mut self, id: u32) {
        let context = self.clients.context_mut(id);
        if let Some(outbox) = context.and_then(|context| context.events.as_mut()) {
            outbox.flush();
            self.poller.follow(outbox, Token::Events(id));
        }
    }
}

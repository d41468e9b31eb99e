//! What is saved of a requester, and what must hold of it when it comes back.
//!
//! Not saved: estimates of the path (window, round trip), which is another one elsewhere; and what came early, which is
//! asked for again.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Requester;
use super::wqe::Wqe;
use crate::rc::image::ImageError;
use crate::{MAX_MESSAGE, Mtu, Operation, Psn, QpAttributes, QpConfig, SendData};

/// The most requests in an image: more than any RNIC takes off a ring at a time.
const MOST_REQUESTS: usize = 1 << 16;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::rc) struct RequesterImage {
    queue: VecDeque<Wqe>,
    ack: Psn,
    high: Psn,
    end: Psn,
    acknowledged_early: Option<Psn>,
    retries_left: u8,
    rnr_retries_left: u8,
    /// What is left of the wait after an RNR NAK.
    rnr_left: Option<Duration>,
}

impl RequesterImage {
    /// The `wr_id`s of the requests that it holds, oldest first.
    pub fn wr_ids(&self) -> impl Iterator<Item = u64> {
        self.queue.iter().map(|wqe| wqe.request.wr_id)
    }

    /// Is nothing under way?
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// All that the rest of the requester takes for granted.
    fn check(&self, mtu: Mtu) -> Result<(), ImageError> {
        let under_way = self.end.offset_from(self.ack);
        let ordered = under_way <= Psn::MASK >> 1
            && self.high.offset_from(self.ack) <= under_way
            && self.queue.len() <= MOST_REQUESTS;
        let early = self
            .acknowledged_early
            .is_none_or(|psn| psn.offset_from(self.ack) < self.high.offset_from(self.ack));
        ImageError::unless(ordered && early, "the requester's PSNs are out of order")?;
        let first = self.queue.front().map_or(self.end, |wqe| wqe.first);
        let begun = self.ack.offset_from(first);
        let oldest = self.queue.front().map_or(0, |wqe| wqe.packets.saturating_sub(1));
        ImageError::unless(begun <= oldest, "the oldest request is complete")?;
        let mut packets = 0;
        for wqe in &self.queue {
            ImageError::unless(wqe.first == first.add(packets), "the requests are not in a row")?;
            ImageError::unless(check_request(wqe, mtu), "a request is not as one can be")?;
            // Nothing is sent behind what happens here before it has happened.
            let sent = self.high.offset_from(first) > packets;
            let stops = wqe.is_local() && (!wqe.executed || wqe.failure.is_some());
            ImageError::unless(!(stops && sent), "a request was overtaken")?;
            packets += wqe.packets;
            ImageError::unless(packets <= Psn::MASK >> 1, "the requests have too many packets")?;
        }
        ImageError::unless(
            packets == begun + under_way,
            "the last request does not end at the end",
        )
    }
}

fn check_request(wqe: &Wqe, mtu: Mtu) -> bool {
    let operation = &wqe.request.operation;
    let packets = if wqe.is_local() { 0 } else { mtu.packets(wqe.len) };
    let in_place = wqe.len <= MAX_MESSAGE
        && wqe.packets == packets
        && wqe.read_piece > 0
        && wqe.opcode == operation.wc_opcode();
    if wqe.failure.is_some() || wqe.is_local() {
        // What makes no sense completes with an opcode that may be another one.
        return wqe.len <= MAX_MESSAGE && wqe.packets == packets && wqe.read_piece > 0;
    }
    let data = &wqe.request.data;
    let inline = matches!(data, SendData::Inline(_));
    let data_fits = match operation {
        Operation::Atomic { .. } => wqe.len == 8 && data.len_bytes() >= 8 && !inline,
        Operation::AtomicWrite { .. } => wqe.len == 8 && data.len_bytes() == 8,
        Operation::Read { .. } => data.len_bytes() == u64::from(wqe.len) && !inline,
        _ => data.len_bytes() == u64::from(wqe.len),
    };
    in_place && data_fits
}

impl Requester {
    /// What is saved of it while it is frozen.
    pub fn save(&self) -> RequesterImage {
        RequesterImage {
            queue: self.queue.clone(),
            ack: self.ack,
            high: self.high,
            end: self.end,
            acknowledged_early: self.acknowledged_early,
            retries_left: self.retries_left,
            rnr_retries_left: self.rnr_retries_left,
            rnr_left: self.rnr_left,
        }
    }

    /// A frozen requester, which begins again at the oldest PSN when it goes on.
    pub fn restore(
        image: RequesterImage,
        attributes: &QpAttributes,
        config: QpConfig,
    ) -> Result<Requester, ImageError> {
        image.check(attributes.path_mtu.unwrap_or_default())?;
        let mut requester = Requester::new(config);
        requester.configure(attributes);
        Ok(Requester {
            queue: image.queue,
            ack: image.ack,
            next: image.ack,
            high: image.high,
            end: image.end,
            asked: image.ack,
            cut_until: image.ack,
            acknowledged_early: image.acknowledged_early,
            retries_left: image.retries_left.min(requester.settings.retry_cnt),
            rnr_retries_left: image.rnr_retries_left.min(requester.settings.rnr_retry),
            rnr_left: image.rnr_left,
            ..requester
        })
    }
}

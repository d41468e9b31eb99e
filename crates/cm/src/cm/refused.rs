//! Addresses at which nobody takes messages.

use std::net::IpAddr;
use std::time::Duration;

use verbatim_roce::Time;

use super::Cm;

/// How soon a request is sent again that was refused, and how often. An RNIC that is started anew takes less time.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
const AGAIN: u8 = 3;

impl Cm {
    /// A host has said that no RNIC is at this address: what is asked of it is asked a few times more, and is unreachable then. To
    /// wait for an answer as on a network that loses messages would take more than a minute.
    pub fn refused(&mut self, now: Time, peer: IpAddr) {
        for id in self.table.asking(peer) {
            self.table.update_talk(id, |talk, deadline| {
                talk.left = talk.left.min(AGAIN);
                let soon = now + AGAIN_AFTER;
                *deadline = Some(deadline.map_or(soon, |deadline| deadline.min(soon)));
            });
        }
    }
}

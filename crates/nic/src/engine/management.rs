//! Queue pair 1: what the communication manager sends, and its channels.

use std::net::SocketAddr;

use verbatim_cm::{QP1_QKEY, Transmit};
use verbatim_roce::icrc::Flow;
use verbatim_roce::{Datagram, Psn, Qpn, Time, Traffic, UDP_PORT};

use super::Nic;
use crate::error::NicError;

/// Queue pair 1, at both ends (IBA Vol 1 §10.2.4).
const QP1: Qpn = Qpn::new(1);

impl Nic {
    /// Sends what the communication manager has to send. What the socket has no room for is lost: it comes again.
    pub(super) fn send_management(&mut self, now: Time) -> Result<(), NicError> {
        while let Some(transmit) = self.objects.cm.next_transmit() {
            // Its own addresses are this RNIC's; a peer's may be anything.
            if !self.gids.contains(&transmit.from.0) || !self.send_batch(now)? {
                tracing::debug!(to = %transmit.to, "a management datagram is lost");
                continue;
            }
            self.put_into_batch(&transmit);
        }
        Ok(())
    }

    fn put_into_batch(&mut self, transmit: &Transmit) {
        let end = |gid: verbatim_cm::Gid| SocketAddr::new(gid.ip(), UDP_PORT);
        let Ok(flow) = Flow::new(end(transmit.from), end(transmit.to)) else {
            return;
        };
        let default = Traffic::default();
        let traffic = Traffic {
            traffic_class: transmit.traffic_class,
            hop_limit: match transmit.hop_limit {
                // A way without routers; the kernel's default works there, too.
                0 | 1 => default.hop_limit,
                limit => limit,
            },
            flow_label: default.flow_label,
        };
        self.batch.restart_with(flow, traffic);
        self.management_psn = self.management_psn.next();
        let datagram = Datagram {
            destination: QP1,
            source: QP1,
            qkey: QP1_QKEY,
            pkey: transmit.pkey,
            psn: self.management_psn,
        };
        datagram.append(&transmit.bytes[..], &mut self.batch);
    }

    /// Ends a channel of rdma_cm, and all its ids.
    pub(super) fn remove_cm_channel(&mut self, channel: u32, now: Time) {
        if let Some(outbox) = self.objects.cm.outbox(channel) {
            self.poller.remove(outbox);
        }
        self.objects.cm.remove_channel(now, channel);
    }
}

/// The first PSN of queue pair 1.
pub fn first_psn() -> Psn {
    Psn::new(rand::random())
}

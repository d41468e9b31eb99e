//! Connections that pause within the protocol, at a partner's host: the RNICs find each other, and the programs' guest libraries
//! are told afterwards where the other ends are.

use futures_util::future::join_all;
use verbatim_channel::{Answer, Order, Relocated};

use super::Partner;
use crate::guests::unexpected;

impl Partner {
    /// Tells the guest libraries. Nothing is posted again: 0.
    pub(super) async fn relocate(&self) -> anyhow::Result<u64> {
        let relocated = self.members.all.iter().map(|member| async move {
            let ends = member.kept.connections.iter();
            let peers = ends.filter_map(|(connection, qpn)| {
                Some(Relocated {
                    qpn: *qpn,
                    remote: *self.moved_to.get(connection)?,
                })
            });
            let order = Order::Relocate {
                peers: peers.collect(),
            };
            let what = "noting where the other ends are";
            match member.order_if_alive(&self.agent, what, order).await? {
                Some(Answer::Done) | None => Ok(0),
                Some(other) => Err(unexpected(&other, "Done")),
            }
        });
        join_all(relocated).await.into_iter().sum()
    }
}

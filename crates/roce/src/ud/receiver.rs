//! What arrives (IBA §9.8.3.2). A datagram that cannot be taken is dropped silently; how, is as in `uc::receiver`.

use crate::receive::{complete_receive, flush_receive, scatter};
use crate::wire::grh::GRH_BYTES;
use crate::{Counters, Event, Host, Packet, QpConfig, ReceiveRequest, WcOpcode, WcStatus};

/// The queue pair must go to ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// The receiver's half of a datagram queue pair.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    /// A RECV that was too short for its datagram: the next one gets it (IBA §9.9.3, class D).
    spare: Option<Box<ReceiveRequest>>,
}

impl Receiver {
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(receive) = self.spare.take() {
            flush_receive(&receive, host, counters);
        }
    }

    /// A datagram has arrived.
    pub fn handle_datagram(
        &mut self,
        packet: &Packet<'_>,
        qkey: u32,
        config: &QpConfig,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Broken> {
        if packet.deth.is_none_or(|deth| deth.qkey != qkey) {
            counters.bad_qkey += 1;
            counters.dropped_packets += 1;
            return Ok(());
        }
        counters.rcvd_requests += 1;
        counters.rcvd_request_bytes += packet.payload.len() as u64;
        if packet.payload.len() > config.port_mtu.bytes() as usize {
            counters.resp_bad_length += 1;
            return Ok(());
        }
        let receive = self.spare.take().map(|spare| *spare);
        let Some(receive) = receive.or_else(|| host.next_receive()) else {
            counters.out_of_buffer += 1;
            return Ok(());
        };
        let byte_len = (GRH_BYTES + packet.payload.len()) as u32;
        let (opcode, mut status) = (WcOpcode::Recv, WcStatus::Success);
        if u64::from(byte_len) > receive.sges.len_bytes() {
            counters.resp_local_length_error += 1;
            if !config.shared_receive_queue {
                self.spare = Some(Box::new(receive));
                return Ok(());
            }
            // It cannot go back to the shared queue (class E).
            status = WcStatus::LocLenErr;
        } else {
            let grh = packet.grh.unwrap_or(&[0; GRH_BYTES]);
            let stored = scatter(&receive, 0, grh, host)
                .and_then(|()| scatter(&receive, GRH_BYTES as u32, packet.payload, host));
            if stored.is_err() {
                status = WcStatus::LocProtErr;
            }
        }
        counters.resp_cqe_error += u64::from(status != WcStatus::Success);
        complete_receive(&receive, status, opcode, byte_len, packet, host);
        if status == WcStatus::LocProtErr {
            host.event(Event::Fatal);
            return Err(Broken);
        }
        Ok(())
    }
}

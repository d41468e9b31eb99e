//! The message that is being received, and how it ends in memory: the same for RC and UC.

use serde::{Deserialize, Serialize};

use crate::wire::reth::Reth;
use crate::{
    AccessError, Completion, Counters, Host, Key, MAX_MESSAGE, Mtu, Packet, Queue, ReceiveRequest,
    RemoteAccess, Rkey, WcFlags, WcOpcode, WcStatus,
};

/// A message of which some packets have come.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// A SEND, and the RECV that it goes into.
    Send {
        /// Where the data goes.
        receive: ReceiveRequest,
        /// Bytes so far.
        received: u32,
    },
    /// A WRITE.
    Write(WriteMessage),
}

/// A WRITE: its memory was checked when the first packet came.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct WriteMessage {
    pub addr: u64,
    pub rkey: Rkey,
    /// Length of the whole message.
    pub len: u32,
    /// Bytes so far.
    pub received: u32,
}

impl WriteMessage {
    /// A WRITE of which nothing has come.
    pub fn new(reth: &Reth) -> WriteMessage {
        WriteMessage {
            addr: reth.virtual_addr,
            rkey: reth.rkey,
            len: reth.dma_len,
            received: 0,
        }
    }

    /// May the partner write there? Asked when the first packet comes.
    pub fn check(&self, host: &mut impl Host) -> Result<(), AccessError> {
        if self.len == 0 {
            return Ok(());
        }
        host.check_remote(self.rkey, self.addr, self.len, RemoteAccess::Write)
    }

    /// Does the payload of this packet fit what is still to come: everything at the end, and less than that before? And
    /// is the message no longer than one may be?
    pub fn accepts(&self, packet: &Packet<'_>) -> bool {
        let rest = (self.len - self.received) as usize;
        if self.len > MAX_MESSAGE {
            return false;
        }
        if packet.info.ends {
            packet.payload.len() == rest
        } else {
            packet.payload.len() < rest
        }
    }

    /// Stores a payload that [`WriteMessage::accepts`] has accepted.
    pub fn store(&mut self, payload: &[u8], host: &mut impl Host) -> Result<(), AccessError> {
        if !payload.is_empty() {
            let addr = self.addr.wrapping_add(u64::from(self.received));
            host.write(Key::Remote(self.rkey), addr, payload)?;
            self.received += payload.len() as u32;
        }
        Ok(())
    }
}

/// Is the payload as long as its position in the message wants it (IBA §9.7.4.1.6)?
pub(crate) fn payload_fits_position(packet: &Packet<'_>, mtu: Mtu) -> bool {
    let (len, mtu) = (packet.payload.len(), mtu.bytes() as usize);
    match (packet.info.starts, packet.info.ends) {
        (_, false) => len == mtu,
        (true, true) => len <= mtu,
        (false, true) => (1..=mtu).contains(&len),
    }
}

/// Why a SEND could not be stored in its RECV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScatterError {
    /// The RECV is too short.
    Length,
    /// A piece of the RECV is not covered by its key.
    Access,
}

/// Stores a payload in a RECV after `received` bytes, or nothing at all if it is too short.
pub(crate) fn scatter(
    receive: &ReceiveRequest,
    received: u32,
    payload: &[u8],
    host: &mut impl Host,
) -> Result<(), ScatterError> {
    let len = payload.len() as u32;
    if u64::from(received) + u64::from(len) > receive.sges.len_bytes() {
        return Err(ScatterError::Length);
    }
    receive.sges.for_range(received, len, |part, at| {
        host.write(
            Key::Local(part.lkey),
            part.addr,
            &payload[at..at + part.len as usize],
        )
        .map_err(|AccessError| ScatterError::Access)
    })
}

/// Completes a RECV with a message, or with the reason why it could not take one.
pub(crate) fn complete_receive(
    receive: &ReceiveRequest,
    status: WcStatus,
    opcode: WcOpcode,
    byte_len: u32,
    packet: &Packet<'_>,
    host: &mut impl Host,
) {
    let good = status == WcStatus::Success;
    let byte_len = if good { byte_len } else { 0 };
    let mut completion = Completion::new(Queue::Receive, receive.wr_id, status, opcode, byte_len);
    completion.solicited = packet.bth.solicited || !good;
    if good {
        completion.imm = packet.imm;
        completion.flags.set(WcFlags::WITH_IMM, packet.imm.is_some());
        completion.invalidated = packet.invalidate;
        completion
            .flags
            .set(WcFlags::WITH_INV, packet.invalidate.is_some());
        if let Some(deth) = packet.deth {
            completion.flags |= WcFlags::GRH;
            completion.source_qpn = deth.source_qpn;
        }
    }
    host.complete(completion);
}

/// Completes a RECV without a message.
pub(crate) fn flush_receive(receive: &ReceiveRequest, host: &mut impl Host, counters: &mut Counters) {
    counters.resp_cqe_flush_error += 1;
    let (status, opcode) = (WcStatus::WrFlushErr, WcOpcode::Recv);
    host.complete(Completion::new(Queue::Receive, receive.wr_id, status, opcode, 0));
}

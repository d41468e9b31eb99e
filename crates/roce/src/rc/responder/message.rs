//! The message that is being received.

use crate::{
    AccessError, Completion, Host, Key, Mtu, Packet, Queue, ReceiveRequest, Rkey, WcOpcode, WcStatus,
};

/// A message of which some packets have come.
#[derive(Clone, Copy, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one per queue pair; a box would be an allocation per message"
)]
pub(super) enum Message {
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
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteMessage {
    pub addr: u64,
    pub rkey: Rkey,
    /// Length of the whole message.
    pub len: u32,
    /// Bytes so far.
    pub received: u32,
}

impl WriteMessage {
    /// Does the payload of this packet fit what is still to come: everything at the end, and less than that before?
    pub fn accepts(&self, packet: &Packet<'_>) -> bool {
        let rest = (self.len - self.received) as usize;
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
pub(super) fn payload_fits_position(packet: &Packet<'_>, mtu: Mtu) -> bool {
    let (len, mtu) = (packet.payload.len(), mtu.bytes() as usize);
    match (packet.info.starts, packet.info.ends) {
        (_, false) => len == mtu,
        (true, true) => len <= mtu,
        (false, true) => (1..=mtu).contains(&len),
    }
}

/// Why a SEND could not be stored in its RECV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScatterError {
    /// The RECV is too short.
    Length,
    /// A piece of the RECV is not covered by its key.
    Access,
}

/// Stores a payload in a RECV after `received` bytes, or nothing at all if it is too short.
pub(super) fn scatter(
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
pub(super) fn complete_receive(
    receive: &ReceiveRequest,
    status: WcStatus,
    opcode: WcOpcode,
    byte_len: u32,
    packet: &Packet<'_>,
    host: &mut impl Host,
) {
    let good = status == WcStatus::Success;
    host.complete(Completion {
        queue: Queue::Receive,
        wr_id: receive.wr_id,
        status,
        opcode,
        byte_len: if good { byte_len } else { 0 },
        imm: packet.imm.filter(|_| good),
        solicited: packet.bth.solicited || !good,
    });
}

//! The sender's side of SEND and WRITE: which opcode a packet has, which local memory its payload is, and what must be
//! right before the first one is sent. The same for RC and UC, and in parts for UD.

use crate::wire::opcode::{Opcode, Service};
use crate::wire::reth::Reth;
use crate::{
    AccessError, AtomicOp, Completion, Host, Key, LocalAccess, MAX_MESSAGE, Operation, Queue, SendData,
    SendRequest, SgeList, WcOpcode, WcStatus,
};

/// Fills a payload with the bytes from `offset` of the message.
pub(crate) fn gather(
    data: &SendData,
    offset: u32,
    out: &mut [u8],
    host: &mut impl Host,
) -> Result<(), AccessError> {
    match data {
        SendData::Inline(bytes) => {
            let start = offset as usize;
            out.copy_from_slice(&bytes[start..start + out.len()]);
            Ok(())
        }
        SendData::Sges(list) => list.for_range(offset, out.len() as u32, |part, at| {
            host.read(
                Key::Local(part.lkey),
                part.addr,
                &mut out[at..at + part.len as usize],
            )
        }),
    }
}

/// The opcode of a packet of this operation. UC has the numbers of RC with another service in the top bits.
pub(crate) fn opcode(service: Service, operation: &Operation, starts: bool, ends: bool) -> Opcode {
    let with_imm = operation.imm().is_some();
    let of_rc = match (operation, starts, ends) {
        (Operation::Send { .. } | Operation::SendInvalidate { .. }, true, false) => Opcode::RC_SEND_FIRST,
        (Operation::Send { .. } | Operation::SendInvalidate { .. }, false, false) => Opcode::RC_SEND_MIDDLE,
        (Operation::Send { .. }, false, true) if with_imm => Opcode::RC_SEND_LAST_IMM,
        (Operation::Send { .. }, false, true) => Opcode::RC_SEND_LAST,
        (Operation::Send { .. }, true, true) if with_imm => Opcode::RC_SEND_ONLY_IMM,
        (Operation::Send { .. }, true, true) => Opcode::RC_SEND_ONLY,
        (Operation::SendInvalidate { .. }, false, true) => Opcode::RC_SEND_LAST_INVALIDATE,
        (Operation::SendInvalidate { .. }, true, true) => Opcode::RC_SEND_ONLY_INVALIDATE,
        (Operation::Write { .. }, true, false) => Opcode::RC_WRITE_FIRST,
        (Operation::Write { .. }, false, false) => Opcode::RC_WRITE_MIDDLE,
        (Operation::Write { .. }, false, true) if with_imm => Opcode::RC_WRITE_LAST_IMM,
        (Operation::Write { .. }, false, true) => Opcode::RC_WRITE_LAST,
        (Operation::Write { .. }, true, true) if with_imm => Opcode::RC_WRITE_ONLY_IMM,
        (Operation::Write { .. }, true, true) => Opcode::RC_WRITE_ONLY,
        (Operation::Read { .. }, ..) => Opcode::RC_READ_REQUEST,
        (Operation::Atomic { op, .. }, ..) => match op {
            AtomicOp::CompareSwap { .. } => Opcode::RC_COMPARE_SWAP,
            AtomicOp::FetchAdd { .. } => Opcode::RC_FETCH_ADD,
        },
        (Operation::AtomicWrite { .. }, ..) => Opcode::RC_ATOMIC_WRITE,
        (Operation::LocalInvalidate { .. } | Operation::Bind(_) | Operation::Executed { .. }, ..) => {
            unreachable!("what happens here has no packets")
        }
    };
    match service {
        Service::Uc => Opcode(of_rc.0 | 0x20),
        _ => of_rc,
    }
}

/// The RDMA header of the first packet of a WRITE, or of an atomic one.
pub(crate) fn write_header(operation: &Operation, starts: bool, len: u32) -> Option<Reth> {
    match *operation {
        Operation::Write {
            remote_addr, rkey, ..
        } if starts => Some(Reth {
            virtual_addr: remote_addr,
            rkey,
            dma_len: len,
        }),
        Operation::AtomicWrite { remote_addr, rkey } => Some(Reth {
            virtual_addr: remote_addr,
            rkey,
            dma_len: len,
        }),
        _ => None,
    }
}

/// Are local memory and length of a request right?
pub(crate) fn check_data(request: &SendRequest, host: &mut impl Host) -> Result<(), WcStatus> {
    let takes_data_in = matches!(
        request.operation,
        Operation::Read { .. } | Operation::Atomic { .. }
    );
    let len = request.data.len_bytes();
    let wrong = match request.operation {
        Operation::Atomic { .. } => len < 8,
        Operation::AtomicWrite { .. } => len != 8,
        _ => len > u64::from(MAX_MESSAGE),
    };
    let list = match &request.data {
        SendData::Inline(_) if takes_data_in => return Err(WcStatus::LocQpOpErr),
        _ if wrong => return Err(WcStatus::LocLenErr),
        SendData::Inline(_) => return Ok(()),
        SendData::Sges(list) => list,
    };
    let access = if takes_data_in {
        LocalAccess::Write
    } else {
        LocalAccess::Read
    };
    for sge in list.as_slice().iter().filter(|sge| sge.len > 0) {
        host.check_local(sge.lkey, sge.addr, sge.len, access)
            .map_err(|_| WcStatus::LocProtErr)?;
    }
    Ok(())
}

/// Executes a request that happens here, without a packet.
pub(crate) fn execute_local(request: &SendRequest, host: &mut impl Host) -> Result<(), WcStatus> {
    match &request.operation {
        Operation::Executed {
            value: Some(value), ..
        } => match &request.data {
            SendData::Sges(list) => scatter(list, 0, &value.to_ne_bytes(), host),
            SendData::Inline(_) => Err(AccessError),
        }
        .map_err(|_| WcStatus::LocProtErr),
        Operation::LocalInvalidate { rkey } => host.local_invalidate(*rkey).map_err(|_| WcStatus::LocQpOpErr),
        Operation::Bind(bind) => host.bind(bind).map_err(|_| WcStatus::MwBindErr),
        _ => Ok(()),
    }
}

/// Puts data that has come into local memory, from `offset` of the message on.
pub(crate) fn scatter(
    list: &SgeList,
    offset: u32,
    data: &[u8],
    host: &mut impl Host,
) -> Result<(), AccessError> {
    list.for_range(offset, data.len() as u32, |part, at| {
        host.write(
            Key::Local(part.lkey),
            part.addr,
            &data[at..at + part.len as usize],
        )
    })
}

/// Gives the slot of a request back that has failed, and completes it with the reason.
pub(crate) fn retire_failed(
    request: &SendRequest,
    opcode: WcOpcode,
    (status, vendor_err): (WcStatus, u32),
    len: u32,
    host: &mut impl Host,
) {
    host.retire_sends(1);
    let mut completion = Completion::new(Queue::Send, request.wr_id, status, opcode, len);
    completion.vendor_err = vendor_err;
    host.complete(completion);
}

/// Gives a request's slot back, and its completion where one is due.
pub(crate) fn retire(
    request: &SendRequest,
    opcode: WcOpcode,
    status: WcStatus,
    len: u32,
    host: &mut impl Host,
) {
    host.retire_sends(1);
    if request.signaled || status != WcStatus::Success {
        host.complete(Completion::new(Queue::Send, request.wr_id, status, opcode, len));
    }
}

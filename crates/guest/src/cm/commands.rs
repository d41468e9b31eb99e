//! From a command that librdmacm has written to a request for the RNIC, and its answer back. Errors are those of the kernel's
//! `ucma_write`.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use verbatim_verbs::{CM_MAX_PRIVATE_DATA, CmChannel, CmParameters, CmReply, CmRequest, CmRoute, QpState};

use super::plain::Plain;
use super::{address, answers, channels};
use crate::abi::*;
use crate::ffi::{Errno, slice, unsupported};

/// Where an answer goes: the program's memory, and how much of it there is.
struct Response {
    address: u64,
    bytes: usize,
}

impl Response {
    /// Writes the whole answer.
    ///
    /// # Safety
    /// The program gave an address that is valid for as many writes as it said.
    unsafe fn whole<T: Plain>(&self, answer: &T) -> Result<(), Errno> {
        if self.bytes < size_of::<T>() {
            return Err(Errno::NO_SPACE);
        }
        // SAFETY: the caller's contract.
        unsafe { self.beginning(answer) }
    }

    /// Writes as much of the answer as the program has room for: it may be older than what has been added.
    ///
    /// # Safety
    /// As for [`Self::whole`].
    unsafe fn beginning<T: Plain>(&self, answer: &T) -> Result<(), Errno> {
        let to = self.address as *mut u8;
        if to.is_null() {
            return Err(Errno::new(libc::EFAULT));
        }
        let bytes = answer.bytes();
        let length = bytes.len().min(self.bytes);
        // SAFETY: the caller's contract; our value is elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
        Ok(())
    }
}

/// Carries out what was written to a channel.
///
/// # Safety
/// Addresses in the command are those of the program's own memory, valid for the lengths that it says.
pub unsafe fn run(channel: &CmChannel, written: &[u8]) -> Result<(), Errno> {
    let head = size_of::<rdma_ucm_cmd_hdr>();
    if written.len() < head {
        return Err(Errno::INVALID);
    }
    let header = rdma_ucm_cmd_hdr::from_bytes(written);
    let body = written
        .get(head..head + usize::from(header.r#in))
        .ok_or(Errno::INVALID)?;
    let to = |address| Response {
        address,
        bytes: header.out.into(),
    };
    // SAFETY: the caller's contract, for all that follows.
    unsafe {
        match header.cmd {
            RDMA_USER_CM_CMD_CREATE_ID => {
                let cmd = rdma_ucm_create_id::from_bytes(body);
                let id = channel.create_id(cmd.uid, cmd.ps, cmd.qp_type)?;
                to(cmd.response).whole(&rdma_ucm_create_id_resp { id })
            }
            RDMA_USER_CM_CMD_DESTROY_ID => {
                let cmd = rdma_ucm_destroy_id::from_bytes(body);
                let events_reported = channel.call_reported(CmRequest::DestroyId { id: cmd.id })?;
                to(cmd.response).whole(&rdma_ucm_destroy_id_resp { events_reported })
            }
            RDMA_USER_CM_CMD_LEAVE_MCAST => {
                let cmd = rdma_ucm_destroy_id::from_bytes(body);
                let events_reported =
                    channel.call_reported(CmRequest::LeaveMulticast { membership: cmd.id })?;
                to(cmd.response).whole(&rdma_ucm_destroy_id_resp { events_reported })
            }
            RDMA_USER_CM_CMD_MIGRATE_ID => {
                let cmd = rdma_ucm_migrate_id::from_bytes(body);
                let from = channels::find(cmd.fd as RawFd).ok_or(Errno::INVALID)?;
                let events_reported = channel.migrate_id(&from, cmd.id)?;
                to(cmd.response).whole(&rdma_ucm_migrate_resp { events_reported })
            }
            RDMA_USER_CM_CMD_GET_EVENT => {
                let cmd = rdma_ucm_get_event::from_bytes(body);
                let event = channel.next_event()?;
                to(cmd.response).beginning(&answers::event(&event))
            }
            RDMA_USER_CM_CMD_QUERY_ROUTE => {
                let cmd = rdma_ucm_query::from_bytes(body);
                let answer = answers::query_route(&route(channel, cmd.id)?);
                to(cmd.response).beginning(&answer)
            }
            RDMA_USER_CM_CMD_QUERY => {
                let cmd = rdma_ucm_query::from_bytes(body);
                let to = to(cmd.response);
                let route = route(channel, cmd.id)?;
                match cmd.option {
                    RDMA_USER_CM_QUERY_ADDR => to.beginning(&answers::query_address(&route)),
                    RDMA_USER_CM_QUERY_GID => to.beginning(&answers::query_gid(&route)),
                    RDMA_USER_CM_QUERY_PATH => to.beginning(&answers::query_path(&route)),
                    _ => Err(Errno::new(libc::ENOSYS)),
                }
            }
            RDMA_USER_CM_CMD_INIT_QP_ATTR => {
                let cmd = rdma_ucm_init_qp_attr::from_bytes(body);
                let state = QpState::from_raw(cmd.qp_state).ok_or(Errno::INVALID)?;
                match channel.call(CmRequest::InitQpAttr { id: cmd.id, state })? {
                    CmReply::QpAttr { mask, attr } => to(cmd.response).whole(&answers::qp_attr(mask, &attr)),
                    _ => Err(Errno::BROKEN),
                }
            }
            RDMA_USER_CM_CMD_JOIN_IP_MCAST => {
                let cmd = rdma_ucm_join_ip_mcast::from_bytes(body);
                let request = CmRequest::JoinMulticast {
                    id: cmd.id,
                    uid: cmd.uid,
                    address: address::from_c(words(&cmd.addr))?,
                };
                to(cmd.response).whole(&created(channel, request)?)
            }
            RDMA_USER_CM_CMD_JOIN_MCAST => {
                let cmd = rdma_ucm_join_mcast::from_bytes(body);
                if cmd.join_flags != RDMA_MC_JOIN_FLAG_FULLMEMBER {
                    return Err(unsupported("a membership of a multicast group that only sends"));
                }
                let request = CmRequest::JoinMulticast {
                    id: cmd.id,
                    uid: cmd.uid,
                    address: sized(&cmd.addr, cmd.addr_size)?,
                };
                to(cmd.response).whole(&created(channel, request)?)
            }
            RDMA_USER_CM_CMD_SET_OPTION => {
                let cmd = rdma_ucm_set_option::from_bytes(body);
                let length = usize::try_from(cmd.optlen).map_err(|_| Errno::INVALID)?;
                if length > MAX_OPTION_BYTES {
                    return Err(Errno::INVALID);
                }
                let value = slice(cmd.optval as *const u8, length)?.to_vec();
                let (id, level, name) = (cmd.id, cmd.level, cmd.optname);
                Ok(channel.call_done(CmRequest::SetOption {
                    id,
                    level,
                    name,
                    value,
                })?)
            }
            _ => Ok(channel.call_done(without_answer(header.cmd, body)?)?),
        }
    }
}

/// The longest value of an option, a path record with its flags.
const MAX_OPTION_BYTES: usize = 4096;

/// Commands that are answered by an errno only.
fn without_answer(cmd: u32, body: &[u8]) -> Result<CmRequest, Errno> {
    match cmd {
        RDMA_USER_CM_CMD_BIND_IP => {
            let cmd = rdma_ucm_bind_ip::from_bytes(body);
            let address = address::from_c(words(&cmd.addr))?;
            Ok(CmRequest::Bind { id: cmd.id, address })
        }
        RDMA_USER_CM_CMD_BIND => {
            let cmd = rdma_ucm_bind::from_bytes(body);
            let address = sized(&cmd.addr, cmd.addr_size)?;
            Ok(CmRequest::Bind { id: cmd.id, address })
        }
        RDMA_USER_CM_CMD_RESOLVE_IP => {
            let cmd = rdma_ucm_resolve_ip::from_bytes(body);
            Ok(CmRequest::ResolveAddress {
                id: cmd.id,
                source: address::optional_from_c(words(&cmd.src_addr))?,
                destination: address::from_c(words(&cmd.dst_addr))?,
                timeout_ms: cmd.timeout_ms,
            })
        }
        RDMA_USER_CM_CMD_RESOLVE_ADDR => {
            let cmd = rdma_ucm_resolve_addr::from_bytes(body);
            let source = match cmd.src_size {
                0 => None,
                size => Some(sized(&cmd.src_addr, size)?),
            };
            Ok(CmRequest::ResolveAddress {
                id: cmd.id,
                source,
                destination: sized(&cmd.dst_addr, cmd.dst_size)?,
                timeout_ms: cmd.timeout_ms,
            })
        }
        RDMA_USER_CM_CMD_RESOLVE_ROUTE => {
            let cmd = rdma_ucm_resolve_route::from_bytes(body);
            let (id, timeout_ms) = (cmd.id, cmd.timeout_ms);
            Ok(CmRequest::ResolveRoute { id, timeout_ms })
        }
        RDMA_USER_CM_CMD_LISTEN => {
            let cmd = rdma_ucm_listen::from_bytes(body);
            let (id, backlog) = (cmd.id, cmd.backlog);
            Ok(CmRequest::Listen { id, backlog })
        }
        RDMA_USER_CM_CMD_CONNECT => {
            let cmd = rdma_ucm_connect::from_bytes(body);
            let parameters = parameters(&cmd.conn_param)?.ok_or(Errno::INVALID)?;
            Ok(CmRequest::Connect {
                id: cmd.id,
                parameters,
            })
        }
        RDMA_USER_CM_CMD_ACCEPT => {
            let cmd = rdma_ucm_accept::from_bytes(body);
            Ok(CmRequest::Accept {
                id: cmd.id,
                uid: cmd.uid,
                parameters: parameters(&cmd.conn_param)?,
            })
        }
        RDMA_USER_CM_CMD_REJECT => {
            let cmd = rdma_ucm_reject::from_bytes(body);
            let length = usize::from(cmd.private_data_len);
            Ok(CmRequest::Reject {
                id: cmd.id,
                reason: cmd.reason,
                private_data: cmd.private_data[..length].to_vec(),
            })
        }
        RDMA_USER_CM_CMD_DISCONNECT => {
            let cmd = rdma_ucm_disconnect::from_bytes(body);
            Ok(CmRequest::Disconnect { id: cmd.id })
        }
        RDMA_USER_CM_CMD_NOTIFY => {
            let cmd = rdma_ucm_notify::from_bytes(body);
            let (id, event) = (cmd.id, cmd.event);
            Ok(CmRequest::Notify { id, event })
        }
        other => {
            unsupported(&format!("command {other} of rdma_cm"));
            Err(Errno::new(libc::ENOSYS))
        }
    }
}

fn created(channel: &CmChannel, request: CmRequest) -> Result<rdma_ucm_create_id_resp, Errno> {
    match channel.call(request)? {
        CmReply::Id { id } => Ok(rdma_ucm_create_id_resp { id }),
        _ => Err(Errno::BROKEN),
    }
}

fn route(channel: &CmChannel, id: u32) -> Result<CmRoute, Errno> {
    match channel.call(CmRequest::Query { id })? {
        CmReply::Route(route) => Ok(route),
        _ => Err(Errno::BROKEN),
    }
}

/// An address whose length is told.
fn sized(storage: &storage_bytes, size: u16) -> Result<SocketAddr, Errno> {
    let bytes = words(storage).get(..size.into()).ok_or(Errno::INVALID)?;
    address::from_c(bytes)
}

/// The bytes of an array of words.
fn words<T: Word, const N: usize>(words: &[T; N]) -> &[u8] {
    // SAFETY: integers have no padding, and bytes any alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

trait Word {}
impl Word for u32 {}
impl Word for u64 {}

/// None if the program did not fill them in.
fn parameters(c: &rdma_ucm_conn_param) -> Result<Option<CmParameters>, Errno> {
    if c.valid == 0 {
        return Ok(None);
    }
    let length = usize::from(c.private_data_len);
    if length > CM_MAX_PRIVATE_DATA {
        return Err(Errno::INVALID);
    }
    Ok(Some(CmParameters {
        qp_num: c.qp_num,
        qkey: c.qkey,
        private_data: c.private_data[..length].to_vec(),
        srq: c.srq != 0,
        responder_resources: c.responder_resources,
        initiator_depth: c.initiator_depth,
        flow_control: c.flow_control,
        retry_count: c.retry_count,
        rnr_retry_count: c.rnr_retry_count,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_become_requests() {
        let mut cmd = rdma_ucm_connect::zeroed();
        cmd.id = 7;
        cmd.conn_param.qp_num = 9;
        assert_eq!(
            without_answer(RDMA_USER_CM_CMD_CONNECT, cmd.bytes()),
            Err(Errno::INVALID),
            "no parameters"
        );
        cmd.conn_param.valid = 1;
        cmd.conn_param.private_data_len = 3;
        cmd.conn_param.private_data[..3].copy_from_slice(b"abc");
        let request = without_answer(RDMA_USER_CM_CMD_CONNECT, cmd.bytes()).unwrap();
        let CmRequest::Connect { id: 7, parameters } = request else {
            panic!("{request:?}");
        };
        assert_eq!((parameters.qp_num, &*parameters.private_data), (9, &b"abc"[..]));

        let mut cmd = rdma_ucm_resolve_ip::zeroed();
        let mut to = [0; 28];
        address::to_c(Some("10.0.0.1:7".parse().unwrap()), &mut to);
        for (word, bytes) in cmd.dst_addr.iter_mut().zip(to.chunks_exact(4)) {
            *word = u32::from_ne_bytes(bytes.try_into().unwrap());
        }
        let request = without_answer(RDMA_USER_CM_CMD_RESOLVE_IP, cmd.bytes()).unwrap();
        let expected = CmRequest::ResolveAddress {
            id: 0,
            source: None,
            destination: "10.0.0.1:7".parse().unwrap(),
            timeout_ms: 0,
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn what_is_no_command_is_refused() {
        let unknown = without_answer(77, &[]);
        assert_eq!(unknown, Err(Errno::new(libc::ENOSYS)));
        let mut cmd = rdma_ucm_bind::zeroed();
        cmd.addr_size = 200;
        assert_eq!(
            without_answer(RDMA_USER_CM_CMD_BIND, cmd.bytes()),
            Err(Errno::INVALID),
            "longer than its structure"
        );
    }
}

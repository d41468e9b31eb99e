//! What a queue pair is to be modified with (the kernel's `rdma_init_qp_attr`).

use verbatim_cm::{Connection, State, Transport};
use verbatim_device::control::{Access, AddressVector, QpAttr, QpAttrMask, QpState};

use super::ids::Id;
use super::ways;
use crate::error::Refused;

/// The only port.
const PORT: u8 = 1;

/// Attributes with which an id's queue pair, which may have a connection, gets to a state.
pub fn init(
    id: &Id,
    connection: Option<&Connection>,
    state: QpState,
    gids: &[[u8; 16]],
) -> Result<(QpAttrMask, QpAttr), Refused> {
    let mut attr = QpAttr {
        state,
        ..QpAttr::default()
    };
    let Some(connection) = connection.filter(|_| !id.is_datagrams()) else {
        return Ok(unconnected(id, attr));
    };
    let mask = match state {
        QpState::Init if is_alive(connection.state) => {
            attr.port_num = PORT;
            attr.access = Access::REMOTE_WRITE;
            if connection.responder_resources > 0 {
                attr.access |= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            }
            QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT
        }
        QpState::Rtr if knows_peer(connection.state) => to_receive(id, connection, gids, &mut attr)?,
        QpState::Rts if knows_peer(connection.state) => to_send(id, connection, &mut attr),
        _ => {
            return Err(Refused::invalid(format!(
                "a connection that is {} has no attributes for {state:?}",
                connection.state
            )));
        }
    };
    Ok((mask, attr))
}

/// Of an id without a connection, or of datagrams.
fn unconnected(id: &Id, mut attr: QpAttr) -> (QpAttrMask, QpAttr) {
    attr.port_num = PORT;
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    if id.is_datagrams() {
        attr.qkey = id.qkey;
        return (mask | QpAttrMask::QKEY, attr);
    }
    (mask | QpAttrMask::ACCESS_FLAGS, attr)
}

/// There is, or will be, a connection.
fn is_alive(state: State) -> bool {
    matches!(state, State::ReqSent | State::MraReqReceived) || knows_peer(state)
}

/// The peer has told its queue pair.
fn knows_peer(state: State) -> bool {
    use State::*;
    matches!(
        state,
        ReqReceived | MraReqSent | RepReceived | MraRepSent | RepSent | MraRepReceived | Established
    )
}

fn to_receive(
    id: &Id,
    connection: &Connection,
    gids: &[[u8; 16]],
    attr: &mut QpAttr,
) -> Result<QpAttrMask, Refused> {
    // As the program knows it: its library finds out where the peer's queue pair is.
    let path = id.path.as_ref().unwrap_or(&connection.path);
    let sgid_index = ways::index_of(gids, path.local)
        .ok_or_else(|| Refused::new(libc::ENODEV, format!("{} is no address of this RNIC", path.local)))?;
    attr.av = AddressVector {
        dgid: path.remote.0,
        sgid_index,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        sl: path.sl,
        port_num: PORT,
    };
    attr.path_mtu = path.mtu as u8;
    attr.dest_qpn = connection.remote_qpn.get();
    // What this end tells, or has told: an answer may still have to be given.
    attr.rq_psn = id.psn.get();
    let mut mask =
        QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    if connection.transport == Transport::Rc {
        attr.max_dest_rd_atomic = connection.responder_resources;
        mask |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    }
    Ok(mask)
}

fn to_send(id: &Id, connection: &Connection, attr: &mut QpAttr) -> QpAttrMask {
    attr.sq_psn = connection.send_psn.get();
    let mut mask = QpAttrMask::STATE | QpAttrMask::SQ_PSN;
    if connection.transport == Transport::Rc {
        attr.timeout = id.ack_timeout.unwrap_or(connection.ack_timeout);
        attr.retry_cnt = connection.retry_count;
        attr.rnr_retry = connection.rnr_retry_count;
        attr.max_rd_atomic = connection.initiator_depth;
        mask |= QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
    }
    mask
}

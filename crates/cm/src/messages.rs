//! The messages of an id, from what is kept of it.

use verbatim_roce::Qpn;

use crate::command::{Accept, Answer, Connect, Resolve};
use crate::error::Error;
use crate::num::{CommId, ServiceId, Transport};
use crate::state::State;
use crate::talk::{Conn, Talk, ack_timeout};
use crate::wire::{
    Drep, Dreq, IP_HEADER_BYTES, IpHeader, Mad, Message, Mra, Rej, RejectReason, Rejected, Rep, Req, Rtu,
    SidrRep, SidrReq, SidrStatus, WirePath,
};

/// The LID of a path that goes through a router, which every RoCE path is for Linux.
const PERMISSIVE_LID: u16 = 0xffff;
/// A REP's word on an alternate path.
const FAILOVER_NOT_SUPPORTED: u8 = 1;

/// Private data with zeros behind it.
pub(crate) fn padded<const N: usize>(bytes: &[u8]) -> Result<[u8; N], Error> {
    let mut padded = [0; N];
    let room = padded.get_mut(..bytes.len()).ok_or(Error::PrivateData {
        given: bytes.len(),
        most: N,
    })?;
    room.copy_from_slice(bytes);
    Ok(padded)
}

/// The same behind the addresses of the program, if it has any.
fn addressed<const N: usize>(ip: Option<&IpHeader>, bytes: &[u8]) -> Result<[u8; N], Error> {
    let Some(ip) = ip else {
        return padded(bytes);
    };
    if ip.source.is_ipv4() != ip.destination.is_ipv4() {
        return Err(Error::Invalid("the two addresses are of different families"));
    }
    let all = [&ip.emit()[..], bytes].concat();
    padded(&all).map_err(|_| Error::PrivateData {
        given: bytes.len(),
        most: N - IP_HEADER_BYTES,
    })
}

/// The transaction that an id begins. Its number is in the low half, which is what Linux makes of it, too.
pub(crate) fn own_tid(id: CommId) -> u64 {
    u64::from(id.0)
}

pub(crate) fn req(id: CommId, guid: u64, ack_delay: u8, connect: &Connect) -> Result<Mad, Error> {
    let path = &connect.path;
    let subnet_local = path.hop_limit <= 1;
    let lid = if subnet_local { 0 } else { PERMISSIVE_LID };
    let req = Req {
        local_comm_id: id,
        service: connect.service,
        local_guid: guid,
        qkey: 0,
        qpn: connect.qpn,
        responder_resources: connect.responder_resources,
        initiator_depth: connect.initiator_depth,
        remote_response_timeout: connect.remote_response_timeout.min(31),
        transport: match connect.transport {
            Transport::Rc => 0,
            Transport::Uc => 1,
        },
        flow_control: connect.flow_control,
        starting_psn: connect.starting_psn,
        local_response_timeout: connect.local_response_timeout.min(31),
        retry_count: connect.retry_count.min(7),
        pkey: path.pkey,
        mtu: path.mtu as u8,
        rnr_retry_count: connect.rnr_retry_count.min(7),
        max_cm_retries: connect.max_cm_retries.min(15),
        srq: connect.srq,
        extended_transport: 0,
        primary: WirePath {
            local_lid: lid,
            remote_lid: lid,
            local_gid: path.local,
            remote_gid: path.remote,
            flow_label: path.flow_label & 0xf_ffff,
            rate: path.rate,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            sl: path.sl & 0xf,
            subnet_local,
            ack_timeout: ack_timeout(ack_delay, path.packet_life_time),
        },
        alternate: WirePath::default(),
        private_data: addressed(connect.ip.as_ref(), &connect.private_data)?,
    };
    Ok(Mad {
        tid: own_tid(id),
        message: Message::Req(Box::new(req)),
    })
}

pub(crate) fn sidr_req(id: CommId, resolve: &Resolve) -> Result<Mad, Error> {
    let req = SidrReq {
        request_id: id,
        pkey: resolve.path.pkey,
        service: resolve.service,
        private_data: addressed(resolve.ip.as_ref(), &resolve.private_data)?,
    };
    Ok(Mad {
        tid: own_tid(id),
        message: Message::SidrReq(Box::new(req)),
    })
}

/// The answer to a SIDR_REQ.
pub(crate) fn sidr_rep(
    tid: u64,
    request_id: CommId,
    service: ServiceId,
    answer: &Answer,
) -> Result<Mad, Error> {
    let rep = SidrRep {
        request_id,
        status: answer.status,
        additional_length: 0,
        qpn: answer.qpn,
        service,
        qkey: answer.qkey,
        additional: [0; SidrRep::ADDITIONAL],
        private_data: padded(&answer.private_data)?,
    };
    Ok(Mad {
        tid,
        message: Message::SidrRep(Box::new(rep)),
    })
}

/// The answer that there is no queue pair.
pub(crate) fn no_queue_pair(tid: u64, request_id: CommId, service: ServiceId, status: SidrStatus) -> Mad {
    let answer = Answer {
        status,
        qpn: Qpn::default(),
        qkey: 0,
        private_data: Vec::new(),
    };
    sidr_rep(tid, request_id, service, &answer).expect("without private data there is room")
}

/// A message for which no id is needed: the other one that it answers has all.
pub(crate) fn rejection(
    tid: u64,
    local: CommId,
    remote: CommId,
    message: Rejected,
    reason: RejectReason,
) -> Mad {
    let rej = Rej {
        local_comm_id: local,
        remote_comm_id: remote,
        message,
        additional_length: 0,
        reason,
        additional: [0; Rej::ADDITIONAL],
        private_data: [0; Rej::PRIVATE_DATA],
    };
    Mad {
        tid,
        message: Message::Rej(Box::new(rej)),
    }
}

/// The answer to a DREQ.
pub(crate) fn drep(tid: u64, dreq: &Dreq) -> Mad {
    let drep = Drep {
        local_comm_id: dreq.remote_comm_id,
        remote_comm_id: dreq.local_comm_id,
        private_data: [0; Drep::PRIVATE_DATA],
    };
    Mad {
        tid,
        message: Message::Drep(Box::new(drep)),
    }
}

impl Talk {
    /// The peer's id, where it has said it.
    fn remote_id(&self) -> CommId {
        self.remote.unwrap_or(CommId(0))
    }

    /// Which message of the peer's would be answered now.
    fn answered(&self) -> Rejected {
        use State::*;
        match self.state {
            ReqReceived | MraReqSent => Rejected::REQ,
            RepReceived | MraRepSent => Rejected::REP,
            _ => Rejected::OTHER,
        }
    }

    pub fn rep(&self, id: CommId, ack_delay: u8, conn: &Conn, accept: &Accept) -> Result<Mad, Error> {
        let rep = Rep {
            local_comm_id: id,
            remote_comm_id: self.remote_id(),
            qkey: 0,
            qpn: accept.qpn,
            starting_psn: accept.starting_psn,
            responder_resources: accept.responder_resources,
            initiator_depth: accept.initiator_depth,
            target_ack_delay: ack_delay.min(31),
            failover_accepted: if conn.failover { FAILOVER_NOT_SUPPORTED } else { 0 },
            flow_control: accept.flow_control,
            rnr_retry_count: accept.rnr_retry_count.min(7),
            srq: accept.srq,
            local_guid: conn.local_guid,
            private_data: padded(&accept.private_data)?,
        };
        Ok(Mad {
            tid: self.tid,
            message: Message::Rep(Box::new(rep)),
        })
    }

    pub fn rtu(&self, id: CommId, private_data: &[u8]) -> Result<Mad, Error> {
        let rtu = Rtu {
            local_comm_id: id,
            remote_comm_id: self.remote_id(),
            private_data: padded(private_data)?,
        };
        Ok(Mad {
            tid: self.tid,
            message: Message::Rtu(Box::new(rtu)),
        })
    }

    pub fn mra(&self, id: CommId, service_timeout: u8, private_data: &[u8]) -> Result<Mad, Error> {
        let mra = Mra {
            local_comm_id: id,
            remote_comm_id: self.remote_id(),
            message: self.answered(),
            service_timeout: service_timeout.min(31),
            private_data: padded(private_data)?,
        };
        Ok(Mad {
            tid: self.tid,
            message: Message::Mra(Box::new(mra)),
        })
    }

    /// A REJ for what the peer has sent, or for nothing of it.
    pub fn rej(&self, id: CommId, reason: RejectReason, private_data: &[u8]) -> Result<Mad, Error> {
        // Who rejects a REQ has not told its number yet, unless by an MRA (IBA §12.6.7.1).
        let told = self.state != State::ReqReceived;
        let local = if told { id } else { CommId(0) };
        let mut mad = rejection(self.tid, local, self.remote_id(), self.answered(), reason);
        if let Message::Rej(rej) = &mut mad.message {
            rej.private_data = padded(private_data)?;
        }
        Ok(mad)
    }

    /// This end does not wait any more. The peer may not know its number, but it knows the RNIC.
    pub fn gives_up(&self, id: CommId, conn: &Conn) -> Mad {
        let mut mad = rejection(
            self.tid,
            id,
            self.remote_id(),
            Rejected::OTHER,
            RejectReason::TIMEOUT,
        );
        if let Message::Rej(rej) = &mut mad.message {
            rej.additional_length = 8;
            rej.additional[..8].copy_from_slice(&conn.local_guid.to_be_bytes());
        }
        mad
    }

    pub fn dreq(&self, id: CommId, conn: &Conn, private_data: &[u8]) -> Result<Mad, Error> {
        let dreq = Dreq {
            local_comm_id: id,
            remote_comm_id: self.remote_id(),
            remote_qpn: conn.remote_qpn,
            private_data: padded(private_data)?,
        };
        Ok(Mad {
            tid: own_tid(id),
            message: Message::Dreq(Box::new(dreq)),
        })
    }

    pub fn sidr_rep(&self, answer: &Answer) -> Result<Mad, Error> {
        sidr_rep(self.tid, self.remote_id(), self.service, answer)
    }
}

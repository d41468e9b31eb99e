//! What the communication manager tells, as events of programs (the kernel's `cma_ib_handler`).

use std::net::{IpAddr, SocketAddr};

use verbatim_cm::wire::{IpHeader, RejectReason, SidrStatus};
use verbatim_cm::{Answer, CommId, Event, Gid, Notice, Path};
use verbatim_device::control::{AddressVector, CmDatagrams, CmDetails, CmEvent, CmParameters, QpType};
use verbatim_roce::{Qpn, Time};

use super::Manager;
use super::channels::Waiting;
use super::ids::{Id, Stage};
use super::ways::{self, stands_for};

/// `enum rdma_cm_event_type`
pub mod event {
    pub const ADDR_RESOLVED: u32 = 0;
    pub const ADDR_ERROR: u32 = 1;
    pub const ROUTE_RESOLVED: u32 = 2;
    pub const CONNECT_REQUEST: u32 = 4;
    pub const CONNECT_RESPONSE: u32 = 5;
    pub const UNREACHABLE: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const ESTABLISHED: u32 = 9;
    pub const DISCONNECTED: u32 = 10;
    pub const DEVICE_REMOVAL: u32 = 11;
    pub const MULTICAST_JOIN: u32 = 12;
    pub const TIMEWAIT_EXIT: u32 = 15;
}

/// Addresses of a peer's program, and the own ones that it has asked for.
struct Asked {
    ip: Option<IpHeader>,
    path: Path,
    port: u16,
    qp_type: QpType,
    details: CmDetails,
}

impl Manager {
    /// Hands out all that the machine has to tell.
    pub fn take_notices(&mut self, now: Time, gids: &[[u8; 16]]) {
        while let Some(notice) = self.machine.poll_event() {
            self.notice(now, notice, gids);
        }
    }

    fn notice(&mut self, now: Time, notice: Notice, gids: &[[u8; 16]]) {
        let comm = notice.id;
        let (kind, status, details) = match notice.event {
            Event::ConnectRequest(request) => {
                let asked = Asked {
                    ip: request.ip,
                    path: request.path,
                    port: request.service.port(),
                    qp_type: match request.transport {
                        verbatim_cm::Transport::Rc => QpType::Rc,
                        verbatim_cm::Transport::Uc => QpType::Uc,
                    },
                    details: CmDetails::Connection(CmParameters {
                        qp_num: request.remote_qpn.get(),
                        qkey: 0,
                        private_data: request.private_data,
                        srq: request.srq,
                        responder_resources: request.responder_resources,
                        initiator_depth: request.initiator_depth,
                        flow_control: request.flow_control.into(),
                        retry_count: request.retry_count,
                        rnr_retry_count: request.rnr_retry_count,
                    }),
                };
                return self.asked(now, comm, request.listener, asked, gids);
            }
            Event::ResolveRequest(request) => {
                let asked = Asked {
                    ip: request.ip,
                    path: Path::new(request.local, request.remote, verbatim_cm::Mtu::default()),
                    port: request.service.port(),
                    qp_type: QpType::Ud,
                    details: CmDetails::Datagrams(CmDatagrams {
                        private_data: request.private_data,
                        ..CmDatagrams::default()
                    }),
                };
                return self.asked(now, comm, request.listener, asked, gids);
            }
            Event::ConnectResponse(response) => (
                event::CONNECT_RESPONSE,
                0,
                CmDetails::Connection(CmParameters {
                    qp_num: response.remote_qpn.get(),
                    qkey: 0,
                    private_data: response.private_data,
                    srq: response.srq,
                    responder_resources: response.responder_resources,
                    initiator_depth: response.initiator_depth,
                    flow_control: response.flow_control.into(),
                    retry_count: 0,
                    rnr_retry_count: response.rnr_retry_count,
                }),
            ),
            // As in the kernel, programs get no private data of an RTU or a DREQ.
            Event::Established { .. } => (event::ESTABLISHED, 0, CmDetails::None),
            Event::Rejected {
                reason, private_data, ..
            } => {
                let parameters = CmParameters {
                    private_data,
                    ..CmParameters::default()
                };
                (
                    event::REJECTED,
                    i32::from(reason.0),
                    CmDetails::Connection(parameters),
                )
            }
            Event::Unreachable => (event::UNREACHABLE, -libc::ETIMEDOUT, CmDetails::None),
            Event::Disconnected { timed_out, .. } => {
                let status = if timed_out { -libc::ETIMEDOUT } else { 0 };
                (event::DISCONNECTED, status, CmDetails::None)
            }
            Event::TimeWaitExit => (event::TIMEWAIT_EXIT, 0, CmDetails::None),
            Event::ResolveResponse(response) if response.status != SidrStatus::VALID => {
                (event::UNREACHABLE, i32::from(response.status.0), CmDetails::None)
            }
            Event::ResolveResponse(response) => {
                let id = self.by_comm.get(&comm).and_then(|id| self.ids.get(*id));
                let path = id.and_then(|id| id.path);
                let known = id.and_then(|id| self.programs.get(id.context)?.known.as_ref());
                let gids = known.map_or(gids, |known| &known.gids);
                let datagrams = CmDatagrams {
                    qp_num: response.qpn.get(),
                    qkey: response.qkey,
                    av: path.map(|path| address_vector(&path, gids)).unwrap_or_default(),
                    private_data: response.private_data,
                };
                (event::ESTABLISHED, 0, CmDetails::Datagrams(datagrams))
            }
        };
        if let Some(id) = self.by_comm.get(&comm).copied() {
            self.tell_id(id, kind, status, details);
        }
    }

    /// An event of an id. One that a program has not agreed to has no name for it yet, and gets none: agreeing fails.
    pub fn tell_id(&mut self, number: u32, kind: u32, status: i32, details: CmDetails) {
        let Some(id) = self.ids.get(number).filter(|id| id.uid != 0) else {
            return;
        };
        let waiting = Waiting {
            id: number,
            counts: number,
            membership: None,
            request: None,
            event: CmEvent {
                uid: id.uid,
                id: id.name,
                event: kind,
                status,
                details,
            },
        };
        self.tell(id.channel, waiting);
    }

    /// A peer has asked a listener: a new id, of which the listener's program is told.
    fn asked(&mut self, now: Time, comm: CommId, listener: CommId, mut asked: Asked, gids: &[[u8; 16]]) {
        let Some((listener, parent)) = self
            .by_comm
            .get(&listener)
            .and_then(|id| Some((*id, self.ids.get(*id)?)))
        else {
            let _ = self.machine.destroy(now, comm);
            return;
        };
        let (uid, channel) = (parent.uid, parent.channel);
        let known = self.programs.get(parent.context);
        if let Some(known) = known.and_then(|program| program.known.as_ref()) {
            // Numbers of its queue pairs are known at the addresses that it knows, and nowhere else.
            let to = asked.ip.map(|ip| Gid::from(ip.destination));
            if to.is_some_and(|to| !known.gids.contains(&to.0)) {
                return self.refuse(now, comm, asked.qp_type);
            }
            let known = stands_for(gids, asked.path.local, &known.gids);
            asked.path.local = to.or(known).unwrap_or(asked.path.local);
        }
        // By which the peer knows its queue pair: it may have moved.
        let by = asked.ip.map(|ip| ip.source);
        if let Some(by) = by.filter(|by| is_possible(*by, asked.path.remote)) {
            asked.path.remote = by.into();
        }
        let ends = asked.ip.map(|ip| {
            let own = SocketAddr::new(ip.destination, asked.port);
            (own, SocketAddr::new(ip.source, ip.source_port))
        });
        let id = Id {
            stage: Stage::Connecting,
            source: ends.map(|(own, _)| own),
            destination: ends.map(|(_, peer)| peer),
            path: Some(asked.path),
            comm: Some(comm),
            is_asked: true,
            traffic_class: parent.traffic_class,
            ack_timeout: parent.ack_timeout,
            ..Id::new(parent.context, channel, 0, parent.space, asked.qp_type)
        };
        let Ok(number) = self.add_id(id) else {
            let _ = self.machine.destroy(now, comm);
            return;
        };
        self.by_comm.insert(comm, number);
        let name = self.name_of(number);
        let waiting = Waiting {
            id: number,
            counts: listener,
            membership: None,
            request: Some(comm),
            event: CmEvent {
                uid,
                id: name,
                event: event::CONNECT_REQUEST,
                status: 0,
                details: asked.details,
            },
        };
        self.tell(channel, waiting);
    }

    /// A request for which nobody is here.
    fn refuse(&mut self, now: Time, comm: CommId, qp_type: QpType) {
        let answer = Answer {
            status: SidrStatus::UNSUPPORTED_SERVICE,
            qpn: Qpn::new(0),
            qkey: 0,
            private_data: Vec::new(),
        };
        let _ = match qp_type {
            QpType::Ud => self.machine.answer(now, comm, &answer),
            _ => self
                .machine
                .reject(now, comm, RejectReason::INVALID_SERVICE_ID, &[]),
        };
        let _ = self.machine.destroy(now, comm);
    }
}

/// Whether a peer whose message came from `from` may be known by that address.
fn is_possible(by: IpAddr, from: Gid) -> bool {
    let from = from.ip();
    let is_one = !by.is_unspecified() && !by.is_multicast() && by.is_loopback() == from.is_loopback();
    is_one && by.is_ipv4() == from.is_ipv4()
}

/// For an address handle.
pub fn address_vector(path: &Path, gids: &[[u8; 16]]) -> AddressVector {
    AddressVector {
        dgid: path.remote.0,
        sgid_index: ways::index_of(gids, path.local).unwrap_or_default(),
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        sl: path.sl,
        port_num: 1,
    }
}

//! Requests of programs (the kernel's `ucma_*` and `rdma_*` functions, and their errors).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use verbatim_cm::wire::{IpHeader, RejectReason, SidrStatus};
use verbatim_cm::{
    Accept, Accepts, Answer, CommId, Connect, Error, Listen, ListenAddress, Owner, PortSpace, Resolve,
    ServiceId, Transport,
};
use verbatim_device::control::{
    CM_MAX_PRIVATE_DATA, CmDetails, CmParameters, CmPath, CmReply, CmRequest, CmRoute, QpType,
};
use verbatim_roce::Qpn;

use super::channels::Channel;
use super::ids::{Id, Stage};
use super::notices::event;
use super::ports::Holder;
use super::requests::Asking;
use super::{Manager, attributes, options};
use crate::error::Refused;
use crate::outbox::Outbox;

/// As many connections as may wait where a program names no number, or a larger one (`max_backlog`).
const MOST_BACKLOG: u32 = 1024;

/// The most retries that a message has room for.
const MOST_RETRIES: u8 = 7;

/// `IBV_EVENT_COMM_EST`
const COMM_EST: u32 = 4;

fn refused(error: Error) -> Refused {
    let errno = match error {
        Error::NoSuchId => libc::ENOENT,
        Error::WrongState(_) | Error::PrivateData { .. } | Error::Invalid(_) => libc::EINVAL,
        Error::InUse => libc::EADDRINUSE,
        Error::TooManyIds => libc::ENOMEM,
    };
    Refused::new(errno, error.to_string())
}

fn wrong_stage<T>(id: u32, stage: Stage) -> Result<T, Refused> {
    Err(Refused::invalid(format!("rdma_cm id {id} is {stage:?}")))
}

impl Manager {
    /// Carries out one whose ids are the table's.
    pub(super) fn carry_out(
        &mut self,
        request: CmRequest,
        fds: &mut Vec<OwnedFd>,
        asking: &Asking<'_>,
    ) -> Result<CmReply, Refused> {
        let Asking { context, now, .. } = *asking;
        let done = |()| CmReply::Done;
        match request {
            CmRequest::CreateChannel => self.create_channel(fds, asking),
            CmRequest::DestroyChannel { channel } => {
                self.own_channel(channel, context)?;
                self.remove_channel(now, channel);
                Ok(CmReply::Done)
            }
            CmRequest::GetEvent { channel } => self.get_event(channel, context),
            CmRequest::CreateId {
                channel,
                uid,
                port_space,
                qp_type,
            } => {
                self.own_channel(channel, context)?;
                let space = PortSpace(port_space);
                let id = Id::new(context, channel, uid, space, qp_type_of(space, qp_type)?);
                let number = self.add_id(id)?;
                Ok(CmReply::Id {
                    id: self.name_of(number),
                })
            }
            CmRequest::DestroyId { id } => {
                self.own_id(id, context)?;
                let (events, quiet) = self.remove_id(now, id);
                Ok(CmReply::Reported { events, quiet })
            }
            CmRequest::Bind { id, address } => self.bind(id, address, asking).map(done),
            CmRequest::ResolveAddress {
                id,
                source,
                destination,
                timeout_ms: _,
            } => self.resolve_address(id, source, destination, asking).map(done),
            CmRequest::ResolveRoute { id, timeout_ms: _ } => {
                let known = self.own_id(id, context)?;
                if known.stage != Stage::AddressResolved {
                    return wrong_stage(id, known.stage);
                }
                known.stage = Stage::RouteResolved;
                self.tell_id(id, event::ROUTE_RESOLVED, 0, CmDetails::None);
                Ok(CmReply::Done)
            }
            CmRequest::Query { id } => self.query(id, asking).map(CmReply::Route),
            CmRequest::Listen { id, backlog } => self.listen(id, backlog, asking).map(done),
            CmRequest::Connect { id, parameters } => self.connect(id, parameters, asking).map(done),
            CmRequest::Accept { id, uid, parameters } => self.accept(id, uid, parameters, asking).map(done),
            CmRequest::Reject {
                id,
                reason,
                private_data,
            } => self.reject(id, reason, &private_data, asking).map(done),
            CmRequest::Disconnect { id } => {
                let comm = self.own_comm(id, context)?;
                self.machine.disconnect(now, comm, &[]).map_err(refused).map(done)
            }
            CmRequest::InitQpAttr { id, state } => {
                let comm = self.own_id(id, context)?.comm;
                let connection = comm.and_then(|comm| self.machine.connection(comm));
                let gids = self.ways(asking).gids();
                let (mask, attr) =
                    attributes::init(self.own_id(id, context)?, connection.as_ref(), state, &gids)?;
                Ok(CmReply::QpAttr { mask, attr })
            }
            CmRequest::SetOption {
                id,
                level,
                name,
                value,
            } => options::set(self.own_id(id, context)?, level, name, &value).map(done),
            CmRequest::Notify { id, event } => {
                let comm = self.own_comm(id, context)?;
                match event {
                    COMM_EST => self.machine.notify_established(comm).map_err(refused).map(done),
                    _ => Err(Refused::invalid(format!(
                        "event {event} is nothing to be told of"
                    ))),
                }
            }
            CmRequest::JoinMulticast { id, uid, address } => self.join(id, uid, address.ip(), asking),
            CmRequest::LeaveMulticast { membership } => self.leave(membership, context),
            CmRequest::MigrateId { id, channel } => self.migrate(id, channel, context),
            CmRequest::Know { .. }
            | CmRequest::Describe
            | CmRequest::Reserve { .. }
            | CmRequest::Dump
            | CmRequest::Adopt { .. }
            | CmRequest::AttachChannel { .. }
            | CmRequest::SendOn { .. } => unreachable!("answered by others"),
        }
    }

    /// A channel of this context.
    pub fn own_channel(&mut self, channel: u32, context: u32) -> Result<&mut Channel, Refused> {
        let known = self
            .channels
            .get_mut(channel)
            .filter(|known| known.context == context);
        known.ok_or_else(|| Refused::no_such("rdma_cm channel", channel))
    }

    fn create_channel(&mut self, fds: &mut Vec<OwnedFd>, asking: &Asking<'_>) -> Result<CmReply, Refused> {
        let context = asking.context;
        let of_it = self
            .channels
            .iter()
            .filter(|(_, channel)| channel.context == context);
        if of_it.count() >= self.most_of_context {
            return Err(Refused::new(
                libc::ENOMEM,
                "this program may have no more rdma_cm channels",
            ));
        }
        let outbox = Outbox::new(fds)?;
        let channel = self
            .channels
            .insert_with(|_, _| Channel::new(context, Some(outbox)))
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no rdma_cm channel is left"))?;
        Ok(CmReply::Channel { channel })
    }

    fn get_event(&mut self, channel: u32, context: u32) -> Result<CmReply, Refused> {
        let taken = self.own_channel(channel, context)?.take();
        let (waiting, quiet) = taken.ok_or_else(|| Refused::new(libc::EAGAIN, "there is no event"))?;
        if let Some(id) = self.ids.get_mut(waiting.counts) {
            id.reported += 1;
        }
        if let Some(membership) = waiting
            .membership
            .and_then(|number| self.memberships.get_mut(number))
        {
            membership.reported += 1;
        }
        if let Some(request) = waiting.request {
            self.machine.taken(request);
        }
        let event = waiting.event;
        Ok(CmReply::Event { event, quiet })
    }

    fn bind(&mut self, id: u32, address: SocketAddr, asking: &Asking<'_>) -> Result<(), Refused> {
        let own = self.ways(asking).own(address.ip())?;
        let known = self.own_id(id, asking.context)?;
        if known.stage != Stage::Idle {
            return wrong_stage(id, known.stage);
        }
        let mut address = SocketAddr::new(own.unwrap_or(address.ip()), address.port());
        let (space, sharing) = (known.space, known.sharing);
        address.set_port(self.ports.take(space, Holder::Id(id), address, sharing)?);
        // The way to itself: it says which device and which own GID, and nothing of a peer.
        let path = own.and_then(|own| self.ways(asking).find(Some(own), own).ok());
        let known = self.own_id(id, asking.context)?;
        known.port = Some(address.port());
        known.source = Some(address);
        known.path = path;
        known.stage = Stage::Bound;
        Ok(())
    }

    fn resolve_address(
        &mut self,
        id: u32,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        asking: &Asking<'_>,
    ) -> Result<(), Refused> {
        if self.own_id(id, asking.context)?.stage == Stage::Idle {
            let any: IpAddr = match destination {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            self.bind(id, source.unwrap_or(SocketAddr::new(any, 0)), asking)?;
        }
        let known = self.own_id(id, asking.context)?;
        let (Stage::Bound, Some(source)) = (known.stage, known.source) else {
            return wrong_stage(id, known.stage);
        };
        if source.is_ipv4() != destination.is_ipv4() {
            return Err(Refused::invalid("the two addresses are of different families"));
        }
        let from = (!source.ip().is_unspecified()).then_some(source.ip());
        known.destination = Some(destination);
        let found = self.ways(asking).find(from, destination.ip());
        let known = self.own_id(id, asking.context)?;
        match found {
            Ok(mut path) => {
                path.traffic_class = known.traffic_class;
                known.source = Some(SocketAddr::new(path.local.ip(), source.port()));
                known.destination = Some(SocketAddr::new(path.remote.ip(), destination.port()));
                known.path = Some(path);
                known.stage = Stage::AddressResolved;
                self.tell_id(id, event::ADDR_RESOLVED, 0, CmDetails::None);
            }
            Err(errno) => self.tell_id(id, event::ADDR_ERROR, errno, CmDetails::None),
        }
        Ok(())
    }

    fn query(&mut self, id: u32, asking: &Asking<'_>) -> Result<CmRoute, Refused> {
        let node_guid = self.ways(asking).node_guid();
        let known = self.own_id(id, asking.context)?;
        let path = known.path.map(|path| CmPath {
            node_guid,
            sgid: path.local.0,
            dgid: match known.destination {
                Some(_) => path.remote.0,
                None => [0; 16],
            },
            resolved: matches!(known.stage, Stage::RouteResolved | Stage::Connecting),
            mtu: path.mtu as u8,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        });
        Ok(CmRoute {
            source: known.source,
            destination: known.destination,
            path,
        })
    }

    fn listen(&mut self, id: u32, backlog: u32, asking: &Asking<'_>) -> Result<(), Refused> {
        if self.own_id(id, asking.context)?.stage == Stage::Idle {
            self.bind(id, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0), asking)?;
        }
        let known = self.own_id(id, asking.context)?;
        let (Stage::Bound, Some(source)) = (known.stage, known.source) else {
            return wrong_stage(id, known.stage);
        };
        let address = match (source.ip(), known.sharing.family_only) {
            (ip, _) if !ip.is_unspecified() => ListenAddress::One(ip),
            (_, false) => ListenAddress::Any,
            (IpAddr::V4(_), true) => ListenAddress::AnyV4,
            (IpAddr::V6(_), true) => ListenAddress::AnyV6,
        };
        let listen = Listen {
            service: ServiceId::of_port(known.space, source.port()),
            address,
            accepts: match known.is_datagrams() {
                true => Accepts::Datagrams,
                false => Accepts::Connections,
            },
            backlog: match backlog {
                0 => MOST_BACKLOG,
                named => named.min(MOST_BACKLOG),
            },
        };
        let owner = Owner(asking.context.into());
        let comm = self.machine.listen(owner, &listen).map_err(refused)?;
        self.has_comm(id, asking.context, comm, Stage::Listening)
    }

    /// The machine has an id for it now.
    fn has_comm(&mut self, id: u32, context: u32, comm: CommId, stage: Stage) -> Result<(), Refused> {
        self.by_comm.insert(comm, id);
        let known = self.own_id(id, context)?;
        known.comm = Some(comm);
        known.stage = stage;
        Ok(())
    }

    fn connect(&mut self, id: u32, parameters: CmParameters, asking: &Asking<'_>) -> Result<(), Refused> {
        check_private_data(&parameters.private_data)?;
        let known = self.own_id(id, asking.context)?;
        let (Stage::RouteResolved, Some(path), Some(source), Some(destination)) =
            (known.stage, known.path, known.source, known.destination)
        else {
            return wrong_stage(id, known.stage);
        };
        let service = ServiceId::of_port(known.space, destination.port());
        let ip = Some(IpHeader {
            source: source.ip(),
            source_port: source.port(),
            destination: destination.ip(),
        });
        let (is_datagrams, qp_type, psn) = (known.is_datagrams(), known.qp_type, known.psn);
        let path = self.ways(asking).physical(path);
        let owner = Owner(asking.context.into());
        let comm = match is_datagrams {
            true => {
                let resolve = Resolve {
                    ip,
                    private_data: parameters.private_data,
                    ..Resolve::new(service, path)
                };
                self.machine.resolve(asking.now, owner, &resolve)
            }
            false => {
                let transport = match qp_type {
                    QpType::Uc => Transport::Uc,
                    _ => Transport::Rc,
                };
                let connect = Connect {
                    ip,
                    transport,
                    responder_resources: parameters.responder_resources,
                    initiator_depth: parameters.initiator_depth,
                    flow_control: parameters.flow_control != 0,
                    srq: parameters.srq,
                    retry_count: parameters.retry_count.min(MOST_RETRIES),
                    rnr_retry_count: parameters.rnr_retry_count.min(MOST_RETRIES),
                    private_data: parameters.private_data,
                    ..Connect::new(service, path, Qpn::new(parameters.qp_num), psn)
                };
                self.machine.connect(asking.now, owner, &connect)
            }
        };
        self.has_comm(id, asking.context, comm.map_err(refused)?, Stage::Connecting)
    }

    fn accept(
        &mut self,
        id: u32,
        uid: u64,
        parameters: Option<CmParameters>,
        asking: &Asking<'_>,
    ) -> Result<(), Refused> {
        let comm = self.own_comm(id, asking.context)?;
        let Some(parameters) = parameters else {
            return self.machine.establish(asking.now, comm, &[]).map_err(refused);
        };
        check_private_data(&parameters.private_data)?;
        let known = self.own_id(id, asking.context)?;
        if !known.is_asked {
            return wrong_stage(id, known.stage);
        }
        if known.is_datagrams() && parameters.qkey != 0 {
            known.qkey = parameters.qkey;
        }
        let (is_datagrams, qkey, psn) = (known.is_datagrams(), known.qkey, known.psn);
        let qpn = Qpn::new(parameters.qp_num);
        let accepted = match is_datagrams {
            true => {
                let answer = Answer {
                    status: SidrStatus::VALID,
                    qpn,
                    qkey,
                    private_data: parameters.private_data,
                };
                self.machine.answer(asking.now, comm, &answer)
            }
            false => {
                let accept = Accept {
                    qpn,
                    starting_psn: psn,
                    responder_resources: parameters.responder_resources,
                    initiator_depth: parameters.initiator_depth,
                    flow_control: parameters.flow_control != 0,
                    rnr_retry_count: parameters.rnr_retry_count.min(MOST_RETRIES),
                    srq: parameters.srq,
                    private_data: parameters.private_data,
                };
                self.machine.accept(asking.now, comm, &accept)
            }
        };
        accepted.map_err(refused)?;
        self.own_id(id, asking.context)?.uid = uid;
        Ok(())
    }

    fn reject(
        &mut self,
        id: u32,
        reason: u8,
        private_data: &[u8],
        asking: &Asking<'_>,
    ) -> Result<(), Refused> {
        /// `CM_REJ_VENDOR_OPTION_NOT_SUPPORTED`
        const VENDOR_OPTION: u8 = 35;
        check_private_data(private_data)?;
        let reason = match reason {
            0 => RejectReason::CONSUMER,
            VENDOR_OPTION => RejectReason(VENDOR_OPTION.into()),
            given if u16::from(given) == RejectReason::CONSUMER.0 => RejectReason::CONSUMER,
            given => {
                return Err(Refused::invalid(format!(
                    "programs do not reject for reason {given}"
                )));
            }
        };
        let comm = self.own_comm(id, asking.context)?;
        if self.own_id(id, asking.context)?.is_datagrams() {
            let answer = Answer {
                status: SidrStatus::REJECTED,
                qpn: Qpn::new(0),
                qkey: 0,
                private_data: private_data.to_vec(),
            };
            return self.machine.answer(asking.now, comm, &answer).map_err(refused);
        }
        self.machine
            .reject(asking.now, comm, reason, private_data)
            .map_err(refused)
    }

    fn migrate(&mut self, id: u32, to: u32, context: u32) -> Result<CmReply, Refused> {
        self.own_channel(to, context)?;
        let known = self.own_id(id, context)?;
        let (from, events) = (std::mem::replace(&mut known.channel, to), known.reported);
        if from == to {
            return Ok(CmReply::Reported { events, quiet: false });
        }
        let channel = self.own_channel(from, context)?;
        channel.ids.remove(&id);
        let (moved, quiet) = channel.take_out(|waiting| waiting.counts == id);
        self.own_channel(to, context)?.ids.insert(id);
        for waiting in moved {
            // Requests that nobody knows of yet go along with the listener.
            if waiting.request.is_some() {
                self.follow(waiting.id, from, to);
            }
            self.tell(to, waiting);
        }
        Ok(CmReply::Reported { events, quiet })
    }

    fn follow(&mut self, request: u32, from: u32, to: u32) {
        if let Some(id) = self.ids.get_mut(request) {
            id.channel = to;
        }
        if let Some(channel) = self.channels.get_mut(from) {
            channel.ids.remove(&request);
        }
        if let Some(channel) = self.channels.get_mut(to) {
            channel.ids.insert(request);
        }
    }
}

fn check_private_data(private_data: &[u8]) -> Result<(), Refused> {
    match private_data.len() {
        length if length > CM_MAX_PRIVATE_DATA => Err(Refused::invalid(format!(
            "{length} bytes of private data are too many"
        ))),
        _ => Ok(()),
    }
}

/// What queue pairs the ids of a port space are for (`ucma_get_qp_type`).
fn qp_type_of(space: PortSpace, asked: u8) -> Result<QpType, Refused> {
    let of_number = |number| match number {
        2 => Ok(QpType::Rc),
        3 => Ok(QpType::Uc),
        4 => Ok(QpType::Ud),
        other => Err(Refused::invalid(format!(
            "rdma_cm has no queue pairs of type {other} here"
        ))),
    };
    match space {
        PortSpace::TCP => Ok(QpType::Rc),
        PortSpace::UDP => Ok(QpType::Ud),
        PortSpace::IB => of_number(asked),
        PortSpace::IPOIB => Err(Refused::new(
            libc::EPROTONOSUPPORT,
            "there is no IP over InfiniBand on RoCE",
        )),
        PortSpace(other) => Err(Refused::invalid(format!("there is no port space {other:#x}"))),
    }
}

//! Two connected processes, and a migration of one of them step by step.

use std::path::Path;
use std::sync::Arc;

use verbatim_channel::{
    Answer, ClaimedChannel, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedMw, ClaimedPd, ClaimedQp,
    ClaimedSrq, Endpoint, KeyPair, MadeContext, MadePeer, MovedEndpoint, Order, QpCount, RoadMap, Scope,
    StandbyPeer, StandbyQp,
};
use verbatim_device::control::{Access, AddressVector, QpAttr, QpAttrMask, QpCap, QpState, QpType, SrqAttr};
use verbatim_device::layout::Sge;

use super::World;
use super::nic::connection;
use crate::backend::{Device, PhysicalMemory, PhysicalMrInit, PhysicalQpInit};
use crate::session::Sessions;
use crate::{
    Ah, Body, Context, Cq, Mr, Pd, PostError, Process, Qp, QpInit, RecvWr, SendOpcode, SendWr, Srq, UdAddress,
};

pub const CAP: QpCap = QpCap {
    max_send_wr: 4,
    max_recv_wr: 8,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 16,
};

pub const SRQ: SrqAttr = SrqAttr {
    max_wr: 8,
    max_sge: 2,
    limit: 0,
};

/// What the ends of a story have beside the least.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    /// Their queue pairs take RECVs from a shared receive queue.
    pub srq: bool,
    /// Their completion queues have a channel, whose descriptor is non-blocking.
    pub channel: bool,
    /// Their connection is unreliable.
    pub unreliable: bool,
    /// Their queue pairs are of datagrams.
    pub datagrams: bool,
    /// Their processes make their contexts again where they move to.
    pub made_again: bool,
}

/// Memory to be registered: read-only, so that it is never adopted.
pub fn buffer() -> u64 {
    static BUFFER: [u8; 64] = [0; 64];
    (&raw const BUFFER) as u64
}

/// One end of the connection: a process with one of everything.
pub struct End {
    pub sessions: Sessions,
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    pub mr: Arc<Mr>,
    pub cq: Arc<Cq>,
    /// What the queue pair takes its RECVs from, if not from an own queue.
    pub srq: Option<Arc<Srq>>,
    pub qp: Arc<Qp>,
    /// The device that it is on.
    pub device: u8,
}

impl End {
    fn new(world: &World, device: u8, shape: Shape) -> Self {
        // There is no agent.
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(world.device(device))).unwrap();
        let pd = context.alloc_pd().unwrap();
        let mr = pd.reg_mr(buffer(), 64, buffer(), Access::LOCAL_WRITE).unwrap();
        let channel = shape.channel.then(|| context.create_comp_channel().unwrap());
        if let Some(channel) = &channel {
            rustix::io::ioctl_fionbio(channel.fd(), true).unwrap();
        }
        let cq = context.create_cq(64, channel.as_ref()).unwrap();
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: match shape {
                Shape { datagrams: true, .. } => QpType::Ud,
                Shape { unreliable: true, .. } => QpType::Uc,
                _ => QpType::Rc,
            },
            cap: CAP,
            signal_all: false,
            srq: shape.srq.then(|| pd.create_srq(&SRQ).unwrap()),
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            sessions: Sessions::new(process),
            context,
            pd,
            mr,
            cq,
            srq: init.srq,
            qp,
            device,
        }
    }

    pub fn endpoint(&self) -> Endpoint {
        let mut gid = [0; 16];
        gid[15] = self.device;
        Endpoint {
            gid,
            qpn: self.qp.control.lock().physical_qpn(),
        }
    }

    fn connect(&self, to: Endpoint) {
        let mut attr = QpAttr {
            state: QpState::Init,
            dest_qpn: to.qpn,
            ..QpAttr::default()
        };
        attr.av.dgid = to.gid;
        self.qp.modify(QpAttrMask::STATE, &attr).unwrap();
        attr.state = QpState::Rtr;
        let mask = match self.qp.qp_type() {
            QpType::Ud => QpAttrMask::STATE,
            QpType::Rc | QpType::Uc => QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::DEST_QPN,
        };
        self.qp.modify(mask, &attr).unwrap();
        attr.state = QpState::Rts;
        self.qp.modify(QpAttrMask::STATE, &attr).unwrap();
    }

    pub fn sge(&self) -> Sge {
        Sge {
            address: buffer(),
            length: 8,
            lkey: self.mr.lkey(),
        }
    }

    /// An address handle of the host that `other` was opened on.
    pub fn handle_to(&self, other: &End) -> Arc<Ah> {
        let way = AddressVector {
            dgid: other.context.gid(0).unwrap(),
            ..AddressVector::default()
        };
        self.pd.create_ah(&way).unwrap()
    }

    /// Sends a datagram of that number to where `other` was when it was opened.
    pub fn send_datagram(&self, message: u32, ah: &Ah, other: &End) {
        let sges = [self.sge()];
        let mut request = SendWr::local_invalidate(message.into(), crate::SEND_SIGNALED, message);
        request.opcode = SendOpcode::SendWithImm;
        request.ud = UdAddress {
            ah: ah.number(),
            remote_qpn: other.qp.number(),
            remote_qkey: 0,
        };
        request.body = Body::Sges(&sges);
        self.qp.post_send([request]).unwrap();
    }

    /// Posts a message of that number, with the number as `wr_id`.
    pub fn send(
        &self,
        message: u32,
        opcode: SendOpcode,
        signaled: bool,
        inline: bool,
    ) -> Result<(), PostError> {
        let sges = [self.sge()];
        let request = SendWr {
            wr_id: message.into(),
            opcode,
            flags: if signaled { crate::SEND_SIGNALED } else { 0 },
            imm: message,
            remote_address: buffer(),
            rkey: 1,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: if inline {
                Body::Inline(&[b"in", b"line"])
            } else {
                Body::Sges(&sges)
            },
        };
        self.qp.post_send([request]).map_err(|(_, error)| error)
    }

    pub fn recv(&self, wr_id: u64) -> Result<(), PostError> {
        let sges = [self.sge()];
        let request = RecvWr { wr_id, sges: &sges };
        let posted = match &self.srq {
            Some(srq) => srq.post_recv([request]),
            None => self.qp.post_recv([request]),
        };
        posted.map_err(|(_, error)| error)
    }

    /// Takes all completions that there are now: (`wr_id`, opcode, immediate data, status).
    pub fn poll(&self) -> Vec<crate::Wc> {
        let mut taken = Vec::new();
        let mut wc = [crate::Wc::default(); 3];
        loop {
            let count = self.cq.poll(&mut wc);
            if count == 0 {
                return taken;
            }
            taken.extend_from_slice(&wc[..count]);
        }
    }

    /// Gives an order that must be carried out.
    pub fn order(&mut self, order: Order) -> Answer {
        match self.sessions.handle(order, Vec::new()) {
            Answer::Error { message } => panic!("{message}"),
            answer => answer,
        }
    }

    fn suspend(&mut self, session: u64, scope: Scope) -> Vec<QpCount> {
        match self.order(Order::Suspend { session, scope }) {
            Answer::Suspended { sent, .. } => sent,
            other => panic!("{other:?}"),
        }
    }
}

/// Two ends and a migration of one to another device.
pub struct Story {
    pub world: World,
    pub ends: [End; 2],
    made_again: bool,
    next_device: u8,
    next_session: u64,
}

/// What the agents know between two steps.
#[derive(Debug)]
pub struct Migration {
    pub session: u64,
    /// Which end moves.
    pub mover: usize,
    target: u8,
    claimed: Vec<ClaimedContext>,
    sent: [Vec<QpCount>; 2],
    parked: Vec<std::os::fd::OwnedFd>,
    standby: StandbyQp,
    /// What the mover has made again, once it has.
    made: Vec<MadeContext>,
}

impl Migration {
    /// What the agent was given when the mover was quiesced.
    pub fn parked(&self) -> &[std::os::fd::OwnedFd] {
        &self.parked
    }

    /// What the mover has made again.
    pub fn made(&self) -> &[MadeContext] {
        &self.made
    }
}

const NOBODY: StandbyQp = StandbyQp {
    qpn: 0,
    physical_qpn: 0,
    sq_psn: 0,
};

impl Story {
    pub fn new() -> Self {
        Self::with(Shape::default())
    }

    pub fn with(shape: Shape) -> Self {
        let world = World::default();
        if shape.made_again {
            [1, 2].iter().for_each(|device| world.makes_again(*device, None));
        }
        let ends = [End::new(&world, 1, shape), End::new(&world, 2, shape)];
        ends[0].connect(ends[1].endpoint());
        ends[1].connect(ends[0].endpoint());
        Self {
            world,
            ends,
            made_again: shape.made_again,
            next_device: 3,
            next_session: 1,
        }
    }

    /// Steps 1 to 3 of `DESIGN.md` §3.5.
    pub fn pre_setup(&mut self, mover: usize) -> Migration {
        let (session, target) = (self.next_session, self.next_device);
        self.next_session += 1;
        self.next_device += 1;
        let Answer::Described(map) = self.ends[mover].order(Order::Describe) else {
            panic!("no road map")
        };
        let partner = &mut self.ends[1 - mover];
        let qpn = partner.qp.number();
        let prepare = Order::PrepareStandby {
            session,
            qpns: vec![qpn],
        };
        let Answer::StandbyPrepared(standby) = partner.order(prepare) else {
            panic!("no standby")
        };
        let mut migration = Migration {
            session,
            mover,
            target,
            claimed: Vec::new(),
            sent: Default::default(),
            parked: Vec::new(),
            standby: standby[0],
            made: Vec::new(),
        };
        if self.made_again {
            let device = self.ends[mover].device;
            self.world.makes_again(device, Some(target));
            return migration;
        }
        let partner_gid = partner.endpoint().gid;
        let device = self.world.device(target);
        let claimed = make_again(&*device, &map, partner_gid, &standby[0]);
        let mut gid = [0; 16];
        gid[15] = target;
        let remote = Endpoint {
            gid,
            qpn: claimed[0].qps[0].physical_qpn,
        };
        let peers = vec![StandbyPeer {
            qpn,
            remote,
            rq_psn: Some(0),
        }];
        partner.order(Order::ConnectStandby { session, peers });
        migration.claimed = claimed;
        migration
    }

    pub fn suspend(&mut self, migration: &mut Migration) {
        let Migration { session, mover, .. } = *migration;
        let partner_qp = self.ends[1 - mover].qp.number();
        migration.sent[mover] = self.ends[mover].suspend(session, Scope::All);
        migration.sent[1 - mover] = self.ends[1 - mover].suspend(session, Scope::Qps(vec![partner_qp]));
    }

    /// Whether both ends were drained within the time: first all that they send is sent, then all that was sent has come.
    pub fn drain(&mut self, migration: &Migration, timeout_ms: u32) -> bool {
        [true, false].into_iter().all(|sends_only| {
            (0..2).all(|end| {
                let expected = migration.sent[1 - end].iter().map(|count| QpCount {
                    qpn: self.ends[end].qp.number(),
                    ..*count
                });
                let order = Order::Drain {
                    session: migration.session,
                    expected: expected.collect(),
                    timeout_ms,
                    sends_only,
                };
                matches!(self.ends[end].sessions.handle(order, Vec::new()), Answer::Drained)
            })
        })
    }

    pub fn abort(&mut self, migration: &Migration) {
        for end in &mut self.ends {
            end.order(Order::Abort {
                session: migration.session,
            });
        }
    }

    pub fn quiesce(&mut self, migration: &mut Migration) {
        let mover = &mut self.ends[migration.mover];
        migration.parked = mover.sessions.quiesce(migration.session).unwrap();
    }

    pub fn roll_back(&mut self, migration: Migration) {
        let Migration {
            session,
            mover,
            parked,
            ..
        } = migration;
        let claim = Order::Claim {
            session,
            contexts: Vec::new(),
            key_tables: Vec::new(),
        };
        let answer = self.ends[mover].sessions.handle(claim, parked);
        assert!(matches!(answer, Answer::Claimed { .. }), "{answer:?}");
        self.ends[1 - mover].order(Order::Abort { session });
        self.ends[mover].order(Order::Resume { session });
    }

    /// The mover makes its context again, and connects it.
    pub fn make_again(&mut self, migration: &mut Migration) {
        let session = migration.session;
        let partner = self.ends[1 - migration.mover].endpoint();
        let mover = &mut self.ends[migration.mover];
        let Answer::Made { contexts, lost } = mover.order(Order::MakeAgain { session }) else {
            panic!("nothing is made")
        };
        assert_eq!(lost, [""; 0]);
        let peers = contexts[0].qps.iter().map(|qp| MadePeer {
            peer: StandbyPeer {
                qpn: qp.qpn,
                remote: Endpoint {
                    gid: partner.gid,
                    qpn: migration.standby.physical_qpn,
                },
                rq_psn: Some(migration.standby.sq_psn),
            },
            key_table: None,
        });
        let peers = peers.collect();
        let connected = mover.order(Order::ConnectMade { session, peers });
        assert!(matches!(connected, Answer::Made { lost, .. } if lost.is_empty()));
        migration.made = contexts;
    }

    /// The mover takes up its new device. How many RECVs were posted again.
    pub fn claim(&mut self, migration: &mut Migration) -> u64 {
        if self.made_again {
            self.make_again(migration);
        }
        let mover = &mut self.ends[migration.mover];
        let claim = Order::Claim {
            session: migration.session,
            contexts: migration.claimed.clone(),
            key_tables: Vec::new(),
        };
        mover.device = migration.target;
        let connections = match self.made_again {
            true => Vec::new(),
            false => vec![connection(migration.target)],
        };
        match mover.sessions.handle(claim, connections) {
            Answer::Claimed { replayed_receives } => replayed_receives,
            other => panic!("{other:?}"),
        }
    }

    /// The partner switches. How many RECVs were posted again.
    pub fn switch(&mut self, migration: &Migration) -> u64 {
        let session = migration.session;
        if let [made] = &migration.made[..] {
            let partner = &mut self.ends[1 - migration.mover];
            let qpn = partner.qp.number();
            let peers = made.qps.iter().map(|qp| StandbyPeer {
                qpn,
                remote: qp.own,
                rq_psn: Some(qp.sq_psn),
            });
            let peers: Vec<_> = peers.collect();
            // Whoever asks again is answered.
            for _ in 0..2 {
                let peers = peers.clone();
                partner.order(Order::ConnectStandby { session, peers });
            }
        }
        let keys = self.new_keys(migration);
        let partner = &mut self.ends[1 - migration.mover];
        let order = Order::Switch {
            session: migration.session,
            key_tables: vec![keys],
            tables: vec![(partner.qp.number(), 0)],
        };
        match partner.order(order) {
            Answer::Claimed { replayed_receives } => replayed_receives,
            other => panic!("{other:?}"),
        }
    }

    /// The mover's remote keys.
    fn new_keys(&self, migration: &Migration) -> Vec<KeyPair> {
        if let [made] = &migration.made[..] {
            return made.keys.clone();
        }
        let mover = &self.ends[migration.mover];
        let mut keys = vec![KeyPair {
            virtual_key: mover.mr.rkey(),
            physical_key: migration.claimed[0].mrs[0].physical_rkey,
            any_tag: false,
        }];
        keys.extend(migration.claimed[0].mws.iter().map(|mw| KeyPair {
            virtual_key: mw.rkey,
            physical_key: mw.physical_rkey,
            any_tag: true,
        }));
        keys
    }

    /// Both go on. How many requests were intercepted at each end.
    pub fn resume(&mut self, migration: &Migration) -> [u64; 2] {
        let session = migration.session;
        [0, 1].map(|end| match self.ends[end].order(Order::Resume { session }) {
            Answer::Resumed { intercepted, .. } => intercepted,
            other => panic!("{other:?}"),
        })
    }

    /// All of it. For a network where everything arrives.
    pub fn migrate(&mut self, mover: usize) {
        let mut migration = self.pre_setup(mover);
        self.suspend(&mut migration);
        assert!(self.drain(&migration, 1000), "everything arrives");
        self.quiesce(&mut migration);
        self.claim(&mut migration);
        self.switch(&migration);
        self.resume(&migration);
    }

    /// Moves an end whose queue pair is of datagrams: nobody is connected to it.
    pub fn migrate_datagrams(&mut self, mover: usize) {
        let (session, target) = (self.next_session, self.next_device);
        self.next_session += 1;
        self.next_device += 1;
        let known = Endpoint {
            gid: self.ends[mover].context.gid(0).unwrap(),
            qpn: self.ends[mover].qp.number(),
        };
        let Answer::Described(map) = self.ends[mover].order(Order::Describe) else {
            panic!("no road map")
        };
        assert_eq!(map.contexts[0].gids[0], known.gid);
        let claimed = match self.made_again {
            true => Vec::new(),
            false => make_again(&*self.world.device(target), &map, [0; 16], &NOBODY),
        };
        if self.made_again {
            let device = self.ends[mover].device;
            self.world.makes_again(device, Some(target));
        }
        let mut migration = Migration {
            session,
            mover,
            target,
            claimed,
            sent: Default::default(),
            parked: Vec::new(),
            standby: NOBODY,
            made: Vec::new(),
        };
        let end = &mut self.ends[mover];
        end.suspend(session, Scope::All);
        end.order(Order::Drain {
            session,
            expected: Vec::new(),
            timeout_ms: 1000,
            sends_only: false,
        });
        self.quiesce(&mut migration);
        self.claim(&mut migration);
        let endpoints = vec![MovedEndpoint {
            known,
            now: self.ends[mover].endpoint(),
            moves: map.contexts[0].moves + 1,
        }];
        self.ends[1 - mover].order(Order::Moved { endpoints });
        self.ends[mover].order(Order::Resume { session });
    }

    /// Lets the RNICs work until they have nothing to do.
    pub fn settle(&self) {
        while self.world.step() {}
    }
}

/// Makes the objects of a road map on another device, last ones first so that the numbers differ.
fn make_again(
    device: &dyn Device,
    map: &RoadMap,
    partner_gid: [u8; 16],
    standby: &StandbyQp,
) -> Vec<ClaimedContext> {
    let [context] = &map.contexts[..] else {
        panic!("one context")
    };
    let [pd] = &context.pds[..] else {
        panic!("one protection domain")
    };
    let physical_pd = device.alloc_pd().unwrap();
    let mrs = context.mrs.iter().rev().map(|mr| {
        let init = PhysicalMrInit {
            pd: physical_pd,
            access: mr.access,
            memory: PhysicalMemory {
                address: mr.address,
                length: mr.length,
                iova: mr.iova,
                segments: &mr.segments,
                file: None,
            },
        };
        // One that nobody uses in between, so that no key stays what it was.
        let (unused, _) = device.reg_mr(&init).unwrap();
        let (physical_lkey, physical_rkey) = device.reg_mr(&init).unwrap();
        device.dereg_mr(unused).unwrap();
        ClaimedMr {
            lkey: mr.lkey,
            physical_lkey,
            physical_rkey,
        }
    });
    let mrs = mrs.collect();
    let mws = context.mws.iter().map(|mw| ClaimedMw {
        rkey: mw.rkey,
        physical_rkey: device.alloc_mw(physical_pd, mw.mw_type).unwrap(),
    });
    let mws = mws.collect();
    let channels = context.channels.iter().map(|channel| ClaimedChannel {
        channel: channel.channel,
        physical_channel: device.create_comp_channel().unwrap().number(),
    });
    let channels: Vec<ClaimedChannel> = channels.collect();
    let physical_channel = |number| {
        let found = channels.iter().find(|claimed| claimed.channel == number);
        found.unwrap().physical_channel
    };
    let cqs: Vec<ClaimedCq> = context
        .cqs
        .iter()
        .map(|cq| {
            let channel = cq.channel.map(|channel| (physical_channel(channel), cq.cq));
            let place = device.create_cq(cq.entries, channel).unwrap();
            ClaimedCq {
                cq: cq.cq,
                physical_cq: place.cq,
                entries: place.entries,
                offset: place.offset,
            }
        })
        .collect();
    let physical_cq = |cq| cqs.iter().find(|claimed| claimed.cq == cq).unwrap().physical_cq;
    let srqs = context.srqs.iter().map(|srq| {
        assert_eq!(srq.pd, pd.pd);
        let place = device.create_srq(physical_pd, &srq.attr).unwrap();
        ClaimedSrq {
            srq: srq.srq,
            physical_srq: place.srq,
            attr: place.attr,
            offset: place.offset,
        }
    });
    let srqs: Vec<ClaimedSrq> = srqs.collect();
    let physical_srq = |srq| {
        srqs.iter()
            .find(|claimed| claimed.srq == srq)
            .unwrap()
            .physical_srq
    };
    let qps = context.qps.iter().rev().map(|qp| {
        let init = PhysicalQpInit {
            pd: physical_pd,
            send_cq: physical_cq(qp.send_cq),
            recv_cq: physical_cq(qp.recv_cq),
            srq: qp.srq.map(physical_srq),
            qp_type: qp.qp_type,
            cap: qp.cap,
        };
        let place = device.create_qp(&init).unwrap();
        let mut attr = qp.attr;
        attr.av.dgid = partner_gid;
        attr.dest_qpn = standby.physical_qpn;
        device.modify_qp(place.qpn, QpAttrMask::all(), &attr).unwrap();
        ClaimedQp {
            qpn: qp.qpn,
            physical_qpn: place.qpn,
            cap: place.cap,
            slot: place.slot,
            offset: place.offset,
            remote: Some(Endpoint {
                gid: partner_gid,
                qpn: standby.physical_qpn,
            }),
            sgid_index: Some(0),
            key_table: None,
        }
    });
    let qps = qps.collect();
    vec![ClaimedContext {
        id: context.id,
        pds: vec![ClaimedPd {
            pd: pd.pd,
            physical_pd,
        }],
        mrs,
        mws,
        channels,
        cqs,
        srqs,
        qps,
    }]
}

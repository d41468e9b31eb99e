//! Two connected processes on RNICs that carry data, and moves of one or both, step by step.

use std::path::Path;
use std::sync::Arc;

use verbatim_channel::{
    Answer, ClaimedContext, Endpoint, KeyPair, Order, QpCount, QpProgress, Relocated, RoadMap, Scope,
    StandbyPeer,
};
use verbatim_device::control::{Access, AddressVector, QpAttr, QpCap, QpSecret, QpState, QpType};

use super::again::{NewPeer, connect_mask, make_again};
use super::{MEMORY, Wire, memory};
use crate::session::Sessions;
use crate::testing::nic::connection;
use crate::{Context, Cq, Mr, Pd, Process, Qp, QpInit, Wc};

const CAP: QpCap = QpCap {
    max_send_wr: 16,
    max_recv_wr: 16,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

/// What is done when a drain does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// It is looked at so often, since the program may be the one that has to do something; then the move is taken back.
    Waits(usize),
    /// After the first look, the connection is stopped in the middle of its requests.
    Stops,
    /// There is no drain: the RNICs pause the connection between themselves.
    Pauses,
}

impl Patience {
    /// Enough for whatever is only on its way.
    pub const LONG: Self = Self::Waits(200);
}

const REMOTE: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

fn attributes(rnr_retry: u8) -> QpAttr {
    QpAttr {
        path_mtu: 1,
        access: REMOTE,
        av: AddressVector {
            port_num: 1,
            ..AddressVector::default()
        },
        port_num: 1,
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry,
        ..QpAttr::default()
    }
}

/// One end of the connection: a process with one of everything.
pub struct End {
    sessions: Sessions,
    process: Arc<Process>,
    context: Arc<Context>,
    _pd: Arc<Pd>,
    pub mr: Arc<Mr>,
    cq: Arc<Cq>,
    pub qp: Arc<Qp>,
    /// The device that it is on.
    device: u8,
}

impl End {
    fn new(wire: &Wire, end: usize) -> Self {
        let device = end as u8 + 1;
        // There is no agent.
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(wire.device(device))).unwrap();
        let pd = context.alloc_pd().unwrap();
        let start = memory(end);
        let mr = pd
            .reg_mr(start, MEMORY as u64, start, Access::LOCAL_WRITE | REMOTE)
            .unwrap();
        let cq = context.create_cq(64, None).unwrap();
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: CAP,
            signal_all: false,
            srq: None,
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            sessions: Sessions::new(process.clone()),
            process,
            context,
            _pd: pd,
            mr,
            cq,
            qp,
            device,
        }
    }

    fn endpoint(&self) -> Endpoint {
        let mut gid = [0; 16];
        gid[15] = self.device;
        Endpoint {
            gid,
            qpn: self.qp.control.lock().physical_qpn(),
        }
    }

    fn connect(&self, to: Endpoint, psn: [u32; 2], rnr_retry: u8) {
        let mut attr = attributes(rnr_retry);
        attr.av.dgid = to.gid;
        attr.dest_qpn = to.qpn;
        [attr.sq_psn, attr.rq_psn] = psn;
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let attr = QpAttr { state, ..attr };
            self.qp.modify(connect_mask(state), &attr).unwrap();
        }
    }

    /// Takes one completion.
    pub fn poll(&self) -> Option<Wc> {
        self.cq.poll_one().map(|completion| completion.wc)
    }

    fn ask(&mut self, order: Order) -> Result<Answer, String> {
        match self.sessions.handle(order, Vec::new()) {
            Answer::Error { message } => Err(message),
            answer => Ok(answer),
        }
    }

    /// Gives an order that must be carried out.
    fn order(&mut self, order: Order) -> Answer {
        self.ask(order).unwrap_or_else(|message| panic!("{message}"))
    }

    fn suspend(&mut self, session: u64, scope: Scope) -> Vec<QpCount> {
        match self.order(Order::Suspend { session, scope }) {
            Answer::Suspended { sent, .. } => sent,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // There are thousands of them in a test.
        self.context.close().expect("a device in use");
        if let Some(helper) = &*self.process.helper.lock() {
            helper.stop(&self.process);
        }
    }
}

/// How far a move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Prepared,
    Suspended,
    Drained,
    Quiesced,
    Claimed,
    Switched,
}

/// A move of one end to another device; what the agents know of it.
#[derive(Debug)]
pub struct Move {
    session: u64,
    mover: usize,
    target: u8,
    step: Step,
    /// The RNICs pause the connection.
    pauses: bool,
    claimed: Vec<ClaimedContext>,
    sent: [Vec<QpCount>; 2],
    parked: Vec<std::os::fd::OwnedFd>,
    looks: usize,
}

impl Move {
    /// Whether nothing is in flight, and nothing has been let go.
    pub fn is_drained(&self) -> bool {
        self.step == Step::Drained
    }

    /// Whether it can still be taken back.
    pub fn can_be_taken_back(&self) -> bool {
        !matches!(self.step, Step::Claimed | Step::Switched)
    }
}

/// What a step of a move has led to.
#[derive(Debug)]
pub enum Outcome {
    Under(Move),
    Done,
    /// Taken back, since the drain did not end.
    TakenBack,
}

/// Two ends.
pub struct Pair {
    pub wire: Wire,
    pub ends: [End; 2],
    next_device: u8,
    next_session: u64,
    pub patience: Patience,
    /// Requests that were posted again because their connection was stopped, and that were only completed.
    pub replayed: [u64; 2],
    /// Why the last move was taken back.
    pub refusal: Option<String>,
}

impl Pair {
    /// Connected, with PSNs that wrap soon.
    pub fn new(rnr_retry: u8) -> Self {
        let wire = Wire::new();
        let ends = [End::new(&wire, 0), End::new(&wire, 1)];
        let psn = [0xff_fffd, 0xff_ffff];
        ends[0].connect(ends[1].endpoint(), psn, rnr_retry);
        ends[1].connect(ends[0].endpoint(), [psn[1], psn[0]], rnr_retry);
        Self {
            wire,
            ends,
            next_device: 3,
            next_session: 1,
            patience: Patience::LONG,
            replayed: [0; 2],
            refusal: None,
        }
    }

    /// Steps 1 to 3 of `DESIGN.md` §3.5.
    pub fn begin(&mut self, mover: usize) -> Move {
        self.wire.count_move(true);
        let (session, target) = (self.next_session, self.next_device);
        self.next_session += 1;
        self.next_device += 1;
        let Answer::Described(map) = self.ends[mover].order(Order::Describe) else {
            panic!("no road map")
        };
        if self.patience == Patience::Pauses {
            return self.begin_to_pause(mover, session, target, &map);
        }
        let partner = &mut self.ends[1 - mover];
        let qpn = partner.qp.number();
        let prepare = Order::PrepareStandby {
            session,
            qpns: vec![qpn],
        };
        let Answer::StandbyPrepared(standby) = partner.order(prepare) else {
            panic!("no standby")
        };
        let partner_gid = partner.endpoint().gid;
        let device = self.wire.parked_device(target);
        let sq_psn = 0x1000 * session as u32;
        let peer = NewPeer {
            gid: partner_gid,
            standby: &standby[0],
            sq_psn,
        };
        let claimed = make_again(&*device, &map, Some(&peer));
        let mut gid = [0; 16];
        gid[15] = target;
        let remote = Endpoint {
            gid,
            qpn: claimed[0].qps[0].physical_qpn,
        };
        let peers = vec![StandbyPeer {
            qpn,
            remote,
            rq_psn: Some(sq_psn),
        }];
        partner.order(Order::ConnectStandby { session, peers });
        Move {
            session,
            mover,
            target,
            step: Step::Prepared,
            pauses: false,
            claimed,
            sent: Default::default(),
            parked: Vec::new(),
            looks: 0,
        }
    }

    /// The same where nothing is made for the partner: the two RNICs get a secret, and the new objects have the old keys.
    fn begin_to_pause(&mut self, mover: usize, session: u64, target: u8, map: &RoadMap) -> Move {
        for (end, first) in [(mover, true), (1 - mover, false)] {
            let key = [session as u8; 32];
            let secrets = vec![(self.ends[end].qp.number(), QpSecret { key, first })];
            self.ends[end].order(Order::Share { secrets });
        }
        let device = self.wire.parked_device(target);
        let mut claimed = make_again(&*device, map, None);
        let (new, old) = (&mut claimed[0].mrs[0], &map.contexts[0].mrs[0]);
        self.wire.rekey(target, new.physical_lkey, old.physical_lkey);
        (new.physical_lkey, new.physical_rkey) = (old.physical_lkey, old.physical_rkey);
        Move {
            session,
            mover,
            target,
            step: Step::Prepared,
            pauses: true,
            claimed,
            sent: Default::default(),
            parked: Vec::new(),
            looks: 0,
        }
    }

    /// The next step.
    pub fn advance(&mut self, mut one: Move) -> Outcome {
        one.step = match one.step {
            Step::Prepared => {
                self.suspend(&mut one);
                Step::Suspended
            }
            Step::Suspended if one.pauses => {
                let session = one.session;
                let dump = Order::StopAndDump {
                    session,
                    timeout_ms: 0,
                };
                match self.ends[one.mover].order(dump) {
                    Answer::Dumped { requests, .. } => self.replayed[0] += requests,
                    other => panic!("{other:?}"),
                }
                Step::Drained
            }
            Step::Suspended if self.drain(&one) => Step::Drained,
            Step::Suspended => match self.patience {
                Patience::Waits(looks) if one.looks >= looks => {
                    self.abort(one);
                    return Outcome::TakenBack;
                }
                Patience::Waits(_) => {
                    one.looks += 1;
                    Step::Suspended
                }
                Patience::Pauses => unreachable!("it does not look whether it is drained"),
                Patience::Stops => match self.stop(&one) {
                    Ok(()) => Step::Drained,
                    Err(refusal) => {
                        self.refusal = Some(refusal);
                        self.abort(one);
                        return Outcome::TakenBack;
                    }
                },
            },
            Step::Drained => {
                let mover = &mut self.ends[one.mover];
                one.parked = mover.sessions.quiesce(one.session).unwrap();
                Step::Quiesced
            }
            Step::Quiesced => {
                self.claim(&one);
                Step::Claimed
            }
            Step::Claimed => {
                self.switch(&one);
                Step::Switched
            }
            Step::Switched => {
                // Of what pauses, the partner has suspended nothing: without effect.
                for end in &mut self.ends {
                    end.order(Order::Resume { session: one.session });
                }
                self.wire.count_move(false);
                return Outcome::Done;
            }
        };
        Outcome::Under(one)
    }

    fn suspend(&mut self, one: &mut Move) {
        let partner = self.ends[1 - one.mover].qp.number();
        one.sent[one.mover] = self.ends[one.mover].suspend(one.session, Scope::All);
        if one.pauses {
            return;
        }
        let scope = Scope::Qps(vec![partner]);
        one.sent[1 - one.mover] = self.ends[1 - one.mover].suspend(one.session, scope);
    }

    /// One look at each end that is not drained.
    fn drain(&mut self, one: &Move) -> bool {
        (0..2).all(|end| {
            let expected = one.sent[1 - end].iter().map(|count| QpCount {
                qpn: self.ends[end].qp.number(),
                ..*count
            });
            let order = Order::Drain {
                session: one.session,
                expected: expected.collect(),
                timeout_ms: 0,
                sends_only: false,
            };
            match self.ends[end].ask(order) {
                Ok(answer) => matches!(answer, Answer::Drained),
                // It was drained at an earlier look.
                Err(message) => message.contains("is Drained"),
            }
        })
    }

    /// Stops both ends in the middle of their requests, and has them find out what was executed.
    fn stop(&mut self, one: &Move) -> Result<(), String> {
        let session = one.session;
        let mut progress: Vec<QpProgress> = Vec::new();
        for end in &mut self.ends {
            let qpns = vec![end.qp.number()];
            match end.ask(Order::Stop { session, qpns })? {
                Answer::Stopped(stopped) => progress.extend(stopped),
                other => panic!("{other:?}"),
            }
        }
        for end in 0..2 {
            let peer = QpProgress {
                qpn: self.ends[end].qp.number(),
                ..progress[1 - end].clone()
            };
            let peers = vec![peer];
            match self.ends[end].ask(Order::Settle { session, peers })? {
                Answer::Settled { replayed, completed } => {
                    self.replayed[0] += replayed;
                    self.replayed[1] += completed;
                }
                other => panic!("{other:?}"),
            }
        }
        Ok(())
    }

    /// Takes it back before it has quiesced.
    pub fn abort(&mut self, one: Move) {
        let Move { session, step, .. } = one;
        self.wire.count_move(false);
        assert!(matches!(step, Step::Prepared | Step::Suspended | Step::Drained));
        for end in &mut self.ends {
            end.order(Order::Abort { session });
        }
    }

    /// Takes it back as far as it is; not after the other end was taken up.
    pub fn take_back(&mut self, one: Move) {
        if one.step != Step::Quiesced {
            return self.abort(one);
        }
        self.wire.count_move(false);
        let session = one.session;
        let claim = Order::Claim {
            session,
            contexts: Vec::new(),
            key_tables: Vec::new(),
        };
        let mover = &mut self.ends[one.mover];
        let answer = mover.sessions.handle(claim, one.parked);
        assert!(matches!(answer, Answer::Claimed { .. }), "{answer:?}");
        self.ends[1 - one.mover].order(Order::Abort { session });
        self.ends[one.mover].order(Order::Resume { session });
    }

    fn claim(&mut self, one: &Move) {
        let mover = &mut self.ends[one.mover];
        let claim = Order::Claim {
            session: one.session,
            contexts: one.claimed.clone(),
            key_tables: Vec::new(),
        };
        if one.pauses {
            let left = (mover.device, mover.qp.control.lock().physical_qpn());
            let to = (one.target, one.claimed[0].qps[0].physical_qpn);
            self.wire.forward(left, to);
        }
        mover.device = one.target;
        let answer = mover.sessions.handle(claim, vec![connection(one.target)]);
        assert!(matches!(answer, Answer::Claimed { .. }), "{answer:?}");
    }

    fn switch(&mut self, one: &Move) {
        let mover = &self.ends[one.mover];
        if one.pauses {
            let remote = mover.endpoint();
            let qpn = self.ends[1 - one.mover].qp.number();
            let peers = vec![Relocated { qpn, remote }];
            self.ends[1 - one.mover].order(Order::Relocate { peers });
            return;
        }
        let keys = vec![KeyPair {
            virtual_key: mover.mr.rkey(),
            physical_key: one.claimed[0].mrs[0].physical_rkey,
            any_tag: false,
        }];
        let partner = &mut self.ends[1 - one.mover];
        partner.order(Order::Switch {
            session: one.session,
            key_tables: vec![keys],
            tables: vec![(partner.qp.number(), 0)],
        });
    }
}

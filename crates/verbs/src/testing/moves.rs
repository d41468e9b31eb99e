//! A move, step by step: the orders that an agent gives to both ends, and what it knows between them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use verbatim_channel::{
    Answer, ClaimedContext, ContextRecord, Endpoint, MadeContext, MadePeer, MovedEndpoint, MrRecord, Order,
    QpCount, QpProgress, Relocated, Scope, StandbyPeer, StandbyQp,
};
use verbatim_device::control::{QpSecret, QpState, QpType};

use super::device::connection;
use super::{Pair, Patience};
use crate::backend::{Device, PhysicalMemory, PhysicalMrInit};
use crate::maker::Made;

/// How far a move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
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
    pub session: u64,
    mover: usize,
    target: u8,
    pub(super) step: Step,
    /// The RNICs pause the connection.
    pub(super) pauses: bool,
    /// What waits at the other end.
    standby: Option<StandbyQp>,
    claimed: Vec<ClaimedContext>,
    /// What there is at the target.
    pub made: Vec<MadeContext>,
    sent: [Vec<QpCount>; 2],
    /// What the agent was given when the mover was quiesced.
    pub parked: Vec<OwnedFd>,
    /// How often the mover has moved, and where its queue pair was first, for who sends datagrams there.
    moves: u32,
    known: Endpoint,
    /// How often its drain was looked at.
    pub(super) looks: usize,
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

/// Makes the objects of a process on another device, as an agent does. A queue pair that gets an image is left as it is, and the regions
/// beside it get the keys that they had.
fn make(device: Arc<dyn Device>, mut record: ContextRecord, pauses: bool) -> Made {
    let qps: Vec<_> = record.qps.clone();
    if pauses {
        let states = record.qps.iter_mut().map(|qp| &mut qp.attr.state);
        states.for_each(|state| *state = QpState::Reset);
    }
    let mut register = |device: &dyn Device, mr: &MrRecord, pd: u32| {
        let init = PhysicalMrInit {
            pd,
            access: mr.access,
            memory: PhysicalMemory {
                address: mr.address,
                length: mr.length,
                iova: mr.iova,
                segments: &mr.segments,
                file: None,
            },
        };
        match pauses {
            true => device
                .reg_mr_as(&init, mr.physical_lkey)
                .map(|()| (mr.physical_lkey, mr.physical_lkey)),
            false => {
                // One that nobody uses in between, so that no key stays what it was.
                let (unused, _) = device.reg_mr(&init)?;
                let keys = device.reg_mr(&init);
                device.dereg_mr(unused)?;
                keys
            }
        }
    };
    let mut made = Made::make(device, &record, &HashMap::new(), &mut register)
        .unwrap_or_else(|not_made| panic!("{not_made}"));
    if pauses {
        for (claimed, qp) in made.claimed.qps.iter_mut().zip(&qps) {
            (claimed.remote, claimed.sgid_index) = (qp.remote, qp.remote.map(|_| 0));
        }
    }
    made
}

impl Pair {
    /// Steps 1 to 3 of `DESIGN.md` §3.5.
    pub fn begin(&mut self, mover: usize) -> Move {
        self.wire.count_move(true);
        let (session, target) = (self.next_session, self.next_device);
        self.next_session += 1;
        self.next_device += 1;
        let Answer::Described(map) = self.ends[mover].order(Order::Describe) else {
            panic!("no road map")
        };
        let [context] = <[_; 1]>::try_from(map.contexts).expect("one context");
        let pauses = self.patience == Patience::Pauses;
        let mut one = Move {
            session,
            mover,
            target,
            step: Step::Prepared,
            pauses,
            standby: None,
            claimed: Vec::new(),
            made: Vec::new(),
            sent: Default::default(),
            parked: Vec::new(),
            moves: context.moves,
            known: Endpoint {
                gid: context.gids[0],
                qpn: self.ends[mover].qp.number(),
            },
            looks: 0,
        };
        if pauses {
            self.share_secrets(&one);
        } else if self.shape.qp_type != QpType::Ud {
            one.standby = Some(self.prepare(&one));
        }
        if self.shape.made_again {
            let device = self.ends[mover].device;
            self.wire.makes_again(device, Some(target));
            return one;
        }
        let mut made = make(self.wire.parked_device(target), context, pauses);
        for peer in self.peers_of_mover(&one, &made.told) {
            made.connect(&peer)
                .unwrap_or_else(|not_made| panic!("{not_made}"));
        }
        one.claimed = vec![made.claimed];
        one.made = vec![made.told];
        self.connect_standby(&one);
        one
    }

    /// The two RNICs get a secret.
    fn share_secrets(&mut self, one: &Move) {
        for (end, first) in [(one.mover, true), (1 - one.mover, false)] {
            let key = [one.session as u8; 32];
            let secrets = vec![(self.ends[end].qp.number(), QpSecret { key, first })];
            self.ends[end].order(Order::Share { secrets });
        }
    }

    fn prepare(&mut self, one: &Move) -> StandbyQp {
        let partner = &mut self.ends[1 - one.mover];
        let prepare = Order::PrepareStandby {
            session: one.session,
            qpns: vec![partner.qp.number()],
        };
        let Answer::StandbyPrepared(standby) = partner.order(prepare) else {
            panic!("no standby")
        };
        standby[0]
    }

    /// With what the new queue pairs of the mover are connected.
    fn peers_of_mover(&self, one: &Move, made: &MadeContext) -> Vec<MadePeer> {
        let Some(standby) = &one.standby else {
            return Vec::new();
        };
        let remote = Endpoint {
            gid: self.ends[1 - one.mover].endpoint().gid,
            qpn: standby.physical_qpn,
        };
        let peers = made.qps.iter().map(|qp| MadePeer {
            peer: StandbyPeer {
                qpn: qp.qpn,
                remote,
                rq_psn: Some(standby.sq_psn),
            },
            key_table: None,
        });
        peers.collect()
    }

    /// The same at the other end.
    fn connect_standby(&mut self, one: &Move) {
        if one.standby.is_none() {
            return;
        }
        let partner = &mut self.ends[1 - one.mover];
        let qpn = partner.qp.number();
        let peers = one.made[0].qps.iter().map(|qp| StandbyPeer {
            qpn,
            remote: qp.own,
            rq_psn: Some(qp.sq_psn),
        });
        let peers: Vec<_> = peers.collect();
        let session = one.session;
        // Whoever asks again is answered.
        for _ in 0..2 {
            let peers = peers.clone();
            partner.order(Order::ConnectStandby { session, peers });
        }
    }

    pub fn suspend(&mut self, one: &mut Move) {
        one.step = Step::Suspended;
        one.sent[one.mover] = self.ends[one.mover].suspend(one.session, Scope::All);
        if one.standby.is_some() {
            let partner = &mut self.ends[1 - one.mover];
            let scope = Scope::Qps(vec![partner.qp.number()]);
            one.sent[1 - one.mover] = partner.suspend(one.session, scope);
        }
    }

    pub(super) fn pause(&mut self, one: &mut Move) {
        let dump = Order::StopAndDump {
            session: one.session,
            timeout_ms: 0,
        };
        match self.ends[one.mover].order(dump) {
            Answer::Dumped { requests, .. } => self.replayed[0] += requests,
            other => panic!("{other:?}"),
        }
        one.step = Step::Drained;
    }

    /// Whether all ends are drained within the time: first all that they send is sent, then all that was sent has come.
    pub fn drain(&mut self, one: &mut Move, timeout_ms: u32) -> bool {
        let ends: &[usize] = match one.standby {
            Some(_) => &[0, 1],
            None => &[one.mover],
        };
        let drained = [true, false].into_iter().all(|sends_only| {
            if !sends_only && self.shape.qp_type == QpType::Uc {
                // In the time between the two orders.
                self.wire.settle();
            }
            ends.iter().all(|end| {
                let expected = one.sent[1 - end].iter().map(|count| QpCount {
                    qpn: self.ends[*end].qp.number(),
                    ..*count
                });
                let order = Order::Drain {
                    session: one.session,
                    expected: expected.collect(),
                    timeout_ms,
                    sends_only,
                };
                match self.ends[*end].ask(order) {
                    Ok(answer) => matches!(answer, Answer::Drained),
                    // It was drained at an earlier look.
                    Err(message) => message.contains("is Drained"),
                }
            })
        });
        if drained {
            one.step = Step::Drained;
        }
        drained
    }

    /// Stops both ends in the middle of their requests, and has them find out what was executed.
    pub(super) fn stop(&mut self, one: &mut Move) -> Result<(), String> {
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
        one.step = Step::Drained;
        Ok(())
    }

    pub fn quiesce(&mut self, one: &mut Move) {
        let mover = &mut self.ends[one.mover];
        one.parked = mover.sessions.quiesce(one.session).unwrap();
        one.step = Step::Quiesced;
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

    /// The mover makes its context again, and connects it.
    pub fn make_again(&mut self, one: &mut Move) {
        let session = one.session;
        let Answer::Made { contexts, lost } = self.ends[one.mover].order(Order::MakeAgain { session }) else {
            panic!("nothing is made")
        };
        assert_eq!(lost, [""; 0]);
        let peers = self.peers_of_mover(one, &contexts[0]);
        let connected = self.ends[one.mover].order(Order::ConnectMade { session, peers });
        assert!(matches!(connected, Answer::Made { lost, .. } if lost.is_empty()));
        one.made = contexts;
    }

    /// The mover takes up its new device. How many RECVs were posted again.
    pub fn claim(&mut self, one: &mut Move) -> u64 {
        if self.shape.made_again {
            self.make_again(one);
        }
        let mover = &mut self.ends[one.mover];
        let claim = Order::Claim {
            session: one.session,
            contexts: one.claimed.clone(),
            key_tables: Vec::new(),
        };
        if one.pauses {
            let left = (mover.device, mover.qp.control.lock().physical_qpn());
            let to = (one.target, one.made[0].qps[0].own.qpn);
            self.wire.forward(left, to);
        }
        mover.device = one.target;
        let connections = match self.shape.made_again {
            true => Vec::new(),
            false => vec![connection(one.target)],
        };
        one.step = Step::Claimed;
        match mover.sessions.handle(claim, connections) {
            Answer::Claimed { replayed_receives } => replayed_receives,
            other => panic!("{other:?}"),
        }
    }

    /// The other end learns where the mover is. How many RECVs were posted again.
    pub fn switch(&mut self, one: &mut Move) -> u64 {
        one.step = Step::Switched;
        if self.shape.made_again {
            self.connect_standby(one);
        }
        let remote = self.ends[one.mover].endpoint();
        let partner = &mut self.ends[1 - one.mover];
        let qpn = partner.qp.number();
        if one.standby.is_some() {
            let switch = Order::Switch {
                session: one.session,
                key_tables: vec![one.made[0].keys.clone()],
                tables: vec![(qpn, 0)],
            };
            return match partner.order(switch) {
                Answer::Claimed { replayed_receives } => replayed_receives,
                other => panic!("{other:?}"),
            };
        }
        partner.order(match one.pauses {
            true => Order::Relocate {
                peers: vec![Relocated { qpn, remote }],
            },
            false => Order::Moved {
                endpoints: vec![MovedEndpoint {
                    known: one.known,
                    now: remote,
                    moves: one.moves + 1,
                }],
            },
        });
        0
    }

    /// Both go on. How many requests were intercepted at each end.
    pub fn resume(&mut self, one: Move) -> [u64; 2] {
        self.wire.count_move(false);
        let session = one.session;
        // Where nothing was suspended, without effect.
        [0, 1].map(|end| match self.ends[end].order(Order::Resume { session }) {
            Answer::Resumed { intercepted, .. } => intercepted,
            other => panic!("{other:?}"),
        })
    }
}

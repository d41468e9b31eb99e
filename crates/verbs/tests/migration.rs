//! A running program moves from one software RNIC to another, over real packets; its partner notices nothing.

mod support;

use std::sync::Barrier;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};

use support::{Agent, End, Nic, Replacement};
use verbatim_channel::{Answer, Endpoint, KeyPair, Order, QpCount, Scope, StandbyPeer};
use verbatim_verbs::{PostError, SendOpcode, WC_SUCCESS, Wc};

const RECV: u32 = 128;

/// Posts numbered messages both ways and checks what arrives, until it is told to stop.
struct Traffic<'a> {
    end: &'a End,
    next: u32,
    next_recv: u64,
    completed: u32,
    received: u32,
}

impl<'a> Traffic<'a> {
    fn new(end: &'a End) -> Self {
        let mut traffic = Self {
            end,
            next: 0,
            next_recv: 0,
            completed: 0,
            received: 0,
        };
        traffic.post_receives();
        traffic
    }

    fn post_receives(&mut self) {
        while self.next_recv - u64::from(self.received) < 64 && self.end.recv(self.next_recv).is_ok() {
            self.next_recv += 1;
        }
    }

    fn send(&mut self) {
        // The contents of a slot must be free again.
        while self.next - self.completed < 32 {
            match self.end.send(self.next, true) {
                Ok(()) => self.next += 1,
                Err(PostError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn poll(&mut self) {
        let mut taken = [Wc::default(); 16];
        let count = self.end.cq.poll(&mut taken);
        for wc in &taken[..count] {
            assert_eq!((wc.status, wc.qp_num), (WC_SUCCESS, self.end.qp.number()));
            if wc.opcode == RECV {
                assert_eq!((wc.wr_id, wc.imm), (u64::from(self.received), self.received));
                let content = self.end.memory.read_u64(2048 + self.received as usize % 1024);
                assert_eq!(content, u64::from(self.received) << 16);
                self.received += 1;
            } else {
                assert_eq!(wc.wr_id, u64::from(self.completed));
                self.completed += 1;
            }
        }
        if count > 0 {
            self.post_receives();
        }
    }

    /// Runs until it is stopped, then takes all that is still to come; how many were sent.
    fn run(mut self, shared: &Shared, me: usize) -> u32 {
        while !shared.stop.load(SeqCst) {
            self.send();
            self.poll();
            shared.sent[me].store(self.next, SeqCst);
        }
        shared.stopped.wait();
        let expected = shared.sent[1 - me].load(SeqCst);
        let start = Instant::now();
        while self.completed < self.next || self.received < expected {
            self.poll();
            assert!(start.elapsed() < Duration::from_secs(20), "messages are missing");
        }
        assert_eq!(self.received, expected);
        self.next
    }
}

/// What the two ends' threads and the test tell each other.
struct Shared {
    stop: AtomicBool,
    /// Both ends send no more.
    stopped: Barrier,
    sent: [AtomicU32; 2],
}

impl Shared {
    /// Waits until both ends have sent so many more messages.
    fn wait_for_messages(&self, count: u32) {
        let start = Instant::now();
        for sent in &self.sent {
            let before = sent.load(SeqCst);
            while sent.load(SeqCst) - before < count {
                assert!(
                    start.elapsed() < Duration::from_secs(20),
                    "the traffic has stopped"
                );
                std::thread::yield_now();
            }
        }
    }
}

struct Scene {
    nics: [Nic; 3],
    agents: [Agent; 2],
    ends: [End; 2],
}

impl Scene {
    fn new(subnet: u8) -> Self {
        let nics = [1, 2, 3].map(|host| Nic::start([127, 0, subnet, host]));
        let mut agents = [Agent::new(&nics[0]), Agent::new(&nics[1])];
        let ends = [End::new(&nics[0]), End::new(&nics[1])];
        agents.iter_mut().for_each(|agent| assert!(!agent.accept()));
        for end in 0..2 {
            std::thread::scope(|scope| {
                scope.spawn(|| agents[end].resolve());
                ends[end].connect(&nics[1 - end], &ends[1 - end]);
            });
        }
        Self { nics, agents, ends }
    }

    /// Moves the first end to the third RNIC; how long its requests were held back.
    fn migrate(agents: &mut [Agent; 2], nics: &[Nic; 3], roll_back: bool) -> Duration {
        let session = 7;
        let [mover, partner] = agents;
        let Answer::Described(map) = mover.order(&Order::Describe) else {
            panic!("no road map")
        };
        let Answer::Described(partner_map) = partner.order(&Order::Describe) else {
            panic!("no road map")
        };
        let partner_qpn = partner_map.contexts[0].qps[0].qpn;
        let qpn = map.contexts[0].qps[0].qpn;
        assert_eq!(map.contexts[0].qps[0].remote.unwrap().qpn, partner_qpn);
        let qpns = vec![partner_qpn];
        let prepare = Order::PrepareStandby { session, qpns };
        let Answer::StandbyPrepared(standby) = partner.order(&prepare) else {
            panic!("no standby")
        };
        let mut replacement = Replacement::prepare(&nics[2], &nics[0], &map);
        let sq_psn = 4711;
        let peers = vec![StandbyPeer {
            qpn: partner_qpn,
            remote: Endpoint {
                gid: nics[2].gid(),
                qpn: replacement.claimed.qps[0].physical_qpn,
            },
            rq_psn: Some(sq_psn),
        }];
        partner.order(&Order::ConnectStandby { session, peers });
        replacement.connect(&map, &nics[1], &standby[0], sq_psn);

        let start = Instant::now();
        let suspend = |agent: &Agent, scope| match agent.order(&Order::Suspend { session, scope }) {
            Answer::Suspended { sent, .. } => sent[0].messages,
            other => panic!("{other:?}"),
        };
        let sent = suspend(mover, Scope::All);
        let partner_sent = suspend(partner, Scope::Qps(vec![partner_qpn]));
        let drain = |agent: &Agent, qpn, messages| {
            let order = Order::Drain {
                session,
                expected: vec![QpCount { qpn, messages }],
                timeout_ms: 10_000,
                sends_only: false,
            };
            assert!(matches!(agent.order(&order), Answer::Drained));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| drain(mover, qpn, partner_sent));
            drain(partner, partner_qpn, sent);
        });
        let (answer, parked) = mover.order_with(&Order::Quiesce { session }, &[]);
        assert!(matches!(answer, Answer::Quiesced));
        mover.wait_for_end();

        mover.gate.open_up().unwrap();
        assert!(mover.accept(), "quiesced");
        if roll_back {
            let claim = Order::Claim {
                session,
                contexts: Vec::new(),
                key_tables: Vec::new(),
            };
            assert!(matches!(
                mover.order_with(&claim, &parked).0,
                Answer::Claimed { .. }
            ));
            mover.order(&Order::Resume { session });
            partner.order(&Order::Abort { session });
            return start.elapsed();
        }
        let (connection, claimed) = replacement.into_parts();
        let keys = vec![KeyPair {
            virtual_key: map.contexts[0].mrs[0].rkey,
            physical_key: claimed.mrs[0].physical_rkey,
            any_tag: false,
        }];
        let claim = Order::Claim {
            session,
            contexts: vec![claimed],
            key_tables: Vec::new(),
        };
        assert!(matches!(
            mover.order_with(&claim, &[connection]).0,
            Answer::Claimed { .. }
        ));
        // The old RNIC's objects go with their last holder.
        drop(parked);
        let switch = Order::Switch {
            session,
            key_tables: vec![keys],
            tables: vec![(partner_qpn, 0)],
        };
        assert!(matches!(partner.order(&switch), Answer::Claimed { .. }));
        mover.order(&Order::Resume { session });
        partner.order(&Order::Resume { session });
        start.elapsed()
    }
}

fn under_traffic(subnet: u8, roll_back: bool) {
    let Scene {
        nics,
        mut agents,
        ends,
    } = Scene::new(subnet);
    let shared = Shared {
        stop: AtomicBool::new(false),
        stopped: Barrier::new(2),
        sent: Default::default(),
    };
    std::thread::scope(|scope| {
        let shared = &shared;
        // Both ends have their RECVs before either sends.
        let [first, second] = [Traffic::new(&ends[0]), Traffic::new(&ends[1])];
        let first = scope.spawn(move || first.run(shared, 0));
        let second = scope.spawn(move || second.run(shared, 1));
        shared.wait_for_messages(1000);
        let held = Scene::migrate(&mut agents, &nics, roll_back);
        shared.wait_for_messages(1000);
        shared.stop.store(true, SeqCst);
        let sent = [first.join().unwrap(), second.join().unwrap()];
        println!("held back for {held:?}; messages {sent:?}");
    });

    // One-sided requests with the key that the partner has always known.
    let [mover, partner] = &ends;
    partner.memory.write_u64(0, 0xfeed);
    let remote = mover.memory.address() + 8 * 5000;
    partner
        .post(SendOpcode::Write, 1, 0, remote, mover.mr.rkey(), true)
        .unwrap();
    assert_eq!(partner.wait().status, WC_SUCCESS);
    assert_eq!(mover.memory.read_u64(5000), 0xfeed);
    partner
        .post(SendOpcode::Read, 2, 1, remote, mover.mr.rkey(), true)
        .unwrap();
    assert_eq!(partner.wait().status, WC_SUCCESS);
    assert_eq!(partner.memory.read_u64(1), 0xfeed);
}

#[test]
fn a_program_moves_under_traffic() {
    under_traffic(71, false);
}

#[test]
fn a_program_that_is_rolled_back_goes_on_under_traffic() {
    under_traffic(72, true);
}

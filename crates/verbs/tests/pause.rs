//! An operator's pause, as the agents order it: both ends stand still, no migration gets them, and what they posted meanwhile is
//! executed once they go on.

mod support;

use std::time::{Duration, Instant};

use support::{Agent, End, Nic};
use verbatim_channel::{Answer, Order, QpRecord, Scope};
use verbatim_device::control::QpSecret;
use verbatim_verbs::{QpAttr, QpAttrMask, QpState, WC_SUCCESS, Wc};

/// Longer than a pause that is to end by itself, shorter than anybody's patience.
const LIMIT_S: u32 = 600;

struct Scene {
    agents: [Agent; 2],
    ends: [End; 2],
    _nics: [Nic; 2],
}

impl Scene {
    fn new(subnet: u8) -> Self {
        let nics = [1, 2].map(|host| Nic::start([127, 0, subnet, host]));
        let mut agents = [Agent::new(&nics[0]), Agent::new(&nics[1])];
        let ends = [End::new(&nics[0]), End::new(&nics[1])];
        agents.iter_mut().for_each(|agent| assert!(!agent.accept()));
        for end in 0..2 {
            std::thread::scope(|scope| {
                scope.spawn(|| agents[end].resolve());
                ends[end].connect(&nics[1 - end], &ends[1 - end]);
            });
        }
        let scene = Self {
            agents,
            ends,
            _nics: nics,
        };
        for (end, first) in [(0, true), (1, false)] {
            let key = [7; 32];
            let secrets = vec![(scene.qpn(end), QpSecret { key, first })];
            scene.done(end, &Order::Share { secrets });
        }
        scene
    }

    fn qpn(&self, end: usize) -> u32 {
        self.ends[end].qp.number()
    }

    fn done(&self, end: usize, order: &Order) {
        let answer = self.agents[end].order(order);
        assert!(matches!(answer, Answer::Done), "{order:?}: {answer:?}");
    }

    fn pause(&self, end: usize, limit_s: u32) {
        let qpns = vec![self.qpn(end)];
        self.done(end, &Order::Pause { qpns, limit_s });
    }

    fn unpause(&self, end: usize) {
        let qpns = vec![self.qpn(end)];
        self.done(end, &Order::Unpause { qpns });
    }

    /// What the road map says of the queue pair, and what stands in the way of a migration.
    fn described(&self, end: usize) -> (QpRecord, Vec<String>) {
        let Answer::Described(mut map) = self.agents[end].order(&Order::Describe) else {
            panic!("no road map")
        };
        (map.contexts.remove(0).qps.remove(0), map.blockers)
    }

    fn is_paused(&self, end: usize) -> bool {
        let (qp, blockers) = self.described(end);
        assert_eq!(
            qp.paused,
            blockers.iter().any(|blocker| blocker.contains("paused"))
        );
        qp.paused
    }

    fn refused(&self, end: usize, order: &Order) {
        let message = self.agents[end].refused(order);
        assert!(
            message.contains("is paused by an operator"),
            "{order:?}: {message}"
        );
    }
}

#[test]
fn what_is_paused_stands_still_and_no_migration_gets_it() {
    let scene = Scene::new(75);
    let [left, right] = &scene.ends;
    for end in [0, 1, 0] {
        scene.pause(end, LIMIT_S);
        assert!(scene.is_paused(end));
    }
    right.recv(0).unwrap();
    left.send(0, true).unwrap();
    let session = 1;
    let qpns = vec![scene.qpn(0)];
    for order in [
        Order::Hold { session },
        Order::PrepareStandby {
            session,
            qpns: qpns.clone(),
        },
        Order::Suspend {
            session,
            scope: Scope::All,
        },
        Order::Suspend {
            session,
            scope: Scope::Qps(qpns),
        },
    ] {
        scene.refused(0, &order);
    }
    for end in &scene.ends {
        assert_eq!(end.cq.poll(&mut [Wc::default()]), 0, "nothing has happened");
    }
    // First the sender, which then looks for its partner.
    scene.unpause(0);
    scene.unpause(1);
    for (end, what) in [(0, left.wait()), (1, right.wait())] {
        assert_eq!((what.status, what.wr_id), (WC_SUCCESS, 0));
        assert!(!scene.is_paused(end));
        // Twice.
        scene.unpause(end);
    }
    // And now a migration may come: until it is over, nothing is paused.
    scene.agents[0].order(&Order::Suspend {
        session,
        scope: Scope::All,
    });
    let pause = Order::Pause {
        qpns: vec![scene.qpn(0)],
        limit_s: LIMIT_S,
    };
    let message = scene.agents[0].refused(&pause);
    assert!(message.contains("is part of migration"), "{message}");
    scene.done(0, &Order::Abort { session });
    scene.done(0, &pause);
    scene.unpause(0);
}

#[test]
fn a_pause_ends_with_its_limit_and_with_its_connection() {
    let scene = Scene::new(76);
    let [left, right] = &scene.ends;
    scene.pause(0, LIMIT_S);
    scene.pause(1, LIMIT_S);
    right.recv(0).unwrap();
    left.send(0, true).unwrap();
    // The latest limit counts.
    scene.pause(0, 1);
    scene.pause(1, 1);
    assert_eq!(
        (left.wait().status, right.wait().status),
        (WC_SUCCESS, WC_SUCCESS)
    );
    let start = Instant::now();
    while scene.is_paused(0) || scene.is_paused(1) {
        assert!(start.elapsed() < Duration::from_secs(20), "the limit has passed");
    }

    // A program that takes it to ERR has it there at once, with its flushed requests.
    scene.pause(0, LIMIT_S);
    left.send(1, true).unwrap();
    let to_error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    left.qp.modify(QpAttrMask::STATE, &to_error).unwrap();
    assert_ne!(left.wait().status, WC_SUCCESS);
    assert!(!scene.is_paused(0));
    // What is no connection cannot be paused, and what is not there neither.
    for qpns in [vec![scene.qpn(0)], vec![0xabc_def]] {
        let limit_s = LIMIT_S;
        scene.agents[0].refused(&Order::Pause { qpns, limit_s });
    }
}

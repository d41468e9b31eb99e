//! A context that was dumped stands still, also for agents: nobody moves it, or pauses it, until it goes on.

mod support;

use support::{Agent, End, Nic};
use verbatim_channel::{Answer, Order, Scope};
use verbatim_verbs::dump::{Owner, QpUser, check};
use verbatim_verbs::{Cq, Qp, Srq, WC_SUCCESS};

/// A program that has nothing to say.
struct Silent;

impl Owner for Silent {
    fn cq(&self, _: &Cq) -> u64 {
        0
    }
    fn srq(&self, _: &Srq) -> u64 {
        0
    }
    fn qp(&self, _: &Qp) -> QpUser {
        QpUser::default()
    }
}

#[test]
fn agents_keep_their_hands_off_what_stands_for_a_dump() {
    let nics = [1, 2].map(|host| Nic::start([127, 0, 81, host]));
    let mut agents = [Agent::new(&nics[0]), Agent::new(&nics[1])];
    let ends = [End::new(&nics[0]), End::new(&nics[1])];
    agents.iter_mut().for_each(|agent| assert!(!agent.accept()));
    for end in 0..2 {
        std::thread::scope(|scope| {
            scope.spawn(|| agents[end].resolve());
            ends[end].connect(&nics[1 - end], &ends[1 - end]);
        });
    }
    let [left, right] = &ends;
    let context = left.qp.context();
    let dump = context.dump(&Silent).unwrap();
    let records = check(&dump.bytes).unwrap();
    assert_eq!(records.len(), dump.count as usize);
    assert!(context.stands());

    let session = 5;
    let qpns = vec![left.qp.number()];
    let orders = [
        Order::Suspend {
            session,
            scope: Scope::All,
        },
        Order::Suspend {
            session,
            scope: Scope::Qps(qpns.clone()),
        },
        Order::Hold { session },
        Order::PrepareStandby {
            session,
            qpns: qpns.clone(),
        },
        Order::Pause { qpns, limit_s: 600 },
    ];
    for order in &orders {
        let message = agents[0].refused(order);
        assert!(message.contains("has dumped its context"), "{order:?}: {message}");
    }
    let Answer::Described(map) = agents[0].order(&Order::Describe) else {
        panic!("no road map")
    };
    assert!(map.blockers.iter().any(|blocker| blocker.contains("dumped")));

    // It goes on, and can be moved again.
    right.recv(0).unwrap();
    left.send(0, true).unwrap();
    context.go_on().unwrap();
    assert!(!context.stands() && context.go_on().is_err());
    for wc in [left.wait(), right.wait()] {
        assert_eq!((wc.status, wc.wr_id), (WC_SUCCESS, 0));
    }
    let suspend = Order::Suspend {
        session,
        scope: Scope::All,
    };
    assert!(matches!(agents[0].order(&suspend), Answer::Suspended { .. }));
    assert!(matches!(agents[0].order(&Order::Abort { session }), Answer::Done));
}

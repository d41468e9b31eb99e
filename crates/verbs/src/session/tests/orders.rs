//! Orders of an agent: drains, standbys, what comes out of turn or from an agent that dies.

use verbatim_channel::{Answer, Order, Scope};
use verbatim_device::control::{Access, QpAttrMask, QpState};

use super::SEND;
use crate::testing::{Pair, Shape, wr_ids};
use crate::{QpAttr, SendOpcode};

#[test]
fn a_drain_is_measured_without_one() {
    let mut pair = Pair::new();
    let scopes = [Scope::All, Scope::Qps(vec![pair.ends[0].qp.number(), 0xabcdef])];
    let measure = |pair: &mut Pair, scope: &Scope, limit_ms| {
        let scope = scope.clone();
        match pair.ends[0].order(Order::MeasureDrain { scope, limit_ms }) {
            Answer::DrainMeasured { us } => us,
            other => panic!("{other:?}"),
        }
    };
    for (n, scope) in (0..).zip(&scopes) {
        assert!(measure(&mut pair, scope, 1).is_some(), "nothing is under way");
        pair.ends[0].send(n, SEND, true, false).unwrap();
        assert_eq!(measure(&mut pair, scope, 1), None, "it waits for a RECV");
        pair.ends[1].recv(50 + u64::from(n)).unwrap();
        let measured = measure(&mut pair, scope, 1000);
        assert!(measured.is_some(), "whether or not it is polled");
        assert_eq!(wr_ids(&pair.ends[0].poll()), [u64::from(n)]);
    }
}

#[test]
fn a_drain_that_cannot_end_is_told_and_taken_back() {
    let mut pair = Pair::with(Shape {
        made_again: true,
        ..Shape::PLAIN
    });
    pair.ends[0].send(0, SEND, true, false).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    let order = Order::Drain {
        session: migration.session,
        expected: Vec::new(),
        timeout_ms: 2,
        sends_only: false,
    };
    let Answer::Undrained { qpns, left } = pair.ends[0].sessions.handle(order, Vec::new()) else {
        panic!("drained")
    };
    assert!(left.contains("unfinished send requests"), "{left}");
    // This device, which its process makes again, cannot stop it in the middle of its requests.
    let stop = Order::Stop {
        session: migration.session,
        qpns,
    };
    let Answer::Error { message } = pair.ends[0].sessions.handle(stop, Vec::new()) else {
        panic!("stopped")
    };
    let number = pair.ends[0].qp.number();
    assert!(
        message.contains(&format!("queue pair {number} cannot be stopped")),
        "{message}"
    );
    pair.abort(migration);
    assert_eq!(pair.wire.qpns(2).len(), 1, "the standby is gone");
    pair.ends[1].recv(50).unwrap();
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0]);
    pair.migrate(1);
}

#[test]
fn what_the_program_changes_meanwhile_loses_its_standby() {
    let mut pair = Pair::new();
    let migration = pair.begin(0);
    assert_eq!(pair.wire.qpns(2).len(), 2);
    let error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    pair.ends[1].qp.modify(QpAttrMask::STATE, &error).unwrap();
    assert_eq!(pair.wire.qpns(2).len(), 1);
    pair.abort(migration);

    let migration = pair.begin(0);
    pair.ends[1].qp.destroy().unwrap();
    assert_eq!(pair.wire.qpns(2).len(), 0);
    let scope = Scope::Qps(vec![pair.ends[1].qp.number()]);
    let session = migration.session;
    pair.ends[1].order(Order::Suspend { session, scope });
    pair.abort(migration);
}

#[test]
fn who_lost_its_standby_but_not_its_connection_is_not_reported_as_suspended() {
    let mut pair = Pair::new();
    let migration = pair.begin(0);
    let rights = QpAttr {
        access: Access::REMOTE_READ,
        ..QpAttr::default()
    };
    pair.ends[1].qp.modify(QpAttrMask::ACCESS_FLAGS, &rights).unwrap();
    let (session, scope) = (migration.session, Scope::Qps(vec![pair.ends[1].qp.number()]));
    let Answer::Suspended { sent, .. } = pair.ends[1].order(Order::Suspend { session, scope }) else {
        panic!("not suspended")
    };
    assert_eq!(
        sent,
        [],
        "it would stay on the connection that the instance leaves"
    );
    pair.abort(migration);
    pair.migrate(0);
}

#[test]
fn an_agent_that_dies_leaves_nobody_suspended() {
    let mut pair = Pair::new();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[1].send(0, SendOpcode::Write, true, false).unwrap();
    pair.ends[1].sessions.agent_is_gone(false);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[1].poll()), [0]);
    assert_eq!(pair.wire.qpns(2).len(), 1);
    pair.abort(migration);

    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.ends[1].sessions.agent_is_gone(false);
    pair.ends[1].send(1, SendOpcode::Write, true, false).unwrap();
    pair.wire.settle();
    assert!(
        pair.ends[1].poll().is_empty(),
        "drained: the other end may have moved"
    );
    pair.ends[1].sessions.agent_is_gone(true);
    pair.wire.settle();
    assert!(pair.ends[1].poll().is_empty(), "however long it takes");
    pair.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    pair.ends[0].sessions.agent_is_gone(false);
    pair.wire.settle();
    assert!(
        pair.ends[0].poll().is_empty(),
        "drained: the agent has a while to come back"
    );
    // Nobody else moves it.
    pair.ends[0].sessions.agent_is_gone(true);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0]);
    let session = migration.session;
    assert!(matches!(
        pair.ends[1].sessions.handle(Order::Abort { session }, Vec::new()),
        Answer::Done
    ));
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[1].poll()), [1]);
}

#[test]
fn orders_out_of_turn_are_refused() {
    let mut pair = Pair::new();
    let mut migration = pair.begin(0);
    let session = migration.session;
    let refused = |answer: Answer| matches!(answer, Answer::Error { .. });
    assert!(refused(
        pair.ends[1]
            .sessions
            .handle(Order::Resume { session }, Vec::new())
    ));
    pair.suspend(&mut migration);
    assert!(refused(
        pair.ends[0]
            .sessions
            .handle(Order::Resume { session }, Vec::new())
    ));
    assert!(pair.ends[0].sessions.quiesce(session).is_err());
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    assert!(refused(
        pair.ends[0].sessions.handle(Order::Abort { session }, Vec::new())
    ));
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    assert!(refused(
        pair.ends[1].sessions.handle(Order::Abort { session }, Vec::new())
    ));
    pair.resume(migration);
    pair.ends[1].order(Order::Abort { session });
}

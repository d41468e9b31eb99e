//! What a partner's program destroys while others move: its RNIC says of nothing that it is in use.

use std::sync::mpsc;

use verbatim_channel::{Answer, Order};

use crate::testing::{End, Pair};

/// Destroys what hangs together. The RNIC would refuse it if anything was left.
fn destroy_all(end: &End) {
    end.qp.destroy().unwrap();
    end.mr.dereg().unwrap();
    end.cq.destroy().unwrap();
    end.pd.dealloc().unwrap();
}

#[test]
fn the_queue_pair_of_before_does_not_keep_its_completion_queue() {
    let mut pair = Pair::new();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    let session = migration.session;
    // The program goes on before the helper has come to the rest.
    let answer = pair.ends[1]
        .sessions
        .answer(Order::Resume { session }, Vec::new());
    assert!(matches!(answer, Answer::Resumed { .. }), "{answer:?}");
    destroy_all(&pair.ends[1]);
    pair.ends[1].sessions.clear();
    pair.resume(migration);
}

#[test]
fn one_that_is_being_destroyed_gets_no_standby() {
    let mut pair = Pair::new();
    let end = &mut pair.ends[1];
    let (qp, qpns) = (end.qp.clone(), vec![end.qp.number()]);
    let (go, may_go) = mpsc::channel();
    let (goes, is_going) = mpsc::channel();
    // Once it is found, and before it is known to be gone.
    pair.wire.on_destroy(move || goes.send(()).unwrap());
    pair.wire.on_look(move || {
        go.send(()).unwrap();
        is_going.recv().unwrap();
    });
    let refused = std::thread::scope(|scope| {
        let destroyer = scope.spawn(move || {
            may_go.recv().unwrap();
            qp.destroy()
        });
        let refused = end.ask(Order::PrepareStandby { session: 7, qpns });
        destroyer.join().unwrap().unwrap();
        refused
    });
    let message = refused.unwrap_err();
    assert!(message.contains("queue pair"), "{message}");
    end.mr.dereg().unwrap();
    end.cq.destroy().unwrap();
    end.pd.dealloc().unwrap();
}

//! A number that an RNIC gives again as soon as it is free.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use verbatim_channel::Endpoint;

use crate::testing::{End, Shape, Wire, connect, wr_ids};
use crate::{Body, Pd, Qp, QpInit, SEND_SIGNALED, SendOpcode, SendWr, UdAddress};

/// Connected to itself.
fn ready(pd: &Arc<Pd>, init: &QpInit, gid: [u8; 16]) -> Arc<Qp> {
    let qp = pd.create_qp(init).unwrap();
    let qpn = qp.number();
    connect(&qp, Endpoint { gid, qpn }, [1, 1], 7);
    qp
}

fn write(qp: &Qp, (remote_address, rkey): (u64, u32), wr_id: u64) {
    let request = SendWr {
        wr_id,
        opcode: SendOpcode::Write,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_address,
        rkey,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Inline(&[b"data"]),
    };
    qp.post_send([request]).unwrap();
}

#[test]
fn a_queue_pair_made_while_another_goes_keeps_its_completions() {
    let wire = Wire::new();
    // Numbers of a context that can be moved are looked up first, which also keeps two lives of one apart.
    wire.pin(1);
    let end = End::new(&wire, 0, Shape::PLAIN);
    let (init, gid) = (end.qp.init_attr(), end.endpoint().gid);
    let old = ready(&end.pd, &init, gid);
    // Of this one nobody takes the completion.
    write(&old, end.remote, 7);
    wire.settle();

    let (made, is_made) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let creator = std::thread::spawn({
        let pd = end.pd.clone();
        move || {
            may_go.recv().unwrap();
            let qp = ready(&pd, &init, gid);
            // The other end may have given up waiting.
            let _ = made.send(());
            qp
        }
    });
    wire.give_again(old.number());
    wire.on_destroy(move || {
        go.send(()).unwrap();
        // It is either through at once, or waits for the one that goes.
        let made = is_made.recv_timeout(Duration::from_millis(200));
        assert_ne!(made, Err(RecvTimeoutError::Disconnected));
    });
    old.destroy().unwrap();
    let new = creator.join().unwrap();
    assert_eq!(new.number(), old.number(), "the number is used again");

    write(&new, end.remote, 8);
    wire.settle();
    assert_eq!(wr_ids(&end.poll()), [8]);
    assert!(new.query().is_ok(), "it is still known");
    new.destroy().unwrap();
}

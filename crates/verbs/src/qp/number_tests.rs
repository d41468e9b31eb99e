//! A number that an RNIC gives again as soon as it is free.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use verbatim_device::control::{Access, QpAttr, QpAttrMask, QpState, QpType};

use crate::testing::{CAP, World, buffer};
use crate::{Body, Pd, Process, Qp, QpInit, SEND_SIGNALED, SendOpcode, SendWr, UdAddress, Wc};

const DEVICE: u8 = 1;

fn ready(pd: &Arc<Pd>, init: &QpInit) -> Arc<Qp> {
    let qp = pd.create_qp(init).unwrap();
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let attr = QpAttr {
            state,
            ..QpAttr::default()
        };
        qp.modify(QpAttrMask::STATE, &attr).unwrap();
    }
    qp
}

fn write(qp: &Qp, wr_id: u64) {
    let request = SendWr {
        wr_id,
        opcode: SendOpcode::Write,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_address: buffer(),
        rkey: 1,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Inline(&[b"data"]),
    };
    qp.post_send([request]).unwrap();
}

#[test]
fn a_queue_pair_made_while_another_goes_keeps_its_completions() {
    let world = World::default();
    // Numbers of a context that can be moved are looked up first, which also keeps two lives of one apart.
    world.pin(DEVICE);
    let process = Process::new(Path::new("/proc/none"));
    let context = process.open_on(|| Ok(world.device(DEVICE))).unwrap();
    let pd = context.alloc_pd().unwrap();
    let _mr = pd.reg_mr(buffer(), 64, buffer(), Access::LOCAL_WRITE).unwrap();
    let cq = context.create_cq(64, None).unwrap();
    let init = QpInit {
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        qp_type: QpType::Rc,
        cap: CAP,
        signal_all: false,
        srq: None,
    };
    let old = ready(&pd, &init);
    // Of this one nobody takes the completion.
    write(&old, 7);
    while world.step() {}

    let (made, is_made) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let creator = std::thread::spawn({
        let (pd, init) = (pd.clone(), init.clone());
        move || {
            may_go.recv().unwrap();
            let qp = ready(&pd, &init);
            // The other end may have given up waiting.
            let _ = made.send(());
            qp
        }
    });
    world.on_destroy(move || {
        go.send(()).unwrap();
        // It is either through at once, or waits for the one that goes.
        let made = is_made.recv_timeout(Duration::from_millis(200));
        assert_ne!(made, Err(RecvTimeoutError::Disconnected));
    });
    old.destroy().unwrap();
    let new = creator.join().unwrap();
    assert_eq!(new.number(), old.number(), "the number is used again");

    write(&new, 8);
    while world.step() {}
    let mut taken = [Wc::default(); 4];
    let count = cq.poll(&mut taken);
    let wr_ids: Vec<u64> = taken[..count].iter().map(|wc| wc.wr_id).collect();
    assert_eq!(wr_ids, [8]);
    assert!(new.query().is_ok(), "it is still known");
    new.destroy().unwrap();
}

//! What else a program has: address handles, windows, new objects and their numbers.

use std::sync::atomic::Ordering::SeqCst;

use verbatim_channel::{Order, Scope};
use verbatim_device::control::{Access, QpAttrMask, QpType};

use crate::testing::{End, Pair, Shape, wr_ids};
use crate::work::MwBind;
use crate::{Ah, Body, Mw, MwType, QpAttr, SEND_SIGNALED, SendOpcode, SendWr};

const DATAGRAMS: Shape = Shape {
    qp_type: QpType::Ud,
    ..Shape::PLAIN
};

#[test]
fn datagrams_find_who_has_moved_by_the_handles_of_before_and_of_after() {
    let mut pair = Pair::with(DATAGRAMS);
    let handles = [0, 1].map(|end| pair.ends[end].handle_to(&pair.ends[1 - end]));
    for end in 0..2 {
        (0..8).for_each(|wr_id| pair.ends[end].recv(wr_id).unwrap());
    }
    let both = |pair: &Pair, number: u32, handles: &[std::sync::Arc<Ah>; 2]| {
        for (end, handle) in handles.iter().enumerate() {
            pair.ends[end].send_datagram(number, handle, &pair.ends[1 - end]);
        }
        pair.wire.settle();
        for end in 0..2 {
            let done = pair.ends[end].poll();
            let received: Vec<u32> = done
                .iter()
                .filter(|wc| wc.opcode == 128)
                .map(|wc| wc.imm)
                .collect();
            assert_eq!(
                (received.as_slice(), done.len()),
                (&[number][..], 2),
                "at end {end}"
            );
        }
    };
    both(&pair, 0, &handles);
    for (number, mover) in [(1, 0), (2, 1), (3, 0)] {
        pair.migrate(mover);
        both(&pair, number, &handles);
    }
    let later = [0, 1].map(|end| pair.ends[end].handle_to(&pair.ends[1 - end]));
    both(&pair, 4, &later);
    // A request that is held back while the other end moves goes to where that is then.
    let session = 99;
    let scope = Scope::Qps(vec![pair.ends[1].qp.number()]);
    pair.ends[1].order(Order::Suspend { session, scope });
    pair.ends[1].send_datagram(5, &handles[1], &pair.ends[0]);
    pair.migrate(0);
    pair.ends[1].order(Order::Abort { session });
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [5]);
    for handle in handles.iter().chain(&later) {
        handle.destroy().unwrap();
    }
}

#[test]
fn windows_are_bound_where_they_go_as_they_were_and_their_keys_stay() {
    let mut pair = Pair::new();
    let bind = |pair: &Pair, end: usize, mw: &Mw, new_rkey: u32| {
        let End { mr, qp, .. } = &pair.ends[end];
        let bind = MwBind {
            mw_rkey: mw.rkey(),
            new_rkey,
            lkey: mr.lkey(),
            address: pair.ends[end].memory + 1024,
            length: 512,
            access: Access::REMOTE_READ,
        };
        qp.post_send([SendWr::bind(0, 0, &bind)]).unwrap();
    };
    // How the RNIC has it, and whether that is where it was bound to, in the RNIC's numbers.
    let state = |pair: &Pair, end: usize, mw: &Mw| {
        let context = &pair.ends[end].context;
        let physical = context.windows.physical(mw.rkey());
        let state = context.device().unwrap().query_mw(physical).unwrap();
        let rkey = context.windows.known(state.rkey);
        let bound = state.bound.map(|bound| {
            let own = &pair.ends[end];
            assert_eq!(bound.lkey, own.mr.physical_lkey.load(SeqCst));
            assert_eq!((bound.address, bound.length), (own.memory + 1024, 512));
            assert_eq!(bound.access, Access::REMOTE_READ);
            if mw.mw_type() == MwType::Two {
                assert_eq!(bound.qpn, Some(own.endpoint().qpn));
            }
        });
        (rkey, bound.is_some())
    };
    let one = pair.ends[0].pd.alloc_mw(MwType::One).unwrap();
    let unbound = pair.ends[0].pd.alloc_mw(MwType::Two).unwrap();
    let two = [0, 1].map(|end| pair.ends[end].pd.alloc_mw(MwType::Two).unwrap());
    let key = |mw: &Mw, tag: u32| mw.rkey() & !0xff | tag;
    bind(&pair, 0, &one, key(&one, 9));
    for (end, mw) in two.iter().enumerate() {
        bind(&pair, end, mw, key(mw, 5));
    }
    pair.wire.settle();
    for (tag, mover) in [(5, 0), (6, 1), (7, 0)] {
        pair.migrate(mover);
        assert_eq!(state(&pair, 0, &one), (key(&one, 9), true));
        assert_eq!(state(&pair, 0, &unbound), (unbound.rkey(), false));
        for (end, mw) in two.iter().enumerate() {
            // Whose peer has moved, and whose own: the other end ends it, and it is bound again under another key.
            assert_eq!(state(&pair, end, mw), (key(mw, tag), true));
            let partner = &pair.ends[1 - end];
            let sges = [partner.sge(0, 8)];
            let read = SendWr {
                remote_address: pair.ends[end].memory + 1024,
                rkey: key(mw, tag),
                body: Body::Sges(&sges),
                ..partner.request(73, SendOpcode::Read, SEND_SIGNALED)
            };
            partner.qp.post_send([read]).unwrap();
            pair.wire.settle();
            assert_eq!(wr_ids(&partner.poll()), [73]);
            pair.ends[end].recv(70).unwrap();
            let mut request = SendWr::local_invalidate(71, SEND_SIGNALED, key(mw, tag));
            request.opcode = SendOpcode::SendWithInvalidate;
            pair.ends[1 - end].qp.post_send([request]).unwrap();
            pair.wire.settle();
            assert_eq!(wr_ids(&pair.ends[1 - end].poll()), [71]);
            let received = pair.ends[end].poll();
            assert_eq!((received[0].wr_id, received[0].imm), (70, key(mw, tag)));
            assert_eq!(state(&pair, end, mw), (key(mw, tag), false));
            bind(&pair, end, mw, key(mw, tag + 1));
        }
        pair.wire.settle();
    }
    // By itself, too.
    let request = SendWr::local_invalidate(72, SEND_SIGNALED, key(&two[0], 8));
    pair.ends[0].qp.post_send([request]).unwrap();
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [72]);
    assert_eq!(state(&pair, 0, &two[0]), (key(&two[0], 8), false));
    for mw in two.iter().chain([&one, &unbound]) {
        mw.dealloc().unwrap();
    }
}

#[test]
fn control_verbs_wait_until_the_session_is_over() {
    let mut pair = Pair::new();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    let (moving, partner) = (pair.ends[0].context.clone(), pair.ends[1].qp.clone());
    std::thread::scope(|scope| {
        let alloc = scope.spawn(move || moving.alloc_pd().map(|_| ()));
        let modify = scope.spawn(move || partner.modify(QpAttrMask::empty(), &QpAttr::default()));
        pair.ends[1].context.alloc_pd().unwrap();
        assert!(pair.drain(&mut migration, 1000));
        pair.quiesce(&mut migration);
        assert!(!alloc.is_finished() && !modify.is_finished());
        pair.claim(&mut migration);
        pair.switch(&mut migration);
        pair.resume(migration);
        alloc.join().unwrap().unwrap();
        modify.join().unwrap().unwrap();
    });
}

#[test]
fn new_objects_get_no_number_that_the_program_knows_for_another() {
    let mut pair = Pair::with(Shape {
        reuses_numbers: false,
        ..Shape::PLAIN
    });
    pair.migrate(0);
    let end = &pair.ends[0];
    // The device gives these numbers again: nothing there has them.
    pair.wire.give_again(end.mr.lkey() >> 8);
    let again = end.pd.reg_mr(end.memory, 64, end.memory, Access::LOCAL_WRITE);
    assert_ne!(again.unwrap().lkey(), end.mr.lkey());
    let init = end.qp.init_attr();
    pair.wire.give_again(end.qp.number());
    let first = end.pd.create_qp(&init).unwrap();
    let second = end.pd.create_qp(&init).unwrap();
    let numbers = [end.qp.number(), first.number(), second.number()];
    assert!(
        numbers[0] != numbers[1] && numbers[0] != numbers[2],
        "{numbers:?}"
    );
    first.destroy().unwrap();
    second.destroy().unwrap();
    assert_eq!(end.cq.destroy().unwrap_err().errno(), libc::EBUSY);
    assert_eq!(end.pd.dealloc().unwrap_err().errno(), libc::EBUSY);
    end.qp.destroy().unwrap();
    end.cq.destroy().unwrap();
    assert_eq!(end.qp.destroy().unwrap_err().errno(), libc::EINVAL);
}

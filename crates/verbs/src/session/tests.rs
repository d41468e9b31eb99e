//! Suspension, drain, replay and switch, one thing at a time.

use std::sync::atomic::Ordering::SeqCst;

use verbatim_channel::{Answer, Order, Scope};
use verbatim_device::control::{Access, AsyncEventType, QpAttrMask, QpState};

use crate::testing::{End, Shape, Story, buffer};
use crate::work::MwBind;
use crate::{MwType, PostError, QpAttr, SEND_SIGNALED, SendOpcode, SendWr, UdAddress, WC_WR_FLUSH_ERR};

const SEND: SendOpcode = SendOpcode::SendWithImm;

const PLAIN: Shape = Shape {
    srq: false,
    channel: false,
    unreliable: false,
    datagrams: false,
    made_again: false,
};
const SHARED: Shape = Shape { srq: true, ..PLAIN };
const WITH_EVENTS: Shape = Shape {
    channel: true,
    ..PLAIN
};
const DATAGRAMS: Shape = Shape {
    datagrams: true,
    ..PLAIN
};

fn wr_ids(completions: &[crate::Wc]) -> Vec<u64> {
    completions.iter().map(|wc| wc.wr_id).collect()
}

#[test]
fn completions_of_before_during_and_after_come_in_order() {
    let mut story = Story::new();
    for wr_id in 0..8 {
        story.ends[1].recv(100 + wr_id).unwrap();
    }
    story.ends[0].send(0, SEND, true, false).unwrap();
    story.ends[0].send(1, SEND, true, true).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[0].send(2, SEND, true, true).unwrap();
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    story.ends[0].send(3, SEND, true, false).unwrap();
    assert_eq!(
        wr_ids(&story.ends[0].poll()),
        [0, 1],
        "from the fake queue, without an RNIC"
    );
    assert_eq!(story.claim(&mut migration), 0);
    assert_eq!(story.switch(&migration), 6, "RECVs that no message has consumed");
    assert_eq!(story.resume(&migration), [2, 0]);
    story.ends[0].send(4, SEND, true, false).unwrap();
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [2, 3, 4]);
    let received = story.ends[1].poll();
    assert_eq!(wr_ids(&received), [100, 101, 102, 103, 104]);
    let messages: Vec<u32> = received.iter().map(|wc| wc.imm).collect();
    assert_eq!(messages, [0, 1, 2, 3, 4]);
    let number = story.ends[1].qp.number();
    assert!(
        received.iter().all(|wc| wc.qp_num == number),
        "numbers stay virtual"
    );
}

#[test]
fn unsignaled_requests_at_the_end_are_waited_for_and_their_room_comes_back() {
    let mut story = Story::new();
    for n in 0..4 {
        story.ends[0].send(n, SendOpcode::Write, false, false).unwrap();
    }
    assert_eq!(
        story.ends[0].send(9, SendOpcode::Write, false, false),
        Err(PostError::Full)
    );
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    assert!(story.world.unfinished() > 0);
    assert!(story.drain(&migration, 1000));
    assert_eq!(story.world.unfinished(), 0);
    story.quiesce(&mut migration);
    story.claim(&mut migration);
    story.switch(&migration);
    story.resume(&migration);
    for n in 0..4 {
        story.ends[0].send(n, SendOpcode::Write, n == 3, false).unwrap();
    }
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [3]);
}

#[test]
fn a_drain_is_measured_without_one() {
    let mut story = Story::new();
    let scopes = [Scope::All, Scope::Qps(vec![story.ends[0].qp.number(), 0xabcdef])];
    let measure = |story: &mut Story, scope: &Scope| {
        let (scope, limit_ms) = (scope.clone(), 1);
        match story.ends[0].order(Order::MeasureDrain { scope, limit_ms }) {
            Answer::DrainMeasured { us } => us,
            other => panic!("{other:?}"),
        }
    };
    for (n, scope) in (0..).zip(&scopes) {
        assert!(measure(&mut story, scope).is_some(), "nothing is under way");
        story.ends[0].send(n, SEND, true, false).unwrap();
        assert_eq!(measure(&mut story, scope), None, "it waits for a RECV");
        story.ends[1].recv(50 + u64::from(n)).unwrap();
        assert!(
            measure(&mut story, scope).is_some(),
            "whether or not it is polled"
        );
        assert_eq!(wr_ids(&story.ends[0].poll()), [u64::from(n)]);
    }
}

#[test]
fn interception_holds_no_more_than_the_queue_would() {
    let mut story = Story::new();
    story.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    for n in 1..4 {
        story.ends[0].send(n, SendOpcode::Write, true, false).unwrap();
    }
    assert_eq!(
        story.ends[0].send(4, SendOpcode::Write, true, false),
        Err(PostError::Full)
    );
    assert!(story.drain(&migration, 1000));
    assert_eq!(wr_ids(&story.ends[0].poll()), [0]);
    story.ends[0].send(4, SendOpcode::Write, true, false).unwrap();
    story.abort(&migration);
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [1, 2, 3, 4]);
}

#[test]
fn a_batch_is_taken_back_as_a_whole_whether_suspended_or_not() {
    let mut story = Story::new();
    let push = |story: &Story| {
        let sges = [story.ends[0].sge()];
        let mut batch = story.ends[0].qp.owned_batch();
        let request = crate::SendWr {
            wr_id: 7,
            opcode: SendOpcode::Write,
            flags: crate::SEND_SIGNALED,
            imm: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: crate::Body::Sges(&sges),
        };
        batch.push(&request).unwrap();
        batch.push(&request).unwrap();
        batch
    };
    push(&story).abort();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    push(&story).abort();
    push(&story).complete().unwrap();
    story.abort(&migration);
    push(&story).complete().unwrap();
    story.settle();
    assert_eq!(story.ends[0].poll().len(), 4);
    drop(push(&story));
    story.settle();
    assert_eq!(story.ends[0].poll().len(), 0);
}

#[test]
fn receives_posted_while_drained_are_posted_once_also_after_a_rollback() {
    let mut story = Story::new();
    for wr_id in 0..2 {
        story.ends[0].recv(wr_id).unwrap();
    }
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[0].recv(2).unwrap();
    assert!(story.drain(&migration, 1000));
    story.ends[0].recv(3).unwrap();
    story.quiesce(&mut migration);
    story.ends[0].recv(4).unwrap();
    story.roll_back(migration);
    for n in 0..5 {
        story.ends[1].send(n, SEND, n % 4 == 3, false).unwrap();
        story.settle();
        story.ends[1].poll();
    }
    assert_eq!(wr_ids(&story.ends[0].poll()), [0, 1, 2, 3, 4]);
    story.ends[1].send(5, SEND, true, false).unwrap();
    story.settle();
    assert_eq!(story.world.unfinished(), 1, "no RECV was posted twice");
}

#[test]
fn a_shared_receive_queue_moves_with_what_nothing_has_consumed() {
    let mut story = Story::with(SHARED);
    for wr_id in 0..4 {
        story.ends[0].recv(wr_id).unwrap();
    }
    story.ends[1].send(0, SEND, false, false).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[0].recv(4).unwrap();
    assert!(story.drain(&migration, 1000));
    story.ends[0].recv(5).unwrap();
    story.quiesce(&mut migration);
    story.ends[0].recv(6).unwrap();
    assert_eq!(wr_ids(&story.ends[0].poll()), [0]);
    story.ends[0].recv(7).unwrap();
    story.ends[0].recv(8).unwrap();
    assert_eq!(story.ends[0].recv(9), Err(PostError::Full));
    assert_eq!(story.claim(&mut migration), 8, "each of them once");
    story.switch(&migration);
    story.resume(&migration);
    for message in 1..9 {
        story.ends[1]
            .send(message, SEND, message % 4 == 0, false)
            .unwrap();
        story.settle();
        story.ends[1].poll();
    }
    assert_eq!(wr_ids(&story.ends[0].poll()), [1, 2, 3, 4, 5, 6, 7, 8]);
    story.ends[0].recv(10).unwrap();
    // The partner's queue stays where it is, below two queue pairs for a while.
    story.ends[1].recv(20).unwrap();
    story.migrate(0);
    story.ends[0].send(9, SEND, true, false).unwrap();
    story.settle();
    assert_eq!(wr_ids(&story.ends[1].poll()), [20]);
}

#[test]
fn the_limit_of_a_shared_receive_queue_is_armed_where_it_goes_and_fires_once() {
    let mut story = Story::with(SHARED);
    let srq = story.ends[0].srq.clone().unwrap();
    for wr_id in 0..3 {
        story.ends[0].recv(wr_id).unwrap();
    }
    srq.modify_limit(2).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    story.claim(&mut migration);
    story.switch(&migration);
    story.resume(&migration);
    assert_eq!(srq.query().unwrap().limit, 2);
    let event = |story: &Story| {
        let context = &story.ends[0].context;
        context.process().look_after_devices();
        rustix::io::ioctl_fionbio(context.async_fd(), true).unwrap();
        context.get_async_event().map(|event| event.event)
    };
    for message in 0..2 {
        story.ends[1].send(message, SEND, true, false).unwrap();
        story.settle();
    }
    // It has fired before the process is quiesced, and the helper thread has not looked yet.
    story.migrate(0);
    assert_eq!(event(&story).unwrap(), AsyncEventType::SrqLimitReached);
    srq.ack_async_event();
    assert_eq!(srq.query().unwrap().limit, 0);
    assert_eq!(event(&story).unwrap_err().errno(), libc::EAGAIN);
}

/// Whether there is an event of an end's completion queue; it is acknowledged.
fn event(story: &Story, end: usize) -> bool {
    let cq = &story.ends[end].cq;
    match cq.channel().unwrap().get_event() {
        Ok(told) => {
            assert!(std::sync::Arc::ptr_eq(&told, cq));
            cq.ack_events(1);
            true
        }
        Err(error) => {
            assert_eq!(error.errno(), libc::EAGAIN);
            false
        }
    }
}

#[test]
fn an_armed_queue_is_armed_where_it_goes() {
    for solicited_only in [false, true] {
        let mut story = Story::with(WITH_EVENTS);
        for end in 0..2 {
            story.ends[end].cq.arm(solicited_only);
            story.ends[end].recv(end as u64).unwrap();
        }
        story.migrate(0);
        story.migrate(1);
        assert!(!event(&story, 0) && !event(&story, 1));
        story.ends[1].send(7, SEND, false, false).unwrap();
        story.settle();
        assert_eq!(event(&story, 0), !solicited_only);
        assert!(!event(&story, 1));
        assert_eq!(wr_ids(&story.ends[0].poll()), [0]);
    }
}

#[test]
fn events_that_nobody_has_read_and_completions_that_nobody_was_told_of_come_after_the_move() {
    let mut story = Story::with(WITH_EVENTS);
    story.ends[0].recv(0).unwrap();
    story.ends[0].cq.arm(false);
    story.ends[1].send(0, SEND, true, false).unwrap();
    story.settle();
    // The event lies in the channel while it moves, twice.
    story.migrate(0);
    story.migrate(0);
    assert!(event(&story, 0) && !event(&story, 0));
    story.ends[0].recv(1).unwrap();
    story.ends[1].send(1, SEND, true, false).unwrap();
    story.settle();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    // Without an RNIC: what has come already fires at once, what is still to come when there is one again.
    story.ends[0].cq.arm(false);
    assert!(event(&story, 0) && !event(&story, 0));
    assert_eq!(wr_ids(&story.ends[0].poll()), [0, 1]);
    story.ends[0].cq.arm(false);
    assert!(!event(&story, 0));
    story.claim(&mut migration);
    story.switch(&migration);
    story.resume(&migration);
    assert!(!event(&story, 0));
    story.ends[0].recv(2).unwrap();
    story.ends[1].send(2, SEND, true, false).unwrap();
    story.settle();
    assert!(event(&story, 0) && !event(&story, 0));
}

#[test]
fn who_waits_for_an_event_while_it_is_moved_gets_it() {
    let mut story = Story::with(WITH_EVENTS);
    story.ends[0].recv(0).unwrap();
    let (cq, context) = (story.ends[0].cq.clone(), story.ends[0].context.clone());
    let channel = cq.channel().unwrap().clone();
    rustix::io::ioctl_fionbio(channel.fd(), false).unwrap();
    cq.arm(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| channel.get_event().map(|_| ()));
        let other = scope.spawn(|| context.get_async_event().map(|event| event.event));
        story.migrate(0);
        story.migrate(0);
        assert!(!waiter.is_finished() && !other.is_finished());
        story.ends[1].send(0, SEND, true, false).unwrap();
        story.settle();
        waiter.join().unwrap().unwrap();
        let physical = story.ends[0].endpoint().qpn;
        let device = story.ends[0].device;
        let event = verbatim_device::control::AsyncEvent {
            event: AsyncEventType::SqDrained,
            object: physical,
        };
        story.world.tell(device, event);
        context.process().look_after_devices();
        assert_eq!(other.join().unwrap().unwrap(), AsyncEventType::SqDrained);
    });
    cq.ack_events(1);
    story.ends[0].qp.ack_async_event();
}

#[test]
fn datagrams_find_who_has_moved_by_the_handles_of_before_and_of_after() {
    let mut story = Story::with(DATAGRAMS);
    let handles = [0, 1].map(|end| story.ends[end].handle_to(&story.ends[1 - end]));
    for end in 0..2 {
        (0..8).for_each(|wr_id| story.ends[end].recv(wr_id).unwrap());
    }
    let both = |story: &Story, number: u32, handles: &[std::sync::Arc<crate::Ah>; 2]| {
        for (end, handle) in handles.iter().enumerate() {
            story.ends[end].send_datagram(number, handle, &story.ends[1 - end]);
        }
        story.settle();
        for end in 0..2 {
            let done = story.ends[end].poll();
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
    both(&story, 0, &handles);
    for (number, mover) in [(1, 0), (2, 1), (3, 0)] {
        story.migrate_datagrams(mover);
        both(&story, number, &handles);
    }
    let later = [0, 1].map(|end| story.ends[end].handle_to(&story.ends[1 - end]));
    both(&story, 4, &later);
    // A request that is held back while the other end moves goes to where that is then.
    let session = 99;
    let scope = Scope::Qps(vec![story.ends[1].qp.number()]);
    story.ends[1].order(Order::Suspend { session, scope });
    story.ends[1].send_datagram(5, &handles[1], &story.ends[0]);
    story.migrate_datagrams(0);
    story.ends[1].order(Order::Abort { session });
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [5]);
    for handle in handles.iter().chain(&later) {
        handle.destroy().unwrap();
    }
}

#[test]
fn windows_are_bound_where_they_go_as_they_were_and_their_keys_stay() {
    let mut story = Story::new();
    let bind = |story: &Story, end: usize, mw: &crate::Mw, new_rkey: u32| {
        let End { mr, qp, .. } = &story.ends[end];
        let bind = MwBind {
            mw_rkey: mw.rkey(),
            new_rkey,
            lkey: mr.lkey(),
            address: 4096,
            length: 512,
            access: Access::REMOTE_READ,
        };
        qp.post_send([SendWr::bind(0, 0, &bind)]).unwrap();
    };
    // How the RNIC has it, and whether that is where it was bound to, in the RNIC's numbers.
    let state = |story: &Story, end: usize, mw: &crate::Mw| {
        let context = &story.ends[end].context;
        let physical = context.windows.physical(mw.rkey());
        let state = context.device().unwrap().query_mw(physical).unwrap();
        let rkey = context.windows.known(state.rkey);
        let bound = state.bound.map(|bound| {
            let own = &story.ends[end];
            assert_eq!(bound.lkey, own.mr.physical_lkey.load(SeqCst));
            assert_eq!((bound.address, bound.length), (4096, 512));
            assert_eq!(bound.access, Access::REMOTE_READ);
            if mw.mw_type() == MwType::Two {
                assert_eq!(bound.qpn, Some(own.endpoint().qpn));
            }
        });
        (rkey, bound.is_some())
    };
    let one = story.ends[0].pd.alloc_mw(MwType::One).unwrap();
    let unbound = story.ends[0].pd.alloc_mw(MwType::Two).unwrap();
    let two = [0, 1].map(|end| story.ends[end].pd.alloc_mw(MwType::Two).unwrap());
    let key = |mw: &crate::Mw, tag: u32| mw.rkey() & !0xff | tag;
    bind(&story, 0, &one, key(&one, 9));
    for (end, mw) in two.iter().enumerate() {
        bind(&story, end, mw, key(mw, 5));
    }
    story.settle();
    for (tag, mover) in [(5, 0), (6, 1), (7, 0)] {
        story.migrate(mover);
        assert_eq!(state(&story, 0, &one), (key(&one, 9), true));
        assert_eq!(state(&story, 0, &unbound), (unbound.rkey(), false));
        for (end, mw) in two.iter().enumerate() {
            // Whose peer has moved, and whose own: the other end ends it, and it is bound again under another key.
            assert_eq!(state(&story, end, mw), (key(mw, tag), true));
            story.ends[end].recv(70).unwrap();
            let mut request = SendWr::local_invalidate(71, SEND_SIGNALED, key(mw, tag));
            request.opcode = SendOpcode::SendWithInvalidate;
            story.ends[1 - end].qp.post_send([request]).unwrap();
            story.settle();
            assert_eq!(wr_ids(&story.ends[1 - end].poll()), [71]);
            let received = story.ends[end].poll();
            assert_eq!((received[0].wr_id, received[0].imm), (70, key(mw, tag)));
            assert_eq!(state(&story, end, mw), (key(mw, tag), false));
            bind(&story, end, mw, key(mw, tag + 1));
        }
        story.settle();
    }
    // By itself, too.
    let request = SendWr::local_invalidate(72, SEND_SIGNALED, key(&two[0], 8));
    story.ends[0].qp.post_send([request]).unwrap();
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [72]);
    assert_eq!(state(&story, 0, &two[0]), (key(&two[0], 8), false));
    for mw in two.iter().chain([&one, &unbound]) {
        mw.dealloc().unwrap();
    }
}

#[test]
fn requests_that_were_posted_in_sqd_wait_there_and_move() {
    let mut story = Story::new();
    let set = |story: &Story, state| {
        let attr = QpAttr {
            state,
            ..QpAttr::default()
        };
        story.ends[0].qp.modify(QpAttrMask::STATE, &attr).unwrap();
    };
    set(&story, QpState::Sqd);
    story.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    story.ends[0].send(1, SendOpcode::Write, true, true).unwrap();
    story.settle();
    assert!(story.ends[0].poll().is_empty());
    story.migrate(0);
    story.settle();
    assert!(story.ends[0].poll().is_empty(), "still in SQD");
    assert_eq!(story.ends[0].qp.query().unwrap().0.state, QpState::Sqd);
    set(&story, QpState::Rts);
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [0, 1]);
}

#[test]
fn a_drain_that_cannot_end_is_told_and_taken_back() {
    let mut story = Story::new();
    story.ends[0].send(0, SEND, true, false).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    let order = Order::Drain {
        session: migration.session,
        expected: Vec::new(),
        timeout_ms: 2,
        sends_only: false,
    };
    let Answer::Undrained { qpns, left } = story.ends[0].sessions.handle(order, Vec::new()) else {
        panic!("drained")
    };
    assert!(left.contains("unfinished send requests"), "{left}");
    // This device cannot stop it in the middle of its requests.
    let stop = Order::Stop {
        session: migration.session,
        qpns,
    };
    let Answer::Error { message } = story.ends[0].sessions.handle(stop, Vec::new()) else {
        panic!("stopped")
    };
    let number = story.ends[0].qp.number();
    assert!(
        message.contains(&format!("queue pair {number} cannot be stopped")),
        "{message}"
    );
    story.abort(&migration);
    assert_eq!(story.world.qpns(2).len(), 1, "the standby is gone");
    story.ends[1].recv(50).unwrap();
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [0]);
    story.migrate(1);
}

#[test]
fn control_verbs_wait_until_the_session_is_over() {
    let mut story = Story::new();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    let (moving, partner) = (story.ends[0].context.clone(), story.ends[1].qp.clone());
    std::thread::scope(|scope| {
        let alloc = scope.spawn(move || moving.alloc_pd().map(|_| ()));
        let modify = scope.spawn(move || partner.modify(QpAttrMask::empty(), &QpAttr::default()));
        story.ends[1].context.alloc_pd().unwrap();
        assert!(story.drain(&migration, 1000));
        story.quiesce(&mut migration);
        assert!(!alloc.is_finished() && !modify.is_finished());
        story.claim(&mut migration);
        story.switch(&migration);
        story.resume(&migration);
        alloc.join().unwrap().unwrap();
        modify.join().unwrap().unwrap();
    });
}

#[test]
fn new_objects_get_no_number_that_the_program_knows_for_another() {
    let mut story = Story::new();
    story.migrate(0);
    let end = &story.ends[0];
    // The device would give these numbers again: nothing there has them.
    let regions: Vec<_> = (0..3)
        .map(|_| {
            end.pd
                .reg_mr(buffer(), 64, buffer(), Access::LOCAL_WRITE)
                .unwrap()
                .lkey()
        })
        .collect();
    assert!(
        !regions.contains(&end.mr.lkey()),
        "{regions:x?} and {:x}",
        end.mr.lkey()
    );
    let init = end.qp.init_attr();
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

#[test]
fn a_failed_queue_pair_is_still_failed_on_its_new_device() {
    let mut story = Story::new();
    story.ends[0].recv(1).unwrap();
    let mut migration = story.pre_setup(0);
    let qpn = story.ends[0].qp.number();
    story.world.fail(1, qpn);
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    story.ends[0].recv(2).unwrap();
    story.ends[0].send(3, SendOpcode::Write, false, false).unwrap();
    story.claim(&mut migration);
    story.switch(&migration);
    story.resume(&migration);
    assert_eq!(story.ends[0].qp.query().unwrap().0.state, QpState::Err);
    story.settle();
    let flushed = story.ends[0].poll();
    assert_eq!(wr_ids(&flushed), [1, 2, 3]);
    assert!(flushed.iter().all(|wc| wc.status == WC_WR_FLUSH_ERR));
}

#[test]
fn what_the_program_changes_meanwhile_loses_its_standby() {
    let mut story = Story::new();
    let migration = story.pre_setup(0);
    assert_eq!(story.world.qpns(2).len(), 2);
    let error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    story.ends[1].qp.modify(QpAttrMask::STATE, &error).unwrap();
    assert_eq!(story.world.qpns(2).len(), 1);
    story.abort(&migration);

    let migration = story.pre_setup(0);
    story.ends[1].qp.destroy().unwrap();
    assert_eq!(story.world.qpns(2).len(), 0);
    let scope = Scope::Qps(vec![story.ends[1].qp.number()]);
    let session = migration.session;
    story.ends[1].order(Order::Suspend { session, scope });
    story.abort(&migration);
}

#[test]
fn who_lost_its_standby_but_not_its_connection_is_not_reported_as_suspended() {
    let mut story = Story::new();
    let migration = story.pre_setup(0);
    let rights = QpAttr {
        access: Access::REMOTE_READ,
        ..QpAttr::default()
    };
    story.ends[1]
        .qp
        .modify(QpAttrMask::ACCESS_FLAGS, &rights)
        .unwrap();
    let (session, scope) = (migration.session, Scope::Qps(vec![story.ends[1].qp.number()]));
    let Answer::Suspended { sent, .. } = story.ends[1].order(Order::Suspend { session, scope }) else {
        panic!("not suspended")
    };
    assert_eq!(
        sent,
        [],
        "it would stay on the connection that the instance leaves"
    );
    story.abort(&migration);
    story.migrate(0);
}

#[test]
fn an_agent_that_dies_leaves_nobody_suspended() {
    let mut story = Story::new();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[1].send(0, SendOpcode::Write, true, false).unwrap();
    story.ends[1].sessions.agent_is_gone(false);
    story.settle();
    assert_eq!(wr_ids(&story.ends[1].poll()), [0]);
    assert_eq!(story.world.qpns(2).len(), 1);
    story.abort(&migration);

    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.ends[1].sessions.agent_is_gone(false);
    story.ends[1].send(1, SendOpcode::Write, true, false).unwrap();
    story.settle();
    assert!(
        story.ends[1].poll().is_empty(),
        "drained: the other end may have moved"
    );
    story.ends[1].sessions.agent_is_gone(true);
    story.settle();
    assert!(story.ends[1].poll().is_empty(), "however long it takes");
    story.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    story.ends[0].sessions.agent_is_gone(false);
    story.settle();
    assert!(
        story.ends[0].poll().is_empty(),
        "drained: the agent has a while to come back"
    );
    // Nobody else moves it.
    story.ends[0].sessions.agent_is_gone(true);
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [0]);
    let session = migration.session;
    assert!(matches!(
        story.ends[1]
            .sessions
            .handle(Order::Abort { session }, Vec::new()),
        Answer::Done
    ));
    story.settle();
    assert_eq!(wr_ids(&story.ends[1].poll()), [1]);
}

#[test]
fn orders_out_of_turn_are_refused() {
    let mut story = Story::new();
    let mut migration = story.pre_setup(0);
    let session = migration.session;
    let refused = |answer: Answer| matches!(answer, Answer::Error { .. });
    assert!(refused(
        story.ends[1]
            .sessions
            .handle(Order::Resume { session }, Vec::new())
    ));
    story.suspend(&mut migration);
    assert!(refused(
        story.ends[0]
            .sessions
            .handle(Order::Resume { session }, Vec::new())
    ));
    assert!(story.ends[0].sessions.quiesce(session).is_err());
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    assert!(refused(
        story.ends[0]
            .sessions
            .handle(Order::Abort { session }, Vec::new())
    ));
    story.claim(&mut migration);
    story.switch(&migration);
    assert!(refused(
        story.ends[1]
            .sessions
            .handle(Order::Abort { session }, Vec::new())
    ));
    story.resume(&migration);
    story.ends[1].order(Order::Abort { session });
}

#[test]
fn a_slot_that_is_freed_late_delays_and_loses_nothing() {
    let story = Story::new();
    story.world.free_slots_late(1000);
    story.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    story.ends[0].send(1, SendOpcode::Write, true, false).unwrap();
    story.world.free_slots_late(0);
    let mut done = story.ends[0].poll();
    story.settle();
    done.extend(story.ends[0].poll());
    assert_eq!(wr_ids(&done), [0, 1]);
}

#[test]
fn a_reset_forgets_everything() {
    let story = Story::new();
    let end = &story.ends[0];
    end.recv(5).unwrap();
    end.send(0, SendOpcode::Write, true, false).unwrap();
    story.settle();
    let reset = QpAttr::default();
    end.qp.modify(QpAttrMask::STATE, &reset).unwrap();
    assert!(end.poll().is_empty());
    assert_eq!(
        end.send(1, SendOpcode::Write, true, false),
        Err(PostError::State(QpState::Reset))
    );
    assert_eq!(end.recv(6), Err(PostError::State(QpState::Reset)));
}

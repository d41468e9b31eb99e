//! Stories: refusals, and how a connection ends.

mod pair;

use pair::{Pair, SEND, Setup, Side, read, sge, write, write_imm};
use verbatim_roce::{
    AccessFlags, BadRequest, Event, QpAttributes, QpConfig, QpState, Qpn, Queue, RcQp, SendData, WcOpcode,
    WcStatus,
};

/// A pair with 64 KiB at each end: key 1 at A, key 2 at B; B has two RECVs posted.
fn pair(setup: Setup) -> Pair {
    let mut pair = Pair::new(setup);
    pair.a.host.register(1, 0x10000, vec![0xaa; 0x10000]);
    pair.b.host.register(2, 0x20000, vec![0xbb; 0x10000]);
    for wr_id in 0..2 {
        pair.b.host.post_receive(wr_id, &[sge(2, 0x20000, 100)]);
    }
    pair
}

/// After a fatal refusal: both ends in ERR, everything flushed in order, and what is posted later too.
fn assert_ended(pair: &mut Pair, first: u64, status: WcStatus, received: &[(u64, WcStatus)]) {
    pair.run();
    assert_eq!(
        (pair.a.qp.state(), pair.b.qp.state()),
        (QpState::Err, QpState::Err)
    );
    let sent = pair.a.host.outcomes(Queue::Send);
    let last = sent.last().unwrap().0;
    let expected: Vec<_> = (0..=last)
        .map(|wr_id| match wr_id {
            _ if wr_id < first => (wr_id, WcStatus::Success),
            _ if wr_id == first => (wr_id, status),
            _ => (wr_id, WcStatus::WrFlushErr),
        })
        .collect();
    assert_eq!(sent, expected);
    assert_eq!(pair.b.host.outcomes(Queue::Receive), received);

    pair.a.host.post(last + 1, SEND, &[]);
    pair.a.host.post_receive(99, &[]);
    pair.run();
    assert_eq!(
        pair.a.host.outcomes(Queue::Send).last(),
        Some(&(last + 1, WcStatus::WrFlushErr))
    );
    assert_eq!(pair.a.host.outcomes(Queue::Receive), [(99, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.host.retired as u64, last + 2);
}

const FLUSHED: [(u64, WcStatus); 2] = [(0, WcStatus::WrFlushErr), (1, WcStatus::WrFlushErr)];

#[test]
fn remote_access_errors() {
    let outside = [
        write(0x2fff0, 2),
        write(0x1ffff, 2),
        write(u64::MAX - 5, 2),
        write(0x20000, 3),
        read(0x2fff0, 2),
    ];
    for operation in outside {
        let mut pair = pair(Setup::default());
        pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 3000)]);
        pair.a.host.post(1, operation, &[sge(1, 0x10000, 3000)]);
        pair.a.host.post(2, write(0x20000, 2), &[sge(1, 0x10000, 3000)]);
        pair.run();
        assert_eq!(
            pair.b.host.bytes(2)[3000..],
            vec![0xbb; 0x10000 - 3000],
            "nothing beyond the good WRITE"
        );
        assert_eq!(pair.b.host.events, [Event::AccessError]);
        assert_ended(&mut pair, 1, WcStatus::RemAccessErr, &FLUSHED);
    }
}

#[test]
fn rights_of_the_region_count() {
    for (operation, right) in [
        (write(0x20000, 2), AccessFlags::REMOTE_READ),
        (read(0x20000, 2), AccessFlags::REMOTE_WRITE),
    ] {
        let mut pair = pair(Setup::default());
        pair.b.host.region(2).access = right | AccessFlags::LOCAL_WRITE;
        pair.a.host.post(0, operation, &[sge(1, 0x10000, 10)]);
        assert_ended(&mut pair, 0, WcStatus::RemAccessErr, &FLUSHED);
    }
}

#[test]
fn rights_of_the_queue_pair_count() {
    for operation in [write(0x20000, 2), read(0x20000, 2)] {
        let mut pair = pair(Setup {
            access: AccessFlags::empty(),
            ..Setup::default()
        });
        pair.a.host.post(0, operation, &[sge(1, 0x10000, 10)]);
        assert_ended(&mut pair, 0, WcStatus::RemInvReqErr, &FLUSHED);
    }
}

#[test]
fn no_key_is_needed_for_nothing() {
    let mut pair = pair(Setup::default());
    pair.a.host.post(0, write(0, 77), &[]);
    pair.a.host.post(1, read(0, 77), &[sge(88, 0, 0)]);
    pair.run();
    assert_eq!(
        pair.a.host.outcomes(Queue::Send),
        [(0, WcStatus::Success), (1, WcStatus::Success)]
    );
}

#[test]
fn memory_that_goes_away_in_the_middle() {
    // Of a WRITE:
    let mut first = pair(Setup {
        budget: 4,
        ..Setup::default()
    });
    first
        .a
        .host
        .post(0, write(0x20000, 2), &[sge(1, 0x10000, 0x10000)]);
    for _ in 0..3 {
        first.transmit(Side::A);
    }
    first.now = first.link.next_due().unwrap();
    first.deliver();
    first.b.host.region(2).access = AccessFlags::LOCAL_WRITE;
    assert_ended(&mut first, 0, WcStatus::RemAccessErr, &FLUSHED);

    // Of a READ, while the answer is being sent:
    let mut second = pair(Setup {
        budget: 4,
        ..Setup::default()
    });
    second
        .a
        .host
        .post(0, read(0x20000, 2), &[sge(1, 0x10000, 0x10000)]);
    second.transmit(Side::A);
    second.now = second.link.next_due().unwrap();
    second.deliver();
    second.transmit(Side::B);
    second.b.host.region(2).access = AccessFlags::LOCAL_WRITE;
    assert_ended(&mut second, 0, WcStatus::RemAccessErr, &FLUSHED);

    // Of a SEND, at the sender: what was posted before it still completes.
    let mut third = pair(Setup {
        budget: 4,
        ..Setup::default()
    });
    third.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 3000)]);
    third
        .a
        .host
        .post(1, write(0x20000, 2), &[sge(1, 0x10000, 0x10000)]);
    third.transmit(Side::A);
    third.transmit(Side::A);
    third.a.host.region(1).key = 9;
    third.run();
    let expected = [(0, WcStatus::Success), (1, WcStatus::LocProtErr)];
    assert_eq!(third.a.host.outcomes(Queue::Send), expected);
}

#[test]
fn send_longer_than_the_receive() {
    for len in [101, 5000] {
        let mut pair = pair(Setup::default());
        pair.a.host.post(0, SEND, &[sge(1, 0x10000, 100)]);
        pair.a.host.post(1, SEND, &[sge(1, 0x10000, len)]);
        pair.a.host.post(2, SEND, &[sge(1, 0x10000, 1)]);
        pair.run();
        assert_eq!(pair.b.host.bytes(2)[100..], vec![0xbb; 0x10000 - 100]);
        assert_eq!(pair.b.host.events, [Event::InvalidRequest]);
        let received = [(0, WcStatus::Success), (1, WcStatus::LocLenErr)];
        assert_ended(&mut pair, 1, WcStatus::RemInvReqErr, &received);
    }
}

#[test]
fn receive_without_a_right_to_its_memory() {
    let mut pair = pair(Setup::default());
    pair.b.host.region(2).access = AccessFlags::REMOTE_WRITE;
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 10)]);
    let received = [(0, WcStatus::LocProtErr), (1, WcStatus::WrFlushErr)];
    assert_ended(&mut pair, 0, WcStatus::RemOpErr, &received);
}

#[test]
fn local_errors_wait_for_their_turn() {
    let mut pair = pair(Setup::default());
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 5000)]);
    pair.a
        .host
        .post(1, write(0x20000, 2), &[sge(1, 0x10000, 10), sge(1, 0x1ffff, 2)]);
    pair.a.host.post(2, write(0x20000, 2), &[sge(1, 0x10000, 10)]);
    pair.run();
    assert_eq!(
        pair.a.host.outcomes(Queue::Send),
        [
            (0, WcStatus::Success),
            (1, WcStatus::LocProtErr),
            (2, WcStatus::WrFlushErr)
        ]
    );
    assert_eq!(pair.a.qp.state(), QpState::Err);
    assert_eq!(
        pair.b.qp.state(),
        QpState::Rts,
        "the partner learns of it by its own retries only"
    );
}

#[test]
fn requests_that_make_no_sense() {
    let mut bad = pair(Setup::default());
    bad.a.host.sends.push_back(Err(BadRequest {
        wr_id: 5,
        opcode: WcOpcode::RdmaWrite,
    }));
    bad.run();
    assert_eq!(bad.a.host.outcomes(Queue::Send), [(5, WcStatus::LocQpOpErr)]);

    let mut inline_read = pair(Setup::default());
    inline_read
        .a
        .host
        .post_with(6, read(0x20000, 2), SendData::inline(b"abc").unwrap(), |_| {});
    inline_read.run();
    assert_eq!(
        inline_read.a.host.outcomes(Queue::Send),
        [(6, WcStatus::LocQpOpErr)]
    );

    let mut long = pair(Setup::default());
    long.a.host.post(
        7,
        write(0x20000, 2),
        &[sge(1, 0x10000, 1 << 31), sge(1, 0x10000, 1)],
    );
    long.run();
    assert_eq!(long.a.host.outcomes(Queue::Send), [(7, WcStatus::LocLenErr)]);
}

#[test]
fn no_receive_and_no_patience() {
    let mut pair = Pair::new(Setup {
        rnr_retry: 2,
        ..Setup::default()
    });
    pair.a.host.post(0, SEND, &[]);
    pair.a.host.post(1, SEND, &[]);
    pair.run();
    let expected = [(0, WcStatus::RnrRetryExcErr), (1, WcStatus::WrFlushErr)];
    assert_eq!(pair.a.host.outcomes(Queue::Send), expected);
    assert_eq!(pair.b.qp.counters().sent_rnr_nak, 3, "the first and two retries");
    assert_eq!(pair.b.qp.state(), QpState::Rts);
}

#[test]
fn no_receive_but_patience() {
    let mut pair = Pair::new(Setup::default());
    pair.a.host.register(1, 0x10000, vec![0xaa; 0x10000]);
    pair.b.host.register(2, 0x20000, vec![0xbb; 0x10000]);
    pair.a
        .host
        .post(0, write_imm(0x20000, 2, [1; 4]), &[sge(1, 0x10000, 5000)]);
    pair.a.host.post(1, SEND, &[sge(1, 0x10000, 3000)]);
    let start = pair.now;
    while pair.b.qp.counters().sent_rnr_nak < 20 {
        assert!(pair.step());
    }
    // Timer code 12 is 0.64 ms.
    assert!(pair.now - start >= std::time::Duration::from_micros(19 * 640));
    assert!(pair.a.host.completions.is_empty());
    pair.b.host.post_receive(0, &[]);
    pair.b.host.post_receive(1, &[sge(2, 0x28000, 3000)]);
    pair.run();
    assert_eq!(
        pair.a.host.outcomes(Queue::Send),
        [(0, WcStatus::Success), (1, WcStatus::Success)]
    );
    assert_eq!(
        pair.b.host.outcomes(Queue::Receive),
        [(0, WcStatus::Success), (1, WcStatus::Success)]
    );
    assert_eq!(pair.b.host.bytes(2)[0x8000..0x8000 + 3000], vec![0xaa; 3000]);
}

#[test]
fn nobody_answers() {
    let mut pair = pair(Setup {
        retry_cnt: 3,
        timeout: 10,
        ..Setup::default()
    });
    pair.link.filter = Some(Box::new(|to, _| to == Side::A));
    let start = pair.now;
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 5000)]);
    pair.a.host.post(1, SEND, &[sge(1, 0x10000, 5000)]);
    pair.run();
    let expected = [(0, WcStatus::RetryExcErr), (1, WcStatus::WrFlushErr)];
    assert_eq!(pair.a.host.outcomes(Queue::Send), expected);
    // Four times 4.096 µs × 2^10: the first wait and one for each retry, however often there were earlier attempts.
    assert_eq!((pair.now - start).as_nanos(), 4 * 4096 * 1024);
    assert_eq!(pair.a.qp.counters().local_ack_timeout_err, 4);
    assert_eq!(pair.a.qp.next_timeout(), None);
}

#[test]
fn timeout_zero_is_never() {
    let mut pair = pair(Setup {
        timeout: 0,
        ..Setup::default()
    });
    pair.link.filter = Some(Box::new(|_, _| false));
    pair.a.host.post(0, SEND, &[]);
    for _ in 0..1000 {
        pair.step();
    }
    assert_eq!(pair.a.qp.state(), QpState::Rts, "it goes on asking");
    assert!(pair.a.host.completions.is_empty());
}

#[test]
fn going_to_err_flushes_and_going_to_reset_forgets() {
    let to = |state| QpAttributes {
        state: Some(state),
        ..QpAttributes::default()
    };
    for (state, flushed) in [(QpState::Err, true), (QpState::Reset, false)] {
        let mut pair = pair(Setup::default());
        pair.link.filter = Some(Box::new(|_, _| false));
        pair.a.host.post(0, SEND, &[sge(1, 0x10000, 5000)]);
        while pair.transmit(Side::A) {}
        pair.a.host.post(1, SEND, &[]);
        pair.a.host.post_receive(7, &[]);
        pair.a.qp.modify(&to(state), &mut pair.a.host).unwrap();
        while pair.transmit(Side::A) {}
        let (sends, receives) = (
            pair.a.host.outcomes(Queue::Send),
            pair.a.host.outcomes(Queue::Receive),
        );
        if flushed {
            assert_eq!(sends, [(0, WcStatus::WrFlushErr), (1, WcStatus::WrFlushErr)]);
            assert_eq!(receives, [(7, WcStatus::WrFlushErr)]);
        } else {
            assert!(sends.is_empty() && receives.is_empty());
        }
        assert_eq!(pair.a.qp.next_timeout(), None);
    }
}

#[test]
fn a_receive_in_use_is_flushed_and_a_shared_queue_is_not() {
    let config = QpConfig {
        shared_receive_queue: true,
        ..Setup::default().config
    };
    let mut pair = pair(Setup {
        config,
        budget: 1,
        ..Setup::default()
    });
    pair.b.host.receives[0].sges = verbatim_roce::SgeList::new(&[sge(2, 0x20000, 0x10000)]).unwrap();
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 5000)]);
    pair.transmit(Side::A);
    pair.now = pair.link.next_due().unwrap();
    pair.deliver();
    let err = QpAttributes {
        state: Some(QpState::Err),
        ..QpAttributes::default()
    };
    pair.b.qp.modify(&err, &mut pair.b.host).unwrap();
    while pair.transmit(Side::B) {}
    assert_eq!(pair.b.host.outcomes(Queue::Receive), [(0, WcStatus::WrFlushErr)]);
    assert_eq!(
        pair.b.host.receives.len(),
        1,
        "the other one is for other queue pairs"
    );
    assert_eq!(pair.b.host.events, [Event::LastWqeReached]);
}

#[test]
fn refused_modify_changes_nothing() {
    let setup = Setup::default();
    let mut host = pair::TestHost::new();
    let mut qp = RcQp::new(Qpn::new(1), QpConfig::default());
    let [init, rtr, rts] = pair::steps(&setup, Side::A);
    assert!(qp.modify(&rtr, &mut host).is_err());
    qp.modify(&init, &mut host).unwrap();
    assert!(
        qp.modify(
            &QpAttributes {
                min_rnr_timer: Some(32),
                ..rtr
            },
            &mut host
        )
        .is_err()
    );
    assert!(
        qp.modify(
            &QpAttributes {
                cur_state: Some(QpState::Rts),
                ..rtr
            },
            &mut host
        )
        .is_err()
    );
    assert_eq!(
        qp.query(),
        QpAttributes {
            cur_state: Some(QpState::Init),
            ..init
        }
    );
    qp.modify(&rtr, &mut host).unwrap();
    qp.modify(&rts, &mut host).unwrap();
    assert_eq!(qp.state(), QpState::Rts);
}

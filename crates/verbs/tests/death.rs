//! `kill -9` of an RNIC: its programs get an event and error completions, and nothing hangs.

mod support;

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Agent, End, Nic};
use verbatim_channel::{Answer, Order, Scope};
use verbatim_verbs::{AsyncEventType, Context, QpAttr, QpAttrMask, SendOpcode, VerbsError, WC_WR_FLUSH_ERR};

#[test]
#[ignore = "an RNIC for the others"]
fn rnic() {
    support::nic::be_an_rnic();
}

fn errno<T: std::fmt::Debug>(outcome: Result<T, VerbsError>) -> i32 {
    outcome.unwrap_err().errno()
}

/// Waits until the program is told that its RNIC is gone.
fn hears_of_it(context: &Context) {
    let mut fds = [PollFd::from_borrowed_fd(context.async_fd(), PollFlags::IN)];
    let limit = Timespec::try_from(Duration::from_secs(10)).unwrap();
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "an event within time");
    assert_eq!(
        context.get_async_event().unwrap().event,
        AsyncEventType::DeviceFatal
    );
}

#[test]
fn a_killed_rnic_leaves_no_program_waiting() {
    let mut killed = Nic::start_process([127, 0, 74, 1], "rnic");
    let other = Nic::start([127, 0, 74, 2]);
    let ends = [End::new(&killed), End::new(&other)];
    ends[0].connect(&other, &ends[1]);
    ends[1].connect(&killed, &ends[0]);
    ends[1].recv(90).unwrap();
    ends[0].send(1, true).unwrap();
    assert_eq!((ends[0].wait().wr_id, ends[1].wait().wr_id), (1, 90));

    // The other end has no RECV for these, and nothing comes for those.
    ends[0].send(2, false).unwrap();
    ends[0].send(3, true).unwrap();
    for number in [20, 21] {
        ends[0].recv(number).unwrap();
    }
    killed.kill();

    let context = &ends[0].context;
    hears_of_it(context);
    for wr_id in [2, 3, 20, 21] {
        let wc = ends[0].wait();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WC_WR_FLUSH_ERR));
    }
    ends[0].post(SendOpcode::Write, 4, 0, 0, 0, false).unwrap();
    let wc = ends[0].wait();
    assert_eq!((wc.wr_id, wc.status), (4, WC_WR_FLUSH_ERR));

    assert_eq!(errno(context.alloc_pd()), libc::EIO);
    assert_eq!(errno(context.create_cq(4, None)), libc::EIO);
    assert_eq!(errno(context.alloc_dm(4, 0)), libc::EIO);
    assert_eq!(
        errno(ends[0].qp.modify(QpAttrMask::STATE, &QpAttr::default())),
        libc::EIO
    );
    assert_eq!(errno(ends[0].qp.query()), libc::EIO);
    ends[0].qp.destroy().unwrap();
    ends[0].cq.destroy().unwrap();
    ends[0].mr.dereg().unwrap();
    ends[0].pd.dealloc().unwrap();
    ends[0].memory.write_u64(0, 5);
    assert_eq!(ends[0].memory.read_u64(0), 5);

    // The program at the other RNIC goes on.
    ends[1].context.alloc_pd().unwrap();
    assert!(!ends[1].context.is_dead());
}

/// As when it dies at the destination between the commit and the claim.
#[test]
fn an_rnic_that_dies_while_nobody_uses_it_ends_the_session_and_the_connections() {
    const SESSION: u64 = 3;
    let mut killed = Nic::start_process([127, 0, 74, 3], "rnic");
    let other = Nic::start([127, 0, 74, 4]);
    let mut agent = Agent::new(&killed);
    let ends = [End::new(&killed), End::new(&other)];
    assert!(!agent.accept());
    std::thread::scope(|scope| {
        scope.spawn(|| agent.resolve());
        ends[0].connect(&other, &ends[1]);
    });
    ends[1].connect(&killed, &ends[0]);
    ends[0].recv(20).unwrap();
    let (session, scope) = (SESSION, Scope::All);
    agent.order(&Order::Suspend { session, scope });
    ends[0].send(2, true).unwrap();
    let drain = Order::Drain {
        session,
        expected: Vec::new(),
        timeout_ms: 10_000,
        sends_only: false,
    };
    assert!(matches!(agent.order(&drain), Answer::Drained));
    let (answer, parked) = agent.order_with(&Order::Quiesce { session }, &[]);
    assert!(matches!(answer, Answer::Quiesced));
    agent.wait_for_end();

    killed.kill();
    agent.gate.open_up().unwrap();
    assert!(agent.accept(), "it waits for its contexts");
    let claim = Order::Claim {
        session,
        contexts: Vec::new(),
        key_tables: Vec::new(),
    };
    let (answer, _) = agent.order_with(&claim, &parked);
    assert!(matches!(answer, Answer::Claimed { .. }), "{answer:?}");
    let answer = agent.order(&Order::Resume { session });
    let Answer::Resumed { lost_rnic, .. } = answer else {
        panic!("{answer:?}")
    };
    assert!(lost_rnic, "the operator is told");

    hears_of_it(&ends[0].context);
    for wr_id in [2, 20] {
        let wc = ends[0].wait();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WC_WR_FLUSH_ERR));
    }
    assert_eq!(errno(ends[0].context.alloc_pd()), libc::EIO);
    assert_eq!(errno(ends[0].qp.query()), libc::EIO);
    ends[0].qp.destroy().unwrap();
    ends[0].cq.destroy().unwrap();
    ends[0].mr.dereg().unwrap();
    ends[0].pd.dealloc().unwrap();
}

//! What a move needs of the backend: markers, channels that outlive their device, a device that is parked, and one that is
//! abandoned.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use verbatim_device::control::{Access, AddressVector, QpAttr, QpState, SrqAttr};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;

use super::*;
use crate::backend::{EventChannel, PhysicalMemory, PhysicalMrInit, SendRing};
use crate::work::{RECV_BIT, SEND_FENCE, SEND_SIGNALED, SendOpcode};

fn write(wr_id: u64, flags: u8) -> SendWqe {
    SendWqe {
        wr_id,
        opcode: SendOpcode::Write as u8,
        flags,
        ..SendWqe::default()
    }
}

/// Posts so many from `first` on, none of them signaled.
fn post(send: &mut dyn SendRing, first: u64, count: u64) {
    for position in first..first + count {
        send.push(&write(position, 0), Body::Sges(&[]));
    }
    send.publish().unwrap();
}

fn is_readable(channel: &dyn EventChannel) -> bool {
    let mut ready = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
    rustix::event::poll(&mut ready, Some(&Timespec::default())) == Ok(1)
}

#[test]
fn a_marker_finishes_what_nobody_signals_and_nobody_sees_it() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    assert_eq!((cq.entries, qp.cap.max_send_wr), (101, 8), "as without markers");
    let mut send = device.qp_ends(&qp).unwrap().send;
    let mut end = device.cq_end(&cq).unwrap();
    assert!(send.mark());
    assert_eq!(fake.get(|knobs| knobs.posted), 0, "nothing is outstanding");

    fake.set(|knobs| knobs.hold = 1);
    post(&mut *send, 0, 8);
    assert!(send.mark() && send.mark());
    assert_eq!(fake.get(|knobs| knobs.posted), 9, "in a full queue, and only one");
    let marker = fake.last(1)[0].wr;
    let flags = SEND_SIGNALED | SEND_FENCE;
    assert_eq!((marker.opcode, marker.send_flags, marker.num_sge), (0, flags, 0));
    assert_eq!((send.unfinished(), end.pop()), (8, None));
    fake.release(qp.qpn);
    assert_eq!(end.pop(), None);
    assert_eq!((send.unfinished(), send.room()), (0, 8));

    // One that outlives its drain, with requests behind it.
    post(&mut *send, 8, 1);
    assert!(send.mark());
    post(&mut *send, 9, 7);
    assert_eq!((send.room(), send.unfinished()), (0, 8));
    send.mark();
    assert_eq!(fake.get(|knobs| knobs.posted), 18, "its place is taken");
    fake.release(qp.qpn);
    assert_eq!((end.pop(), send.unfinished()), (None, 7));
    send.mark();
    fake.release(qp.qpn);
    assert_eq!((end.pop(), send.unfinished()), (None, 0));
}

#[test]
fn where_no_reads_are_a_marker_waits_for_none() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, _, qp) = queue_pair(&*device, QpType::Uc, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    post(&mut *send, 0, 1);
    assert!(send.mark());
    assert_eq!(fake.last(1)[0].wr.send_flags, SEND_SIGNALED);
}

#[test]
fn a_marker_that_fails_says_so_until_the_queue_pair_is_reset() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    let mut end = device.cq_end(&cq).unwrap();
    fake.set(|knobs| knobs.status = 5);
    post(&mut *send, 0, 2);
    assert!(send.mark());
    assert_eq!((end.pop(), send.unfinished()), (None, 0));
    assert!(!send.mark());
    send.reset();
    assert!(send.mark());
    fake.set(|knobs| (knobs.status, knobs.hold) = (0, 1));
    post(&mut *send, 2, 1);
    send.mark();
    // A completion of the life before counts for nothing in this one.
    send.reset();
    post(&mut *send, 3, 2);
    fake.release(qp.qpn);
    assert_eq!((end.pop(), send.unfinished()), (None, 2));
    send.mark();
    fake.release(qp.qpn);
    assert_eq!((end.pop(), send.unfinished()), (None, 0));
}

#[test]
fn markers_take_no_more_entries_of_a_completion_queue_than_it_hides() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, first) = queue_pair(&*device, QpType::Rc, None);
    let init = PhysicalQpInit {
        pd,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        srq: None,
        qp_type: QpType::Rc,
        cap: CAP,
    };
    let second = device.create_qp(&init).unwrap();
    let mut sends = Vec::from([first, second].map(|qp| device.qp_ends(&qp).unwrap().send));
    let mut end = device.cq_end(&cq).unwrap();
    fake.set(|knobs| knobs.hold = 1);
    for send in &mut sends {
        post(&mut **send, 0, 1);
        send.mark();
    }
    // The fake's queues are small, and hide one entry.
    assert_eq!(fake.get(|knobs| knobs.posted), 3);
    fake.release(first.qpn);
    assert_eq!(end.pop(), None);
    sends[1].mark();
    assert_eq!(fake.get(|knobs| knobs.posted), 4);
    // It comes back also from a queue pair that goes, which none does whose queue has an end.
    assert_eq!(device.destroy_qp(second.qpn).unwrap_err().errno(), libc::EBUSY);
    sends.pop();
    device.destroy_qp(second.qpn).unwrap();
    post(&mut *sends[0], 1, 1);
    sends[0].mark();
    fake.release(first.qpn);
    assert_eq!((end.pop(), sends[0].unfinished()), (None, 0));
    assert_eq!(device.resize_cq(cq.cq, 50).unwrap().entries, 50);
}

#[test]
fn a_queue_as_large_as_can_be_lends_a_slot_to_the_marker() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, _) = queue_pair(&*device, QpType::Rc, None);
    let init = PhysicalQpInit {
        pd,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        srq: None,
        qp_type: QpType::Rc,
        cap: QpCap {
            max_send_wr: 128,
            ..CAP
        },
    };
    let qp = device.create_qp(&init).unwrap();
    assert_eq!(qp.cap.max_send_wr, 128);
    let mut send = device.qp_ends(&qp).unwrap().send;
    fake.set(|knobs| knobs.hold = 1);
    post(&mut *send, 0, 127);
    send.mark();
    assert_eq!(send.room(), 0);
    fake.release(qp.qpn);
    assert_eq!(device.cq_end(&cq).unwrap().pop(), None);
    assert_eq!(send.room(), 128);
    post(&mut *send, 127, 128);
    send.mark();
    assert_eq!(
        fake.get(|knobs| knobs.posted),
        127 + 1 + 128,
        "no room for one more"
    );
}

#[test]
fn a_marker_of_datagrams_goes_to_the_device_itself_and_nobody() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, qp) = queue_pair(&*device, QpType::Ud, None);
    let ah = device.create_ah(pd, &AddressVector::default()).unwrap();
    let mut send = device.qp_ends(&qp).unwrap().send;
    let datagram = SendWqe {
        ah,
        opcode: SendOpcode::Send as u8,
        ..SendWqe::default()
    };
    send.push(&datagram, Body::Sges(&[]));
    send.publish().unwrap();
    send.mark();
    let marker = fake.last(1)[0].wr;
    // SAFETY: a datagram, to a handle that is alive; `handle` is the third member, and the fake's is the last byte of the GID.
    unsafe {
        assert_eq!(*marker.wr.ud.ah.cast::<u32>().add(4), 1);
        assert_eq!((marker.opcode, marker.wr.ud.remote_qpn), (2, 0x00ff_fffe));
    }
    assert_eq!(device.cq_end(&cq).unwrap().pop(), None);
    assert_eq!(send.unfinished(), 0);
    drop(send);
    device.destroy_qp(qp.qpn).unwrap();
    device.destroy_ah(ah).unwrap();
    device.destroy_cq(cq.cq).unwrap();
    device.dealloc_pd(pd).unwrap();
    assert_eq!(fake.get(|knobs| knobs.live), 1, "the context");
}

/// A device with a channel, and a queue pair whose queue sends its events there.
fn with_channel(fake: &Fake) -> (Arc<dyn Device>, Arc<dyn EventChannel>, CqPlace, QpPlace) {
    let device = fake.open();
    let channel = device.create_comp_channel().unwrap();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, Some(channel.number()));
    (device, channel, cq, qp)
}

/// Makes a completion, for which an armed queue makes an event.
fn complete(device: &dyn Device, cq: &CqPlace, qp: &QpPlace) {
    device.cq_end(cq).unwrap().arm(false);
    let mut send = device.qp_ends(qp).unwrap().send;
    send.push(&write(0, layout::SEND_SIGNALED), Body::Sges(&[]));
    send.publish().unwrap();
}

#[test]
fn injected_events_are_seen_by_who_polls_and_come_before_others() {
    let fake = Fake::new();
    let (device, channel, cq, qp) = with_channel(&fake);
    rustix::fs::fcntl_setfl(channel.fd(), OFlags::NONBLOCK).unwrap();
    assert!(!is_readable(&*channel));
    channel.inject(7);
    channel.inject(8);
    assert!(is_readable(&*channel));
    complete(&*device, &cq, &qp);
    assert_eq!(channel.unread().unwrap(), [7, 8, super::EVENT]);
    assert_eq!([(); 3].map(|()| channel.next().unwrap()), [7, 8, super::EVENT]);
    assert!(!is_readable(&*channel));
    assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);
}

#[test]
fn who_waits_for_edges_sees_each_event() {
    let fake = Fake::new();
    let (device, channel, cq, qp) = with_channel(&fake);
    rustix::fs::fcntl_setfl(channel.fd(), OFlags::NONBLOCK).unwrap();
    let mine = epoll::create(CreateFlags::CLOEXEC).unwrap();
    epoll::add(
        &mine,
        channel.fd(),
        EventData::new_u64(1),
        EventFlags::IN | EventFlags::ET,
    )
    .unwrap();
    let edges = || {
        let mut events = Vec::with_capacity(2);
        let found = epoll::wait(
            &mine,
            rustix::buffer::spare_capacity(&mut events),
            Some(&Timespec::default()),
        );
        found.unwrap()
    };
    assert_eq!(edges(), 0);
    // Also of one that comes while another is there, which nobody has read.
    let makers: [&dyn Fn(); 4] = [
        &|| complete(&*device, &cq, &qp),
        &|| complete(&*device, &cq, &qp),
        &|| channel.inject(1),
        &|| channel.inject(2),
    ];
    for make in makers {
        make();
        assert_eq!((edges(), edges()), (1, 0));
    }
    assert_eq!(
        [(); 4].map(|()| channel.next().unwrap()),
        [1, 2, super::EVENT, super::EVENT]
    );
    assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);
    complete(&*device, &cq, &qp);
    assert_eq!(edges(), 1);
}

#[test]
fn a_channel_goes_on_with_another_device_under_a_thread_that_sleeps_in_it() {
    let fake = Fake::new();
    let (old, channel, old_cq, old_qp) = with_channel(&fake);
    let number = channel.fd().as_raw_fd();
    let new = fake.open();
    let made = new.create_comp_channel().unwrap().number();
    let (_, cq, qp) = queue_pair(&*new, QpType::Rc, Some(made));
    complete(&*old, &old_cq, &old_qp);
    std::thread::scope(|scope| {
        assert_eq!(channel.next().unwrap(), super::EVENT);
        let sleeper = scope.spawn(|| channel.next().unwrap());
        complete(&*old, &old_cq, &old_qp);
        assert_eq!(sleeper.join().unwrap(), super::EVENT);
        let sleeper = scope.spawn(|| channel.next().unwrap());
        // One that nobody reads any more there is read here.
        let parked = old.clone().park().unwrap();
        new.attach_comp_channel(made, &*channel).unwrap();
        drop(parked);
        drop(old);
        complete(&*new, &cq, &qp);
        assert_eq!(sleeper.join().unwrap(), super::EVENT);
    });
    assert_eq!((channel.fd().as_raw_fd(), channel.number()), (number, made));
    assert_eq!(
        fake.get(|knobs| knobs.closed),
        1,
        "the old one needs the channel no more"
    );
    assert!(!is_readable(&*channel));
}

#[test]
fn two_threads_read_one_channel() {
    const EACH: u32 = 2000;
    let fake = Fake::new();
    let (_device, channel, ..) = with_channel(&fake);
    let read =
        |channel: &dyn EventChannel| -> u64 { (0..EACH).map(|_| u64::from(channel.next().unwrap())).sum() };
    std::thread::scope(|scope| {
        let readers = [(); 2].map(|()| scope.spawn(|| read(&*channel)));
        (1..=2 * EACH).for_each(|event| channel.inject(event));
        let sum: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert_eq!(sum, (1..=u64::from(2 * EACH)).sum::<u64>());
    });
    assert!(!is_readable(&*channel));
}

#[test]
fn a_signal_ends_a_wait_as_it_ends_a_read() {
    static HANDLED: AtomicBool = AtomicBool::new(false);
    extern "C" fn handle(_: c_int) {
        HANDLED.store(true, SeqCst);
    }
    let install = |flags: c_int| {
        // SAFETY: a handler that only stores; the signal is used by no other test.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = flags;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
        }
    };
    let fake = Fake::new();
    let (_device, channel, ..) = with_channel(&fake);
    for (flags, ends) in [(0, true), (libc::SA_RESTART, false)] {
        install(flags);
        HANDLED.store(false, SeqCst);
        std::thread::scope(|scope| {
            let (told, asked) = std::sync::mpsc::channel();
            let channel = &*channel;
            let sleeper = scope.spawn(move || {
                // SAFETY: this thread's own numbers.
                told.send(unsafe { (libc::pthread_self(), libc::gettid()) })
                    .unwrap();
                channel.next()
            });
            let (thread, tid) = asked.recv().unwrap();
            let sleeps = || {
                let call = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall"));
                call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_ppoll)))
            };
            let until = |done: &dyn Fn() -> bool| {
                while !done() {
                    std::thread::yield_now();
                }
            };
            until(&sleeps);
            // SAFETY: the thread is not joined yet.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
            until(&|| HANDLED.load(SeqCst));
            if ends {
                assert_eq!(sleeper.join().unwrap().unwrap_err().errno(), libc::EINTR);
            } else {
                until(&sleeps);
                channel.inject(5);
                assert_eq!(sleeper.join().unwrap().unwrap(), 5);
            }
        });
    }
    // SAFETY: as it was.
    unsafe { libc::signal(libc::SIGUSR2, libc::SIG_DFL) };
}

/// A datagram queue pair in RTS.
fn datagram_qp(device: &dyn Device, pd: u32, cq: &CqPlace, srq: Option<u32>) -> QpPlace {
    let init = PhysicalQpInit {
        pd,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        srq,
        qp_type: QpType::Ud,
        cap: CAP,
    };
    let qp = device.create_qp(&init).unwrap();
    let attr = QpAttr {
        qkey: 0x1234,
        sq_psn: 77,
        ..QpAttr::default()
    };
    for (state, mask) in verbatim_device::transitions::steps(QpType::Ud, QpState::Rts).unwrap() {
        device.modify_qp(qp.qpn, mask, &QpAttr { state, ..attr }).unwrap();
    }
    qp
}

#[test]
fn a_parked_device_is_the_same_when_it_goes_on_and_datagrams_rest_meanwhile() {
    let fake = Fake::new();
    let (device, channel, cq, connected) = with_channel(&fake);
    let pd = device.alloc_pd().unwrap();
    let srq = device
        .create_srq(
            pd,
            &SrqAttr {
                max_wr: 4,
                max_sge: 1,
                limit: 0,
            },
        )
        .unwrap();
    let own = datagram_qp(&*device, pd, &cq, None);
    let shared = datagram_qp(&*device, pd, &cq, Some(srq.srq));
    let idle = device
        .create_qp(&PhysicalQpInit {
            pd,
            send_cq: cq.cq,
            recv_cq: cq.cq,
            srq: None,
            qp_type: QpType::Ud,
            cap: CAP,
        })
        .unwrap();
    let mut recv = device.qp_ends(&own).unwrap().recv;
    recv.push(RECV_BIT, &[]);
    recv.push(RECV_BIT | 1, &[]);
    recv.publish().unwrap();
    complete(&*device, &cq, &connected);
    // It has come, and nobody has looked since.
    assert!(fake.receive(own.qpn, 1, false));
    drop(recv);
    fake.set(|knobs| knobs.states = 0);

    let mut parked = device.clone().park().unwrap();
    assert_eq!(fake.get(|knobs| knobs.states), 0, "RESET is 0");
    let states = [own, shared, idle, connected].map(|qp| device.query_qp(qp.qpn).unwrap().state);
    assert_eq!(states, [QpState::Reset; 4]);
    rustix::fs::fcntl_setfl(channel.fd(), OFlags::NONBLOCK).unwrap();
    assert_eq!(channel.next().unwrap(), super::EVENT, "what was unread stays");
    assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);

    let kept = parked.kept.take().unwrap();
    let again = (parked.reopen)(parked.connection).unwrap();
    assert!(Arc::ptr_eq(&kept, &again));
    assert_eq!(fake.get(|knobs| knobs.states), 123_123, "INIT, RTR, RTS, twice");
    let attr = again.query_qp(own.qpn).unwrap();
    assert_eq!((attr.state, attr.qkey, attr.sq_psn), (QpState::Rts, 0x1234, 77));
    assert_eq!(again.lost_recvs(), [own.qpn]);
    // The completion of a request is still there; the message that came too late is not.
    let mut end = again.cq_end(&cq).unwrap();
    assert_eq!(end.pop().map(|cqe| cqe.qpn), Some(connected.qpn));
    assert_eq!(end.pop(), None);
    assert_eq!(again.qp_ends(&own).unwrap().recv.room(), 8);
    complete(&*again, &cq, &connected);
    assert_eq!(channel.next().unwrap(), super::EVENT);
}

#[test]
fn an_abandoned_device_is_forgotten_without_a_command() {
    let fake = Fake::new();
    let (device, channel, cq, qp) = with_channel(&fake);
    let pd = device.alloc_pd().unwrap();
    let memory = PhysicalMemory {
        address: 0x10000,
        length: 4096,
        iova: 0,
        segments: &[],
        file: None,
    };
    let init = PhysicalMrInit {
        pd,
        access: Access::empty(),
        memory,
    };
    device.reg_mr(&init).unwrap();
    device.alloc_mw(pd, MwType::Two).unwrap();
    device.create_ah(pd, &AddressVector::default()).unwrap();
    device.create_srq(pd, &SrqAttr::default()).unwrap();
    complete(&*device, &cq, &qp);
    // SAFETY: the fake's queue pair is alive, and with it its context.
    let numbers = unsafe {
        let context = (*fake.qp(qp.qpn)).context;
        [(*context).cmd_fd, (*context).async_fd]
    };
    // SAFETY: it is open.
    let commands: OwnedFd = unsafe { std::os::fd::BorrowedFd::borrow_raw(numbers[0]) }
        .try_clone_to_owned()
        .unwrap();
    let said = || rustix::fs::fstat(&commands).unwrap().st_size;

    let parked = device.clone().park().unwrap();
    drop(device);
    let before = said();
    parked.kept.unwrap().abandon(None);
    drop(parked.reopen);
    assert_eq!(said(), before, "nobody is told");
    assert_eq!(fake.get(|knobs| (knobs.closed, knobs.live)), (1, 0));
    rustix::fs::fcntl_setfl(channel.fd(), OFlags::NONBLOCK).unwrap();
    assert_eq!(
        channel.next().unwrap(),
        super::EVENT,
        "the program's channel stays, with its events"
    );
    assert_eq!(channel.next().unwrap_err().errno(), libc::EAGAIN);
}

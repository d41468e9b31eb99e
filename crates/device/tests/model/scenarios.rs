//! Short stories between a program and the RNIC, one for each thing that they share.

use std::ptr::NonNull;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::control::QpCap;
use crate::layout::{
    CQE_STRIDE, ContextPage, CqHeader, CqLayout, Cqe, QpHeader, QpLayout, RecvLayout, SEND_INLINE, SendWqe,
    Sge,
};
use crate::ring::completion::{CqConsumer, CqProducer};
use crate::ring::doorbell::{Doorbell, DoorbellReader};
use crate::ring::testing::Memory;
use crate::ring::work::{Body, RecvConsumer, RecvProducer, SendConsumer, SendProducer, SentWqe};
use crate::shared::{watch_slot, watch32, watch64};

/// All of them, by name.
pub const SCENARIOS: &[(&str, fn())] = &[
    ("send queue", send_queue),
    ("receive queue", receive_queue),
    ("completion queue", completion_queue),
    ("doorbell of one thread", doorbell_of_one_thread),
    ("doorbell of two threads", doorbell_of_two_threads),
    ("armed for any completion", armed_for_any),
    ("armed for a solicited completion", armed_for_solicited),
];

/// More requests than slots, so that slots are used again.
const REQUESTS: u64 = 3;

const CAP: QpCap = QpCap {
    max_send_wr: 2,
    max_recv_wr: 2,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 16,
};

/// A descriptor that wakes: the doorbell's eventfd, the socket of a completion channel.
#[derive(Clone)]
struct Wake(Arc<(Mutex<bool>, Condvar)>);

impl Wake {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn write(&self) {
        *self.0.0.lock().expect("no panic under it") = true;
        self.0.1.notify_one();
    }

    /// Loom ends an execution in which nobody is left to wake who waits here.
    fn wait(&self) {
        let mut written = self.0.0.lock().expect("no panic under it");
        while !*written {
            written = self.0.1.wait(written).expect("no panic under it");
        }
        *written = false;
    }
}

fn sge(n: u64) -> Sge {
    Sge {
        address: n,
        length: 1,
        lkey: 2,
    }
}

/// A queue pair's memory, of which all is watched.
fn queue_pair() -> (Memory, QpLayout) {
    let layout = QpLayout::new(&CAP);
    let memory = Memory::zeroed(layout.bytes);
    // SAFETY: the header lies at the start of the memory.
    let header: &QpHeader = unsafe { memory.base().cast().as_ref() };
    for word in [
        &header.sq_producer,
        &header.sq_completed,
        &header.rq_producer,
        &header.rq_consumed,
    ] {
        watch32(word);
    }
    for slot in 0..u64::from(layout.send_slots) {
        let offset = size_of::<QpHeader>() as u64 + slot * layout.send_stride;
        watch_slot(memory.base(), offset, layout.send_stride);
    }
    let RecvLayout {
        slots,
        stride,
        offset,
        ..
    } = layout.recv;
    for slot in 0..u64::from(slots) {
        watch_slot(memory.base(), offset + slot * stride, stride);
    }
    (memory, layout)
}

fn completions() -> (Memory, CqProducer, CqConsumer) {
    let layout = CqLayout::new(2);
    let memory = Memory::zeroed(layout.bytes);
    // SAFETY: the header lies at the start of the memory.
    let header: &CqHeader = unsafe { memory.base().cast().as_ref() };
    for word in [&header.producer, &header.consumer, &header.armed] {
        watch32(word);
    }
    for slot in 0..u64::from(layout.entries) {
        watch_slot(
            memory.base(),
            size_of::<CqHeader>() as u64 + slot * CQE_STRIDE,
            CQE_STRIDE,
        );
    }
    // SAFETY: the caller keeps the memory until the threads with the ends are joined.
    let ends = unsafe {
        (
            CqProducer::new(memory.base(), &layout),
            CqConsumer::new(memory.base(), &layout),
        )
    };
    (memory, ends.0, ends.1)
}

/// Requests come whole, in order, each once; a slot is not written again before its request was completed.
fn send_queue() {
    let (memory, layout) = queue_pair();
    // SAFETY: the memory outlives the thread and both ends.
    let (mut producer, mut consumer) = unsafe {
        (
            SendProducer::new(memory.base(), &layout),
            SendConsumer::new(memory.base(), &layout),
        )
    };
    let program = thread::spawn(move || {
        let mut posted = 0;
        for _ in 0..=REQUESTS {
            if producer.room() > 0 && posted < REQUESTS {
                let head = SendWqe {
                    wr_id: posted,
                    ..SendWqe::default()
                };
                if posted == 0 {
                    let flags = SEND_INLINE;
                    let inline_bytes = 2;
                    producer.push(
                        &SendWqe {
                            flags,
                            inline_bytes,
                            ..head
                        },
                        Body::Inline(&[b"h", b"i"]),
                    );
                } else {
                    producer.push(&SendWqe { num_sge: 1, ..head }, Body::Sges(&[sge(posted)]));
                }
                producer.publish();
                posted += 1;
            }
        }
        posted
    });
    let mut taken = 0;
    let mut take = || {
        let mut out = SentWqe::default();
        if !consumer.pop(&mut out).expect("an honest index") {
            return false;
        }
        assert_eq!(out.head.wr_id, taken);
        if taken == 0 {
            assert_eq!(out.inline, b"hi");
        } else {
            assert_eq!(out.sges, [sge(taken)]);
        }
        taken += 1;
        consumer.complete(1);
        true
    };
    for _ in 0..REQUESTS {
        take();
    }
    let posted = program.join().expect("no panic");
    while take() {}
    assert_eq!(taken, posted);
}

/// As [`send_queue`].
fn receive_queue() {
    let (memory, layout) = queue_pair();
    // SAFETY: the memory outlives the thread and both ends.
    let (mut producer, mut consumer) = unsafe {
        (
            RecvProducer::new(memory.base(), &layout.recv),
            RecvConsumer::new(memory.base(), &layout.recv),
        )
    };
    let program = thread::spawn(move || {
        let mut posted = 0;
        for _ in 0..=REQUESTS {
            if producer.room() > 0 && posted < REQUESTS {
                producer.push(posted, &[sge(posted)]);
                producer.publish();
                posted += 1;
            }
        }
        posted
    });
    let mut taken = 0;
    let mut take = || {
        let mut sges = Vec::new();
        let Some(wr_id) = consumer.pop(&mut sges).expect("an honest index") else {
            return false;
        };
        assert_eq!((wr_id, &sges[..]), (Some(taken), &[sge(taken)][..]));
        taken += 1;
        true
    };
    for _ in 0..REQUESTS {
        take();
    }
    let posted = program.join().expect("no panic");
    while take() {}
    assert_eq!(taken, posted);
}

/// Completions come whole, in order, each once; a full queue is seen.
fn completion_queue() {
    let (_memory, mut producer, mut consumer) = completions();
    let nic = thread::spawn(move || {
        let mut pushed = 0;
        for _ in 0..=REQUESTS {
            if pushed < REQUESTS {
                let wr_id = pushed;
                pushed += u64::from(producer.push(&Cqe {
                    wr_id,
                    ..Cqe::default()
                }));
            }
        }
        pushed
    });
    let mut read = 0;
    let mut poll = || {
        let Some(cqe) = consumer.pop() else {
            return false;
        };
        assert_eq!(cqe.wr_id, read);
        read += 1;
        true
    };
    for _ in 0..REQUESTS {
        poll();
    }
    let pushed = nic.join().expect("no panic");
    while poll() {}
    assert_eq!(read, pushed);
}

/// The RNIC goes to sleep, as in [`ContextPage`]'s words, until it has seen `requests` requests.
fn sleep_until_all_is_seen(
    reader: &mut DoorbellReader,
    wake: &Wake,
    requests: u32,
    mut serve: impl FnMut(u32) -> u32,
) {
    let mut served = 0;
    while served < requests {
        reader.set_sleeping(true);
        if !reader.is_rung() {
            wake.wait();
        }
        reader.set_sleeping(false);
        reader.drain(|slot| served += serve(slot));
    }
}

fn doorbell(page: &mut Box<ContextPage>) -> (Doorbell, DoorbellReader) {
    watch32(&page.nic_sleeping);
    watch64(&page.summary[0]);
    watch64(&page.doorbells[0]);
    let page = NonNull::from(&mut **page);
    // SAFETY: the scenario keeps the page until its threads are joined.
    unsafe { (Doorbell::new(page), DoorbellReader::new(page)) }
}

fn zeroed_page() -> Box<ContextPage> {
    // SAFETY: a ContextPage is atomics and padding; zero is a value of each.
    unsafe { Box::new(std::mem::zeroed()) }
}

/// The RNIC does not sleep through a request, and sees it when it has seen the bell.
fn doorbell_of_one_thread() {
    let (memory, layout) = queue_pair();
    let mut page = zeroed_page();
    let (bell, mut reader) = doorbell(&mut page);
    // SAFETY: the memory outlives the thread and both ends.
    let (mut producer, mut consumer) = unsafe {
        (
            SendProducer::new(memory.base(), &layout),
            SendConsumer::new(memory.base(), &layout),
        )
    };
    let wake = Wake::new();
    let waker = wake.clone();
    let program = thread::spawn(move || {
        for wr_id in 0..2 {
            producer.push(
                &SendWqe {
                    wr_id,
                    ..SendWqe::default()
                },
                Body::Sges(&[]),
            );
            producer.publish();
            if bell.ring(5) {
                waker.write();
            }
        }
    });
    let mut out = SentWqe::default();
    sleep_until_all_is_seen(&mut reader, &wake, 2, |slot| {
        assert_eq!(slot, 5);
        let mut taken = 0;
        while consumer.pop(&mut out).expect("an honest index") {
            taken += 1;
        }
        taken
    });
    program.join().expect("no panic");
}

/// Two threads of a program ring for queue pairs whose bits lie in one word: only one of them sets the word's own bit.
fn doorbell_of_two_threads() {
    let mut page = zeroed_page();
    let (bell, mut reader) = doorbell(&mut page);
    let wake = Wake::new();
    let threads = [3, 4].map(|slot| {
        let waker = wake.clone();
        thread::spawn(move || {
            if bell.ring(slot) {
                waker.write();
            }
        })
    });
    let mut seen = [0; 2];
    sleep_until_all_is_seen(&mut reader, &wake, 2, |slot| {
        seen[slot as usize - 3] += 1;
        1
    });
    assert_eq!(seen, [1, 1]);
    for thread in threads {
        thread.join().expect("no panic");
    }
}

/// A program that waits for events misses no completion.
fn armed(solicited_only: bool, pushed: &'static [bool]) {
    let (_memory, mut producer, mut consumer) = completions();
    let channel = Wake::new();
    let events = channel.clone();
    let nic = thread::spawn(move || {
        for solicited in pushed {
            assert!(producer.push(&Cqe::default()));
            if producer.take_armed(*solicited) {
                events.write();
            }
        }
    });
    let mut read = 0;
    while read < pushed.len() {
        let there = consumer.arm(solicited_only);
        if !there {
            channel.wait();
        }
        let before = read;
        while consumer.pop().is_some() {
            read += 1;
        }
        assert!(!there || read > before, "what was there can be read");
    }
    nic.join().expect("no panic");
}

fn armed_for_any() {
    armed(false, &[false, true]);
}

fn armed_for_solicited() {
    armed(true, &[false, true]);
}

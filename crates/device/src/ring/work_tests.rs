//! Both ends of a queue in one process.

use super::super::testing::Memory;
use super::*;
use crate::control::QpCap;

const CAP: QpCap = QpCap {
    max_send_wr: 4,
    max_recv_wr: 4,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 100,
};

#[test]
fn requests_arrive_in_order_with_their_bodies_and_room_is_bounded() {
    let layout = QpLayout::new(&CAP);
    let memory = Memory::zeroed(layout.bytes);
    // SAFETY: the memory outlives both ends and is theirs alone.
    let (mut producer, mut consumer) = unsafe {
        (
            SendProducer::new(memory.base(), &layout),
            SendConsumer::new(memory.base(), &layout),
        )
    };
    let mut out = SentWqe::default();
    for round in 0..10u64 {
        for n in 0..4u64 {
            let sge = Sge {
                address: n,
                length: 8,
                lkey: 3,
            };
            let head = SendWqe {
                wr_id: round * 4 + n,
                num_sge: 1,
                ..SendWqe::default()
            };
            if n % 2 == 0 {
                producer.push(&head, Body::Sges(&[sge]));
            } else {
                let head = SendWqe {
                    flags: SEND_INLINE,
                    inline_bytes: 5,
                    num_sge: 0,
                    ..head
                };
                producer.push(&head, Body::Inline(&[b"he", b"llo"]));
            }
        }
        assert_eq!(producer.room(), 0);
        assert!(!consumer.pop(&mut out).unwrap(), "nothing was published yet");
        producer.publish();
        for n in 0..4u64 {
            assert!(consumer.pop(&mut out).unwrap());
            assert_eq!(out.head.wr_id, round * 4 + n);
            match n % 2 {
                0 => assert_eq!(out.sges[0].address, n),
                _ => assert_eq!(out.inline, b"hello"),
            }
        }
        assert!(!consumer.pop(&mut out).unwrap());
        assert_eq!(producer.room(), 0, "taken is not completed");
        consumer.complete(1);
        let mut left = Vec::new();
        producer.for_each_unfinished(|head, body| {
            let body = match body {
                Body::Sges(sges) => sges[0].address.to_le_bytes().to_vec(),
                Body::Inline(pieces) => pieces.concat(),
            };
            left.push((head.wr_id - round * 4, body));
        });
        let inline = b"hello".to_vec();
        assert_eq!(
            left,
            [(1, inline.clone()), (2, 2u64.to_le_bytes().to_vec()), (3, inline)]
        );
        consumer.complete(3);
        assert_eq!(producer.room(), 4);
    }
}

#[test]
fn receives_arrive_in_order() {
    let layout = QpLayout::new(&CAP);
    let memory = Memory::zeroed(layout.bytes);
    // SAFETY: as above.
    let (mut producer, mut consumer) = unsafe {
        (
            RecvProducer::new(memory.base(), &layout.recv),
            RecvConsumer::new(memory.base(), &layout.recv),
        )
    };
    let mut sges = Vec::new();
    for n in 0..20u64 {
        assert!(producer.room() > 0, "what was there before was taken");
        producer.push(
            n,
            &[Sge {
                address: n,
                length: 1,
                lkey: 2,
            }; 2],
        );
        assert_eq!(consumer.pop(&mut sges).unwrap(), None);
        producer.publish();
        assert_eq!(consumer.pop(&mut sges).unwrap(), Some(Some(n)));
        assert_eq!(sges.len(), 2);
    }
}

#[test]
fn hostile_counters_and_lengths_are_refused() {
    let layout = QpLayout::new(&CAP);
    let memory = Memory::zeroed(layout.bytes);
    // SAFETY: as above.
    let (mut producer, mut send, mut recv) = unsafe {
        (
            SendProducer::new(memory.base(), &layout),
            SendConsumer::new(memory.base(), &layout),
            RecvConsumer::new(memory.base(), &layout.recv),
        )
    };
    let head = SendWqe {
        flags: SEND_INLINE,
        inline_bytes: u32::MAX,
        ..SendWqe::default()
    };
    producer.push(&head, Body::Sges(&[]));
    producer.push(
        &SendWqe {
            num_sge: u16::MAX,
            ..SendWqe::default()
        },
        Body::Sges(&[]),
    );
    producer.publish();
    let mut out = SentWqe::default();
    assert!(send.pop(&mut out).unwrap() && out.overlong);
    assert!(send.pop(&mut out).unwrap() && out.overlong);

    // SAFETY: the header lies at the start of the memory.
    let header = unsafe { memory.base().cast::<QpHeader>().as_ref() };
    header.sq_producer.store(5, Relaxed);
    assert_eq!(
        send.pop(&mut out),
        Err(BadIndex {
            claimed: 5,
            seen: 0,
            slots: 4
        })
    );
    header.rq_producer.store(u32::MAX, Relaxed);
    assert!(recv.pop(&mut Vec::new()).is_err());
    assert!(memory.guard_is_intact());
}

//! An exchange between two programs, and what they see of it.

use std::time::Duration;

use verbatim_roce::{Completion, Location, QpState, Qpn, Queue, SendData, Standing, WcStatus};

use super::world::{World, address};
use super::{SEND, Setup, Side, compare_swap, fetch_add, read, send_imm, sge, write, write_imm};

pub const LEN: u32 = 5_000;
pub const MEMORY: usize = 1 << 16;

/// Requests of every kind in both directions, all posted at once.
pub fn busy(setup: Setup) -> World {
    let mut world = World::new(setup);
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        let own = u64::from(key) << 20;
        let (other, there) = (3 - key, u64::from(3 - key) << 20);
        let host = &mut world.end(side).host;
        let bytes = (0..MEMORY).map(|at| (at % 251) as u8 ^ key as u8);
        host.register(key, own, bytes.collect());
        for wr_id in 0..4 {
            host.post_receive(wr_id, &[sge(key, own + 0x4000 + wr_id * 0x1400, LEN)]);
        }
        host.post(
            0,
            SEND,
            &[sge(key, own, 3_000), sge(key, own + 0x1000, LEN - 3_000)],
        );
        host.post(
            1,
            fetch_add(there + 0xf000, other, 5),
            &[sge(key, own + 0xf100, 8)],
        );
        host.post(2, read(there, other), &[sge(key, own + 0xa000, LEN)]);
        let inline = SendData::inline(b"a few bytes").expect("they are few");
        host.post_with(3, send_imm([1, 2, 3, 4]), inline, |_| {});
        host.post(4, write(there + 0xc000, other), &[sge(key, own, LEN)]);
        host.post(
            5,
            compare_swap(there + 0xf008, other, 0, 7),
            &[sge(key, own + 0xf108, 8)],
        );
        host.post(6, write_imm(there + 0xd800, other, [9; 4]), &[sge(key, own, LEN)]);
        let unsignaled = SendData::Sges(verbatim_roce::SgeList::new(&[sge(key, own, 8)]).unwrap());
        host.post_with(7, write(there + 0xf200, other), unsignaled, |request| {
            request.signaled = false;
        });
        host.post_with(
            8,
            read(there + 0xf000, other),
            SendData::Sges(verbatim_roce::SgeList::new(&[sge(key, own + 0xf300, 16)]).unwrap()),
            |request| request.fence = true,
        );
        host.post(9, SEND, &[]);
    }
    world
}

pub fn small_steps() -> Setup {
    Setup {
        psn: [0xff_fffa, 200],
        timeout: 8,
        retry_cnt: 2,
        budget: 1,
        ..Setup::default()
    }
}

/// What the programs have seen.
#[derive(Debug, PartialEq)]
pub struct Trace {
    pub sent: Vec<Completion>,
    pub received: Vec<Completion>,
    pub retired: u32,
    pub executed_atomics: usize,
    pub memory: Vec<u8>,
}

pub fn trace(world: &mut World) -> [Trace; 2] {
    [(Side::A, 1), (Side::B, 2)].map(|(side, key)| {
        let end = world.end(side);
        assert_eq!(end.qp.state(), QpState::Rts, "{:?}", end.host.completions);
        assert_eq!(end.qp.standing(), Standing::Running);
        assert!(end.host.events.is_empty(), "{:?}", end.host.events);
        let of = |queue| {
            let all = end.host.completions.iter();
            all.filter(|wc| wc.queue == queue).copied().collect()
        };
        Trace {
            sent: of(Queue::Send),
            received: of(Queue::Receive),
            retired: end.host.retired,
            executed_atomics: end.host.atomics.len(),
            memory: end.host.bytes(key).to_vec(),
        }
    })
}

pub fn finish(mut world: World) -> [Trace; 2] {
    world.run();
    let traces = trace(&mut world);
    for trace in &traces {
        assert!(trace.sent.iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!((trace.sent.len(), trace.received.len()), (9, 4));
    }
    traces
}

pub fn elsewhere(side: Side, stay: u8, qpn: u32) -> Location {
    Location {
        address: address(10 * (1 + stay) + side as u8),
        qpn: Qpn::new(qpn),
    }
}

pub fn one_moves(world: &mut World, side: Side, gap: Duration, qpn: u32) {
    let moving = world.take_out(side);
    world.run_for(gap);
    world.put_in(side, moving, elsewhere(side, 0, qpn));
}

pub const SHORT: Duration = Duration::from_micros(25);
/// Longer than all retries take.
pub const LONG: Duration = Duration::from_secs(20);

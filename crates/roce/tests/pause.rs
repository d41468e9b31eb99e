//! Pause and resume: one end of a connection, or both, are stopped at any packet, saved, restored elsewhere and resumed.
//! The programs see the same as if nothing had happened.

mod pair;

use std::time::Duration;

use pair::world::{Moving, World, address};
use pair::{SEND, Setup, Side, compare_swap, fetch_add, read, send_imm, sge, write, write_imm};
use verbatim_roce::{Completion, Location, QpState, Qpn, Queue, SendData, Standing, WcStatus};

const LEN: u32 = 5_000;
const MIB: usize = 1 << 16;

/// Requests of every kind in both directions, all posted at once.
fn busy(setup: Setup) -> World {
    let mut world = World::new(setup);
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        let own = u64::from(key) << 20;
        let (other, there) = (3 - key, u64::from(3 - key) << 20);
        let host = &mut world.end(side).host;
        let bytes = (0..MIB).map(|at| (at % 251) as u8 ^ key as u8);
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

fn small_steps() -> Setup {
    Setup {
        psn: [0xff_fffa, 200],
        timeout: 8,
        retry_cnt: 2,
        ..Setup::default()
    }
}

/// What the programs have seen.
#[derive(Debug, PartialEq)]
struct Trace {
    sent: Vec<Completion>,
    received: Vec<Completion>,
    retired: u32,
    executed_atomics: usize,
    memory: Vec<u8>,
}

fn trace(world: &mut World) -> [Trace; 2] {
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

fn finish(mut world: World) -> [Trace; 2] {
    world.run();
    let traces = trace(&mut world);
    for trace in &traces {
        assert!(trace.sent.iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!((trace.sent.len(), trace.received.len()), (9, 4));
    }
    traces
}

fn elsewhere(side: Side, stay: u8, qpn: u32) -> Location {
    Location {
        address: address(10 * (1 + stay) + side as u8),
        qpn: Qpn::new(qpn),
    }
}

/// What happens after so many steps.
type Story = fn(&mut World);

fn one_moves(world: &mut World, side: Side, gap: Duration, qpn: u32) {
    let moving = world.take_out(side);
    world.run_for(gap);
    world.put_in(side, moving, elsewhere(side, 0, qpn));
}

const SHORT: Duration = Duration::from_micros(25);
/// Longer than all retries take.
const LONG: Duration = Duration::from_secs(20);

/// Both are stopped; the first to be restored does not know where the other one will be.
fn both(world: &mut World) -> [Moving; 2] {
    let a = world.take_out(Side::A);
    world.run_for(SHORT);
    let b = world.take_out(Side::B);
    world.run_for(SHORT);
    [a, b]
}

const STORIES: [(&str, Story); 9] = [
    ("A moves", |world| one_moves(world, Side::A, SHORT, 0x11)),
    ("B moves", |world| one_moves(world, Side::B, SHORT, 0x22)),
    ("A moves at once, and gets another number", |world| {
        one_moves(world, Side::A, Duration::ZERO, 0x77);
    }),
    ("B is away for long", |world| {
        one_moves(world, Side::B, LONG, 0x78)
    }),
    ("A goes on where it was", |world| {
        let now = world.now;
        assert!(world.end(Side::A).qp.halt(now));
        world.run_for(LONG);
        let now = world.now;
        world.end(Side::A).qp.resume(now);
    }),
    ("both move, A comes first", |world| {
        let [a, b] = both(world);
        world.put_in(Side::A, a, elsewhere(Side::A, 0, 0x91));
        world.run_for(Duration::from_millis(5));
        world.put_in(Side::B, b, elsewhere(Side::B, 0, 0x92));
    }),
    ("both move, B comes first and A has left already", |world| {
        let [a, b] = both(world);
        world.put_in(Side::B, b, elsewhere(Side::B, 0, 0x92));
        world.put_in(Side::A, a, elsewhere(Side::A, 0, 0x91));
    }),
    ("A moves on before anybody has heard of it, and back", |world| {
        one_moves(world, Side::A, SHORT, 0x31);
        let moving = world.take_out(Side::A);
        world.run_for(SHORT);
        world.put_in(Side::A, moving, elsewhere(Side::A, 1, 0x32));
        world.run_for(SHORT);
        let moving = world.take_out(Side::A);
        let home = Location {
            address: address(1),
            qpn: Qpn::new(0x11),
        };
        world.put_in(Side::A, moving, home);
    }),
    ("both change places", |world| {
        let [a, b] = both(world);
        let [home_a, home_b] = world.at;
        world.put_in(
            Side::A,
            a,
            Location {
                qpn: Qpn::new(0x93),
                ..home_b
            },
        );
        world.put_in(
            Side::B,
            b,
            Location {
                qpn: Qpn::new(0x94),
                ..home_a
            },
        );
    }),
];

#[test]
fn moved_at_every_packet_the_programs_see_the_same() {
    let plain = finish(busy(small_steps()));
    for (name, story) in STORIES {
        let mut steps = 0;
        loop {
            let mut world = busy(small_steps());
            if !(0..steps).all(|_| world.step()) {
                break;
            }
            story(&mut world);
            world.run();
            let seen = trace(&mut world);
            assert!(seen == plain, "{name}, after {steps} steps: {seen:?}");
            for side in [Side::A, Side::B] {
                let counters = world.end(side).qp.counters();
                assert_eq!(
                    (counters.migration_forged, counters.migration_refused),
                    (0, 0),
                    "{name}, after {steps} steps"
                );
            }
            steps += 1;
        }
        assert!(steps > 100, "{name}: {steps} steps");
    }
}

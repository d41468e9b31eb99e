//! Pause and resume: one end of a connection, or both, are stopped at any packet, saved, restored elsewhere and resumed.
//! The programs see the same as if nothing had happened.

mod pair;

use std::time::Duration;

use pair::exchange::{LONG, SHORT, busy, elsewhere, finish, one_moves, small_steps, trace};
use pair::world::{Moving, World, address};
use pair::{Faults, Setup, Side};
use proptest::prelude::*;
use verbatim_roce::{Location, Qpn};

/// What happens after so many steps.
type Story = fn(&mut World);

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
                let counters = world.end(side).qp.migration_counters();
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

#[derive(Clone, Copy, Debug)]
enum Act {
    Move { side: Side, gap_us: u64, stay: u8 },
    Both { gap_us: [u64; 3] },
    Hold { side: Side, gap_us: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    let side = || prop::sample::select(vec![Side::A, Side::B]);
    let gap = || prop_oneof![Just(0u64), 1u64..200, 1000u64..20_000];
    prop_oneof![
        (side(), gap(), 0u8..4).prop_map(|(side, gap_us, stay)| Act::Move { side, gap_us, stay }),
        [gap(), gap(), gap()].prop_map(|gap_us| Act::Both { gap_us }),
        (side(), gap()).prop_map(|(side, gap_us)| Act::Hold { side, gap_us }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    /// Several moves, each in the middle of the one before, over a network with every fault.
    #[test]
    fn moved_over_a_bad_network_the_programs_see_the_same(
        seed: u64,
        loss in 0u32..12,
        duplication in 0u32..10,
        reordering in 0u32..20,
        budget in 1usize..20,
        acts in prop::collection::vec((0usize..120, act()), 1..6),
    ) {
        let setup = Setup {
            seed,
            budget,
            faults: Faults { loss, duplication, reordering, corruption: 0 },
            retry_cnt: 7,
            timeout: 14,
            ..small_steps()
        };
        let plain = finish(busy(small_steps()));
        let mut world = busy(setup);
        let micros = Duration::from_micros;
        for (number, (steps, act)) in (0..).zip(acts) {
            for _ in 0..steps {
                world.step();
            }
            let qpn = 0x100 + 2 * number;
            match act {
                Act::Move { side, gap_us, stay } => {
                    let moving = world.take_out(side);
                    world.run_for(micros(gap_us));
                    world.put_in(side, moving, elsewhere(side, stay, qpn));
                }
                Act::Both { gap_us } => {
                    let a = world.take_out(Side::A);
                    world.run_for(micros(gap_us[0]));
                    let b = world.take_out(Side::B);
                    world.run_for(micros(gap_us[1]));
                    world.put_in(Side::A, a, elsewhere(Side::A, 5, qpn));
                    world.run_for(micros(gap_us[2]));
                    world.put_in(Side::B, b, elsewhere(Side::B, 5, qpn + 1));
                }
                Act::Hold { side, gap_us } => {
                    let now = world.now;
                    world.end(side).qp.halt(now);
                    world.run_for(micros(gap_us));
                    let now = world.now;
                    world.end(side).qp.resume(now);
                }
            }
        }
        world.run();
        let seen = trace(&mut world);
        prop_assert!(seen == plain, "{:?}", seen);
        for side in [Side::A, Side::B] {
            prop_assert_eq!(world.end(side).qp.migration_counters().migration_forged, 0);
        }
    }
}

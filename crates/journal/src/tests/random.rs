//! Random stories.

use proptest::prelude::*;

use super::model::{BROKEN, World};
use crate::Durability;
use crate::testing::Fault;

#[derive(Debug, Clone)]
enum Step {
    Append(usize, Durability),
    Rewrite(usize),
    Reserve(u64),
    Restart,
    Crash(u64),
    /// From so many operations on, so many fail.
    Fail(u64, u64, Fault),
    Heal,
    /// So many bytes are free on an empty disk.
    Capacity(Option<u64>),
}

fn step() -> impl Strategy<Value = Step> {
    let durability = prop_oneof![Just(Durability::Synced), Just(Durability::Later)];
    let done = prop_oneof![3 => Just(0), 2 => 0..60_usize, 1 => Just(usize::MAX)];
    let fault = (0..12_u64, 1..6_u64, done);
    prop_oneof![
        12 => (0..60_usize, durability).prop_map(|(length, durability)| Step::Append(length, durability)),
        1 => (0..2_usize).prop_map(Step::Rewrite),
        2 => (0..200_u64).prop_map(Step::Reserve),
        1 => Just(Step::Restart),
        2 => any::<u64>().prop_map(Step::Crash),
        4 => fault.prop_map(|(first, count, done)| Step::Fail(first, count, Fault { error: BROKEN, done })),
        1 => Just(Step::Heal),
        1 => prop_oneof![Just(None), (100..2_000_u64).prop_map(Some)].prop_map(Step::Capacity),
    ]
}

/// A linear congruential generator (Knuth's MMIX).
fn generator(mut state: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

fn crash(world: &mut World, seed: u64) {
    world.kill();
    let mut random = generator(seed);
    world.disk.crash(|all| match random(4) {
        0 => 0..0,
        1 => 0..all,
        2 => 0..random(all + 1),
        _ => random(all + 1)..all,
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    #[test]
    fn any_story_keeps_the_promises(steps in proptest::collection::vec(step(), 1..60), last in any::<u64>()) {
        let mut world = World::new(400);
        for step in steps {
            world.open();
            match step {
                Step::Append(length, durability) => world.append(length, durability),
                Step::Rewrite(skip) => world.rewrite(skip),
                Step::Reserve(bytes) => world.reserve(bytes),
                Step::Restart => world.kill(),
                Step::Crash(seed) => crash(&mut world, seed),
                Step::Fail(first, count, fault) => {
                    let begin = world.disk.operations() + first;
                    world.disk.fail(begin..begin + count, fault);
                }
                Step::Heal => world.disk.heal(),
                Step::Capacity(capacity) => world.disk.set_capacity(capacity),
            }
        }
        crash(&mut world, last);
        world.is_in_order();
    }
}

//! Each target for a moment.
//!
//! `VERBATIM_FUZZ_TIMES` makes it so many times as long, `VERBATIM_FUZZ_SEED` tries other inputs.

use verbatim_fuzz::{TARGETS, Target, engine};

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

fn short(name: &str) {
    let target = Target::named(name).expect("a target");
    let (seed, times) = (
        number("VERBATIM_FUZZ_SEED", 0x5eed),
        number("VERBATIM_FUZZ_TIMES", 1),
    );
    let start = std::time::Instant::now();
    let executions = engine::run(target, seed, target.short_executions * times);
    println!("{name}: {executions} inputs in {:?}", start.elapsed());
}

macro_rules! short_runs {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                short(stringify!($name));
            }
        )*

        #[test]
        fn every_target_has_a_short_run() {
            let with_one = [$(stringify!($name)),*];
            let all: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(all, with_one);
        }
    };
}

short_runs! {
    packet
    transport
    control_messages
    agent_messages
    criu_images
    gate_file
    nic_ends
    program_ends
    criu_messages
    bundle_config
    journal
    segments
    records
    file_parts
    lab_protocol
    statistics
    context_dump
    rc_image
    cm_messages
    cm_image
    volume_messages
    volume_clients
    volume_sources
    volume_guests
}

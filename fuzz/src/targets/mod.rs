//! The targets, one file for each party whose bytes they stand for.

mod agent;
mod cm;
mod container;
mod control;
mod dump;
mod folder;
mod guest;
mod images;
mod packet;
mod rings;
mod segments;
mod statistics;
mod transport;
mod volume;

use crate::Target;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "packet",
        run: packet::packet,
        seeds: packet::seeds,
        short_executions: 300_000,
    },
    Target {
        name: "transport",
        run: transport::transport,
        seeds: transport::seeds,
        short_executions: 20_000,
    },
    Target {
        name: "control_messages",
        run: control::control_messages,
        seeds: control::seeds,
        short_executions: 20_000,
    },
    Target {
        name: "agent_messages",
        run: guest::agent_messages,
        seeds: guest::seeds,
        short_executions: 10_000,
    },
    Target {
        name: "criu_images",
        run: images::criu_images,
        seeds: images::seeds,
        short_executions: 50_000,
    },
    Target {
        name: "gate_file",
        run: guest::gate_file,
        seeds: guest::gate_seeds,
        short_executions: 5_000,
    },
    Target {
        name: "nic_ends",
        run: rings::nic_ends,
        seeds: rings::seeds,
        short_executions: 50_000,
    },
    Target {
        name: "program_ends",
        run: rings::program_ends,
        seeds: rings::seeds,
        short_executions: 50_000,
    },
    Target {
        name: "criu_messages",
        run: container::criu_messages,
        seeds: container::criu_seeds,
        short_executions: 300_000,
    },
    Target {
        name: "bundle_config",
        run: container::bundle_config,
        seeds: container::bundle_seeds,
        short_executions: 30_000,
    },
    Target {
        name: "journal",
        run: agent::journal,
        seeds: agent::journal_seeds,
        short_executions: 5_000,
    },
    Target {
        name: "segments",
        run: segments::segments,
        seeds: segments::seeds,
        short_executions: 50_000,
    },
    Target {
        name: "records",
        run: agent::records,
        seeds: agent::record_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "file_parts",
        run: agent::file_parts,
        seeds: agent::file_part_seeds,
        short_executions: 3_000,
    },
    Target {
        name: "lab_protocol",
        run: agent::lab_protocol,
        seeds: agent::lab_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "statistics",
        run: statistics::statistics,
        seeds: statistics::seeds,
        short_executions: 10_000,
    },
    Target {
        name: "context_dump",
        run: dump::context_dump,
        seeds: dump::dump_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "rc_image",
        run: dump::rc_image,
        seeds: dump::image_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "cm_messages",
        run: cm::cm_messages,
        seeds: cm::seeds,
        short_executions: 30_000,
    },
    Target {
        name: "cm_image",
        run: cm::cm_image,
        seeds: cm::image_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "volume_messages",
        run: volume::messages,
        seeds: volume::message_seeds,
        short_executions: 100_000,
    },
    Target {
        name: "volume_clients",
        run: volume::client,
        seeds: volume::client_seeds,
        short_executions: 3_000,
    },
    Target {
        name: "volume_sources",
        run: volume::source,
        seeds: volume::source_seeds,
        short_executions: 3_000,
    },
    Target {
        name: "volume_guests",
        run: volume::guest,
        seeds: volume::guest_seeds,
        short_executions: 3_000,
    },
];

/// What was decoded and encoded again must be the same the second time.
fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) {
    let bytes = postcard::to_stdvec(value).expect("what was decoded can be encoded");
    let again: T = postcard::from_bytes(&bytes).expect("and decoded again");
    assert_eq!(postcard::to_stdvec(&again).as_ref(), Ok(&bytes));
}

fn encoded<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("a seed can be encoded")
}

/// Bytes for targets that take their input for a story, the same every time.
fn noise(inputs: u32, bytes: usize) -> Vec<Vec<u8>> {
    let noise = |seed: u32| {
        let mut state = seed;
        let next = || {
            // A linear congruential generator (Numerical Recipes).
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        std::iter::repeat_with(next).take(bytes).collect()
    };
    (1..=inputs).map(noise).collect()
}

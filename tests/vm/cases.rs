//! The table of what is tested.

use crate::site::End;
use End::{GuestOverRxe, Ours, Rxe};

/// What a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// A program of perftest that prints a row of bandwidth per size.
    Bandwidth(&'static str),
    /// One that prints a row of latency per size.
    Latency(&'static str),
    /// The check program: contents and order are checked.
    Check,
}

/// A pair of programs, and where they run.
#[derive(Clone, Debug)]
pub struct Case {
    pub program: Program,
    /// What tells it from others of its program.
    pub variant: &'static str,
    /// Options of both sides, but for device and address.
    pub options: &'static str,
    pub client: End,
    pub server: End,
    /// Packets lost on the way, of a thousand.
    pub loss_per_mille: u32,
    /// Between IPv6 addresses instead of IPv4 ones.
    pub ipv6: bool,
}

impl Case {
    /// The test's name, such as `ours-to-rxe::ib_write_bw::mtu_1024`.
    pub fn name(&self) -> String {
        let program = match self.program {
            Program::Bandwidth(name) | Program::Latency(name) => name,
            Program::Check => "vcheck",
        };
        let (client, server) = (self.client.name(), self.server.name());
        format!("{client}-to-{server}::{program}::{}", self.variant)
    }
}

/// Variant and options.
type Row = (&'static str, &'static str);

/// READ and ATOMIC have `-o`, the number outstanding, since perftest takes each side's own limit for the other's.
const BANDWIDTH: &[(&str, &[Row])] = &[
    (
        "ib_send_bw",
        &[
            ("mtu_1024", "-n 100 -s 65536 -m 1024"),
            ("mtu_4096", "-n 100 -s 65536 -m 4096"),
            ("many_queue_pairs", "-n 50 -s 4096 -q 8"),
            ("inline", "-n 200 -s 64 -I 64"),
            ("all_sizes", "-n 5 -a"),
            ("completion_events", "-n 100 -s 4096 -e"),
            ("shared_receive_queue", "-n 50 -s 4096 -q 4 --use-srq"),
            ("unreliable_connection", "-c UC -n 50 -s 4096 -t 8"),
            // The receiver waits for all of them, and nothing repeats a lost one: no more in flight than fits anywhere.
            ("datagram", "-c UD -n 50 -s 1024 -t 8 -r 64"),
        ],
    ),
    (
        "ib_write_bw",
        &[
            ("mtu_1024", "-n 100 -s 65536 -m 1024"),
            ("mtu_4096", "-n 100 -s 65536 -m 4096"),
            ("many_queue_pairs", "-n 50 -s 4096 -q 8"),
            ("odd_size", "-n 100 -s 10001"),
            ("all_sizes", "-n 5 -a"),
            ("both_ways", "-n 100 -s 16384 -b"),
        ],
    ),
    (
        "ib_read_bw",
        &[
            ("mtu_1024", "-n 100 -s 65536 -m 1024 -o 16"),
            ("mtu_4096", "-n 100 -s 65536 -m 4096 -o 16"),
            ("one_outstanding", "-n 50 -s 16384 -o 1"),
            ("all_sizes", "-n 5 -a -o 16"),
        ],
    ),
    (
        "ib_atomic_bw",
        &[
            ("compare_and_swap", "-A CMP_AND_SWAP -n 200 -o 16"),
            ("fetch_and_add", "-A FETCH_AND_ADD -n 200 -o 16 -q 4"),
        ],
    ),
];

const LATENCY: &[(&str, &[Row])] = &[
    (
        "ib_send_lat",
        &[
            ("small", "-n 100 -s 8"),
            ("large", "-n 50 -s 65536"),
            ("datagram", "-c UD -n 100 -s 1000"),
            ("unreliable_connection", "-c UC -n 100 -s 1000"),
        ],
    ),
    (
        "ib_write_lat",
        &[("small", "-n 100 -s 8"), ("large", "-n 50 -s 65536")],
    ),
    (
        "ib_read_lat",
        &[("small", "-n 100 -s 8 -o 1"), ("large", "-n 50 -s 65536 -o 1")],
    ),
    (
        "ib_atomic_lat",
        &[("fetch_and_add", "-A FETCH_AND_ADD -n 100 -o 1")],
    ),
];

const CHECKS: &[Row] = &[
    (
        "send_mtu_1024",
        "--op send -n 500 -s 20000 --random-size --mtu 1024",
    ),
    (
        "send_mtu_4096",
        "--op send -n 500 -s 20000 --random-size --mtu 4096",
    ),
    (
        "write_mtu_1024",
        "--op write -n 500 -s 20000 --random-size --mtu 1024",
    ),
    (
        "write_imm_mtu_4096",
        "--op write-imm -n 500 -s 20000 --random-size --mtu 4096",
    ),
    (
        "read_mtu_1024",
        "--op read -n 300 -s 20000 --random-size --mtu 1024",
    ),
    (
        "read_mtu_4096",
        "--op read -n 300 -s 20000 --random-size --mtu 4096",
    ),
    ("mix", "--op mix -n 300 -s 65536 --random-size -q 4"),
    (
        "mix_both_ways",
        "--op mix -n 300 -s 16384 --random-size -q 2 --bidirectional",
    ),
    ("large", "--op mix -n 8 -s 8388608 --depth 4"),
    // Our end stands still in the middle of it. Rxe, which shares no secret with it, is told nothing, and takes it for loss.
    (
        "held_still",
        "--op mix -D 10 -s 20000 --random-size -q 2 --bidirectional --hold-every 500",
    ),
];

/// Lost packets, of a thousand, with what runs meanwhile.
const LOSSES: &[(u32, Row)] = &[
    (
        10,
        (
            "1_percent_lost_mtu_1024",
            "--op mix -n 200 -s 20000 --random-size --mtu 1024 --bidirectional",
        ),
    ),
    (
        10,
        (
            "1_percent_lost_mtu_4096",
            "--op mix -n 200 -s 65536 --random-size --mtu 4096 --bidirectional",
        ),
    ),
    (
        50,
        (
            "5_percent_lost",
            "--op mix -n 100 -s 16384 --random-size --mtu 4096",
        ),
    ),
];

/// The same over IPv6, whose ICRC covers other fields and whose headers leave less room.
const OVER_IPV6: &[(u32, Program, Row)] = &[
    (0, Program::Bandwidth("ib_write_bw"), ("ipv6", "-n 100 -s 65536")),
    (
        0,
        Program::Latency("ib_send_lat"),
        ("ipv6_datagram", "-c UD -n 50 -s 1000"),
    ),
    (
        0,
        Program::Check,
        (
            "ipv6_mix_mtu_1024",
            "--op mix -n 200 -s 65536 --random-size -q 2 --mtu 1024",
        ),
    ),
    (
        10,
        Program::Check,
        (
            "ipv6_1_percent_lost",
            "--op mix -n 100 -s 16384 --random-size --mtu 4096",
        ),
    ),
];

/// What goes through our guest library to a device that it did not make: each verb once.
const PASSED_THROUGH: &[(Program, Row)] = &[
    (Program::Bandwidth("ib_send_bw"), ("plain", "-n 50 -s 16384")),
    (
        Program::Bandwidth("ib_send_bw"),
        ("completion_events", "-n 50 -s 4096 -e"),
    ),
    (
        Program::Bandwidth("ib_send_bw"),
        ("shared_receive_queue", "-n 50 -s 4096 -q 4 --use-srq"),
    ),
    (
        Program::Bandwidth("ib_write_bw"),
        ("many_queue_pairs", "-n 50 -s 4096 -q 8"),
    ),
    (
        Program::Bandwidth("ib_read_bw"),
        ("plain", "-n 50 -s 16384 -o 16"),
    ),
    (
        Program::Bandwidth("ib_atomic_bw"),
        ("fetch_and_add", "-A FETCH_AND_ADD -n 100 -o 16"),
    ),
    (
        Program::Latency("ib_send_lat"),
        ("datagram", "-c UD -n 50 -s 1000"),
    ),
    (Program::Latency("ib_write_lat"), ("small", "-n 50 -s 8")),
    (
        Program::Check,
        ("mix", "--op mix -n 300 -s 65536 --random-size -q 4"),
    ),
    (
        Program::Check,
        (
            "mix_both_ways",
            "--op mix -n 200 -s 16384 --random-size -q 2 --bidirectional",
        ),
    ),
];

/// All cases.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for (client, server) in [(Rxe, Ours), (Ours, Rxe)] {
        cases.extend(between(client, server));
    }
    for (client, server) in [(GuestOverRxe, Rxe), (Ours, GuestOverRxe)] {
        cases.extend(PASSED_THROUGH.iter().map(|&(program, (variant, options))| Case {
            program,
            variant,
            options,
            client,
            server,
            loss_per_mille: 0,
            ipv6: false,
        }));
    }
    cases
}

/// The whole table between two ends.
fn between(client: End, server: End) -> Vec<Case> {
    let case = |program, (variant, options): Row, loss_per_mille| Case {
        program,
        variant,
        options,
        client,
        server,
        loss_per_mille,
        ipv6: false,
    };
    let mut cases = Vec::new();
    for &(name, rows) in BANDWIDTH {
        cases.extend(rows.iter().map(|&row| case(Program::Bandwidth(name), row, 0)));
    }
    for &(name, rows) in LATENCY {
        cases.extend(rows.iter().map(|&row| case(Program::Latency(name), row, 0)));
    }
    cases.extend(CHECKS.iter().map(|&row| case(Program::Check, row, 0)));
    cases.extend(LOSSES.iter().map(|&(loss, row)| case(Program::Check, row, loss)));
    cases.extend(OVER_IPV6.iter().map(|&(loss, program, row)| Case {
        ipv6: true,
        ..case(program, row, loss)
    }));
    cases
}

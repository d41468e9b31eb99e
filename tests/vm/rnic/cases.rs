//! What is run between two instances that have rxe: a line for each case.

/// A program at both ends, and who moves.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its name among the programs'.
    pub what: &'static str,
    /// The program.
    pub program: Program,
    /// Options at both ends.
    pub options: &'static str,
    /// Who moves in the middle of it.
    pub moves: Moves,
}

/// What both ends run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// perftest's, by its name.
    Perftest(&'static str),
    /// Our check program.
    Check,
}

/// Who moves. The server is on the first host, the client on the second, but for [`Moves::Client`]; who moves goes to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    Nobody,
    Server,
    Client,
    /// There, and back.
    ServerTwice,
    /// The server, then the client to where the server was.
    Both,
    /// The same, without waiting for each other.
    AtOnce,
    /// The server; then its old host is switched off.
    Left,
}

impl Moves {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "stays",
            Self::Server => "server",
            Self::Client => "client",
            Self::ServerTwice => "server-twice",
            Self::Both => "both",
            Self::AtOnce => "at-once",
            Self::Left => "left",
        }
    }

    /// How many moves there are one after the other.
    pub fn in_a_row(self) -> u32 {
        match self {
            Self::Nobody => 0,
            Self::Server | Self::Client | Self::Left => 1,
            Self::ServerTwice | Self::Both | Self::AtOnce => 2,
        }
    }
}

impl Case {
    /// The name of its test.
    pub fn name(&self) -> String {
        format!("{}::{}", self.moves.name(), self.what)
    }
}

const fn perftest(
    what: &'static str,
    program: &'static str,
    options: &'static str,
) -> (&'static str, Program, &'static str) {
    (what, Program::Perftest(program), options)
}

/// The programs.
const PROGRAMS: &[(&str, Program, &str)] = &[
    perftest("write_bw", "ib_write_bw", "-s 4096 -t 16"),
    perftest("read_bw", "ib_read_bw", "-s 4096 -t 8"),
    perftest("send_bw", "ib_send_bw", "-s 4096 -t 16 -r 32"),
    perftest("send_bw_events", "ib_send_bw", "-s 4096 -t 16 -r 32 -e"),
    perftest("send_bw_uc", "ib_send_bw", "-c UC -s 2048 -t 16 -r 64"),
    perftest("send_bw_ud", "ib_send_bw", "-c UD -s 1024 -t 16 -r 64"),
    perftest("send_bw_srq", "ib_send_bw", "-s 4096 -t 16 -r 32 --use-srq"),
    perftest("atomic_bw", "ib_atomic_bw", "-t 8"),
    perftest("write_bw_two_qps", "ib_write_bw", "-s 4096 -t 16 -q 2"),
    perftest("write_bw_both_ways", "ib_write_bw", "-s 4096 -t 16 -b"),
    perftest("write_bw_inline", "ib_write_bw", "-s 64 -t 16 -I 64"),
    perftest(
        "write_bw_old_verbs",
        "ib_write_bw",
        "-s 4096 -t 16 --use_old_post_send",
    ),
    perftest("write_lat", "ib_write_lat", "-s 64"),
    perftest("read_lat", "ib_read_lat", "-s 4096"),
    perftest("send_lat", "ib_send_lat", "-s 64"),
    perftest("atomic_lat", "ib_atomic_lat", "-A CMP_AND_SWAP"),
    (
        "check",
        Program::Check,
        "--op all -q 2 --depth 8 --random-size --bidirectional --nap 5",
    ),
];

/// Those that are run where it is about who moves.
const SEVERAL: &[&str] = &["write_bw", "check"];

/// All of them.
pub fn all() -> Vec<Case> {
    let case = |&(what, program, options): &(&'static str, Program, &'static str), moves| Case {
        what,
        program,
        options,
        moves,
    };
    let some = |names: &'static [&str], moves| {
        let named = PROGRAMS.iter().filter(move |(what, ..)| names.contains(what));
        named.map(move |program| case(program, moves))
    };
    let each = |moves| PROGRAMS.iter().map(move |program| case(program, moves));
    each(Moves::Nobody)
        .chain(each(Moves::Server))
        .chain(each(Moves::Client))
        .chain(some(SEVERAL, Moves::ServerTwice))
        .chain(some(SEVERAL, Moves::Both))
        .chain(some(SEVERAL, Moves::AtOnce))
        .chain(some(&["check"], Moves::Left))
        .collect()
}

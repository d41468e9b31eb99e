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

/// Who moves, from the first host to the last; the other end is on the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    Nobody,
    Server,
    Client,
    /// There, and back.
    ServerTwice,
}

impl Moves {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "stays",
            Self::Server => "server",
            Self::Client => "client",
            Self::ServerTwice => "server-twice",
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
    ("check", Program::Check, "--op mix --depth 8"),
];

/// All of them.
pub fn all() -> Vec<Case> {
    let case = |&(what, program, options): &(&'static str, Program, &'static str), moves| Case {
        what,
        program,
        options,
        moves,
    };
    let each = |moves| PROGRAMS.iter().map(move |program| case(program, moves));
    let twice = PROGRAMS
        .iter()
        .filter(|(what, ..)| ["write_bw", "check"].contains(what));
    each(Moves::Nobody)
        .chain(each(Moves::Server))
        .chain(each(Moves::Client))
        .chain(twice.map(|program| case(program, Moves::ServerTwice)))
        .collect()
}

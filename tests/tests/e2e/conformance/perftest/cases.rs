//! The command lines of perftest: only tables.

/// A program with its connection type, and the options that it is tried with, one set after the other.
pub struct Family {
    pub program: &'static str,
    pub connection: &'static [&'static str],
    /// The sets that `make test` runs too.
    pub fast: &'static [&'static str],
    /// Those that only `make conformance` runs.
    pub slow: &'static [&'static str],
}

const RC: &[&str] = &["-c", "RC"];
const UC: &[&str] = &["-c", "UC"];
const UD: &[&str] = &["-c", "UD"];
/// Atomics are 8 bytes and on reliable connections, always.
const ATOMIC: &[&str] = &[];
/// 239.77.1.1 as a multicast GID, in perftest's way of writing it. Its own default is an IPv6 group of the scope of one
/// interface, which leaves no host.
const MULTICAST: &str = "-s 1024 -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:77:1:1";
const MULTICAST_WITH_EVENTS: &str = "-s 1024 -e -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:77:1:1";
const MULTICAST_LATENCY: &str = "-s 64 -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:77:1:1";

/// With `ibv_post_send`. UC has no shared receive queue (IBA Vol 1 §10.2.9); perftest has no `-e` with WRITE.
pub const FAMILIES: &[Family] = &[
    Family {
        program: "ib_send_bw",
        connection: RC,
        fast: &[
            "-s 65536",
            "-s 4096 -e",
            "-s 4096 --use-srq -q 4",
            "-s 64 -I 64 -l 8",
        ],
        slow: &[
            "-s 1",
            "-a",
            "-a -b",
            "-s 4096 -b",
            "-s 4096 -b -e",
            "-s 4096 -e -q 8",
            // Many queue pairs both ways with events only here: for each event perftest 4.5 takes at most as many completions as
            // one queue pair has RECVs, and waits for the next event with the rest in the queue. Of a shared receive
            // queue there are never more.
            "-s 4096 -b -e -q 8 --use-srq",
            "-s 4096 -q 16",
            "-s 4096 -q 128 -r 32 -t 20",
            "-s 4096 --use-srq -e -q 8",
            "-s 65536 --mr_per_qp -q 4",
            "-s 4096 -Q 1",
            "-s 4096 --recv_post_list=8",
            "-s 4096 -m 256",
            "-s 65536 -m 1024",
            "-s 8388608",
            "-s 4096 --reversed",
            "-s 4096 -b --report-both",
            "-s 65536 -D 1",
        ],
    },
    Family {
        program: "ib_send_bw",
        connection: UC,
        fast: &["-s 65536"],
        slow: &[
            "-s 1",
            "-a",
            "-s 4096 -e",
            "-s 4096 -b",
            "-s 4096 -q 16",
            "-s 64 -I 64 -l 8",
            "-s 65536 -m 1024",
        ],
    },
    Family {
        program: "ib_send_bw",
        connection: UD,
        fast: &["-s 4096", "-s 1024 -e", MULTICAST],
        slow: &[
            "-s 1",
            "-a",
            "-s 1024 -b",
            "-s 1024 -q 8",
            "-s 1024 --use-srq",
            "-s 64 -I 64 -l 8",
            MULTICAST_WITH_EVENTS,
        ],
    },
    Family {
        program: "ib_write_bw",
        connection: RC,
        fast: &["-s 65536", "-s 64 -I 64 -l 8"],
        slow: &[
            "-s 1",
            "-a",
            "-a -b",
            "-s 4096 -b",
            "-s 4096 -q 16",
            "-s 4096 -q 256 -t 8",
            "-s 65536 --mr_per_qp -q 4",
            "-s 4096 -Q 1",
            "-s 65536 -m 1024",
            "-s 8388608",
            "-s 65536 -D 1",
            "-s 65536 --perform_warm_up",
        ],
    },
    Family {
        program: "ib_write_bw",
        connection: UC,
        fast: &["-s 65536"],
        slow: &["-s 1", "-a", "-s 4096 -b", "-s 4096 -q 16", "-s 64 -I 64 -l 8"],
    },
    Family {
        program: "ib_read_bw",
        connection: RC,
        fast: &["-s 65536"],
        slow: &[
            "-s 1",
            "-a",
            "-a -b",
            "-s 4096 -e",
            "-s 4096 -b",
            "-s 4096 -q 16",
            "-s 4096 -o 1",
            "-s 4096 -o 16 -l 4",
            "-s 65536 --mr_per_qp -q 4",
            "-s 65536 -m 1024",
            "-s 8388608",
        ],
    },
    Family {
        program: "ib_atomic_bw",
        connection: ATOMIC,
        fast: &["-A CMP_AND_SWAP", "-A FETCH_AND_ADD"],
        slow: &[
            "-A CMP_AND_SWAP -e",
            "-A FETCH_AND_ADD -e",
            "-A FETCH_AND_ADD -b",
            "-A FETCH_AND_ADD -q 16",
            "-A FETCH_AND_ADD -o 1",
            "-A FETCH_AND_ADD -l 4",
        ],
    },
    Family {
        program: "ib_send_lat",
        connection: RC,
        fast: &["-s 2", "-s 2 -e"],
        slow: &[
            "-a",
            "-s 64 -I 64",
            "-s 64 -I 0",
            "-s 64 --use-srq",
            "-s 64 --use-srq -e",
            "-s 65536",
        ],
    },
    Family {
        program: "ib_send_lat",
        connection: UC,
        fast: &["-s 2"],
        slow: &["-a", "-s 2 -e", "-s 64 -I 64", "-s 64 -I 0", "-s 65536"],
    },
    Family {
        program: "ib_send_lat",
        connection: UD,
        fast: &["-s 2"],
        slow: &[
            "-a",
            "-s 2 -e",
            "-s 64 -I 64",
            "-s 64 -I 0",
            "-s 1024 --use-srq",
            MULTICAST_LATENCY,
        ],
    },
    Family {
        program: "ib_write_lat",
        connection: RC,
        fast: &["-s 2"],
        slow: &["-a", "-s 64 -I 64", "-s 64 -I 0", "-s 65536"],
    },
    Family {
        program: "ib_write_lat",
        connection: UC,
        fast: &["-s 2"],
        slow: &["-a", "-s 64 -I 64", "-s 64 -I 0", "-s 65536"],
    },
    Family {
        program: "ib_read_lat",
        connection: RC,
        fast: &["-s 2"],
        slow: &["-a", "-s 2 -e", "-s 65536", "-s 2 -o 1"],
    },
    Family {
        program: "ib_atomic_lat",
        connection: ATOMIC,
        fast: &["-A CMP_AND_SWAP", "-A FETCH_AND_ADD"],
        slow: &["-A CMP_AND_SWAP -e", "-A FETCH_AND_ADD -e"],
    },
];

/// With the `ibv_wr_*` calls; the first ones run in `make test` too.
pub const WITH_WR_FAST: &[&str] = &[
    "ib_send_bw -c RC -s 65536",
    "ib_send_bw -c UD -s 1024",
    "ib_write_bw -c RC -s 64 -I 64",
    "ib_read_bw -c RC -s 65536",
    "ib_atomic_bw -A CMP_AND_SWAP",
    "ib_atomic_bw -A FETCH_AND_ADD",
];

/// The others.
pub const WITH_WR: &[&str] = &[
    "ib_send_bw -c RC -s 4096 -b -e -q 4 --use-srq",
    "ib_send_bw -c RC -a",
    "ib_send_bw -c UC -s 65536",
    "ib_send_bw -c UD -s 1024 -e -q 8",
    "ib_write_bw -c RC -a -b",
    "ib_write_bw -c UC -s 65536",
    "ib_read_bw -c RC -s 4096 -q 16",
    "ib_send_lat -c RC -s 64 -I 64",
    "ib_send_lat -c UC -s 2",
    "ib_send_lat -c UD -s 2 -e",
    "ib_write_lat -c RC -a",
    "ib_write_lat -c UC -s 2",
    "ib_read_lat -c RC -a",
    "ib_atomic_lat -A CMP_AND_SWAP",
    "ib_atomic_lat -A FETCH_AND_ADD",
];

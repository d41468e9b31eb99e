//! perftest's programs between two hosts: every operation in every connection type that it makes sense in, with the
//! options that change which verbs they use. The numbers that they print are not judged here; `bench/` does that.

mod cases;

use anyhow::ensure;
use verbatim_e2e::{BandwidthRow, Finished, LatencyRow, PATIENCE, PERFTEST_PORT, Shim, TestLab};

use self::cases::{FAMILIES, WITH_WR, WITH_WR_FAST};
use crate::Test;
use crate::programs::between_preloaded;

const HOSTS: &[&str] = &["src", "peer"];

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    let mut add = |argv: Vec<&'static str>, calls: Calls, only_on_demand: bool| {
        let name = format!("conformance::perftest::{}{}", calls.prefix(), argv.join(" "));
        let test = Test::new(name, HOSTS, move |lab| runs(lab, argv, calls));
        tests.push(test.only_on_demand(only_on_demand));
    };
    for family in FAMILIES {
        for (sets, only_on_demand) in [(family.fast, false), (family.slow, true)] {
            for set in sets {
                let argv = [&[family.program], family.connection, &words(set)].concat();
                add(argv, Calls::PostSend, only_on_demand);
            }
        }
    }
    for (cases, only_on_demand) in [(WITH_WR_FAST, false), (WITH_WR, true)] {
        for case in cases {
            add(words(case), Calls::Wr, only_on_demand);
        }
    }
    tests
}

/// With what requests are posted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Calls {
    PostSend,
    Wr,
}

impl Calls {
    fn prefix(self) -> &'static str {
        match self {
            Self::PostSend => "",
            Self::Wr => "ibv_wr: ",
        }
    }
}

fn words(case: &'static str) -> Vec<&'static str> {
    case.split(' ').collect()
}

/// Both sides run, and the client prints a line for each size.
fn runs(lab: &TestLab, mut argv: Vec<&'static str>, calls: Calls) -> anyhow::Result<()> {
    let all_sizes = argv.contains(&"-a");
    if !argv.contains(&"-D") {
        // No more than the receive queue holds: UC and UD lose what finds no RECV, and perftest then waits for ever. So
        // it may if `-t` is no divisor of `-n` (it counts completions in steps of `-t`, and stops to poll too early).
        argv.extend(["-n", if all_sizes { "10" } else { "200" }]);
    }
    argv.push("-F");
    argv.extend(PATIENCE);
    let shim = match calls {
        Calls::PostSend => None,
        Calls::Wr => Some(Shim::build("known_device")?),
    };
    let (client, server) = between_preloaded(lab, &argv, PERFTEST_PORT, shim.as_ref())?;
    if calls == Calls::Wr {
        let used = [&client, &server].map(|side| side.stderr.contains("known_device: ibv_qp_to_qp_ex"));
        ensure!(used.contains(&true), "ibv_wr_* was not used{}", client.output());
    }
    let mut sizes = sizes(&client)?;
    // `--report-both` prints the other side's table too.
    sizes.dedup();
    let expected = match (all_sizes, value_of(&argv, "-s"), value_of(&argv, "-c")) {
        // Up to the path's MTU, 4096.
        (true, _, Some("UD")) => (1..=12).map(|power| 1 << power).collect(),
        (true, ..) => (1..=23).map(|power| 1 << power).collect(),
        (false, Some(size), _) => vec![size.parse()?],
        (false, None, _) => vec![8],
    };
    ensure!(sizes == expected, "sizes {sizes:?}{}", client.output());
    Ok(())
}

fn sizes(client: &Finished) -> anyhow::Result<Vec<u64>> {
    Ok(if client.what.contains("_lat ") {
        LatencyRow::parse(client)?.iter().map(|row| row.bytes).collect()
    } else {
        BandwidthRow::parse(client)?.iter().map(|row| row.bytes).collect()
    })
}

fn value_of<'a>(argv: &[&'a str], option: &str) -> Option<&'a str> {
    let at = argv.iter().position(|word| *word == option)?;
    argv.get(at + 1).copied()
}

//! The end-to-end tests: unmodified programs in a lab's hosts and instances, moved while they run.
//!
//! Each test gets a lab of its own with the hosts that it names. They run one after the other, since they measure
//! nothing but keep every core busy. On a machine without root or without the programs that `setup.sh` installs they
//! are skipped, and say why; with `CI=true` that is a failure.
//!
//! Cases that take long and add little ([`on_demand`], most of [`conformance`]) run only on demand: `make e2e`,
//! `make conformance`, or `--include-ignored`.
//!
//! | variable | |
//! | --- | --- |
//! | `VERBATIM_SOAK_MOVES` | how many moves in a row `soak::lossy` makes; default 200 |
//! | `VERBATIM_NEMESIS_MINUTES` | how long `nemesis::strikes` goes on; default 2 |
//! | `VERBATIM_NEMESIS_SEED` | what strikes there; default: any |
//! | `VERBATIM_NEMESIS_FIRST` | the number of the first move of that seed; default 0 |

mod application;
mod conformance;
mod drain;
mod failures;
mod faults;
mod gids;
mod identity;
mod lost_rnic;
mod many;
mod migration;
mod nemesis;
mod objects;
mod on_demand;
mod pause;
mod pause_resume;
mod pre_copy;
mod programs;
mod rnic_again;
mod robustness;
mod rollback;
mod soak;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use verbatim_e2e::{Stolen, TestLab, Tools};

/// What a test does in its lab.
type Body = Box<dyn FnOnce(&TestLab) -> anyhow::Result<()> + Send>;

/// A test: its name, the hosts of its lab, and what it does there.
struct Test {
    name: String,
    hosts: &'static [&'static str],
    only_on_demand: bool,
    body: Body,
}

impl Test {
    fn new(
        name: impl Into<String>,
        hosts: &'static [&'static str],
        body: impl FnOnce(&TestLab) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            hosts,
            only_on_demand: false,
            body: Box::new(body),
        }
    }

    /// Whether it runs only when it is asked for.
    fn only_on_demand(self, only_on_demand: bool) -> Self {
        Self {
            only_on_demand,
            ..self
        }
    }

    fn run(self, tools: &Tools) -> anyhow::Result<()> {
        let stolen = Stolen::now();
        let lab = TestLab::up(tools, self.hosts)?;
        let body = self.body;
        // A panic must not hide the logs.
        let result = catch_unwind(AssertUnwindSafe(|| body(&lab)));
        if !matches!(result, Ok(Ok(()))) {
            eprintln!("\n{}\nthe logs of {}:{}", stolen.since(), self.name, lab.logs());
        }
        let down = lab.down();
        match result {
            Ok(result) => result.and(down),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

fn main() -> ExitCode {
    // A program of these tests that is no test: it says that other programs' queue pairs are its own.
    if std::env::args().nth(1).as_deref() == Some(identity::PRETENDER) {
        return identity::pretend();
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let obstacle = Tools::obstacle();
    let strict = std::env::var("CI").is_ok_and(|value| value == "true");
    let tests = [
        programs::tests(),
        migration::tests(),
        objects::tests(),
        pre_copy::tests(),
        rollback::tests(),
        drain::tests(),
        pause::tests(),
        pause_resume::tests(),
        gids::tests(),
        failures::tests(),
        faults::tests(),
        lost_rnic::tests(),
        rnic_again::tests(),
        robustness::tests(),
        identity::tests(),
        many::tests(),
        soak::tests(),
        nemesis::tests(),
        application::tests(),
        conformance::tests(),
    ];
    let tests = on_demand::mark(tests.into_iter().flatten().collect());
    let trials = tests.into_iter().map(|test| {
        let obstacle = obstacle.clone();
        let only_on_demand = test.only_on_demand;
        let trial = Trial::ignorable_test(test.name.clone(), move || match obstacle {
            Some(reason) if strict => Err(Failed::from(reason)),
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => {
                let result = Tools::find().and_then(|tools| test.run(&tools));
                result
                    .map(|()| Completion::Completed)
                    .map_err(|error| Failed::from(format!("{error:#}")))
            }
        });
        trial.with_ignored_flag(only_on_demand)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

//! The end-to-end tests: unmodified programs in a lab's hosts and instances, moved while they run.
//!
//! Each test gets a lab of its own with the hosts that it names. They run one after the other, since they measure
//! nothing but keep every core busy. On a machine without root or without the programs that `setup.sh` installs they
//! are skipped, and say why; with `CI=true` that is a failure.
//!
//! Cases that take long and add little ([`on_demand`], most of [`conformance`]) run only on demand: `make e2e`,
//! `make conformance`, `make compat-test`, or `--include-ignored`.
//!
//! | variable | |
//! | --- | --- |
//! | `VERBATIM_PREVIOUS` | the folder with the previous release's programs, for [`compat`] |
//! | `VERBATIM_SOAK_MOVES` | how many moves in a row `soak::lossy` makes; default 200 |
//! | `VERBATIM_NEMESIS_MINUTES` | how long `nemesis::strikes` goes on; default 2 |
//! | `VERBATIM_NEMESIS_SEED` | what strikes there; if it is empty: anything; default: always the same |
//! | `VERBATIM_TEST_LOOK` | a shell command that is run when a test has failed, while its lab (`VERBATIM_LAB_NAME`) still stands |
//! | `VERBATIM_NEMESIS_FIRST` | the number of the first move of that seed; default 0 |

mod addresses;
mod application;
mod border;
mod by_name;
mod came_back;
mod carried;
mod compat;
mod conformance;
mod containers;
mod deep;
mod drain;
mod failures;
mod faults;
mod files;
mod gids;
mod identity;
mod jail;
mod libvirt;
mod lost_rnic;
mod machines;
mod many;
mod migration;
mod nemesis;
mod network;
mod objects;
mod on_demand;
mod pause;
mod pause_resume;
mod pre_copy;
mod private;
mod programs;
mod rdma_cm;
mod rdma_cm_ends;
mod rdma_cm_moves;
mod rdma_cm_ucx;
mod rnic_again;
mod robustness;
mod rollback;
mod sleeps;
mod soak;
mod sockets;
mod transport;
mod unfinished;
mod volumes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use verbatim_e2e::{Release, Stolen, TestLab, Tools, Ungrouped};

/// How long each test took, its lab included.
static TIMES: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// More than any test takes that `make test` runs.
const LONGEST: Duration = Duration::from_secs(600);

/// So many of the slowest are told at the end.
const TOLD: usize = 15;

/// What a test does in its lab.
type Body = Box<dyn FnOnce(&TestLab) -> anyhow::Result<()> + Send>;

/// A test: its name, the hosts of its lab, and what it does there.
struct Test {
    name: String,
    hosts: &'static [&'static str],
    /// Hosts whose programs can be exchanged, and what they run at first.
    releases: Vec<(&'static str, Release)>,
    only_on_demand: bool,
    /// It hangs if it takes longer, unless it runs on demand only.
    longest: Duration,
    /// Its agents fail where it orders that.
    injects_faults: bool,
    /// Each host has a volume daemon, which copies in that way.
    volumes: Option<&'static str>,
    /// Its hosts' daemons are started with this umask.
    umask: Option<u32>,
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
            releases: Vec::new(),
            only_on_demand: false,
            longest: LONGEST,
            injects_faults: false,
            volumes: None,
            umask: None,
            body: Box::new(body),
        }
    }

    /// It orders failures: its hosts run the program that takes such orders.
    fn injecting_faults(self) -> Self {
        Self {
            injects_faults: true,
            ..self
        }
    }

    /// With a volume daemon on each host.
    fn with_volumes(self) -> Self {
        self.with_volumes_by("tls")
    }

    /// The same; these copy in that way.
    fn with_volumes_by(self, transport: &'static str) -> Self {
        Self {
            volumes: Some(transport),
            ..self
        }
    }

    /// The same on hosts of these releases; only on demand, since the previous one has to be built.
    fn with_releases(self, releases: &[(&'static str, Release)]) -> Self {
        Self {
            releases: releases.to_vec(),
            ..self.only_on_demand(true)
        }
    }

    /// It takes so much longer than a test may.
    fn longer_by(self, longer: Duration) -> Self {
        Self {
            longest: self.longest + longer,
            ..self
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
        let tools = match self.injects_faults {
            true => &tools.that_fail_on_order(),
            false => tools,
        };
        let lab = TestLab::up_with(tools, self.hosts, &self.releases, self.volumes, self.umask)?;
        let _deadline = (!self.only_on_demand).then(|| Deadline::of(&self.name, self.longest));
        let body = self.body;
        // A panic must not hide the logs.
        let result = catch_unwind(AssertUnwindSafe(|| body(&lab)));
        if !matches!(result, Ok(Ok(()))) {
            eprintln!("\n{}\nthe logs of {}:{}", stolen.since(), self.name, lab.logs());
        }
        // After the logs, which are long: who reads only the end of the output reads why.
        if let Ok(Err(error)) = &result {
            eprintln!("{} failed: {error:#}", self.name);
        }
        if !matches!(result, Ok(Ok(()))) {
            look_at(&lab);
        }
        let down = lab.down();
        match result {
            Ok(result) => result.and(down),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Ends everything when a test that is no long one has not ended in time: one that hangs would keep its reader from all that the
/// others have to say. The lab's keeper sees it, and takes the lab down.
struct Deadline(Option<std::sync::mpsc::Sender<()>>);

impl Deadline {
    fn of(name: &str, longest: Duration) -> Self {
        let (ended, waits) = std::sync::mpsc::channel::<()>();
        let name = name.to_owned();
        std::thread::spawn(move || {
            if waits.recv_timeout(longest) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{name} has not ended in {longest:?}: it hangs, and so everything is ended");
                std::process::exit(1);
            }
        });
        Self(Some(ended))
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

fn main() -> ExitCode {
    // A program of these tests that is no test: it says that other programs' queue pairs are its own.
    if std::env::args().nth(1).as_deref() == Some(identity::PRETENDER) {
        return identity::pretend();
    }
    let mut arguments = Arguments::from_args();
    // Each has hosts of its own, and waits for most of its time.
    arguments.test_threads.get_or_insert(2);
    let obstacle = Tools::obstacle();
    let strict = std::env::var("CI").is_ok_and(|value| value == "true");
    let tests = [
        programs::tests(),
        by_name::tests(),
        rdma_cm::tests(),
        rdma_cm_moves::tests(),
        rdma_cm_ends::tests(),
        rdma_cm_ucx::tests(),
        migration::tests(),
        objects::tests(),
        pre_copy::tests(),
        private::tests(),
        transport::tests(),
        rollback::tests(),
        drain::tests(),
        pause::tests(),
        pause_resume::tests(),
        gids::tests(),
        failures::tests(),
        unfinished::tests(),
        came_back::tests(),
        faults::tests(),
        lost_rnic::tests(),
        addresses::tests(),
        border::tests(),
        containers::tests(),
        network::tests(),
        files::tests(),
        carried::tests(),
        machines::tests(),
        libvirt::tests(),
        volumes::tests(),
        rnic_again::tests(),
        robustness::tests(),
        identity::tests(),
        jail::tests(),
        many::tests(),
        sleeps::tests(),
        sockets::tests(),
        deep::tests(),
        soak::tests(),
        nemesis::tests(),
        compat::tests(),
        application::tests(),
        conformance::tests(),
    ];
    let tests = on_demand::mark(tests.into_iter().flatten().collect());
    let trials = tests.into_iter().map(|test| {
        let obstacle = obstacle.clone();
        let only_on_demand = test.only_on_demand;
        let name = test.name.clone();
        let trial = Trial::ignorable_test(test.name.clone(), move || match obstacle {
            Some(reason) if strict => Err(Failed::from(reason)),
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => {
                let begun = Instant::now();
                let result = Tools::find().and_then(|tools| test.run(&tools));
                let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
                times.push((begun.elapsed(), name));
                result
                    .map(|()| Completion::Completed)
                    .map_err(|error| Failed::from(format!("{error:#}")))
            }
        });
        trial.with_ignored_flag(only_on_demand)
    });
    let ungrouped = match arguments.list {
        true => None,
        false => Some(Ungrouped::hold()),
    };
    if let Some(Err(error)) = &ungrouped {
        eprintln!("sessions stay groups of the scheduler: {error:#}");
    }
    let code = libtest_mimic::run(&arguments, trials.collect()).exit_code();
    drop(ungrouped);
    tell_slowest();
    code
}

/// Runs the command that is to look at a lab in which a test has failed, while it still stands.
fn look_at(lab: &TestLab) {
    let Some(command) = std::env::var_os("VERBATIM_TEST_LOOK") else {
        return;
    };
    let mut shell = std::process::Command::new("sh");
    shell.arg("-c").arg(command).env("VERBATIM_LAB_NAME", lab.name());
    match shell.status() {
        Ok(status) => eprintln!("VERBATIM_TEST_LOOK: {status}"),
        Err(error) => eprintln!("VERBATIM_TEST_LOOK: {error}"),
    }
}

fn tell_slowest() {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    times.sort();
    let all: Duration = times.iter().map(|(time, _)| *time).sum();
    eprintln!(
        "{} tests took {:.0} s; the slowest:",
        times.len(),
        all.as_secs_f64()
    );
    for (time, name) in times.iter().rev().take(TOLD) {
        eprintln!("  {:6.1} s  {name}", time.as_secs_f64());
    }
}

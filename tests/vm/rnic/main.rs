//! Instances that have an RNIC of the kernel's, on machines that are hosts of their own: agents without a lab, rxe, containers.
//!
//! Machines are booted once for all cases. `make rnic-test` runs what has not passed on this build yet (`results.rs`); plain `cargo test`
//! only lists these tests.

mod blackout;
mod cases;
mod faults;
mod lost;
mod machines;
mod memory;
mod plugin;
#[path = "../results.rs"]
mod results;
mod run;
mod self_test;
mod soak;
mod trial;
mod windows;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, ensure};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use machines::Machines;
use results::Results;
use verbatim_testbed::{Command, Network};

/// The first argument of the part within a machine.
const INSIDE: &str = "--inside";

/// The first argument where blackouts are to be measured instead.
const BLACKOUT: &str = "--blackout";

/// Everything of ours that a case runs.
const PARTS: &[&str] = &[
    "verbatim",
    "verbatim-with-faults",
    "libverbatim.so",
    "libverbatim_criu_plugin.so",
    "../vm-probes/traffic",
    "../../vcheck/vcheck",
];

/// How long the story of CRIU's plugin may take.
const STORY_LIMIT: Duration = Duration::from_secs(240);

/// What `make build` has made, in the folder of what was built with this program.
fn built(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(std::path::Path::parent);
    let path = folder.context("a test is in target/PROFILE/deps")?.join(name);
    path.canonicalize().with_context(|| {
        format!(
            "{} is missing: run `make build` and `make -C tests/vm/probes`",
            path.display()
        )
    })
}

type Body = Box<dyn FnOnce(&mut Option<Machines>) -> anyhow::Result<()> + Send>;

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    let told = match std::env::args().nth(1).as_deref() {
        Some(INSIDE) => Some(plugin::tell()),
        Some(BLACKOUT) => Some(blackout::tell()),
        _ => None,
    };
    if let Some(told) = told {
        return match told {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let mut arguments = Arguments::from_args();
    // One machine with two cores; and the thread that boots machines must live as long as they do.
    arguments.test_threads = Some(1);
    let machines = Arc::new(Mutex::new(None));
    let trial = |name: String, body: Body| {
        let machines = Arc::clone(&machines);
        let test = name.clone();
        let run = move || {
            let mut machines = machines.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let result = once(&test, |_| body(&mut machines));
            result.map_err(|error| Failed::from(format!("{error:#}")))
        };
        Trial::ignorable_test(name, run).with_ignored_flag(true)
    };
    let plugin = trial(
        "plugin::a_container_is_dumped_and_restored".to_owned(),
        Box::new(|_| plugin()),
    );
    let self_test = trial(
        "self_test::a_program_is_moved_and_goes_on".to_owned(),
        Box::new(|_| self_test::run()),
    );
    let on_trial = trial(
        "trial::what_cannot_be_made_is_refused_before".to_owned(),
        Box::new(|machines| trial::run(shared(machines)?)),
    );
    let lost = trial(
        "lost::a_device_that_goes_after_the_trial".to_owned(),
        Box::new(|machines| lost::run(shared(machines)?)),
    );
    let windows = trial(
        "windows::bound_ones_move_with_their_program".to_owned(),
        Box::new(|machines| windows::run(shared(machines)?)),
    );
    let memory = trial(
        "memory::goes_ahead_by_rdma".to_owned(),
        Box::new(|machines| memory::by_rdma(shared(machines)?)),
    );
    let private = trial(
        "memory::private_memory_is_compared".to_owned(),
        Box::new(|machines| memory::private(shared(machines)?)),
    );
    let cases = cases::all().into_iter().map(|case| {
        let body: Body = Box::new(move |machines| {
            let done = run::run(shared(machines)?, &case);
            if case.moves == cases::Moves::Left {
                // One of them is off.
                *machines = None;
            }
            done
        });
        trial(case.name(), body)
    });
    let faults = faults::points().map(|point| {
        let body: Body = Box::new(move |machines| faults::run(shared(machines)?, point));
        trial(format!("faults::{}", point.name()), body)
    });
    let lossy = trial(
        "soak::lossy".to_owned(),
        Box::new(|machines| soak::lossy(shared(machines)?)),
    );
    let trials = [plugin, self_test, on_trial, lost, windows, memory, private]
        .into_iter()
        .chain(cases)
        .chain(faults)
        .chain([lossy])
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Runs what has not passed on this build yet.
fn once(test: &str, run: impl FnOnce(&Results) -> anyhow::Result<()>) -> anyhow::Result<Completion> {
    let results = Results::open("rnic-results", PARTS)?;
    if results.has(test) {
        return Ok(Completion::ignored_with("it has passed on this build"));
    }
    run(&results)?;
    results.note(test)?;
    Ok(Completion::Completed)
}

/// The machines that all cases share, which are booted by the first of them.
fn shared(slot: &mut Option<Machines>) -> anyhow::Result<&Machines> {
    if slot.is_none() {
        *slot = Some(Machines::up()?);
    }
    slot.as_ref().context("they were booted just now")
}

/// A story in a machine of its own: no agent is in the way.
fn plugin() -> anyhow::Result<()> {
    let vm = machines::boot("plugin", 8, &Network::new()?)?;
    let program = std::env::current_exe()?.display().to_string();
    // No hardware breakpoints: see host.sh.
    let command = Command::new([program.as_str(), INSIDE]).env("CRIU_FAULT", "130");
    let ended = vm.run(&command, STORY_LIMIT)?;
    ensure!(
        ended.code == 0,
        "status {}\n{}",
        ended.code,
        machines::words(&ended)
    );
    Ok(())
}

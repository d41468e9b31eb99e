//! Volumes on disks that really fail: device-mapper's flakey, error, delay, log-writes and thin pools, SCSI
//! disks that vanish, nbdkit's filters, and machines that lose power. Each case shows a promise of
//! docs/disk-failures.md.
//!
//! Most cases run in one machine, which has two daemons (`--inside`, [`inside`]); [`power`] kills machines.
//! `make faulty-test` runs the cases that have not passed on this build yet; plain `cargo test` only lists
//! the cases.

#[path = "../../../crates/volume/tests/support/client.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod client;
mod destination;
mod disks;
mod hosts;
mod identity;
mod inside;
mod log;
mod power;
mod replay;
#[path = "../results.rs"]
mod results;
mod rounds;
mod serving;
mod slow;
mod state;
mod thin;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use power::Power;
use results::Results;
use verbatim_testbed::{Command, Network, Vm, VmConfig};

/// First argument of the part within a machine.
const INSIDE: &str = "--inside";

/// Limit for a case in the machine: emulated processors are slow, and slower beside builds.
const CASE_LIMIT: Duration = Duration::from_secs(1800);

/// Our own programs that a case runs.
const PARTS: &[&str] = &["verbatim", "verbatim-volume-with-faults"];

/// Processor features for TLS: without them an emulated processor encrypts so slowly that each copy seems to
/// have lost its destination.
const FOR_TLS: &str = ",+aes,+pclmulqdq";

/// One processor: the kernel changes its own code while it runs, which sometimes fails with several emulated
/// processors (docs/testbed.md), and the kernel panics.
const CPUS: u32 = 1;

/// Loads the kernel modules that the cases need.
const MODULES: &str = "for module in loop dm-mod dm-flakey dm-log-writes dm-delay dm-thin-pool nbd sd_mod ext4 fuse; do modprobe $module; done";

/// A program of `make build`, from the build folder of this test program.
fn built(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent);
    let path = folder.context("a test is in target/PROFILE/deps")?.join(name);
    path.canonicalize()
        .with_context(|| format!("{} is missing: run `make build`", path.display()))
}

/// Machines that the cases share; each is booted by the first case that needs it.
#[derive(Default)]
struct Shared {
    machine: Option<Vm>,
    power: Option<Power>,
}

type Body = Box<dyn FnOnce(&mut Shared) -> anyhow::Result<()> + Send>;

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == INSIDE) {
        return match inside::tell(&words[1..]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let mut arguments = Arguments::from_args();
    // The cases share machines, and the thread that boots a machine must live as long as the machine.
    arguments.test_threads = Some(1);
    let shared = Arc::new(Mutex::new(Shared::default()));
    let trial = |name: String, body: Body| {
        let (shared, test) = (Arc::clone(&shared), name.clone());
        let run = move || {
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            once(&test, || body(&mut shared)).map_err(|error| {
                // Printed at once, too: the other cases take long.
                eprintln!("{test}: {error:#}");
                Failed::from(format!("{error:#}"))
            })
        };
        Trial::ignorable_test(name, run).with_ignored_flag(true)
    };
    let cases = inside::CASES
        .iter()
        .flat_map(|cases| cases.iter())
        .map(|&(name, _)| {
            let body: Body = Box::new(move |shared| in_machine(shared, name));
            trial(name.to_owned(), body)
        });
    let points = power::cases().into_iter().map(|point| {
        let body: Body = Box::new(move |shared| {
            shared.machine = None;
            power::run(&mut shared.power, point)
        });
        trial(format!("power::{point:?}"), body)
    });
    let trials = cases.chain(points).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Runs a case unless it has passed on this build.
fn once(test: &str, run: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Completion> {
    let results = Results::open("faulty-results", PARTS)?;
    if results.has(test) {
        return Ok(Completion::ignored_with("it has passed on this build"));
    }
    run()?;
    results.note(test)?;
    Ok(Completion::Completed)
}

/// Runs a case in the shared machine. After a failure, which may have left something behind, the next case
/// gets another machine.
fn in_machine(shared: &mut Shared, case: &str) -> anyhow::Result<()> {
    let vm = match shared.machine.take() {
        Some(vm) => vm,
        None => boot()?,
    };
    let own = std::env::current_exe()?;
    let own = own.to_str().context("a path that is not UTF-8")?;
    let ended = vm
        .run(&Command::new([own, INSIDE, case]), CASE_LIMIT)
        .with_context(|| kernel_says(&vm))?;
    let said = words(&ended);
    ensure!(ended.code == 0, "{said}\n{}", kernel_says(&vm));
    eprint!("{said}");
    shared.machine = Some(vm);
    Ok(())
}

fn boot() -> anyhow::Result<Vm> {
    let config = VmConfig {
        cpus: CPUS,
        features: FOR_TLS.to_owned(),
        ..VmConfig::new(format!("faulty-{}", std::process::id()))
    };
    let vm = Vm::boot(&config, &Network::new()?)?;
    let ended = vm.run(&Command::new(["sh", "-ec", MODULES]), Duration::from_secs(120))?;
    ensure!(ended.code == 0, "a module is missing: {}", words(&ended));
    Ok(vm)
}

/// Last lines of the machine's console, for the message of a failed case.
fn kernel_says(vm: &Vm) -> String {
    let bytes = std::fs::read(vm.record().console()).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Output of a command.
fn words(ended: &verbatim_testbed::Ended) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&ended.stdout), text(&ended.stderr))
}

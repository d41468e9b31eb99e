//! Our software RNIC and the Linux kernel's rxe, on one bridge, as client and server in turn.
//!
//! rxe is in a virtual machine (`crates/testbed`), our RNIC in a host of a lab (`crates/lab`) whose bridge the machine's
//! tap joins. Both sides run the same unmodified programs. What is tested is a table, [`cases::all`]; all cases share
//! one lab and one machine and run one after the other.
//!
//! Booting takes seconds and a kernel that not every machine has, so plain `cargo test` only lists these tests;
//! `make vm-test` runs them.

mod backend;
mod cases;
mod private;
mod probes;
mod run;
mod site;
mod tool;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use site::Site;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// What a test does at the site that all share.
type Body = Box<dyn FnOnce(&Site) -> anyhow::Result<Completion> + Send>;

fn main() -> ExitCode {
    verbatim_testbed::run_role();
    let mut given = std::env::args().skip(1);
    if let (Some(part), Some(story)) = (given.next(), given.next())
        && part == private::INSIDE
    {
        return private::inside(&story);
    }
    let mut arguments = Arguments::from_args();
    // One machine, two cores; and the thread that boots it must live as long as it does.
    arguments.test_threads = Some(1);
    let site = Arc::new(Mutex::new(None));
    let trial = |name: String, body: Body| {
        let site = Arc::clone(&site);
        let run = move || {
            let mut site = site.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let result = Site::shared(&mut site).and_then(body);
            result.map_err(|error| Failed::from(format!("{error:#}")))
        };
        Trial::ignorable_test(name, run).with_ignored_flag(true)
    };
    let tool = tool::ALL
        .iter()
        .chain(private::ALL)
        .chain(probes::ALL)
        .chain(backend::ALL)
        .map(|&(name, body)| {
            trial(
                name.to_owned(),
                Box::new(move |site| body(site).map(|()| Completion::Completed)),
            )
        });
    let cases = cases::all()
        .into_iter()
        .map(|case| trial(case.name(), Box::new(move |site| run::run(site, &case))));
    let trials = tool.chain(cases).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    let site = site
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .take();
    if let Some(Err(error)) = site.map(Site::down) {
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

//! What the simulated world believes of CRIU, runc, the kernel's freezer and the proxy, tried with the real ones.
//!
//! Each rule is a case; docs/assumptions.md lists them. All of them run in two worlds at the same time: one with the cgroups that
//! this machine has, and one with nothing but the unified hierarchy, as on Docker's hosts. In a world one case follows the other, on
//! containers of its own.
//!
//! ```text
//!  agent (the case) ── runc ── proxy ── shim ── CRIU        the shim stops at notifications, and tells the case who is who
//! ```
//!
//! While a case looks at what is left when it has killed one of them, its own part as the agent stands still: what it sees is what
//! the others do by themselves.
//!
//! `cargo test -p verbatim-container --test assumptions -- [NAME…]` runs the cases whose names contain a NAME.

mod descriptors;
mod dump;
mod freezer;
mod held;
mod restore;
mod runcs_own;
mod shim;
#[path = "../support/mod.rs"]
mod support;
mod world;

use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use support::workload;
use world::World;

/// For a world; an idle machine needs less than a third.
const LIMIT: Duration = Duration::from_secs(120);

/// Leaves only the unified hierarchy, without controllers: the freezer needs none.
const UNIFIED: &str = "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup";

type Case = (&'static str, fn(&mut World));

const CASES: [Case; 24] = [
    (
        "frozen_tasks_stand_still_and_go_on",
        freezer::frozen_tasks_stand_still_and_go_on,
    ),
    (
        "what_is_killed_while_frozen_never_runs_again",
        freezer::what_is_killed_while_frozen_never_runs_again,
    ),
    (
        "frozen_before_the_dump_criu_hangs",
        freezer::frozen_before_the_dump_criu_hangs,
    ),
    ("dump_order_of_notifications", dump::order_of_notifications),
    ("dump_with_the_network_order_of_notifications", |world| {
        with_the_network(world, dump::order_of_notifications)
    }),
    ("dump_kills", dump::kills),
    ("held_kills_then_abort", held::kills_then_abort),
    ("held_kills_then_commit", held::kills_then_commit),
    ("held_then_the_agent_too", held::then_the_agent_too),
    (
        "a_dump_that_criu_let_go_of_is_not_held",
        held::a_dump_that_criu_let_go_of_is_not_held,
    ),
    ("lazy_dump_order_of_notifications", |world| {
        lazily(world, dump::order_of_notifications)
    }),
    ("lazy_dump_kills", |world| lazily(world, dump::kills)),
    ("lazy_held_kills_then_abort", |world| {
        lazily(world, held::kills_then_abort)
    }),
    ("lazy_held_kills_then_commit", |world| {
        lazily(world, held::kills_then_commit)
    }),
    ("lazy_held_then_the_agent_too", |world| {
        lazily(world, held::then_the_agent_too)
    }),
    ("lazy_dump_that_criu_let_go_of_is_not_held", |world| {
        lazily(world, held::a_dump_that_criu_let_go_of_is_not_held)
    }),
    (
        "restore_order_of_notifications_and_the_marker",
        restore::order_of_notifications_and_the_marker,
    ),
    ("restore_with_the_network_order_of_notifications", |world| {
        with_the_network(world, restore::order_of_notifications_and_the_marker)
    }),
    ("restore_kills", restore::kills),
    (
        "what_was_released_is_left_alone",
        restore::what_was_released_is_left_alone,
    ),
    (
        "a_killed_runcs_mount_is_not_followed",
        runcs_own::a_killed_runcs_mount_is_not_followed,
    ),
    ("runc_and_a_frozen_container", runcs_own::a_frozen_container),
    ("pidfds_of_frozen_tasks", descriptors::pidfds_of_frozen_tasks),
    ("the_gates_sockets", descriptors::the_gates_sockets),
];

/// The same case with dumps that leave private memory out.
fn lazily(world: &mut World, case: fn(&mut World)) {
    world.a.lazy.set(true);
    case(world);
    world.a.lazy.set(false);
}

/// The same case with images that say something of the network namespace, as for a destination of an earlier release.
fn with_the_network(world: &mut World, case: fn(&mut World)) {
    world.a.apart.set(false);
    case(world);
    world.a.apart.set(true);
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if support::is_called("criu") {
        verbatim_container::criu_proxy_main();
    }
    if support::is_called(shim::NAME) {
        return shim::run(&arguments);
    }
    let pause = || Duration::from_micros(arguments[1].parse().expect("a number of µs"));
    match arguments.first().map(String::as_str) {
        Some("count") => workload::count(pause()),
        Some("count-child") => workload::count_child(pause()),
        // `cargo test` asks every test binary for its list.
        Some("--list") => {
            CASES.iter().for_each(|(name, _)| println!("{name}: test"));
            ExitCode::SUCCESS
        }
        _ if support::inside().is_some() => run_cases(&arguments),
        _ => run_worlds(&arguments),
    }
}

/// Runs both worlds, or says why that cannot be.
fn run_worlds(arguments: &[String]) -> ExitCode {
    if let Some(reason) = support::reason_to_skip() {
        println!("skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let has_own = std::path::Path::new("/sys/fs/cgroup/freezer").exists();
    let mut prepared = vec![("unified", UNIFIED)];
    if has_own {
        prepared.push(("freezer-v1", ":"));
    } else {
        println!("skipped: version 1 of the freezer is not mounted on this machine");
    }
    let worlds: Vec<_> = prepared
        .into_iter()
        .map(|(name, prepare)| {
            let unique = format!("{}-{name}", support::unique());
            let child = support::enter_namespaces(&unique, prepare, arguments)
                .env(
                    shim::REAL,
                    verbatim_container::Criu::find()
                        .expect("it was found above")
                        .path(),
                )
                .env("VERBATIM_CRIU", shim::path())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .expect("unshare can be started");
            (name, unique, child)
        })
        .collect();
    let ended: Vec<_> = worlds
        .into_iter()
        .map(|(name, unique, mut child)| {
            let mut output = child.stdout.take().expect("it was piped");
            let printed = std::thread::spawn(move || {
                let mut text = Vec::new();
                std::io::Read::read_to_end(&mut output, &mut text).map(|_| text)
            });
            let code = support::finish(child, &unique, LIMIT);
            let text = printed
                .join()
                .expect("reading does not panic")
                .unwrap_or_default();
            println!("world {name}\n{}", String::from_utf8_lossy(&text));
            code
        })
        .collect();
    match ended.iter().all(|code| *code == ExitCode::SUCCESS) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs the cases in this world.
fn run_cases(arguments: &[String]) -> ExitCode {
    let wanted: Vec<_> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let chosen = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    let ran = std::panic::catch_unwind(|| {
        let mut world = World::new();
        for (name, case) in CASES.iter().filter(|(name, _)| chosen(name)) {
            let start = Instant::now();
            case(&mut world);
            println!("case {name}: {:.1} s", start.elapsed().as_secs_f64());
        }
    });
    if ran.is_err() {
        // What is frozen by version 1 would keep our namespaces, which are about to end, from ending.
        support::sweep(&support::inside().expect("cases run inside"));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

//! A dump whose tasks are not frozen: what becomes of them when somebody is killed.

use verbatim_container::{Error, Fact};

use crate::world::{At, Running, World, assert_runs, name, runs};

/// CRIU's notifications in their order. The tasks are stopped from after the first on, and CRIU lets go of them after the last.
const NOTIFICATIONS: [&str; 3] = ["pre-dump", "query-ext-files", "post-dump"];

/// A dump that is given up at the end.
fn dump<'a>(world: &'a World) -> Running<'a, Result<(), Error>> {
    Box::pin(async {
        let checkpoint = world.a.try_checkpoint(&name()).await?;
        checkpoint.freeze_and_dump().await?.abort().await
    })
}

pub fn order_of_notifications(world: &mut World) {
    let place = world.start();
    let mut seen = Vec::new();
    let note = |at: &At| {
        let own = "0100007F";
        for listener in listeners(at.pid("criu")) {
            assert!(
                listener.starts_with(own),
                "CRIU listens at {listener}, {} {}",
                at.phase,
                at.name
            );
        }
        if at.phase == "before" {
            seen.push(at.name.clone());
        }
        // Unlike a restore's: what is done to the container's tasks is not done to them.
        for who in ["criu", "proxy", "runc"] {
            let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", at.pid(who))).unwrap();
            assert!(
                !cgroups.lines().any(|line| line.ends_with("-a/web")),
                "{who}: {cgroups}"
            );
        }
    };
    world.run_through(dump(world), note).unwrap();
    let mut expected = NOTIFICATIONS.to_vec();
    if !world.a.apart.get() {
        expected.insert(1, "network-lock");
        // Of one that is given up CRIU says so at last.
        expected.push("network-unlock");
    }
    if world.a.lazy.get() {
        // It serves pages all the same.
        expected.push("status-ready");
    }
    assert_eq!(seen, expected);
    assert_runs(&place);
    world.stop(&world.a, place);
}

/// The addresses at which anybody listens by TCP in the network namespace of a process (`/proc/PID/net/tcp`), in hexadecimal digits.
fn listeners(pid: i32) -> Vec<String> {
    const LISTEN: &str = "0A";
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        let rows = table
            .lines()
            .skip(1)
            .map(|row| row.split_whitespace().collect::<Vec<_>>());
        found.extend(rows.filter(|row| row[3] == LISTEN).map(|row| row[1].to_owned()));
    }
    found
}

/// Whoever is killed, and whenever: the tasks run on, and nobody is needed for that. So before the tasks are frozen by their
/// cgroup nobody may be asked to run the copy.
pub fn kills(world: &mut World) {
    let place = world.start();
    for stop in NOTIFICATIONS {
        for phase in ["before", "after"] {
            for victim in ["criu", "proxy", "runc"] {
                let case = format!("{victim} killed {phase} {stop}");
                let mut operation = dump(world);
                let at = world.run_until(&mut operation, stop, phase);
                at.kill(victim);
                at.settle();
                assert!(runs(&place), "{case}");
                // The agent goes on. After post-dump was refused its abort is what happens anyway.
                if let Err(error) = world.finish(operation) {
                    assert!(
                        error.to_string().starts_with("checkpoint of web failed"),
                        "{case}: {error}"
                    );
                }
                assert_eq!(world.fact(&world.a), Fact::Running, "{case}");
            }
        }
    }
    world.stop(&world.a, place);
}

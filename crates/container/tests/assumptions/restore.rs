//! A restore: who decides, when the marker changes, and what is left when somebody is killed.

use std::time::Duration;

use verbatim_container::{CgroupVersion, Dumped, Ended, Error, Fact, Link, Restore, released};

use crate::support::host::{Place, copy_images, copy_runtime};
use crate::world::{Running, World, counts, name, runs, workload};

/// What a restore leaves on its host when somebody was killed, and the agent did nothing about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// No task; none has run, and the marker says so.
    Nothing,
    /// Tasks that have not run and stand still for ever, and the marker says so.
    Still,
    /// No task, and none has run, but the marker cannot exclude it.
    NothingReleased,
    /// Tasks that have not run and stand still for ever, in CRIU's own code, but the marker cannot exclude that they have.
    StillReleased,
    /// Tasks that run.
    Runs,
}

/// CRIU's notifications in their order, and what is left when CRIU, the proxy or runc is killed before the proxy has heard of them,
/// and after the proxy has answered, when CRIU has not got the answer.
///
/// The last row in which nobody runs is `post-restore`: from there on CRIU asks nobody any more.
const TABLE: [(&str, [[Left; 3]; 2]); 6] = {
    use Left::*;
    const EARLY: [Left; 3] = [Nothing, Nothing, Nothing];
    const MADE: [Left; 3] = [Still, Nothing, Nothing];
    const RESUMED: [Left; 3] = [Runs, Runs, Runs];
    [
        ("pre-restore", [EARLY, EARLY]),
        ("setup-namespaces", [MADE, MADE]),
        ("post-setup-namespaces", [MADE, MADE]),
        ("post-restore", [MADE, [StillReleased, NothingReleased, Runs]]),
        ("pre-resume", [RESUMED, RESUMED]),
        ("post-resume", [RESUMED, RESUMED]),
    ]
};

/// Comes only if the images say something of the network namespace.
const UNLOCK: &str = "network-unlock";

/// A container that is dumped and held on host `a`.
struct Source {
    place: Place,
    dumped: Dumped,
}

impl Source {
    fn new(world: &World) -> Self {
        let place = world.start();
        let dumped = world.runtime.block_on(async {
            let mut dumped = world.a.checkpoint(&name()).await.freeze_and_dump().await.unwrap();
            dumped.hold().await.unwrap();
            dumped
        });
        Self { place, dumped }
    }

    /// A restore of it on host `b`, which has its images.
    fn prepare(&self, world: &World) -> (Place, Restore) {
        let pause = Duration::from_micros(50);
        let next = world.b.make_place_for(&name(), Link::Detached, &workload(pause));
        copy_runtime(&self.place, &next);
        let restore = world.runtime.block_on(world.b.restore(&name(), &next));
        copy_images(&world.a.images(&name()), &world.b.images(&name()));
        (next, restore)
    }

    /// The same, to be let run.
    fn restore<'a>(&self, world: &'a World) -> (Place, Running<'a, Result<(), Error>>) {
        let (next, restore) = self.prepare(world);
        let operation = async {
            let resumed = restore.restore().await?.resume().await?;
            let (mut init, runc) = resumed.settled().await;
            let ended = tokio::time::timeout(Duration::ZERO, init.wait_exit()).await;
            assert!(
                ended.is_err(),
                "the first process runs, whatever became of runc: {ended:?}"
            );
            runc
        };
        (next, Box::pin(operation))
    }

    fn end(self, world: &World) {
        world.runtime.block_on(self.dumped.commit()).unwrap();
        world.stop(&world.a, self.place);
    }
}

pub fn order_of_notifications_and_the_marker(world: &mut World) {
    let source = Source::new(world);
    let (next, operation) = source.restore(world);
    assert!(!released(&world.b.work()).unwrap(), "it is only prepared");
    assert_eq!(world.fact(&world.b), Fact::Frozen, "CRIU and the proxy are there");
    let copied = counts(&next);
    let mut seen = Vec::new();
    world
        .run_through(operation, |at| {
            let (released, ran) = (released(&world.b.work()).unwrap(), counts(&next) != copied);
            let place = format!("{} {}", at.phase, at.name);
            if at.phase == "before" {
                seen.push(at.name.clone());
            }
            // It is released before CRIU gets the answer to post-restore, and not before the proxy has got the agent's order.
            let answered = at.phase == "after" && at.name == "post-restore";
            let later = [UNLOCK, "pre-resume", "post-resume"].contains(&at.name.as_str());
            assert_eq!(released, answered || later, "{place}");
            assert!(released || !ran, "{place}");
            assert!(!ran || at.name == "post-resume", "{place}");
            // Whoever could let them run is killed with the cgroup.
            assert!(
                is_in_container(at.pid("criu")) && is_in_container(at.pid("proxy")),
                "{place}"
            );
            assert!(!is_in_container(at.pid("runc")), "{place}");
        })
        .unwrap();
    let mut expected = TABLE.map(|(name, _)| name).to_vec();
    if !world.a.apart.get() {
        let after = expected.iter().position(|name| *name == "pre-resume");
        expected.insert(after.expect("it is in the table"), UNLOCK);
    }
    assert_eq!(seen, expected);
    assert!(runs(&next));
    assert_eq!(world.fact(&world.b), Fact::Running);
    let state = world.b.host.state().join("runc/web/state.json");
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(state).unwrap()).unwrap();
    let marker: serde_json::Value =
        serde_json::from_slice(&std::fs::read(world.b.work().join("released")).unwrap()).unwrap();
    let controller = match world.version {
        CgroupVersion::V1 => "freezer",
        CgroupVersion::V2 => "",
    };
    assert_eq!(
        marker["path"], state["cgroup_paths"][controller],
        "the proxy found what runc says later"
    );
    world.stop(&world.b, next);
    source.end(world);
}

/// Whether a process is in the container's cgroup.
fn is_in_container(pid: i32) -> bool {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    cgroups.lines().any(|line| line.ends_with("-b/web"))
}

pub fn kills(world: &mut World) {
    let source = Source::new(world);
    for (stop, phases) in TABLE {
        for (phase, expected) in ["before", "after"].into_iter().zip(phases) {
            for (victim, expected) in ["criu", "proxy", "runc"].into_iter().zip(expected) {
                kill(world, &source, (stop, phase, victim), expected);
            }
        }
    }
    source.end(world);
}

fn kill(world: &World, source: &Source, (stop, phase, victim): (&str, &str, &str), expected: Left) {
    let case = format!("{victim} killed {phase} {stop}");
    let (next, mut operation) = source.restore(world);
    let copied = counts(&next);
    let at = world.run_until(&mut operation, stop, phase);
    at.kill(victim);
    at.settle();
    let runs = runs(&next);
    let released = released(&world.b.work()).unwrap();
    let fact = world.fact(&world.b);
    let left = match (runs, released, &fact) {
        (true, true, Fact::Running) => Left::Runs,
        (false, true, Fact::Running) => Left::StillReleased,
        (false, true, Fact::Gone { ran: true }) => Left::NothingReleased,
        (false, false, Fact::Frozen) => Left::Still,
        (false, false, Fact::Gone { ran: false }) => Left::Nothing,
        other => panic!("{case}: {other:?}"),
    };
    assert_eq!(left, expected, "{case}");
    assert_eq!(counts(&next) != copied, runs, "{case}");
    let ended = world
        .runtime
        .block_on(world.b.tasks(&name()).end_unreleased())
        .unwrap();
    match ended {
        Ended::NotRun(_) => {
            assert!(!released, "{case}");
            assert_eq!(world.fact(&world.b), Fact::Gone { ran: false }, "{case}");
        }
        Ended::Released => assert_eq!((released, world.fact(&world.b)), (true, fact), "{case}"),
    }
    // The agent goes on, hears of it, and cleans up what has not run.
    if let Err(error) = world.finish(operation) {
        assert!(
            error.to_string().starts_with("restore of web failed"),
            "{case}: {error}"
        );
    } else {
        assert_eq!(left, Left::Runs, "{case}");
    }
    if !released {
        assert_eq!(counts(&next), copied, "{case}");
        let state = world
            .runtime
            .block_on(world.b.host.runc().state(&name()))
            .unwrap();
        assert_eq!(
            (world.fact(&world.b), state),
            (Fact::Gone { ran: false }, None),
            "{case}"
        );
    }
    world.stop(&world.b, next);
}

/// A failure after the decision does not end what may have run, if the agent has said so.
pub fn what_was_released_is_left_alone(world: &mut World) {
    let source = Source::new(world);
    let (next, restore) = source.prepare(world);
    let mut operation: Running<'_, Result<(), Error>> = Box::pin(async {
        let mut restored = restore.restore().await?;
        restored.leave_released();
        restored.resume().await.map(drop)
    });
    let at = world.run_until(&mut operation, "pre-resume", "before");
    at.kill("criu");
    at.settle();
    world.finish(operation).unwrap_err();
    assert!(runs(&next));
    assert_eq!(world.fact(&world.b), Fact::Running);
    world.stop(&world.b, next);
    source.end(world);
}

//! What is tried.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use verbatim_fill::{Filler, Phase};

use crate::changes::changed_memory;
use crate::criu::{self, Criu};
use crate::kills::{kill_now, kill_one};
use crate::speed;
use crate::task::{BASE, Container, PAGE, check};
use crate::world::{MIB, World, end, is_right_everywhere, most, seed, soon};

type Story = (&'static str, fn());

pub const STORIES: &[Story] = &[
    ("plain", plain),
    ("faults_while_it_fills", faults_while_it_fills),
    ("memory_that_changes_while_it_fills", memory_that_changes),
    ("several_tasks_and_a_zombie", several_tasks),
    ("killed_again_and_again", killed_again_and_again),
    ("killed_while_criu_sends", killed_while_criu_sends),
    ("both_killed_is_noticed", both_killed),
    ("a_task_that_exits", exits),
    ("bad_images_are_refused", bad_images),
    ("a_missing_page_is_refused", missing_page),
    ("speed", speed::speed),
];

pub fn run(names: &[String]) -> ExitCode {
    let mut failed = 0;
    for (name, story) in STORIES {
        let wanted = names
            .iter()
            .filter(|name| !name.starts_with('-'))
            .collect::<Vec<_>>();
        if !wanted.is_empty() && !wanted.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        let start = Instant::now();
        let right = catch_unwind(AssertUnwindSafe(story)).is_ok();
        println!(
            "{name}: {} ({:?})",
            if right { "ok" } else { "FAILED" },
            start.elapsed()
        );
        failed += usize::from(!right);
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn plain() {
    let world = World::new();
    let filler = world.start();
    assert_eq!(filler.status().unwrap().phase, Phase::Waiting);
    let ranges = [(BASE, 24 * MIB)];
    world.dump(7, &ranges, most);
    criu::write_tree(&world.config.images, &[(7, false), (8, true)]);
    assert_eq!(verbatim_fill::tasks(&world.config.images).unwrap(), [7]);
    filler.prepare().unwrap();
    let mut container = Container::start(&ranges, || is_right_everywhere(BASE, 24 * MIB));
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    filler.wait(&Phase::Restoring, soon()).unwrap();
    criu.finish();
    filler.wait(&Phase::Filled, soon()).unwrap();
    container.go();
    assert!(container.is_right());
    use std::os::unix::fs::MetadataExt;
    let held = std::fs::metadata(world.cache(7)).unwrap().blocks() * 512;
    end(&world, filler);
    assert!(held <= 16 * MIB, "{held} bytes of the cache are still there");
    container.kill();
}

fn faults_while_it_fills() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 48 * MIB)];
    world.dump(7, &ranges, most);
    let seed = seed();
    let mut container = Container::start(&ranges, move || {
        let mut random = StdRng::seed_from_u64(seed);
        let mut pages: Vec<u64> = (BASE..BASE + 48 * MIB).step_by(PAGE as usize).collect();
        pages.shuffle(&mut random);
        pages.into_iter().all(|at| check(at, most(at).then_some(at)))
    });
    let mut criu = Criu::connect(&world.config.work);
    container.go();
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    assert!(container.is_right(), "{}", world.log());
    end(&world, filler);
    container.kill();
}

fn memory_that_changes() {
    let seed = seed();
    for round in 0..25 {
        changed_memory(seed.wrapping_add(round), |_| {});
    }
}

fn several_tasks() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 4 * MIB), (BASE + 8 * MIB, 2 * MIB)];
    let mut containers = Vec::new();
    let mut criu = Criu::connect(&world.config.work);
    for vpid in 1..=6 {
        world.dump(vpid, &ranges, most);
        let mut container = Container::start(&ranges, || {
            is_right_everywhere(BASE, 4 * MIB) && is_right_everywhere(BASE + 8 * MIB, 2 * MIB)
        });
        criu.task(vpid as i32, container.uffd()).unwrap();
        criu.zombie(100 + vpid as i32);
        container.go();
        containers.push(container);
    }
    criu.finish();
    for container in &mut containers {
        assert!(container.is_right(), "{}", world.log());
    }
    end(&world, filler);
    containers.iter().for_each(Container::kill);
}

fn killed_again_and_again() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut kills = 0;
    let start = Instant::now();
    for round in 0..200 {
        changed_memory(seed.wrapping_add(round), |filler| {
            kill_one(filler, &mut random, &mut kills)
        });
        if start.elapsed() > Duration::from_secs(10) {
            break;
        }
    }
    println!("{kills} kills");
    assert!(kills > 100, "only {kills} kills");
}

/// The worker dies while connection, numbers, descriptors and the end come in.
fn killed_while_criu_sends() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut kills = 0;
    let start = Instant::now();
    for round in 0..60 {
        let world = World::new();
        let filler = world.start();
        let ranges = [(BASE, MIB / 2)];
        let mut criu = Criu::connect(&world.config.work);
        let mut containers = Vec::new();
        for vpid in 1..=4 {
            world.dump(vpid, &ranges, most);
            // A child has what this process has: each descriptor is given away before the next child is made.
            let mut container = Container::start(&ranges, || is_right_everywhere(BASE, MIB / 2));
            let uffd = container.uffd();
            criu.task(vpid as i32, uffd).unwrap();
            criu.zombie(100 + vpid as i32);
            container.go();
            containers.push(container);
            kill_now(&filler, &mut random, &mut kills);
        }
        criu.finish();
        kill_now(&filler, &mut random, &mut kills);
        for container in &mut containers {
            assert!(
                container.is_right(),
                "seed {seed}, round {round}: {}",
                world.log()
            );
        }
        end(&world, filler);
        containers.iter().for_each(Container::kill);
        if start.elapsed() > Duration::from_secs(6) {
            break;
        }
    }
    println!("{kills} kills");
}

fn both_killed() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, MIB)];
    world.dump(7, &ranges, most);
    let mut container = Container::start(&ranges, || true);
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    let status = filler.wait(&Phase::Restoring, soon()).unwrap();
    let mut watch = filler.watch().unwrap();
    assert_eq!(watch.next(Some(soon())).unwrap().unwrap().phase, Phase::Restoring);
    for pid in status.processes {
        // SAFETY: processes of this test, in its own PID namespace.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    let lost = watch.next(Some(soon())).unwrap().unwrap();
    assert!(matches!(lost.phase, Phase::Lost(_)), "{lost:?}");
    let found = Filler::find(&world.config.control).unwrap().unwrap();
    assert!(matches!(found.status().unwrap().phase, Phase::Lost(_)));
    assert!(found.clone().end().is_err());
    found.give_up().unwrap();
    assert!(Filler::find(&world.config.control).unwrap().is_none());
    container.kill();
}

fn exits() {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 64 * MIB)];
    world.dump(7, &ranges, most);
    let mut container = Container::start(&ranges, || true);
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    container.kill();
    end(&world, filler);
}

fn refused(world: &World, filler: Filler, wanted: &str) {
    let ranges = [(BASE, MIB)];
    let mut container = Container::start(&ranges, || is_right_everywhere(BASE, MIB));
    let mut criu = Criu::connect(&world.config.work);
    criu.task(7, container.uffd()).unwrap();
    assert!(criu.is_cut_off(), "{:?}\n{}", filler.status(), world.log());
    let status = filler.status().unwrap();
    let Phase::Refused(why) = &status.phase else {
        panic!("{status:?}");
    };
    assert!(why.contains(wanted), "{why}");
    container.go();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!container.has_ended(), "it has read a page that was not filled");
    container.kill();
    filler.give_up().unwrap();
    assert!(!Path::new(&world.config.control).exists());
}

fn bad_images() {
    for (name, keep) in [("pagemap-7.img", 30), ("pagemap-7.img", 5), ("mm-7.img", 20)] {
        let world = World::new();
        let filler = world.start();
        world.dump(7, &[(BASE, MIB)], most);
        let path = world.config.images.join(name);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(keep).unwrap();
        refused(&world, filler, name);
        let error = match name {
            "mm-7.img" => verbatim_fill::images::mappings(&world.config.images, 7).unwrap_err(),
            _ => verbatim_fill::left_to_fill(&world.config.images, 7).unwrap_err(),
        };
        assert!(error.to_string().contains("cut off"), "{error}");
    }
}

fn missing_page() {
    let world = World::new();
    let filler = world.start();
    world.dump(7, &[(BASE, MIB)], most);
    let file = std::fs::File::options().write(true).open(world.cache(7)).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, flags, BASE + 20 * PAGE, PAGE).unwrap();
    refused(
        &world,
        filler,
        &format!("lacks the page at {:#x}", BASE + 20 * PAGE),
    );
}

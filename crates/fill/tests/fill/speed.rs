//! How fast it is.

use std::time::{Duration, Instant};

use verbatim_fill::Phase;

use crate::criu::Criu;
use crate::task::{BASE, Container};
use crate::world::{MIB, World, end, soon};

/// The rate of a fill that nobody disturbs, and how long threads wait that fault meanwhile. What is asked of both is far below what
/// an idle machine does, so that a busy one passes, too; the numbers are printed.
pub fn speed() {
    let rate = filled_at(|| true, false);
    println!("{rate:.0} MiB/s");
    assert!(rate > 300.0, "{rate} MiB/s");
    filled_at(faults_are_short, true);
}

fn faults_are_short() -> bool {
    let mut times = Vec::new();
    // From the end, so that the fill comes late.
    for step in (64..4096).rev() {
        let at = BASE + step * MIB / 8;
        let start = Instant::now();
        // SAFETY: the container has mapped it.
        unsafe { std::ptr::read_volatile(at as *const u64) };
        times.push(start.elapsed());
        let pause = Instant::now() + Duration::from_micros(300);
        while Instant::now() < pause {
            std::hint::spin_loop();
        }
        // What takes less was there already.
        if times.last().is_some_and(|time| *time < Duration::from_micros(2)) {
            break;
        }
    }
    times.pop();
    times.sort();
    let middle = times[times.len() / 2];
    println!(
        "{} faults while it fills: median {middle:?}, longest {:?}",
        times.len(),
        times[times.len() - 1]
    );
    middle < Duration::from_millis(5)
}

/// MiB/s of filling 512 MiB.
fn filled_at(what: fn() -> bool, meanwhile: bool) -> f64 {
    let world = World::new();
    let filler = world.start();
    let ranges = [(BASE, 512 * MIB)];
    world.dump(7, &ranges, |_| true);
    filler.prepare().unwrap();
    let mut container = Container::start(&ranges, what);
    let mut criu = Criu::connect(&world.config.work);
    let start = Instant::now();
    criu.task(7, container.uffd()).unwrap();
    criu.finish();
    if meanwhile {
        container.go();
    }
    filler.wait(&Phase::Filled, soon()).unwrap();
    let rate = 512.0 / start.elapsed().as_secs_f64();
    if !meanwhile {
        container.go();
    }
    assert!(container.is_right());
    end(&world, filler);
    container.kill();
    rate
}

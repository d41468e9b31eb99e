//! Deaths of helper processes.

use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::StdRng;
use verbatim_fill::{Filler, Phase};

use crate::world::soon;

/// Kills one of the two, at a random moment, and waits until it was replaced.
pub fn kill_one(filler: &Filler, random: &mut StdRng, kills: &mut u32) {
    let deadline = soon();
    let Ok(before) = filler.status() else { return };
    if matches!(before.phase, Phase::Filled) {
        return;
    }
    let pause = Instant::now() + Duration::from_micros(random.random_range(0..3000));
    while Instant::now() < pause {
        std::hint::spin_loop();
    }
    let which = usize::from(random.random_bool(0.7));
    // SAFETY: a process that this test has started, in its own PID namespace.
    unsafe { libc::kill(before.processes[which], libc::SIGKILL) };
    *kills += 1;
    loop {
        let now = filler.status().unwrap();
        assert!(!matches!(now.phase, Phase::Lost(_)), "{now:?}");
        if now.processes[which] != before.processes[which] || now.phase == Phase::Filled {
            return;
        }
        assert!(Instant::now() < deadline, "{which} was not replaced: {now:?}");
    }
}

/// Kills the worker within 200 µs, and waits until there is another one.
pub fn kill_now(filler: &Filler, random: &mut StdRng, kills: &mut u32) {
    let worker = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        line.starts_with(b"verbatim-fill").then_some(pid)
    });
    // The worker is the younger of the two, unless a guardian was replaced, which this story does not do.
    let Some(worker) = worker.max() else { return };
    let until = Instant::now() + Duration::from_micros(random.random_range(0..200));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
    // SAFETY: a process that this test has started, in its own PID namespace.
    unsafe { libc::kill(worker, libc::SIGKILL) };
    *kills += 1;
    let status = filler.status().unwrap();
    let log = std::fs::read_to_string(filler.control().with_file_name("log"));
    assert!(
        !matches!(status.phase, Phase::Lost(_)),
        "killed {worker}: {status:?}\n{}",
        log.unwrap_or_default()
    );
}

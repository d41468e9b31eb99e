//! How long adoption and release take: `cargo run --release -p verbatim-adopt --example timing [FOLDER]`.
//!
//! One line per size: touched and untouched memory, median of several repeats, in microseconds.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use verbatim_adopt::{Adopter, Backing, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let dir = tempfile::tempdir_in(base)?;
    let adopter = Adopter::new(dir.path())?;
    // Another thread, so that a userfaultfd is needed as in a real program.
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || wait.recv());
    adopter.set_options(Options {
        user_mode: true,
        ..Options::default()
    });
    println!(
        "{:>12} {:>10} {:>12} {:>12}",
        "bytes", "touched", "adopt_us", "release_us"
    );
    for (bytes, repeats) in [
        (4 << 10, 101),
        (64 << 10, 101),
        (1 << 20, 51),
        (16 << 20, 11),
        (1 << 30, 3),
    ] {
        for touched in [true, false] {
            let mut times = Vec::new();
            for _ in 0..repeats {
                times.push(once(&adopter, bytes, touched)?);
            }
            let median = |mut times: Vec<Duration>| {
                times.sort();
                times[times.len() / 2].as_micros()
            };
            let adopt = median(times.iter().map(|(adopt, _)| *adopt).collect());
            let release = median(times.iter().map(|(_, release)| *release).collect());
            println!("{bytes:>12} {touched:>10} {adopt:>12} {release:>12}");
        }
    }
    adopter.cleanup();
    drop(end);
    let _ = other.join();
    Ok(())
}

fn once(
    adopter: &Adopter,
    bytes: usize,
    touched: bool,
) -> Result<(Duration, Duration), Box<dyn std::error::Error>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping disturbs nobody.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
    if touched {
        // SAFETY: the whole mapping is ours.
        unsafe { start.cast::<u8>().write_bytes(1, bytes) };
    }
    let begun = Instant::now();
    let adoption = adopter.adopt(start.expose_provenance(), bytes)?;
    let adopt = begun.elapsed();
    if adoption
        .segments
        .iter()
        .any(|(_, backing)| *backing == Backing::Process)
    {
        return Err("not adopted: no right to a userfaultfd".into());
    }
    let begun = Instant::now();
    adopter.release(adoption.token);
    let release = begun.elapsed();
    // SAFETY: nobody uses it any more.
    unsafe { munmap(start, bytes) }?;
    Ok((adopt, release))
}

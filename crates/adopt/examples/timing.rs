//! How long adoption and release take: `cargo run --release -p verbatim-adopt --example timing [FOLDER]`.
//!
//! One line per size: touched and untouched memory, median of several repeats, in microseconds. Then the mean processor time over
//! many regions of one page that exist at the same time, side by side or apart.

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
    println!(
        "\n{:>12} {:>10} {:>12} {:>12}",
        "regions", "apart", "adopt_us", "release_us"
    );
    for regions in [64, 512, 4096] {
        for apart in [false, true] {
            let (adopt, release) = many(&adopter, regions, apart)?;
            let mean = |time: Duration| time.as_secs_f64() * 1e6 / regions as f64;
            println!(
                "{regions:>12} {apart:>10} {:>12.1} {:>12.1}",
                mean(adopt),
                mean(release)
            );
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

/// All adopted, then all released, in the order of their addresses.
fn many(
    adopter: &Adopter,
    regions: usize,
    apart: bool,
) -> Result<(Duration, Duration), Box<dyn std::error::Error>> {
    let page = rustix::param::page_size();
    let step = if apart { 2 * page } else { page };
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping disturbs nobody.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), regions * step, access, MapFlags::PRIVATE) }?;
    // SAFETY: the whole mapping is ours.
    unsafe { start.cast::<u8>().write_bytes(1, regions * step) };
    let address = start.expose_provenance();
    let begun = cpu_time();
    let adoptions = (0..regions)
        .map(|index| adopter.adopt(address + index * step, page))
        .collect::<Result<Vec<_>, _>>()?;
    let adopt = cpu_time() - begun;
    let begun = cpu_time();
    for adoption in adoptions {
        adopter.release(adoption.token);
    }
    let release = cpu_time() - begun;
    // SAFETY: nobody uses it any more.
    unsafe { munmap(start, regions * step) }?;
    Ok((adopt, release))
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
